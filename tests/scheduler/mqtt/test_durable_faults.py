"""What breaks under a worker with a journal: a job's trouble is its own, and what cannot be done is left, not lost."""

import asyncio
import gc
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from drumline import InvalidRequest
from drumline.scheduler.journal.errors import JournalError
from drumline.scheduler.journal.journal import Journal
from drumline.scheduler.mqtt.broker import EmbeddedBroker
from drumline.scheduler.mqtt.topics import Topics
from tests.drive import Gate, until
from tests.scheduler.mqtt.durable import EXACT, Killed, full_disk, worker
from tests.scheduler.mqtt.support import BODY, Network, address, counted, device, serving
from tests.tiny import tiny_model

JOBS = BODY | {"max_tokens": 3}


class Broken:
    """The real scheduler, but for one of its methods."""

    def __init__(self, scheduler: Any, **methods: Any) -> None:
        self._scheduler = scheduler
        for name, method in methods.items():
            setattr(self, name, method)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


async def test_a_job_belongs_to_the_model_that_begins_it(broker: EmbeddedBroker, topics: Topics, tmp_path: Path):
    """Accepted under one model and begun under another: its tokens are never taken for the first one's."""
    path, other = tmp_path / "journal", tiny_model(window=64, precision="int8", seed=1)
    long = BODY | {"max_tokens": 20, "id": "j"}

    async def stopped(model: Any, gate: Gate, steps: int) -> None:
        async with worker(broker, topics, path, gate, model=model):
            if steps == 0:
                await this.send(topics.submit("a"), long)
                await this.state("j/state", "accepted")
            for _ in range(steps):
                await gate.arrived()
                gate.step()
            await asyncio.sleep(0.1 if steps else 0)
            raise Killed

    async with device(address(broker), f"{topics.client('a')}/jobs/#") as this:
        for model, steps in ((EXACT, 0), (other, 6)):
            with pytest.raises(Killed):
                await stopped(model, Gate(), steps)
        async with worker(broker, topics, path, on_change="fail"):
            body = await this.body("j/result")
    assert (body["status"], body["error"]["code"]) == ("failed", "changed")


async def test_what_cannot_be_settled_fails_alone(broker: EmbeddedBroker, topics: Topics, tmp_path: Path):
    async def refuse(*_: object) -> None:
        raise InvalidRequest("prompt", "has no place in this model any more")

    gate = Gate()
    async with (
        worker(
            broker,
            topics,
            tmp_path / "j",
            gate,
            rows=1,
            queue_requests=1,
            wrap=lambda real: Broken(real, settle=refuse),
        ) as gateway,
        device(address(broker), f"{topics.client('a')}/jobs/#") as this,
    ):
        for name in ("runs", "engine", "submitting", "waits"):
            await this.send(topics.submit("a"), JOBS | {"id": name})
            await this.state(f"{name}/state", "accepted")
        await this.send(topics.job("a", "cancel", "waits"))
        body = await this.body("waits/result")
        gate.open()
        for name in ("runs", "engine", "submitting"):
            assert (await this.body(f"{name}/result"))["status"] == "completed"
        assert counted(gateway) == ({"completed": 3, "failed": 1}, {})
    assert (body["status"], body["error"]["code"]) == ("failed", "failed")


async def test_an_accepted_job_that_the_next_model_refuses_has_failed_and_was_not_rejected(
    broker: EmbeddedBroker, topics: Topics, tmp_path: Path
):
    path = tmp_path / "journal"
    long = BODY | {"id": "j", "prompt": "x" * 60, "max_tokens": 3}  # has no place in the window of the second worker
    async with device(address(broker), f"{topics.client('a')}/jobs/#") as this:
        gate = Gate()
        with suppress(Killed):
            async with worker(broker, topics, path, gate):
                await this.send(topics.submit("a"), long)
                await this.state("j/state", "accepted")
                raise Killed
        gate.open()
        async with (
            Journal(path) as journal,
            serving(
                address(broker),
                topics,
                model=tiny_model(window=16, precision="int8"),
                journal=journal,
                worker="w",
            ) as gateway,
        ):
            body = await this.body("j/result")
            assert counted(gateway) == ({"failed": 1}, {})
    assert (body["status"], body["error"]["code"]) == ("failed", "failed")


async def test_a_job_that_a_drain_keeps_is_counted_by_the_worker_that_ends_it(
    broker: EmbeddedBroker, topics: Topics, tmp_path: Path
):
    path, gate = tmp_path / "journal", Gate()
    async with device(address(broker), f"{topics.client('a')}/jobs/#") as this:
        async with worker(broker, topics, path, gate, drain_s=0) as gateway:
            await this.send(topics.submit("a"), BODY | {"id": "j"})
            await gate.arrived()
            stopping = asyncio.create_task(gateway.stop())
            await until(lambda: gateway._engine.statistics().draining)
            gate.open()
            await stopping
            assert counted(gateway) == ({}, {})
        async with worker(broker, topics, path) as gateway:
            assert (await this.body("j/result"))["status"] == "completed"
            assert counted(gateway) == ({"completed": 1}, {})


