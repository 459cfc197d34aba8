"""A hundred thousand jobs through one worker with a journal: each has its outcome, and memory stays where it was."""

import asyncio
import json
from pathlib import Path

import psutil
import pytest

from drumline.scheduler.mqtt.topics import Topics
from tests.scheduler.mqtt.conftest import embedded
from tests.scheduler.mqtt.durable import worker
from tests.scheduler.mqtt.support import address, device

JOBS, WARM, AT_ONCE = 100_000, 20_000, 400
GROWTH_BYTES = 48 * 2**20


@pytest.mark.soak
@pytest.mark.timeout(3_600)
async def test_memory_stays_where_it_was(tmp_path: Path):
    topics, room, process = Topics("soak"), asyncio.Semaphore(AT_ONCE), psutil.Process()
    held: list[int] = []
    async with (
        embedded("mosquitto") as broker,
        worker(broker, topics, tmp_path / "journal", rows=32, journal={"keep_bytes": 8 * 2**20}) as gateway,
        device(address(broker), f"{topics.client('a')}/jobs/+/result") as this,
    ):

        async def collect() -> None:
            for count in range(1, JOBS + 1):
                body = json.loads((await this.next()).payload)
                assert body["status"] == "completed"
                this.heard.clear()
                room.release()
                if count % WARM == 0:
                    held.append(process.memory_info().rss)

        collecting = asyncio.create_task(collect())
        for number in range(JOBS):
            await room.acquire()
            body = {"id": f"j{number}", "prompt": "d", "max_tokens": 2, "ignore_eos": True}
            await this.send(topics.submit("a"), body)
        await collecting
        assert gateway._journal is not None
        assert gateway._journal.failure is None
    print(f"resident after each {WARM} jobs:", [f"{size / 2**20:.0f} MiB" for size in held])
    assert held[-1] - held[0] < GROWTH_BYTES
