"""Single faults between a device, a broker and a worker: repeated jobs, answers half on their way, large messages."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.kills.device import Device, device
from tests.kills.faults import LONG, PATIENCE_S, SHORT, accepted_longs, until, until_begun
from tests.kills.processes import Mosquitto, Nursery, Worker
from tests.kills.work import flawless
from tests.scheduler.mqtt.support import device as listener

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("one_thread")]


@pytest_asyncio.fixture(loop_scope="session")
async def broker(tmp_path: Path) -> AsyncIterator[Mosquitto]:
    async with Mosquitto(tmp_path / "broker") as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def worker(workers: Nursery, tiny: Path, broker: Mosquitto, tmp_path: Path) -> AsyncIterator[Worker]:
    running = Worker(workers, tiny, broker.address, tmp_path / "worker")
    await running.start()
    await running.is_up()
    yield running
    if running.pid is not None:
        assert await running.terminate() == 0


@pytest_asyncio.fixture(loop_scope="session")
async def desk(broker: Mosquitto) -> AsyncIterator[Device]:
    async with device(broker.address, "desk", asks=False) as running:
        yield running


async def test_a_job_that_is_sent_while_the_worker_is_down(desk: Device, worker: Worker, tiny: Path):
    await worker.kill()
    sent = desk.submit("a", SHORT)
    await asyncio.sleep(0.3)
    assert not sent.accepted.is_set()
    await worker.start()
    await desk.results()
    assert (await flawless(tiny, desk)).accepted == 1


async def test_a_job_that_is_sent_again_while_it_runs_and_after_its_end(desk: Device, worker: Worker, tiny: Path):
    sent, *_ = jobs = await accepted_longs(desk)
    await until_begun(worker.journal)
    await desk.send(sent)
    await worker.kill()
    await desk.send(sent)
    await worker.start()
    await desk.results()
    await desk.send(sent)
    await worker.kill()
    await desk.send(sent)
    await worker.start()
    await worker.is_up()
    last = desk.submit("last", SHORT)
    await desk.results(last)
    verdict = await flawless(tiny, desk)
    assert verdict.accepted == len(jobs) + 1
    assert verdict.repeated >= 1


async def test_a_worker_that_is_killed_between_the_journal_and_the_brokers_confirmation(
    broker: Mosquitto, desk: Device, worker: Worker, tiny: Path
):
    await accepted_longs(desk)
    broker.send(signal.SIGSTOP)
    await until(worker.journal, lambda jobs: all(job.state == "done" for job in jobs))
    await worker.kill()
    broker.send(signal.SIGCONT)
    await worker.start()
    await desk.results()
    await until(worker.journal, lambda jobs: all(job.published_at is not None for job in jobs))
    await flawless(tiny, desk)


async def test_a_job_of_two_megabytes_is_refused(broker: Mosquitto, desk: Device, worker: Worker, tiny: Path):
    async with listener(broker.address, "drumline/v1/dead") as dead:
        await desk.publish("drumline/v1/clients/desk/submit", b'{"id": "huge", "prompt": "%s"}' % (b"x" * 2**21))
        letter = await dead.body("dead")
        assert (letter["code"], letter["payload_bytes"] > 2**21) == ("too_large", True)
    desk.submit("a", SHORT)
    await desk.results()
    await flawless(tiny, desk)


async def test_a_cancel_holds_over_a_kill(desk: Device, worker: Worker, tiny: Path):
    """Of a job that waits, and one that runs."""
    jobs = await accepted_longs(desk, 4)
    async with asyncio.timeout(PATIENCE_S):
        await jobs[0].running.wait()
    for sent in (jobs[0], jobs[-1]):
        await desk.cancel(sent)
    await desk.results(jobs[0], jobs[-1])
    await worker.kill()
    await worker.start()
    await desk.results()
    verdict = await flawless(tiny, desk)
    assert verdict.statuses == {"cancelled": 2, "completed": 2}


async def test_an_answer_in_parts_over_a_kill(workers: Nursery, tiny: Path, tmp_path: Path):
    """The broker hangs up on a whole answer; the next worker finds out for itself, and may cut elsewhere."""
    async with (
        Mosquitto(tmp_path / "broker", "max_packet_size 60000\n") as broker,
        device(broker.address, "desk", asks=False) as desk,
    ):
        worker = Worker(workers, tiny, broker.address, tmp_path / "worker")
        await worker.start()
        sent = desk.submit("large", LONG | {"n": 2, "max_tokens": 300, "sampling": {"temperature": 1.0, "seed": 4}})
        await worker.says("cost the connection 3 times")
        await worker.kill()
        await worker.start()
        await desk.results(sent)
        await until(worker.journal, lambda jobs: all(job.published_at is not None for job in jobs))
        assert await worker.terminate() == 0
        assert sum(b'"offset"' in heard.payload for heard in desk.heard) >= 2
        await flawless(tiny, desk)
