"""A network that breaks, and one that crawls, between the worker and its broker."""

import asyncio
from pathlib import Path

import pytest

from tests.kills.device import device
from tests.kills.faults import SHORT, accepted_longs, until_begun
from tests.kills.processes import Mosquitto, Nursery, Worker
from tests.kills.work import flawless
from tests.scheduler.mqtt.support import Network

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("one_thread")]


class SlowNetwork(Network):
    """20 ms and 2 KB at a time: a large answer takes a second."""

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(2048):
                await asyncio.sleep(0.02)
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        sink.close()


@pytest.mark.parametrize("kind", [Network, pytest.param(SlowNetwork, marks=pytest.mark.soak)])
async def test_a_cut(workers: Nursery, tiny: Path, tmp_path: Path, kind: type[Network]):
    """While jobs run, and while their answers are on their way; the worker is killed between the two."""
    async with (
        Mosquitto(tmp_path / "broker") as broker,
        kind(broker.address) as network,
        device(broker.address, "desk", asks=False) as desk,
    ):
        worker = Worker(workers, tiny, network.address, tmp_path / "worker")
        await worker.start()
        jobs = await accepted_longs(desk)
        await until_begun(worker.journal)
        await network.cut()
        desk.submit("meanwhile", SHORT)
        await asyncio.sleep(0.5)
        await worker.kill()
        await worker.start()
        await network.join()
        await desk.results(jobs[0])
        await network.cut()
        await network.join()
        await desk.results()
        assert await worker.terminate() == 0
        await flawless(tiny, desk)
