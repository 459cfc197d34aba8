"""The journal as an event loop sees it: group commits, whom an error reaches, health, the end."""

import asyncio
import logging
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drumline import QueueFull
from drumline.scheduler.journal import journal as module
from drumline.scheduler.journal.errors import (
    DuplicateJob,
    JobFinished,
    JournalCorrupt,
    JournalError,
    JournalFull,
    JournalHeld,
    JournalReplaced,
)
from drumline.scheduler.journal.integrity import problems
from drumline.scheduler.journal.journal import Journal
from drumline.scheduler.journal.reader import Reader
from tests.processes import ENVIRONMENT, read_until, running_python
from tests.scheduler.journal.support import NOW, job, outcome, tokens

LONG_S = 60.0
"""A window that only a full batch, a flush or the end closes: nothing depends on how fast this machine is."""

ACCEPT_FOR_EVER = """
import asyncio, itertools, sys
from drumline.scheduler.journal.journal import Journal
from tests.scheduler.journal.support import job, outcome, tokens

async def main():
    async with Journal(sys.argv[1], window_s=0.001) as journal:
        numbers = itertools.count()
        async def client():
            for number in numbers:
                place = await journal.accept(job(f"job-{number}"))
                print("accepted", number, flush=True)
                journal.progress(place, tokens(1, 2, 3))
                if number % 3 == 0:
                    await journal.finish(place, outcome(f"outcome of {number}"))
                    print("finished", number, flush=True)
        await asyncio.gather(*(client() for _ in range(10)))

asyncio.run(main())
"""


@contextmanager
def disk_of(size_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond; Python turns the signal into an error of the write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_events_of_one_window_are_one_commit(path):
    counted, seconds = [], []

    def committed(events: int, commit_s: float) -> None:
        counted.append(events)
        seconds.append(commit_s)

    started = time.perf_counter()
    async with Journal(path, window_s=LONG_S, batch=51, on_commit=committed) as journal:
        numbers = await asyncio.gather(*(journal.accept(job(f"job-{number}")) for number in range(50)))
        assert numbers == list(range(1, 51))
        assert (journal.commits, counted) == (1, [51])  # the first pruning is among them
        done = [asyncio.create_task(journal.finish(number, outcome())) for number in numbers]
        done += [asyncio.create_task(journal.accept(job("another")))]
        await asyncio.sleep(0)
        await journal.flush()
        await asyncio.gather(*done)
        assert (journal.commits, counted) == (2, [51, 51])
    assert min(seconds) > 0
    assert sum(seconds) < time.perf_counter() - started


async def test_events_that_were_refused_are_not_on_the_disk(path):
    counted = []
    async with Journal(path, window_s=LONG_S, batch=4, on_commit=lambda events, _: counted.append(events)) as journal:
        accepting = (journal.accept(job(name)) for name in "aa")
        await asyncio.gather(*accepting, journal.flush(), return_exceptions=True)
        assert counted == [2]  # a job and the first pruning, but neither its double nor the flush


async def test_a_window_ends_by_itself(path):
    async with Journal(path, window_s=0.001) as journal:
        assert await journal.accept(job("a")) == 1


async def test_one_caller_hears_of_what_is_wrong_with_its_event(path):
    async with Journal(path, window_s=LONG_S, batch=6, max_unfinished=3) as journal:
        answers = await asyncio.gather(
            *(journal.accept(job(name)) for name in ("a", "b", "a", "c", "d")), return_exceptions=True
        )
        assert answers[:2] + answers[3:4] == [1, 2, 3]
        assert isinstance(answers[2], DuplicateJob)
        assert isinstance(answers[4], QueueFull)
        assert (answers[4].bound, answers[4].limit, answers[4].queued) == ("journal", 3, 3)
        assert (journal.commits, journal.failure) == (1, None)


async def test_the_bound_counts_what_is_not_done(path):
    async with Journal(path, window_s=0.0, max_unfinished=1) as journal:
        number = await journal.accept(job("a"))
        with pytest.raises(QueueFull):
            await journal.accept(job("b"))
        await journal.finish(number, outcome())
        await journal.finish(number, outcome())
        with pytest.raises(JobFinished):
            await journal.finish(number, outcome("another"))
        assert await journal.accept(job("b")) == 2
        with pytest.raises(QueueFull):
            await journal.accept(job("c"))
    async with Journal(path, window_s=0.0, max_unfinished=1) as journal:
        with pytest.raises(QueueFull):
            await journal.accept(job("c"))


async def test_reads_see_what_is_committed_alone(path):
    async with Journal(path, window_s=LONG_S, clock=lambda: NOW) as journal:
        accepting = asyncio.create_task(journal.accept(job("a")))
        await asyncio.sleep(0)
        assert await journal.find("alice", "a") is None
        await journal.flush()
        found = await journal.find("alice", "a")
        assert (found.number, found.accepted_at) == (await accepting, NOW)


async def test_a_job_goes_on_where_a_worker_before_left_it(path):
    async with Journal(path, window_s=0.0) as journal:
        first, second, third = [await journal.accept(job(name)) for name in "abc"]
        journal.progress(first, tokens(1, 2))
        journal.progress(first, tokens())
        journal.progress(first, tokens(3, first=2))
        await journal.restart(second, "gpu")
        await journal.finish(third, outcome())
    async with Journal(path, window_s=0.0) as journal:
        one, two = await journal.unfinished()
        assert (one.number, one.state, one.progress) == (first, "running", (tokens(1, 2, 3),))
        assert (two.number, two.state, two.job.fingerprint) == (second, "accepted", "gpu")
        assert [found.number for found in await journal.unfinished(first)] == [second]
        assert [found.terminal for found in await journal.unpublished()] == [outcome()]
        journal.published(third)
        await journal.flush()
        assert await journal.unpublished() == []


async def test_pruning_happens_by_itself(path, monkeypatch):
    monkeypatch.setattr(module, "PRUNE_EVERY", 3)
    now = NOW
    async with Journal(path, window_s=0.0, keep_s=10, clock=lambda: now) as journal:
        for name in "abc":
            number = await journal.accept(job(name))
            await journal.finish(number, outcome())
            journal.published(number)
            now += 6
        await journal.flush()
        assert await journal.find("alice", "a") is None
        assert await journal.find("alice", "b") is not None
        assert await journal.prune() == 1
    now += 6
    async with Journal(path, window_s=0.0, keep_s=10, clock=lambda: now) as journal:
        await journal.flush()
        assert await journal.find("alice", "c") is None


async def test_what_nobody_waits_for_is_told_once_when_it_fails(path, caplog):
    caplog.set_level(logging.INFO, "drumline.journal")
    async with Journal(path, window_s=0.0) as journal:
        number = await journal.accept(job("a"))
        journal.progress(number, tokens(1, first=5))
        journal.published(number)
        await journal.flush()
        assert "is not done" in journal.failure or "goes on at 0, not at 5" in journal.failure
        await journal.accept(job("b"))
        assert journal.failure is None
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]