async def test_what_is_left_to_the_next_worker_is_not_refused(broker: EmbeddedBroker, topics: Topics, tmp_path: Path):
    async with device(address(broker), f"{topics.client('a')}/jobs/#") as this:
        async with worker(broker, topics, tmp_path / "j") as gateway:
            checked = asyncio.Event()
            check = gateway._engine.check

            async def watched(request: Any) -> Any:
                try:
                    return await check(request)
                finally:
                    checked.set()

            gateway._engine.check = watched
            await gateway._engine.drain()
            await this.send(topics.submit("a"), BODY | {"id": "j"})
            await checked.wait()
            assert counted(gateway) == ({}, {})
        async with worker(broker, topics, tmp_path / "j"):
            assert (await this.body("j/result"))["status"] == "completed"


async def test_a_journal_that_cannot_be_read_once(broker: EmbeddedBroker, topics: Topics, tmp_path: Path):
    async with (
        worker(broker, topics, tmp_path / "j") as gateway,
        device(address(broker), f"{topics.client('a')}/jobs/#") as this,
    ):
        journal = gateway._journal
        assert journal is not None
        find = journal.find

        async def fail(*_: str) -> None:
            raise JournalError(tmp_path, "disk I/O error")

        journal.find = fail  # type: ignore[method-assign]
        await this.send(topics.job("a", "cancel", "nobody"))
        assert (await this.body("nobody/state"))["state"] == "unknown"
        journal.find = find  # type: ignore[method-assign]
        await this.send(topics.submit("a"), JOBS | {"id": "j"})
        assert (await this.body("j/result"))["status"] == "completed"


