"""The probes of a worker, over real HTTP, while things hang, fail and come back; time is the test's own."""

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry

from drumline import Request, Scheduler
from drumline.metrics.exporter import Exporter
from drumline.metrics.pages import Pages
from drumline.scheduler.cli.health import Health
from drumline.scheduler.journal.journal import Journal
from tests.tiny import tiny_model

PATIENCE_S = 20.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def probes(health: Health) -> Iterator[str]:
    pages = Pages(CollectorRegistry(), health=health.health, ready=health.ready)
    with Exporter(pages, port=0) as exporter:
        yield exporter.url


def ask(url: str, path: str) -> tuple[int, list[str]]:
    try:
        with urllib.request.urlopen(url + path, timeout=PATIENCE_S) as response:
            status, body = response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            status, body = error.code, error.read()
    return status, json.loads(body)["reasons"]


@asynccontextmanager
async def running(health: Health, clock: Clock, **settings: object) -> AsyncIterator[Scheduler]:
    async with Scheduler(tiny_model(), rows=2, clock=clock, **settings) as scheduler:
        health.scheduler, health.starting = scheduler, None
        yield scheduler


class Hanging:
    """The backend of a scheduler, which hangs in its next step until it is let go."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.entered, self.let_go = threading.Event(), threading.Event()
        self._forward = scheduler.backend.forward
        scheduler.backend.forward = self._hang

    def _hang(self, *arguments: object, **named: object) -> object:
        self.entered.set()
        assert self.let_go.wait(PATIENCE_S)
        return self._forward(*arguments, **named)


async def test_a_step_that_hangs_is_named_until_it_goes_on():
    health, clock = Health(), Clock()
    with probes(health) as url:
        async with running(health, clock, stall_s=10.0) as scheduler:
            hanging = Hanging(scheduler)
            job = await scheduler.submit(Request(prompt="a", max_tokens=2))
            await asyncio.to_thread(hanging.entered.wait, PATIENCE_S)
            clock.now += 9.0
            assert await asyncio.to_thread(ask, url, "/healthz") == (200, [])
            clock.now += 3.0
            said = "a step has been running for 12 s"
            for path in ("/healthz", "/readyz"):
                status, reasons = await asyncio.to_thread(ask, url, path)
                assert (status, reasons[-1]) == (503, said)
            hanging.let_go.set()
            assert (await job.result()).status == "completed"
            await beaten(scheduler, clock)
            for path in ("/healthz", "/readyz"):
                assert await asyncio.to_thread(ask, url, path) == (200, [])


async def beaten(scheduler: Scheduler, clock: Clock) -> None:
    """Wait until the event loop has beaten at the time it is now."""
    async with asyncio.timeout(PATIENCE_S):
        while scheduler.health():  # noqa: ASYNC110 the beat sets no event
            await asyncio.sleep(0.05)


async def test_an_event_loop_that_is_blocked_is_seen_from_outside():
    health, clock = Health(), Clock()
    with probes(health) as url:
        async with running(health, clock, stall_s=10.0) as scheduler:
            scheduler._reporting.pulse.beat()
            clock.now += 11.0
            assert ask(url, "/healthz") == (503, ["the event loop has not moved for 11 s"])  # blocks this loop
            await beaten(scheduler, clock)
            assert await asyncio.to_thread(ask, url, "/healthz") == (200, [])
        clock.now += 100.0
        assert await asyncio.to_thread(ask, url, "/healthz") == (200, [])  # it ended as planned


async def test_an_engine_that_failed_says_why():
    health = Health()
    with probes(health) as url:
        async with running(health, Clock()) as scheduler:

            def broken(*arguments: object, **named: object) -> object:
                raise ZeroDivisionError("the backend broke")

            scheduler.backend.forward = broken
            job = await scheduler.submit(Request(prompt="a", max_tokens=2))
            assert (await job.result()).status == "failed"
            reason = "the engine failed: ZeroDivisionError: the backend broke"
            for path in ("/healthz", "/readyz"):
                assert await asyncio.to_thread(ask, url, path) == (503, [reason])


def test_before_there_is_anything_a_worker_lives_and_is_not_ready():
    health = Health()
    with probes(health) as url:
        assert ask(url, "/healthz") == (200, [])
        assert ask(url, "/readyz") == (503, ["the model is being loaded"])
        health.draining = True
        assert ask(url, "/readyz") == (503, ["draining: what runs is finished, nothing new is taken"])
        health.ended("the MQTT edge ended: it gave no reason")
        assert ask(url, "/healthz") == (503, ["the MQTT edge ended: it gave no reason"])


async def test_a_scheduler_that_drains_is_not_ready_but_lives():
    health = Health()
    async with running(health, Clock()) as scheduler:
        assert health.ready() == []
        await scheduler.drain()
        assert health.ready() == ["the engine takes no requests"]
        assert health.health() == []


async def test_a_journal_that_takes_no_writes_is_a_reason(tmp_path: Path):
    health = Health()
    async with running(health, Clock()), Journal(tmp_path / "jobs.db") as journal:
        health.journal = journal
        assert health.ready() == []
        journal.failure = "database or disk is full"
        assert health.ready() == ["the journal takes no writes: database or disk is full"]
        assert health.health() == []
