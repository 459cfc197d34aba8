"""Jobs that outlive their worker: a journal on the disk, between two workers of one name."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from drumline import Request, Scheduler
from drumline.scheduler.journal.journal import Journal
from drumline.scheduler.mqtt.broker import EmbeddedBroker
from drumline.scheduler.mqtt.client import Client
from drumline.scheduler.mqtt.connection import Message
from drumline.scheduler.mqtt.quotas import Quota, QuotaExceeded, Quotas
from drumline.scheduler.mqtt.topics import Topics
from tests.drive import Gate, until
from tests.scheduler.mqtt.durable import EXACT, Killed, full_disk, worker
from tests.scheduler.mqtt.support import BODY, MODEL, address, counted, device
from tests.tiny import tiny_model

LONG = BODY | {"max_tokens": 20, "logprobs": 1, "sampling": {"temperature": 1.0, "seed": 5}}


async def undisturbed(**body: object) -> dict[str, Any]:
    async with Scheduler(EXACT, rows=1) as scheduler:
        result = await (await scheduler.submit(Request.from_json(json.dumps(body)))).result()
    return {"token_ids": list(result.token_ids), "logprobs": [entry.logprob for entry in result.choices[0].logprobs]}


def said(body: dict[str, Any]) -> dict[str, Any]:
    return {"token_ids": body["token_ids"], "logprobs": [entry["logprob"] for entry in body["choices"][0]["logprobs"]]}


async def test_a_job_goes_on_behind_what_is_in_the_journal(broker: EmbeddedBroker, topics: Topics, tmp_path: Path):
    path, gate = tmp_path / "journal", Gate()
    async with device(address(broker), f"{topics.client('a')}/jobs/#") as this:

        async def first() -> None:
            async with worker(broker, topics, path, gate):
                await this.send(topics.submit("a"), LONG | {"id": "j"})
                for _ in range(8):
                    await gate.arrived()
                    gate.step()
                await asyncio.sleep(0.1)  # the journal is told every 10 ms
                raise Killed

        with pytest.raises(Killed):
            await first()
        async with Journal(path) as journal:
            [left] = await journal.unfinished()
            kept = left.progress[0].token_ids
        assert 5 <= len(kept) < 20
        async with worker(broker, topics, path):
            body = await this.body("j/result")
    assert said(body) == await undisturbed(**LONG)
    assert body["token_ids"][: len(kept)] == list(kept)
    prompt = 4
    assert body["usage"]["evaluated_positions"] == prompt + 20 - 1  # the kept ones in one pass, the others as ever


async def test_it_is_accepted_after_the_commit_and_not_before(broker: EmbeddedBroker, topics: Topics, tmp_path: Path):
    """A worker that dies before it: the broker has the job still, for nobody acknowledged it."""
    async with device(address(broker), f"{topics.client('a')}/jobs/#") as this:

        async def first() -> None:
            async with worker(broker, topics, tmp_path / "first") as gateway:
                asked = asyncio.Event()

                async def never(request: object) -> object:
                    asked.set()
                    return await asyncio.Event().wait()

                gateway._engine.check = never  # type: ignore[method-assign]
                await this.send(topics.submit("a"), BODY | {"id": "j"})
                await asked.wait()
                raise Killed

        with pytest.raises(Killed):
            await first()
        assert this.heard == []
        async with worker(broker, topics, tmp_path / "second"):
            body = await this.body("j/result")
    assert body["status"] == "completed"
    assert this.heard[0].topic.endswith("/state")


async def test_an_outcome_is_the_same_bytes_for_ever(broker: EmbeddedBroker, topics: Topics, tmp_path: Path):
    async with device(address(broker), f"{topics.client('a')}/jobs/#") as this:
        payloads = []
        for _ in range(3):
            async with worker(broker, topics, tmp_path / "journal"):
                await this.send(topics.submit("a"), LONG | {"id": "j"})
                payloads.append((await this.next(lambda message: message.topic.endswith("/result"))).payload)
                await this.send(topics.job("a", "get", "j"))
                payloads.append((await this.next(lambda message: message.topic.endswith("/result"))).payload)
                await this.send(topics.submit("a"), LONG | {"id": "j", "max_tokens": 3})
                refused = await this.next(lambda message: b'"error":{' in message.payload)
                assert json.loads(refused.payload)["error"]["code"] == "duplicate_id"
    assert len(set(payloads)) == 1


async def test_what_the_broker_has_not_confirmed_is_published_again(
    broker: EmbeddedBroker, topics: Topics, tmp_path: Path
):
    path = tmp_path / "journal"
    async with device(address(broker), f"{topics.client('a')}/jobs/#") as this:

        async def first() -> bytes:
            async with worker(broker, topics, path) as gateway:
                told: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

                def keep(kind: str, message: Message, *_: object, **__: object) -> None:
                    if kind == "result":
                        told.set_result(message.payload)

                gateway._outbox.put = keep  # type: ignore[method-assign, assignment]
                await this.send(topics.submit("a"), LONG | {"id": "j"})
                raise Killed(await told)

        with pytest.raises(Killed) as killed:
            await first()
        async with worker(broker, topics, path):
            message = await this.next(lambda message: message.topic.endswith("/result"))
            assert message.payload == killed.value.args[0]
        async with Journal(path) as journal:
            assert await journal.unpublished() == []


async def test_a_drain_leaves_the_rest_to_the_next_worker(broker: EmbeddedBroker, topics: Topics, tmp_path: Path):
    """What runs, what waits in the engine, what waits in the journal, and what is sent meanwhile."""
    path, gate = tmp_path / "journal", Gate()
    names = ["runs", "engine", "journal", "meanwhile"]
    async with device(address(broker), f"{topics.client('a')}/jobs/#", topics.worker_status("w")) as this:
        async with worker(broker, topics, path, gate, rows=1, queue_requests=1) as gateway:
            for name in names[:3]:
                await this.send(topics.submit("a"), LONG | {"id": name})
                await this.state(f"{name}/state", "accepted")
            await gate.arrived()
            stopping = asyncio.create_task(gateway.stop(drain_s=0))
            await this.next(lambda message: b'"draining"' in message.payload)
            await this.send(topics.submit("a"), LONG | {"id": "meanwhile"})
            gate.open()
            await stopping
        ended = {json.loads(m.payload)["job_id"] for m in this.heard if m.topic.endswith("/result")}
        assert ended == set()
        async with worker(broker, topics, path):
            bodies = [await this.body("/result") for _ in names]
    assert sorted(body["job_id"] for body in bodies) == sorted(names)
    expected = await undisturbed(**LONG)
    assert [said(body) for body in bodies] == [expected] * 4


@pytest.mark.parametrize("policy", ["restart", "fail"])
async def test_a_job_that_was_begun_with_another_model(
    broker: EmbeddedBroker, topics: Topics, tmp_path: Path, policy: Any
):
    path, gate = tmp_path / "journal", Gate()
    async with device(address(broker), f"{topics.client('a')}/jobs/#") as this:

        async def first() -> None:
            async with worker(broker, topics, path, gate, model=tiny_model(window=64, precision="int8", seed=1)):
                await this.send(topics.submit("a"), LONG | {"id": "begun"})
                await this.state("begun/state", "accepted")
                for _ in range(5):
                    await gate.arrived()
                    gate.step()
                await asyncio.sleep(0.1)
                raise Killed

        with pytest.raises(Killed):
            await first()
        async with worker(broker, topics, path, on_change=policy) as gateway:
            body = await this.body("begun/result")
            outcomes, _ = counted(gateway)
            ended = [outcomes[outcome] for outcome in ("completed", "failed")]
    assert ended == ([0, 1] if policy == "fail" else [1, 0])
    if policy == "fail":
        assert (body["status"], body["error"]["code"]) == ("failed", "changed")
    else:
        assert said(body) == await undisturbed(**LONG)


async def test_cancels_and_deadlines_of_jobs_that_wait(broker: EmbeddedBroker, topics: Topics, tmp_path: Path):
    gate = Gate()
    async with (
        worker(broker, topics, tmp_path / "journal", gate, rows=1, queue_requests=1),
        device(address(broker), f"{topics.client('a')}/jobs/#") as this,
    ):
        for name in ("runs", "engine", "submitting", "waits"):
            await this.send(topics.submit("a"), BODY | {"id": name})
            await this.state(f"{name}/state", "accepted")
        await this.send(topics.submit("a"), BODY | {"id": "late", "deadline_s": 0.05})
        await gate.arrived()
        ended = {"late": (await this.body("late/result"))["status"]}
        for name in ("waits", "submitting"):  # the engine has no room, and yet they end now
            await this.send(topics.job("a", "cancel", name))
            ended[name] = (await this.body(f"{name}/result"))["status"]
        gate.open()
        for name in ("runs", "engine"):
            ended[name] = (await this.body(f"{name}/result"))["status"]
    assert ended == {
        "late": "expired",
        "waits": "cancelled",
        "submitting": "cancelled",
        "runs": "completed",
        "engine": "completed",
    }


async def test_a_cancel_that_is_sent_while_the_worker_is_away(broker: EmbeddedBroker, topics: Topics, tmp_path: Path):
    path, gate = tmp_path / "journal", Gate()
    async with device(address(broker), f"{topics.client('a')}/jobs/#") as this:

        async def first() -> None:
            async with worker(broker, topics, path, gate):
                await this.send(topics.submit("a"), BODY | {"id": "j", "max_tokens": 50})
                await this.state("j/state", "accepted")
                await gate.arrived()
                raise Killed

        with pytest.raises(Killed):
            await first()
        await this.send(topics.job("a", "cancel", "j"))
        second = Gate()
        async with worker(broker, topics, path, second):
            await second.arrived()
            await until(lambda: any(b'"state"' in m.payload for m in this.heard))
            second.open()
            assert (await this.body("j/result"))["status"] == "cancelled"


async def test_a_clock_that_is_set_back_extends_no_deadline(broker: EmbeddedBroker, topics: Topics, tmp_path: Path):
    path, gate, now = tmp_path / "journal", Gate(), [1_000_000.0]
    clock = {"clock": lambda: now[0]}
    async with device(address(broker), f"{topics.client('a')}/jobs/#") as this:

        async def first() -> None:
            async with worker(broker, topics, path, gate, journal=clock):
                await this.send(topics.submit("a"), BODY | {"id": "j", "deadline_s": 60.0})
                await this.state("j/state", "accepted")
                await gate.arrived()
                now[0] += 100
                await this.send(topics.submit("a"), BODY | {"id": "later"})
                await this.state("later/state", "accepted")
                raise Killed

        with pytest.raises(Killed):
            await first()
        now[0] -= 5_000
        async with worker(broker, topics, path, journal=clock):
            assert (await this.body("j/result"))["status"] == "expired"


async def test_a_journal_that_takes_nothing(broker: EmbeddedBroker, topics: Topics, tmp_path: Path):
    """New jobs are refused with the reason; the outcome of one that runs waits until it can be written."""
    gate = Gate()
    async with (
        worker(broker, topics, tmp_path / "journal", gate) as gateway,
        device(address(broker), f"{topics.client('a')}/jobs/#") as this,
    ):
        await this.send(topics.submit("a"), BODY | {"id": "runs"})
        await gate.arrived()
        journal = gateway._journal
        assert journal is not None
        refuse, finishes = full_disk(tmp_path), 0

        async def refuse_once(number: int, terminal: object) -> None:
            nonlocal finishes
            finishes += 1
            if finishes == 1:
                await refuse()
            await finish(number, terminal)

        accept, finish = journal.accept, journal.finish
        journal.accept, journal.finish = refuse, refuse_once  # type: ignore[method-assign]
        await this.send(topics.submit("a"), BODY | {"id": "new"})
        error = (await this.body("new/result"))["error"]
        assert (error["code"], error["message"]) == ("journal", "cannot be written: database or disk is full")
        gate.open()
        assert (await this.body("runs/result"))["token_ids"] == (await this_answer())
        journal.accept = accept  # type: ignore[method-assign]
        await this.send(topics.submit("a"), BODY | {"id": "new"})
        assert (await this.body("new/result"))["status"] == "completed"
    assert finishes == 3


async def this_answer() -> list[int]:
    return (await undisturbed(**BODY | {"logprobs": 0}))["token_ids"]


async def test_two_workers_of_one_name(broker: EmbeddedBroker, topics: Topics, tmp_path: Path):
    """The older one stops and says why; the newer one serves."""
    async with device(address(broker), f"{topics.client('a')}/jobs/#") as this:

        async def both() -> None:
            async with worker(broker, topics, tmp_path / "older") as older:
                await asyncio.sleep(0.01)
                async with worker(broker, topics, tmp_path / "newer"):
                    with pytest.raises(ExceptionGroup):
                        await older.wait_ended()
                    await this.send(topics.submit("a"), BODY | {"id": "j"})
                    assert (await this.body("j/result"))["status"] == "completed"

        with pytest.raises(ExceptionGroup) as told:
            await both()
    assert "another worker named w was started" in str(told.value.exceptions[0])


async def test_workers_of_one_name_and_other_topics_let_each_other_be(broker: EmbeddedBroker, topics: Topics):
    other = Topics(f"{topics.prefix}/other")
    async with (
        worker(broker, topics, None),
        worker(broker, other, None),
        device(address(broker), f"{topics.prefix}/#") as this,
    ):
        for where, name in ((topics, "j1"), (other, "j2"), (topics, "j3")):
            await this.send(where.submit("a"), BODY | {"id": name})
            assert (await this.next(lambda message: message.topic.endswith("/result"))).topic == where.job(
                "a", "result", name
            )


class TestQuotas:
    async def test_jobs(self, broker: EmbeddedBroker, topics: Topics, tmp_path: Path):
        gate = Gate()
        quotas = Quotas(default=Quota(jobs=1))
        async with (
            worker(broker, topics, None, gate, quotas=quotas),
            Client(broker.host, broker.port, name="a", topics=topics) as client,
            Client(broker.host, broker.port, name="b", topics=topics) as other,
        ):
            first = await client.submit(**BODY)
            with pytest.raises(QuotaExceeded, match="jobs: the limit of this client is 1, it has 1"):
                await client.submit(**BODY)
            second = await other.submit(**BODY)
            gate.open()
            assert (await first.result()).status == (await second.result()).status == "completed"
            assert (await (await client.submit(**BODY)).result()).status == "completed"

    async def test_those_beyond_the_live_ones_let_others_pass(
        self, broker: EmbeddedBroker, topics: Topics, tmp_path: Path
    ):
        gate = Gate()
        quotas = Quotas(clients={"greedy": Quota(live=1)})
        async with (
            worker(broker, topics, None, gate, rows=4, quotas=quotas) as gateway,
            Client(broker.host, broker.port, name="greedy", topics=topics) as greedy,
            Client(broker.host, broker.port, name="b", topics=topics) as other,
        ):
            jobs = [await greedy.submit(**BODY) for _ in range(3)]
            await other.submit(**BODY)
            engine: Any = gateway._engine
            await until(lambda: len(engine.jobs) == 2)
            assert [job.request.tenant for job in engine.jobs] == ["greedy", "b"]
            gate.open()
            assert {(await job.result()).status for job in jobs} == {"completed"}

    async def test_classes_are_capped(self, broker: EmbeddedBroker, topics: Topics, tmp_path: Path):
        gate = Gate()
        quotas = Quotas(default=Quota(priority="normal"))
        async with (
            worker(broker, topics, None, gate, quotas=quotas) as gateway,
            Client(broker.host, broker.port, name="a", topics=topics) as client,
        ):
            job = await client.submit(**BODY, priority="high")
            await gate.arrived()
            engine: Any = gateway._engine
            assert engine.jobs[0].request.priority == "normal"
            gate.open()
            assert list((await job.result()).token_ids) == await this_answer()


async def test_of_a_worker_without_a_journal(broker: EmbeddedBroker, topics: Topics):
    """The same, but for the disk: nothing is left behind, and what runs at the end is cancelled."""
    gate = Gate()
    async with device(address(broker), f"{topics.client('a')}/jobs/#", topics.worker_status("w")) as this:
        async with worker(broker, topics, None, gate, rows=1, model=MODEL) as gateway:
            for name in ("runs", "waits"):
                await this.send(topics.submit("a"), BODY | {"id": name})
                await this.state(f"{name}/state", "accepted")
            await gate.arrived()
            stopping = asyncio.create_task(gateway.stop(drain_s=0))
            await this.next(lambda message: b'"draining"' in message.payload)
            gate.open()
            await stopping
        bodies = {body["job_id"]: body for body in [await this.body("/result") for _ in range(2)]}
    assert {name: body["status"] for name, body in bodies.items()} == dict.fromkeys(("runs", "waits"), "cancelled")
    assert bodies["waits"]["token_ids"] == []