async def test_a_full_disk_is_told_to_callers_and_passes(path, caplog):
    up = []
    async with Journal(path, window_s=LONG_S, batch=3, on_up=up.append) as journal:
        number, _ = await asyncio.gather(journal.accept(job("a")), journal.accept(job("b")))
        with disk_of(100_000):
            journal.progress(number, tokens(1))
            large = [journal.accept(job(name, body=bytes(200_000))) for name in "cd"]
            answers = await asyncio.gather(*large, return_exceptions=True)
            assert [type(answer) for answer in answers] == [JournalFull, JournalFull]
            assert journal.failure == str(answers[0])
            assert up == [False]
            assert [found.job.job_id for found in await journal.unfinished()] == ["a", "b"]
        journal.progress(number, tokens(2, first=1))  # behind a lost piece: not kept, and no failure of its own
        await asyncio.gather(*(journal.accept(job(name, body=bytes(200_000))) for name in "cde"))
        assert journal.failure is None
        assert up == [False, True]
        assert [found.progress for found in await journal.unfinished()] == [()] * 5
    with Reader.open_read_only(path) as reader:
        assert problems(reader) == []
    assert [record.levelname for record in caplog.records] == ["ERROR"]


async def test_events_that_wait_are_bounded(path, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    async with Journal(path, window_s=0.0) as journal:
        number = await journal.accept(job("a"))
        await journal.flush()
        for first in range(5):
            journal.progress(number, tokens(first, first=first))
        assert "3 events wait to be written" in journal.failure
        await journal.flush()
        (found,) = await journal.unfinished()
        assert found.progress == (tokens(0, 1, 2),)


async def test_a_deleted_file_is_no_journal(path):
    async with Journal(path, window_s=0.0) as journal:
        await journal.accept(job("a"))
        path.unlink()
        with pytest.raises(JournalReplaced, match=r"jobs\.journal was deleted or replaced while in use"):
            await journal.accept(job("b"))
        assert "deleted or replaced" in journal.failure


async def test_leaving_writes_what_waits(path):
    async with Journal(path, window_s=LONG_S) as journal:
        accepting = [asyncio.create_task(journal.accept(job(name))) for name in "abc"]
        await asyncio.sleep(0)
    assert [task.result() for task in accepting] == [1, 2, 3]
    assert "drumline-journal" not in [thread.name for thread in threading.enumerate()]
    for use in (journal.flush(), journal.accept(job("d"))):
        with pytest.raises(JournalError, match="is closed"):
            await use
    with pytest.raises(JournalError, match="is closed"):
        journal.published(1)


async def test_a_caller_that_is_cancelled_disturbs_nobody(path):
    async with Journal(path, window_s=LONG_S) as journal:
        gone = asyncio.create_task(journal.accept(job("a")))
        stays = asyncio.create_task(journal.accept(job("b")))
        await asyncio.sleep(0)
        gone.cancel()
        await journal.flush()
        assert await stays == 2
        assert (await journal.find("alice", "a")).number == 1


async def test_entering_says_why_it_cannot(path):
    async with Journal(path):
        with pytest.raises(JournalHeld):
            async with Journal(path):
                pass
    path.write_bytes(b"a diary" * 1000)
    with pytest.raises(JournalCorrupt):
        async with Journal(path):
            pass


def test_what_was_said_to_be_accepted_survives_a_kill(path: Path, monkeypatch):
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", ".:src")
    with running_python("-c", ACCEPT_FOR_EVER, path) as child:
        said = [read_until(child, r"(accepted|finished) (\d+)").groups()]
        while len(said) < 150:
            said.append(read_until(child, r"(accepted|finished) (\d+)").groups())
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().splitlines()
    said += [tuple(line.split()) for line in rest]
    with Reader.open_read_only(path) as reader:  # what the killed one left can be looked at before a worker mends it
        assert problems(reader) == []
        assert reader.count() >= len([what for what, _ in said if what == "accepted"])
    asyncio.run(_all_there(path, said))


async def _all_there(path: Path, said: list[tuple[str, str]]) -> None:
    async with Journal(path) as journal:
        for what, number in said:
            found = await journal.find("alice", f"job-{number}")
            assert found is not None
            if what == "finished":
                assert found.terminal.payload == f"outcome of {number}".encode()
    with Reader.open_read_only(path) as reader:
        assert problems(reader) == []
