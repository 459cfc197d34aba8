"""What the outbox does with messages that a broker does not take, and with what waits."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from drumline.scheduler.mqtt import broker as module
from drumline.scheduler.mqtt.broker import EmbeddedBroker
from drumline.scheduler.mqtt.client import Client
from drumline.scheduler.mqtt.connection import Message, PublishRefused
from drumline.scheduler.mqtt.outbox import MAX_LOSSES_OF_A_SMALL_ONE, Outbox
from drumline.scheduler.mqtt.parts import Joined, read_part
from drumline.scheduler.mqtt.reconnect import Backoff
from drumline.scheduler.mqtt.reply import Reply
from drumline.scheduler.mqtt.topics import Topics
from drumline.scheduler.request import Chunk
from tests.scheduler.mqtt.conftest import embedded
from tests.scheduler.mqtt.support import BODY, Counts, Device, address, device, expected_ids, serving

LARGE = BODY | {"n": 2, "logprobs": 10}
"""Its result takes more than 3,000 bytes, each of its chunks less."""


@pytest_asyncio.fixture
async def strict_broker(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EmbeddedBroker]:
    """A mosquitto that takes 3,000 bytes at most, and no result of client `mute`."""
    configure = module._mosquitto

    def strict(directory: Path, port: int, port_v311: int) -> list[str]:
        command = configure(directory, port, port_v311)
        (directory / "acl").write_text("topic readwrite #\ntopic deny test/+/clients/mute/jobs/+/result\n")
        with (directory / "mosquitto.conf").open("a") as config:
            config.write(f"max_packet_size 3000\nacl_file {directory}/acl\n")
        return command

    monkeypatch.setattr(module, "_mosquitto", strict)
    async with embedded("mosquitto") as running:
        yield running


async def test_a_result_that_the_broker_drops_us_for_is_cut_into_parts(
    strict_broker: EmbeddedBroker, topics: Topics, caplog: pytest.LogCaptureFixture
):
    async with (
        serving(address(strict_broker), topics, backoff=lambda: Backoff(base_s=0.0)),
        device(address(strict_broker), f"{topics.client('a')}/jobs/#") as this,
        Client(strict_broker.host, strict_broker.port, name="c", topics=topics) as client,
    ):
        await this.send(topics.submit("a"), LARGE | {"id": "large"})
        whole = await joined_result(this)
        await this.send(topics.submit("a"), BODY | {"id": "small"})
        small = await this.body("small/result")
        await this.send(topics.submit("a"), LARGE | {"id": "large"})
        assert await joined_result(this) == whole
        result = await (await client.submit(**LARGE)).result()
    assert small["token_ids"] == await expected_ids(**BODY)
    body = json.loads(whole)
    assert (body["status"], body["usage"]["generated_tokens"]) == ("completed", 12)
    assert body["token_ids"] == list(result.token_ids)
    assert 'reason="of' in caplog.text
    assert "cost the connection 3 times" in caplog.text


async def joined_result(this: Device) -> bytes:
    joined, whole = Joined(), None
    while whole is None:
        part = read_part((await this.next(lambda message: message.topic.endswith("large/result"))).payload)
        whole = joined.add(part)
    return whole


async def test_a_small_message_that_costs_the_connection_is_put_aside(
    strict_broker: EmbeddedBroker, topics: Topics, caplog: pytest.LogCaptureFixture
):
    """Whatever a broker hangs up on, the others come through; what is put aside was not confirmed."""
    confirmed: list[str] = []
    async with (
        serving(address(strict_broker), topics, backoff=lambda: Backoff(base_s=0.0)) as gateway,
        device(address(strict_broker), f"{topics.client('a')}/jobs/#", topics.dead) as this,
    ):
        deep = Message(f"{topics.client('a')}/jobs/" + "x/" * 300, b"poison", qos=1)
        gateway._outbox.put("result", deep, confirmed=lambda: confirmed.append("deep"))
        await this.send(topics.submit("a"), BODY | {"id": "j"})
        assert (await this.body("j/result"))["token_ids"] == await expected_ids(**BODY)
        letter = await this.body("/dead")
    assert f"cost the connection {MAX_LOSSES_OF_A_SMALL_ONE} times" in caplog.text
    assert letter["code"] == "invalid"
    assert confirmed == []


async def test_a_result_that_the_broker_refuses_is_put_on_record(
    strict_broker: EmbeddedBroker, topics: Topics, caplog: pytest.LogCaptureFixture
):
    """Also pins what the adapter wraps in aiomqtt and paho: without it the refusal reads as a delivery."""
    counts = Counts()
    async with (
        serving(address(strict_broker), topics, observer=counts),
        device(address(strict_broker), f"{topics.client('a')}/#", topics.dead) as this,
    ):
        await this.send(topics.submit("mute"), BODY | {"id": "j"})
        letter = await this.body("/dead")
        await this.send(topics.submit("a"), BODY | {"id": "heard"})
        assert (await this.body("/result"))["status"] == "completed"
        with pytest.raises(PublishRefused, match=r"jobs/x/result: Not authorized"):
            await this.send(topics.job("mute", "result", "x"), b"")
        await this.send(topics.job("a", "result", "x"), b"")
    assert (letter["code"], letter["client"], letter["job_id"]) == ("refused", "mute", "j")
    assert letter["topic"] == topics.job("mute", "result", "j")
    assert counts.messages.count(("out", "result")) == 1
    assert "Not authorized" in caplog.text


def chunk(first: int, text: str) -> Chunk:
    return Chunk(0, first, first, text, tuple(range(first, first + len(text))))


async def test_chunks_grow_without_a_connection_and_done_comes_after_them(broker: EmbeddedBroker, topics: Topics):
    reply = Reply(topics, "a", "j")
    async with device(address(broker), f"{topics.prefix}/#") as this:
        outbox = Outbox(topics)
        outbox.put("state", Message(f"{topics.prefix}/s", b"queued"), key="state")
        outbox.put("state", Message(f"{topics.prefix}/s", b"running"), key="state")
        for first, text in ((0, "a"), (1, "bc"), (3, "d")):
            outbox.put_chunk(reply, chunk(first, text), "chunk")
        sending = asyncio.create_task(outbox.send(this._connection))
        heard = [await this.next() for _ in range(2)]
        sending.cancel()
        await asyncio.wait([sending])
        outbox.put("state", Message(f"{topics.prefix}/s", b"running"), key="state")
        outbox.put_chunk(reply, chunk(4, "e"), "chunk")
        outbox.put("state", Message(f"{topics.prefix}/s", b"done"), key="state", at_end=True)
        outbox.put("result", Message(f"{topics.prefix}/r", b"result", qos=1))
        sending = asyncio.create_task(outbox.send(this._connection))
        heard += [await this.next() for _ in range(3)]
        sending.cancel()
        await asyncio.wait([sending])
    texts = [
        json.loads(message.payload)["text"] if message.topic.endswith("/chunks") else message.payload.decode()
        for message in heard
    ]
    assert texts == ["running", "abcd", "e", "done", "result"]


async def test_what_waits_is_bounded_in_bytes(broker: EmbeddedBroker, topics: Topics):
    async with device(address(broker), f"{topics.prefix}/#") as this:
        outbox = Outbox(topics, room_bytes=10_000)
        outbox.put("result", Message(f"{topics.prefix}/x", b"1" * 9_000, qos=1))
        assert outbox.has_room
        outbox.put("status", Message(f"{topics.prefix}/x", b"2" * 900, qos=1), key="status")
        outbox.put("status", Message(f"{topics.prefix}/x", b"3", qos=1), key="status")
        assert outbox.has_room
        outbox.put("result", Message(f"{topics.prefix}/x", b"4" * 1_000, qos=1))
        assert not outbox.has_room
        outbox.put("state", Message(f"{topics.prefix}/x", b"let go"))
        outbox.put_chunk(Reply(topics, "a", "j"), chunk(0, "let go"), "chunk")
        assert len(outbox) == 3
        waiting = asyncio.create_task(outbox.room())
        sending = asyncio.create_task(outbox.send(this._connection))
        await waiting
        await outbox.flushed()
        assert (len(outbox), outbox._bytes, outbox.has_room) == (0, 0, True)
        assert [(await this.next()).payload[:1] for _ in range(3)] == [b"1", b"3", b"4"]
        sending.cancel()
        await asyncio.wait([sending])


async def test_a_chunk_above_the_limit_is_not_sent(
    broker: EmbeddedBroker, topics: Topics, caplog: pytest.LogCaptureFixture
):
    async with device(address(broker), f"{topics.prefix}/#") as this:
        outbox = Outbox(topics, message_bytes=500)
        outbox.put_chunk(Reply(topics, "a", "j"), chunk(0, "x" * 500), "chunk")
        outbox.put("status", Message(f"{topics.prefix}/next", b"", qos=1))
        sending = asyncio.create_task(outbox.send(this._connection))
        assert (await this.next()).topic.endswith("/next")
        sending.cancel()
        await asyncio.wait([sending])
    assert "the limit is 500" in caplog.text
