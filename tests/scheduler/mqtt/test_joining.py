"""Jobs that are slow to be accepted, joined in the middle, cancelled while the outbox is full."""

import asyncio
import json
import threading
from collections.abc import Callable

import pytest

from drumline import Request, Scheduler
from drumline.scheduler.admission import LONG_TEXT
from drumline.scheduler.mqtt.broker import EmbeddedBroker
from drumline.scheduler.mqtt.connection import Message
from drumline.scheduler.mqtt.topics import Topics
from tests.drive import Gate
from tests.scheduler.mqtt.support import BODY, Counts, address, device, expected_ids, serving


async def test_a_long_text_holds_nobody_up_and_is_joined_meanwhile(broker: EmbeddedBroker, topics: Topics):
    long = BODY | {"prompt": "x" * (LONG_TEXT + 1), "overflow": "slide"}
    begun, may_end = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(scheduler: Scheduler) -> Scheduler:
        admit = scheduler._intake._admission.admit

        def admit_slowly(request: Request) -> object:
            if request.text_length > LONG_TEXT:
                loop.call_soon_threadsafe(begun.set)
                may_end.wait(20)
            return admit(request)

        scheduler._intake._admission.admit = admit_slowly
        return scheduler

    async with (
        serving(address(broker), topics, wrap=slow),
        device(address(broker), f"{topics.client('a')}/jobs/#") as this,
    ):
        await this.send(topics.submit("a"), long | {"id": "long"})
        await begun.wait()
        await this.send(topics.submit("a"), long | {"id": "long"})
        await this.send(topics.submit("a"), BODY | {"id": "quick"})
        quick = await this.body("quick/result")
        await this.send(topics.job("a", "get", "long"))
        assert (await this.body("long/state"))["state"] == "unknown"
        may_end.set()
        assert (await this.body("long/state"))["state"] == "accepted"
        result = await this.body("long/result")
    assert quick["token_ids"] == await expected_ids(**BODY)
    assert result["token_ids"] == await expected_ids(**long)
    assert len([message for message in this.heard if b'"accepted"' in message.payload]) == 2


def _ends_with_token(count: int) -> Callable[[Message], bool]:
    """Chunks may come joined, so what counts is how far they have come."""

    def ends(message: Message) -> bool:
        if not message.topic.endswith("/chunks"):
            return False
        chunk = json.loads(message.payload)
        return chunk["first_token"] + len(chunk["token_ids"]) == count

    return ends


async def test_who_joins_in_the_middle_hears_all_from_the_start(broker: EmbeddedBroker, topics: Topics):
    gate = Gate()
    async with (
        serving(address(broker), topics, gate=gate, rows=1),
        device(address(broker), f"{topics.client('a')}/jobs/#") as this,
    ):
        await this.send(topics.submit("a"), BODY | {"id": "j"})
        for _ in range(3):
            await gate.arrived()
            gate.step()
        await gate.arrived()
        await this.next(_ends_with_token(3))
        await this.send(topics.submit("a"), BODY | {"id": "j"})
        again = await this.body("j/chunks")
        gate.open()
        result = await this.body("j/result")
    assert (again["first_token"], again["text_offset"]) == (0, 0)
    assert again["token_ids"] == result["token_ids"][:3]
    assert result["text"].startswith(again["text"])


async def test_a_cancel_is_heard_while_jobs_must_wait(
    broker: EmbeddedBroker, topics: Topics, caplog: pytest.LogCaptureFixture
):
    gate, cancel_heard = Gate(), asyncio.Event()

    class Told(Counts):
        def mqtt_message(self, direction: str, kind: str) -> None:
            if kind == "cancel":
                cancel_heard.set()

    async with (
        serving(address(broker), topics, gate=gate, rows=1, observer=Told()) as gateway,
        device(address(broker), f"{topics.client('a')}/jobs/#") as this,
    ):
        await this.send(topics.submit("a"), BODY | {"id": "j"})
        await gate.arrived()
        await this.state("j/state", "accepted")
        gateway._outbox._room = 0
        await this.send(topics.job("a", "get", "j"))
        await this.send(topics.job("a", "cancel", "j"))
        await cancel_heard.wait()
        gateway._outbox._room = 100
        gate.open()
        assert (await this.body("/result"))["status"] == "cancelled"
    assert "get not answered job=j client=a" in caplog.text
