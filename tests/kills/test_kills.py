"""Workers and brokers are killed at random; what was accepted ends once, with the bits that it has undisturbed."""

from pathlib import Path

import pytest

from drumline.scheduler.mqtt.address import BrokerAddress
from drumline.scheduler.mqtt.broker import EmbeddedBroker
from tests.kills.killer import Plan, flawless, kill_often, run
from tests.kills.processes import Nursery

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("one_thread")]


async def test_8_kills_of_workers_and_brokers(workers: Nursery, tiny: Path, tmp_path: Path):
    report = await kill_often(Plan(seed=0, kills=8), workers, tiny, tmp_path)
    flawless(report)
    assert set(report.kills) == {"worker", "broker", "both"}
    assert report.resumed > 0


async def test_kills_of_workers_over_the_broker_that_pip_installs(workers: Nursery, tiny: Path, tmp_path: Path):
    """No device asks again for an answer here: a broker that lives loses none."""
    async with EmbeddedBroker(prefer="iotcore") as broker:
        where = BrokerAddress(broker.host, broker.port)
        report = await run(
            Plan(seed=1, kills=3, victims=("worker",)),
            *(workers, tiny, tmp_path, where, None),
            {"five": {"replies": True}, "plain": {}},
        )
    flawless(report)
