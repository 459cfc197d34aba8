"""Single faults of a worker: another one of its name, an end that comes too early, a disk that takes no more."""

import json
import resource
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import pytest_asyncio

from tests.kills.device import Device, device
from tests.kills.faults import SHORT, accepted_longs, journaled, until_begun
from tests.kills.processes import Mosquitto, Nursery, Worker
from tests.kills.work import flawless

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("one_thread")]


@pytest_asyncio.fixture(loop_scope="session")
async def broker(tmp_path: Path) -> AsyncIterator[Mosquitto]:
    async with Mosquitto(tmp_path / "broker") as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def desk(broker: Mosquitto) -> AsyncIterator[Device]:
    async with device(broker.address, "desk", asks=False) as running:
        yield running


def readiness(worker: Worker) -> int:
    url = worker.said.rpartition("metrics  ")[2].split()[0].removesuffix("/metrics")
    try:
        with urlopen(f"{url}/readyz", timeout=10) as response:
            return response.status
    except HTTPError as error:
        with error:
            return error.code


async def refusal(desk: Device) -> str:
    """The code with which a new job is refused; it is no part of what is judged."""
    sent = desk.submit("refused", SHORT)
    await desk.results(sent)
    (result,) = [heard.payload for heard in desk.heard if heard.kind == "result" and heard.job[1] == sent.id]
    document = json.loads(result)
    assert document["status"] == "rejected"
    return document["error"]["code"]


async def test_two_workers_of_one_name(workers: Nursery, tiny: Path, broker: Mosquitto, desk: Device, tmp_path: Path):
    older = Worker(workers, tiny, broker.address, tmp_path / "older")
    newer = Worker(workers, tiny, broker.address, tmp_path / "newer")
    await older.start()
    await accepted_longs(desk)
    await until_begun(older.journal)
    await newer.start()
    assert await older.ended() == 2
    assert "drumline: the MQTT edge ended: another worker named main" in older.said
    await newer.is_up()
    desk.submit("new", SHORT)
    await desk.results(desk.jobs["new"])
    assert await newer.terminate() == 0
    await older.start()  # its jobs are where they were
    await desk.results()
    assert await older.terminate() == 0
    await flawless(tiny, desk)


async def test_two_workers_of_one_journal(
    workers: Nursery, tiny: Path, broker: Mosquitto, desk: Device, tmp_path: Path
):
    first = Worker(workers, tiny, broker.address, tmp_path / "worker")
    second = Worker(workers, tiny, broker.address, tmp_path / "worker")
    await first.start()
    await accepted_longs(desk)
    await second.start()
    assert await second.ended() == 2
    assert f"is held by process {first.pid}" in second.said or str(first.pid) in second.said
    await desk.results()
    assert await first.terminate() == 0
    await flawless(tiny, desk)


async def test_what_a_drain_does_not_finish_goes_on(
    workers: Nursery, tiny: Path, broker: Mosquitto, desk: Device, tmp_path: Path
):
    worker = Worker(workers, tiny, broker.address, tmp_path / "worker", "--drain", "0.3")
    await worker.start()
    jobs = await accepted_longs(desk, 6)
    await until_begun(worker.journal)
    assert await worker.terminate() == 0
    assert not all(sent.ended.is_set() for sent in jobs)
    assert any(job.state != "done" for job in journaled(worker.journal))
    await worker.start()
    await desk.results()
    assert await worker.terminate() == 0
    await flawless(tiny, desk)


async def test_a_second_signal_ends_at_once(
    workers: Nursery, tiny: Path, broker: Mosquitto, desk: Device, tmp_path: Path
):
    worker = Worker(workers, tiny, broker.address, tmp_path / "worker")
    await worker.start()
    await accepted_longs(desk, 6)
    await until_begun(worker.journal)
    worker.send(signal.SIGTERM)
    await worker.says("draining")
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 130
    await worker.start()
    await desk.results()
    assert await worker.terminate() == 0
    await flawless(tiny, desk)


async def test_a_journal_that_is_deleted_under_its_worker(
    workers: Nursery, tiny: Path, broker: Mosquitto, desk: Device, tmp_path: Path
):
    """New jobs are refused. What runs is not answered, aloud: an answer that no journal has could come twice."""
    worker = Worker(workers, tiny, broker.address, tmp_path / "worker")
    await worker.start()
    jobs = await accepted_longs(desk)
    await until_begun(worker.journal)
    for suffix in ("", "-wal", "-shm"):
        worker.journal.with_name(worker.journal.name + suffix).unlink()
    assert await refusal(desk) == "journal"
    assert await worker.ended() == 2
    assert "drumline: the MQTT edge ended: journal" in worker.said
    assert "was deleted or replaced" in worker.said
    assert not any(sent.ended.is_set() for sent in jobs)
    await worker.start()
    for sent in jobs:  # a device that hears nothing sends its job again
        await desk.send(sent)
    await desk.results()
    assert await worker.terminate() == 0
    await flawless(tiny, desk)


async def test_a_full_disk(workers: Nursery, tiny: Path, broker: Mosquitto, desk: Device, tmp_path: Path):
    """Files may not grow beyond a limit: new jobs are refused; once there is room, all that was accepted ends."""
    worker = Worker(workers, tiny, broker.address, tmp_path / "worker")
    await worker.start()
    await accepted_longs(desk, 3, logprobs=20)
    await until_begun(worker.journal)
    worker.limit_files(40_000)  # what it has written is longer
    assert await refusal(desk) == "journal"
    assert readiness(worker) == 503
    worker.limit_files(resource.RLIM_INFINITY)
    await desk.results()
    desk.submit("new", SHORT)
    await desk.results()
    assert await worker.terminate() == 0
    await flawless(tiny, desk)
