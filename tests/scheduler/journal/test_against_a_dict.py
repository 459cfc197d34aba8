"""Random lives of jobs, against a plain dict of what the journal must know."""

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from drumline import QueueFull
from drumline.scheduler.journal.errors import DuplicateJob, JobFinished
from drumline.scheduler.journal.integrity import problems
from drumline.scheduler.journal.journal import Journal
from drumline.scheduler.journal.reader import Reader
from drumline.scheduler.journal.records import Terminal
from tests.scheduler.journal.support import NOW, job, outcome, tokens

KEEP_S = 10.0
MAX_UNFINISHED = 4
NAMES = "abcdefgh"


@dataclass
class Known:
    """What must be in the journal of one job."""

    number: int
    ids: tuple[int, ...] = ()
    terminal: Terminal | None = None
    finished_at: float = 0.0
    published: bool = False


class Life(RuleBasedStateMachine):
    """The journal tells of every job what the dict tells, through every reopening."""

    @initialize()
    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp())
        self.now = NOW
        self.known: dict[str, Known] = {}
        self.accepted = 0
        self._open()

    def wait(self, what: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(what)

    def _open(self) -> None:
        self.journal = Journal(
            self.folder / "journal", window_s=0.0, max_unfinished=MAX_UNFINISHED, keep_s=KEEP_S, clock=lambda: self.now
        )
        self.wait(self.journal.__aenter__())
        self._forget_old()

    def _forget_old(self) -> int:
        old = [name for name, known in self.known.items() if known.published and known.finished_at < self.now - KEEP_S]
        for name in old:
            del self.known[name]
        return len(old)

    @rule(name=st.sampled_from(NAMES))
    def accept(self, name: str) -> None:
        unfinished = sum(known.terminal is None for known in self.known.values())
        if name in self.known:
            with pytest.raises(DuplicateJob):
                self.wait(self.journal.accept(job(name)))
        elif unfinished >= MAX_UNFINISHED:
            with pytest.raises(QueueFull):
                self.wait(self.journal.accept(job(name)))
        else:
            self.accepted += 1
            assert self.wait(self.journal.accept(job(name))) == self.accepted
            self.known[name] = Known(self.accepted)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), ids=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3))
    def progress(self, data: st.DataObject, ids: list[int]) -> None:
        known = data.draw(st.sampled_from(list(self.known.values())))
        if known.terminal is None:
            self.journal.progress(known.number, tokens(*ids, first=len(known.ids), logprobs=True))
            known.ids += tuple(ids)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(list(self.known.values())))
        if known.terminal is None:
            self.wait(self.journal.restart(known.number, "cpu"))
            known.ids = ()

    @precondition(lambda self: self.known)
    @rule(data=st.data(), terminal=st.sampled_from([outcome(), outcome("late", "expired")]))
    def finish(self, data: st.DataObject, terminal: Terminal) -> None:
        known = data.draw(st.sampled_from(list(self.known.values())))
        if known.terminal not in (None, terminal):
            with pytest.raises(JobFinished):
                self.wait(self.journal.finish(known.number, terminal))
            return
        self.wait(self.journal.finish(known.number, terminal))
        if known.terminal is None:
            known.terminal, known.finished_at, known.ids = terminal, self.now, ()

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def published(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(list(self.known.values())))
        if known.terminal is not None:
            self.journal.published(known.number)
            known.published = True

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def prune(self) -> None:
        assert self.wait(self.journal.prune()) == self._forget_old()

    @rule()
    def reopen(self) -> None:
        self.wait(self.journal.__aexit__())
        self._open()

    @invariant()
    def tells_the_same(self) -> None:
        if not hasattr(self, "journal"):
            return
        self.wait(self.journal.flush())
        assert self.journal.failure is None
        for name in NAMES:
            found = self.wait(self.journal.find("alice", name))
            known = self.known.get(name)
            assert (found is None) == (known is None)
            if known is not None:
                ids = found.progress[0].token_ids if found.progress else ()
                assert (found.number, found.terminal, ids) == (known.number, known.terminal, known.ids)
                assert (found.published_at is not None) == known.published
        unfinished = sorted(known.number for known in self.known.values() if known.terminal is None)
        assert [found.number for found in self.wait(self.journal.unfinished())] == unfinished
        with Reader.open_read_only(self.folder / "journal") as reader:
            assert problems(reader) == []

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.wait(self.journal.__aexit__())
            self.loop.close()
            shutil.rmtree(self.folder)


TestLife = Life.TestCase
TestLife.settings = settings(deadline=None, max_examples=20, stateful_step_count=25)