async def test_an_engine_that_breaks_takes_no_waiting_job_with_it(
    broker: EmbeddedBroker, topics: Topics, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Those in its rows fail, one of them may be the reason; the worker ends and the next one finishes the others."""
    path, gate = tmp_path / "journal", Gate()
    names = [f"j{number}" for number in range(6)]
    async with device(address(broker), f"{topics.client('a')}/jobs/#") as this:

        async def first() -> None:
            async with worker(broker, topics, path, gate, rows=1, queue_requests=2) as gateway:
                for name in names:
                    await this.send(topics.submit("a"), JOBS | {"id": name})
                    await this.state(f"{name}/state", "accepted")
                await gate.arrived()
                scheduler: Any = gateway._engine

                def fail(*_: object) -> None:
                    raise MemoryError("out of memory")

                scheduler._scheduler._runner.run = fail
                gate.step()
                await gateway.wait_ended()

        with pytest.raises(ExceptionGroup) as told:
            await first()
        assert "out of memory" in str(told.value.exceptions[0])
        del told
        gc.collect()
        assert "never retrieved" not in caplog.text  # the job on its way to the engine hears of its end, too
        async with worker(broker, topics, path):
            bodies = {}
            while len(bodies) < len(names):
                body = await this.body("/result")
                bodies[body["job_id"]] = body["status"]
    assert bodies == {"j0": "failed"} | dict.fromkeys(names[1:], "completed")


async def test_saving_and_ending_at_once(broker: EmbeddedBroker, topics: Topics, tmp_path: Path):
    """What is kept of a job never comes behind its outcome."""
    async with (
        worker(broker, topics, tmp_path / "journal", progress_s=0.001) as gateway,
        device(address(broker), f"{topics.client('a')}/jobs/+/result") as this,
    ):
        journal = gateway._journal
        assert journal is not None
        for number in range(12):
            await this.send(topics.submit("a"), JOBS | {"id": f"j{number}"})
            await this.body("/result")
            assert journal.failure is None
        assert journal._cut_short == set()


async def test_leaving_while_nothing_can_be_written(broker: EmbeddedBroker, topics: Topics, tmp_path: Path):
    path, gate = tmp_path / "journal", Gate()
    async with device(address(broker), f"{topics.client('a')}/jobs/#") as this:
        async with worker(broker, topics, path, gate) as gateway:
            await this.send(topics.submit("a"), JOBS | {"id": "j"})
            await gate.arrived()
            journal = gateway._journal
            assert journal is not None

            journal.finish = full_disk(path)  # type: ignore[method-assign]
            gate.open()
            async with asyncio.timeout(10):
                await gateway.stop(drain_s=0.1)
        async with worker(broker, topics, path):
            assert (await this.body("j/result"))["status"] == "completed"


async def test_leaving_while_the_broker_is_away(broker: EmbeddedBroker, topics: Topics, tmp_path: Path):
    path = tmp_path / "journal"
    async with (
        Network(address(broker)) as network,
        device(address(broker), f"{topics.client('a')}/jobs/#") as this,
    ):
        async with worker(broker, topics, path, where=network.address, backoff=network.patient, flush_s=0.1) as gateway:
            await this.send(topics.submit("a"), JOBS | {"id": "j"})
            await this.state("j/state", "accepted")
            gateway._outbox._room = 0  # what is not confirmed waits for room
            await network.cut()
            journal = gateway._journal
            assert journal is not None
            async with asyncio.timeout(20):
                await until(lambda: not gateway.connected)
                await gateway.stop()
        async with worker(broker, topics, path):
            assert (await this.body("j/result"))["status"] == "completed"


async def test_a_job_that_comes_again_while_it_arrives(broker: EmbeddedBroker, topics: Topics, tmp_path: Path):
    """Over another connection, as after a cut: neither is acknowledged before the commit."""
    gates = [asyncio.Event(), asyncio.Event()]

    async def never(request: Any) -> Any:
        gates[0].set()
        await asyncio.Event().wait()

    async with (
        Network(address(broker)) as network,
        device(address(broker), f"{topics.client('a')}/jobs/#") as this,
    ):

        async def first() -> None:
            async with worker(
                broker,
                topics,
                tmp_path / "first",
                where=network.address,
                backoff=network.patient,
                wrap=lambda real: Broken(real, check=never),
            ) as gateway:
                await this.send(topics.submit("a"), JOBS | {"id": "j"})
                await gates[0].wait()
                await network.cut()
                await until(lambda: not gateway.connected)
                await network.join()
                await until(lambda: gateway.connected)
                await asyncio.sleep(0.2)  # it comes again
                raise Killed

        with pytest.raises(Killed):
            await first()
        async with worker(broker, topics, tmp_path / "second"):
            assert (await this.body("j/result"))["status"] == "completed"


@pytest.mark.parametrize("durable", [True, False])
async def test_a_job_that_arrives_while_the_worker_leaves(
    broker: EmbeddedBroker, topics: Topics, tmp_path: Path, durable: bool
):
    """It is accepted and has an outcome, or nobody acknowledged it; never the one without the other."""
    path = tmp_path / "journal" if durable else None
    asked, may_go_on = asyncio.Event(), asyncio.Event()

    def slow(real: Any) -> Any:
        async def check(request: Any) -> Any:
            asked.set()
            await may_go_on.wait()
            return await real.check(request)

        return Broken(real, check=check)

    async with device(address(broker), f"{topics.client('a')}/jobs/#", topics.worker_status("w")) as this:
        async with worker(broker, topics, path, wrap=slow) as gateway:
            await this.send(topics.submit("a"), JOBS | {"id": "j"})
            await asked.wait()
            stopping = asyncio.create_task(gateway.stop())
            await this.next(lambda message: b'"draining"' in message.payload)
            may_go_on.set()
            await stopping
        async with worker(broker, topics, path):
            body = await this.body("j/result")
    assert body["status"] in ("completed", "cancelled")
    results = [json.loads(m.payload) for m in this.heard if m.topic.endswith("/result")]
    assert len(results) == 1


async def test_answers_go_to_the_last_who_asked(broker: EmbeddedBroker, topics: Topics, tmp_path: Path):
    """After a restart, too."""
    path, gate = tmp_path / "journal", Gate()
    own = f"{topics.client('a')}/mine"
    async with device(address(broker), f"{topics.client('a')}/jobs/#", own) as this:

        async def first() -> None:
            async with worker(broker, topics, path, gate) as gateway:
                await this.send(topics.submit("a"), JOBS | {"id": "j"})
                await gate.arrived()
                await this.send(topics.submit("a"), JOBS | {"id": "j"}, response_topic=own)
                await this.next(lambda message: message.topic == own)
                assert gateway._journal is not None
                await gateway._journal.flush()
                raise Killed

        with pytest.raises(Killed):
            await first()
        async with worker(broker, topics, path):
            result = await this.next(lambda message: b'"status":"completed"' in message.payload)
    assert result.topic == own


async def test_what_an_old_journal_holds_is_listed_as_it_is(broker: EmbeddedBroker, topics: Topics, tmp_path: Path):
    """A worker that was killed while it ended leaves no doubt: done and published, or to be published."""
    path = tmp_path / "journal"
    async with device(address(broker), f"{topics.client('a')}/jobs/+/result") as this:
        async with worker(broker, topics, path):
            await this.send(topics.submit("a"), JOBS | {"id": "j"})
            await this.body("/result")
        async with Journal(path) as journal:
            job = await journal.find("a", "j")
    assert job is not None
    assert (job.state, job.published_at is not None) == ("done", True)
