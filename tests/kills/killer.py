"""Kills at random instants while devices go on sending, and then judges what they heard."""

import asyncio
import json
import platform
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drumline.scheduler.journal.reader import Reader
from drumline.scheduler.mqtt.address import BrokerAddress
from tests.kills.checker import Verdict
from tests.kills.device import Device, device
from tests.kills.processes import Mosquitto, Nursery, Worker
from tests.kills.work import body, judged

SETTLE_S = 120.0
CANCELLED = 0.2
"""The part of the jobs that their device stops."""


@dataclass(frozen=True)
class Plan:
    """What a run does. A part of the kills, `early`, come while the worker starts, the others once it is up.

    `open_jobs` of each device are unfinished at any time; their lengths are drawn from `tokens`, or, for a part `long`
    of them, from `long_tokens`.
    """

    seed: int
    kills: int
    victims: Sequence[str] = ("worker", "worker", "worker", "broker", "both")
    early: float = 0.25
    early_s: float = 0.7
    late_s: float = 0.9
    open_jobs: int = 4
    tokens: range = range(10, 100)
    long_tokens: range = range(150, 400)
    long: float = 0.25


@dataclass
class Report:
    """What happened, and how it was judged."""

    plan: Plan
    verdict: Verdict
    kills: Counter[str] = field(default_factory=Counter)
    jobs: int = 0
    resent: int = 0
    asked: int = 0
    resumed: int = 0
    """Jobs of which the journal had tokens at a kill of the worker: they went on in the middle."""
    duration_s: float = 0.0
    unfinished: int = 0
    unpublished: int = 0
    exit_code: int | None = None

    def document(self) -> dict[str, Any]:
        """For a file."""
        faults = {name: len(jobs) for name, jobs in self.verdict.faults.items()}
        return faults | {
            "jobs": self.jobs,
            "accepted": self.verdict.accepted,
            "statuses": self.verdict.statuses,
            "kills": dict(self.kills),
            "result_repeated": self.verdict.repeated,
            "submits_repeated": self.resent,
            "gets": self.asked,
            "resumed_in_the_middle": self.resumed,
            "left_in_journal": {"unfinished": self.unfinished, "unpublished": self.unpublished},
            "duration_s": round(self.duration_s, 1),
            "seed": self.plan.seed,
            "python": platform.python_version(),
            "machine": machine(),
        }


def machine() -> str:
    """What /proc/cpuinfo calls it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


class Killer:
    """Drives one run; `broker` None is one that is never killed."""

    def __init__(self, plan: Plan, worker: Worker, broker: Mosquitto | None, devices: Sequence[Device]) -> None:
        self._plan, self._worker, self._broker, self._devices = plan, worker, broker, devices
        self._dice = random.Random(plan.seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self.kills: Counter[str] = Counter()
        self.resumed = 0

    async def run(self) -> None:
        """All kills, and then as long as the jobs take."""
        feeding = [asyncio.create_task(self._feed(device, seed)) for seed, device in enumerate(self._devices)]
        await self._worker.start()
        for _ in range(self._plan.kills):
            early = self._dice.random() < self._plan.early
            if not early:
                await self._worker.is_up()
            await asyncio.sleep(self._dice.uniform(0, self._plan.early_s if early else self._plan.late_s))
            await self._kill(self._dice.choice(self._plan.victims))
            for task in feeding:
                if task.done():
                    task.result()
        for task in feeding:
            task.cancel()
        await asyncio.wait(feeding)
        async with asyncio.timeout(SETTLE_S):
            for sent in [sent for device in self._devices for sent in device.jobs.values()]:
                await sent.ended.wait()

    async def _kill(self, victim: str) -> None:
        self.kills[victim] += 1
        starts = []
        if victim in ("broker", "both"):
            await self._broker.kill()
            starts.append(self._broker.start())
        if victim in ("worker", "both"):
            await self._worker.kill()
            self.resumed += begun(self._worker.journal)
            starts.append(self._worker.start())
        await asyncio.gather(*starts)

    async def _feed(self, device: Device, number: int) -> None:
        dice = random.Random(self._plan.seed * 1000 + number)
        while True:
            unfinished = [sent for sent in device.jobs.values() if not sent.ended.is_set()]
            if len(unfinished) < self._plan.open_jobs:
                is_long = dice.random() < self._plan.long
                job = body(dice, self._plan.long_tokens if is_long else self._plan.tokens)
                job_id = f"{len(device.jobs)}"
                if device.name.startswith("three") and dice.random() < 0.3:
                    job["correlation_data"] = f"C-{job_id}"
                device.submit(job_id, job)
                if dice.random() < CANCELLED:
                    task = asyncio.create_task(self._cancel(device, job_id, dice.uniform(0, 1)))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(0.02)

    async def _cancel(self, device: Device, job_id: str, after_s: float) -> None:
        """At any time, also before it was accepted."""
        sent = device.jobs[job_id]
        await asyncio.sleep(after_s)
        if not sent.ended.is_set():
            await device.cancel(sent)


def begun(journal: Path) -> int:
    """Unfinished jobs of which a journal has tokens."""
    if not journal.exists():
        return 0
    with Reader.open_read_only(journal) as reader:
        return sum(bool(job.progress) for job in reader.unfinished(0, 10_000))


async def kill_often(plan: Plan, nursery: Nursery, model: Path, folder: Path, *options: str) -> Report:
    """A run with mosquitto, which is killed as well: devices of both versions of MQTT."""
    async with Mosquitto(folder / "broker") as broker:
        kinds = {"five": {"replies": True}, "plain": {}, "three": {"protocol": 4}}
        return await run(plan, nursery, model, folder, broker.address, broker, kinds, *options)


async def run(
    plan: Plan,
    nursery: Nursery,
    model: Path,
    folder: Path,
    where: BrokerAddress,
    broker: Mosquitto | None,
    kinds: dict[str, dict[str, Any]],
    *options: str,
) -> Report:
    """Run, end the worker politely, compare all answers with undisturbed ones."""
    began = time.monotonic()
    worker = Worker(nursery, model, where, folder / "worker", *options)
    async with AsyncExitStack() as stack:
        devices = [
            await stack.enter_async_context(device(where, name, asks=broker is not None, **given))
            for name, given in kinds.items()
        ]
        killer = Killer(plan, worker, broker, devices)
        with suppress(TimeoutError):  # the verdict says what is lost
            await killer.run()
        exit_code = await worker.terminate()
        await asyncio.sleep(0.2)  # what came twice would have come by now
    verdict = await judged(model, *devices)
    with Reader.open_read_only(worker.journal) as journal:
        left = len(journal.unfinished(0, 10_000)), len(journal.unpublished(0, 10_000))
    return Report(
        plan,
        verdict,
        killer.kills,
        sum(len(each.jobs) for each in devices),
        sum(each.resent for each in devices),
        sum(each.asked for each in devices),
        killer.resumed,
        time.monotonic() - began,
        *left,
        exit_code,
    )


def flawless(report: Report) -> None:
    """Raise `AssertionError` with all there is to know unless nothing was lost, doubled or changed."""
    told = json.dumps(report.document(), indent=1)
    print(told, flush=True)
    assert report.verdict.faults == {"lost": [], "doubled": [], "changed": []}, told
    assert (report.unfinished, report.unpublished, report.exit_code) == (0, 0, 0), told
    assert report.verdict.accepted == report.jobs > 0, told
