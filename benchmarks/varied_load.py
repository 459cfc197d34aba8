"""Two minutes in the life of a worker, for pictures: three devices whose jobs differ, a rush, cancels and mistakes."""

import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.machine import free_port
from benchmarks.prometheus import Prometheus, running_prometheus
from benchmarks.served import served
from drumline.client import Client
from drumline.model.errors import DrumlineError

PHASES = ((25.0, 1.0), (30.0, 4.0), (30.0, 1.2), (25.0, 3.0), (10.0, 0.3))
"""(Seconds, jobs a second) one after another."""
RUSH = (32.0, 60)
"""At so many seconds, so many jobs come at once."""
DEVICES = ("kitchen", "workshop", "garden")
SETTLE_S = 3.0
"""What the last scrapes are given before the pictures are drawn."""
SYSTEM = "You are the assistant of a house with a kitchen, a workshop and a garden. Answer in a few plain words."
QUESTIONS = (
    "What is the capital of France?", "Name three herbs for a soup.", "How do I sharpen a chisel?",
    "When are tomatoes ripe?", "Tell a short story about a drummer.", "List the days of the week again and again.",
    "What is twelve times twelve?", "Why does bread rise?",
)  # fmt: skip


@contextmanager
def watched_worker() -> Iterator[tuple[Prometheus, float]]:
    """A worker that has had its two minutes, and the Prometheus that saw them from the given Unix second on."""
    with tempfile.TemporaryDirectory(prefix="drumline-panels-") as name:
        folder, metrics = Path(name), f"127.0.0.1:{free_port()}"
        options = ("--rows", "16", "--metrics", metrics, "--journal", str(folder / "jobs.db"))
        with (
            served(*options, ready="broker ") as (port, _),
            running_prometheus(folder, [metrics], interval="1s") as server,
        ):
            server.wait_for("drumline_ready == 1")
            started = time.time()
            asyncio.run(_live(port))
            time.sleep(SETTLE_S)
            yield server, started


async def _live(port: int) -> None:
    """All arrivals in their time, and every job to its end."""
    draw = random.Random(7)
    clients = [Client("127.0.0.1", port, name=name) for name in DEVICES]
    loop = asyncio.get_running_loop()
    async with clients[0], clients[1], clients[2], asyncio.TaskGroup() as jobs:
        begin = loop.time()
        for at in _arrivals(draw):
            await asyncio.sleep(max(0.0, begin + at - loop.time()))
            jobs.create_task(_one(draw.choice(clients), draw.random(), _job(draw), draw.random()))


def _arrivals(draw: random.Random) -> list[float]:
    """Seconds from the start, in order."""
    times = [RUSH[0]] * RUSH[1]
    begin = 0.0
    for seconds, rate in PHASES:
        at = begin
        while (at := at + draw.expovariate(rate)) < begin + seconds:
            times.append(at)
        begin += seconds
    return sorted(times)


def _job(draw: random.Random) -> dict[str, Any]:
    """A chat question of some priority, its answer of 8 to 200 tokens; one in eight has a deadline."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": draw.choice(QUESTIONS)}]
    job: dict[str, Any] = {
        "messages": messages,
        "max_tokens": round(min(200, max(8, draw.lognormvariate(4.1, 0.7)))),
        "priority": draw.choices(("high", "normal", "low"), (1, 5, 2))[0],
        "ignore_eos": draw.random() < 1 / 2,
        "sampling": {"temperature": draw.choice((0.0, 0.8))},
    }
    if draw.random() < 1 / 8:
        job["deadline_s"] = draw.uniform(0.5, 5.0)
    return job


async def _one(client: Client, kind: float, job: dict[str, Any], patience: float) -> None:
    """Send it and wait; one in eight is given up after a while, one in sixteen is longer than any window."""
    if kind < 1 / 16:
        job |= {"messages": [{"role": "user", "content": "too long " * 4_000}]}
    with suppress(DrumlineError):
        sent = await client.submit(**job)
        if kind > 7 / 8:
            await asyncio.sleep(2 * patience)
            await sent.cancel()
        await sent.result()
