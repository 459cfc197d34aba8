"""The journal for an event loop: it never blocks the loop, and many events share one commit."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Self, TypeVar

from drumline.scheduler.journal.errors import JobFinished, JournalError
from drumline.scheduler.journal.records import AcceptedJob, JournaledJob, Progress, Terminal
from drumline.scheduler.journal.store import Store
from drumline.scheduler.journal.writer import Done, Task, Writer, answer_all
from drumline.scheduler.log import Event

T = TypeVar("T")
PRUNE_EVERY = 1_000
"""Jobs that finish between two prunings, unless an eighth of what is kept comes sooner."""
MAX_WAITING = 10_000
"""Events nobody waits for that may wait for the disk; beyond, progress is not kept."""

logger = logging.getLogger("drumline.journal")


class Journal:
    """`async with Journal(path) as journal`; entering raises `JournalError`, leaving writes what still waits. None: in
    memory, for as long as the process lives, and not `durable`.

    Events that come within `window_s` of the first, at most `batch`, are one transaction. What is awaited returns when
    it is on the disk; an event's own error reaches its caller alone, a commit's error all callers of the group. Reads
    see what is committed. `on_commit` hears how many events a group brought to the disk and in how many seconds,
    `on_up` whether the journal takes writes, when that changes; both are called on the loop.
    """

    def __init__(
        self,
        path: str | Path | None,
        *,
        window_s: float = 0.02,
        batch: int = 256,
        max_unfinished: int = 10_000,
        keep_s: float = 7 * 86_400,
        keep_bytes: float = 256 * 2**20,
        clock: Callable[[], float] = time.time,
        on_commit: Callable[[int, float], None] | None = None,
        on_up: Callable[[bool], None] | None = None,
    ) -> None:
        self.durable = path is not None
        self.path = Path(":memory:" if path is None else path)
        self.commits = 0
        self.failure: str | None = None
        """Why the last group, or an event in it that nobody waited for, was not written; None when all was."""
        self._window_s, self._batch = window_s if self.durable else 0.0, batch
        self._latest = 0.0
        self._max_unfinished, self._keep_s, self._keep_bytes = max_unfinished, keep_s, keep_bytes
        self._clock, self._on_commit, self._on_up = clock, on_commit, on_up
        self._waiting = 0
        self._finished = self._added_bytes = 0
        self._cut_short: set[int] = set()
        self._open = False

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        path = self.path if self.durable else None
        self._writer = Writer(path, self._window_s, self._batch, self._loop, self._settle, self.now)
        self._latest = await self._writer.start()
        self._open = True
        self._tell(self._pruning())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._open = False
        await self._writer.close()

    def now(self) -> float:
        """Unix seconds, never less than what the journal has seen: a clock that is set back extends no deadline."""
        self._latest = max(self._latest, self._clock())
        return self._latest

    async def accept(self, job: AcceptedJob) -> int:
        """Add a job; its number. Raises `DuplicateJob`, `QueueFull` (bound `journal`)."""
        at = self.now()
        self._added_bytes += len(job.body)
        return await self._ask("write", lambda store: store.accept(job, at, self._max_unfinished))

    async def find(self, client: str, job_id: str) -> JournaledJob | None:
        """The job of this name."""
        return await self._ask("read", lambda store: store.find(client, job_id))

    def progress(self, number: int, progress: Progress) -> None:
        """Add tokens that go on where those before ended; nobody waits.

        When a piece is lost, so are those behind it: what is kept is always the beginning.
        """
        if number not in self._cut_short and progress.token_ids:
            self._tell(lambda store: store.progress(number, progress), progress_of=number)

    async def restart(self, number: int, fingerprint: str) -> None:
        """Forget the tokens of an unfinished job, whose bits depend on `fingerprint` from now on."""
        await self._ask("write", lambda store: store.restart(number, fingerprint))

    def redirect(self, number: int, reply: bytes) -> None:
        """The answers of a job go elsewhere from now on; nobody waits."""
        self._tell(lambda store: store.redirect(number, reply))

    async def finish(self, number: int, terminal: Terminal) -> None:
        """Give a job its outcome. Raises `JobFinished` for one that has another, `UnknownJob`."""
        at = self.now()
        await self._ask("write", lambda store: store.finish(number, terminal, at))
        self._cut_short.discard(number)
        self._finished += 1
        self._added_bytes += len(terminal.payload)
        if self._finished % PRUNE_EVERY == 0 or self._added_bytes > self._keep_bytes / 8:
            self._added_bytes = 0
            self._tell(self._pruning())

    def published(self, number: int) -> None:
        """The broker has confirmed the terminal message; nobody waits."""
        at = self.now()
        self._tell(lambda store: store.published(number, at))

    async def unfinished(self, after_number: int = 0, limit: int = 1_000) -> list[JournaledJob]:
        """Jobs without an outcome, with their progress, in order of acceptance, from behind `after_number`."""
        return await self._ask("read", lambda store: store.unfinished(after_number, limit))

    async def unpublished(self, after_number: int = 0, limit: int = 1_000) -> list[JournaledJob]:
        """Jobs whose outcome the broker has not confirmed, likewise."""
        return await self._ask("read", lambda store: store.unpublished(after_number, limit))

    async def prune(self) -> int:
        """Delete published jobs that are older or larger than is kept; how many. Also done by itself."""
        return await self._ask("write", self._pruning())

    async def flush(self) -> None:
        """Return when all that was told before is on the disk. Ends the group; raises its error."""
        await self._ask("flush", lambda store: None)

    def _pruning(self) -> Callable[[Store], int]:
        finished_before = self.now() - self._keep_s
        return lambda store: store.prune(finished_before, self._keep_bytes)

    async def _ask(self, kind: Literal["read", "write", "flush"], do: Callable[[Store], T]) -> T:
        self._check_open()
        answer: asyncio.Future[T] = self._loop.create_future()
        self._writer.put(Task(kind, do, answer))
        return await answer

    def _tell(self, do: Callable[[Store], object], progress_of: int | None = None) -> None:
        self._check_open()
        task = Task("write", do, progress_of=progress_of)
        if self._waiting >= MAX_WAITING:
            error = JournalError(self.path, f"{MAX_WAITING} events wait to be written, no more are kept")
            self._note([Done(task, error=error)])
            return
        self._waiting += 1
        self._writer.put(task)

    def _check_open(self) -> None:
        if not self._open:
            raise JournalError(self.path, "is closed")

    def _settle(self, done: list[Done], commit_s: float | None) -> None:
        """On the loop: tell callers what became of a group."""
        self._waiting -= sum(each.task.answer is None for each in done)
        all_lost = commit_s is None
        self._note([each for each in done if each.error is not None and (all_lost or each.task.answer is None)])
        answer_all(done)
        if commit_s is not None:
            self.commits += 1
            if self._on_commit is not None:
                self._on_commit(sum(each.task.kind == "write" and each.error is None for each in done), commit_s)

    def _note(self, lost: list[Done]) -> None:
        """Say once that writing fails, and once that it is over."""
        for each in lost:
            if each.task.progress_of is not None and not isinstance(each.error, JobFinished):
                self._cut_short.add(each.task.progress_of)
        if lost and self.failure is None:
            logger.error(Event("journal failing", path=self.path, error=lost[0].error))
        elif not lost and self.failure is not None:
            logger.info(Event("journal recovered", path=self.path))
        if self._on_up is not None and bool(lost) != (self.failure is not None):
            self._on_up(not lost)
        self.failure = str(lost[0].error) if lost else None
