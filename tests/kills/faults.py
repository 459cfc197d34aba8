"""What the tests of single faults share: jobs long enough to be caught, and a look into the journal."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drumline.scheduler.journal.reader import Reader
from drumline.scheduler.journal.records import JournaledJob
from tests.kills.device import Device, Sent

PATIENCE_S = 60.0
LONG: dict[str, Any] = {"prompt": "drum", "max_tokens": 450, "ignore_eos": True, "n": 3, "logprobs": 2}
SHORT: dict[str, Any] = {"prompt": "a", "max_tokens": 5, "ignore_eos": True, "logprobs": 2}


async def accepted_longs(device: Device, count: int = 3, **changes: Any) -> list[Sent]:
    """Accepted jobs that run for a second or more."""
    jobs = []
    for number in range(count):
        sampling = {"temperature": 1.0, "seed": number}
        jobs.append(device.submit(f"long-{number}", LONG | {"sampling": sampling} | changes))
    async with asyncio.timeout(PATIENCE_S):
        for sent in jobs:
            await sent.accepted.wait()
    return jobs


def journaled(journal: Path) -> list[JournaledJob]:
    with Reader.open_read_only(journal) as reader:
        return reader.jobs(0, 1_000) if journal.exists() else []


async def until(journal: Path, holds: Callable[[list[JournaledJob]], bool]) -> None:
    """Wait until what a journal says is so."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds(journaled(journal)):  # noqa: ASYNC110 a file
            await asyncio.sleep(0.02)


async def until_begun(journal: Path) -> None:
    """Wait until there are tokens of unfinished jobs in it."""

    def begun(_: list[JournaledJob]) -> bool:
        with Reader.open_read_only(journal) as reader:
            return any(job.progress for job in reader.unfinished(0, 1_000))

    await until(journal, begun)
