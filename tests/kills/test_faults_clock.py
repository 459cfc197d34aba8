"""A clock that is set back between two starts extends no deadline."""

import asyncio
import json
from pathlib import Path

import pytest

from drumline import Scheduler, load_model
from drumline.scheduler.journal.journal import Journal
from drumline.scheduler.mqtt.broker import EmbeddedBroker
from drumline.scheduler.mqtt.gateway import Gateway
from drumline.scheduler.mqtt.options import GatewayOptions
from drumline.scheduler.mqtt.topics import Topics
from tests.scheduler.mqtt.support import address, device

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("one_thread")]
DAY_S = 86_400.0


async def test_a_clock_that_is_set_back_extends_no_deadline(tiny: Path, tmp_path: Path):
    """The first worker notes when it last wrote; the second, by its clock a day earlier, counts on from there."""
    wall_s = [1_000 * DAY_S]
    model = load_model(tiny, precision="int8")
    body = {"id": "a", "prompt": "a", "max_tokens": 100_000, "overflow": "slide", "deadline_s": 0.8}
    body["ignore_eos"] = True

    async with EmbeddedBroker() as broker, device(address(broker), "drumline/v1/clients/desk/#") as desk:

        async def serve(drain_s: float, until_told: str) -> bytes:
            async with (
                Scheduler(model, rows=1) as scheduler,
                Journal(tmp_path / "journal.db", clock=lambda: wall_s[0]) as journal,
                Gateway(
                    scheduler,
                    address(broker),
                    journal=journal,
                    topics=Topics(),
                    options=GatewayOptions(drain_s=drain_s),
                    wall_clock=lambda: wall_s[0],
                ),
            ):
                if until_told == "state":
                    await desk.send("drumline/v1/clients/desk/submit", body)
                told = await desk.next(lambda message: message.topic.endswith(f"/{until_told}"))
                wall_s[0] += 0.5  # the journal notes it at its next commit
                return told.payload

        await serve(0.0, "state")
        wall_s[0] -= DAY_S
        began = asyncio.get_running_loop().time()
        outcome = json.loads(await serve(0.0, "result"))
        assert outcome["status"] == "expired"
        assert asyncio.get_running_loop().time() - began < 5
