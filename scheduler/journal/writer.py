"""The journal's thread: it gathers events for a while, writes them as one transaction and tells the event loop."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal

from drumline.scheduler.journal.store import Store


@dataclass(frozen=True, eq=False)
class Task:
    """Something for the thread. A `write` joins the group, a `flush` or `close` also ends it, a `read` is done at once.

    `answer` None: nobody waits. `progress_of` is the job whose stored progress ends where this is lost.
    """

    kind: Literal["read", "write", "flush", "close"]
    do: Callable[[Store], Any]
    answer: "asyncio.Future[Any] | None" = None
    progress_of: int | None = None


@dataclass(frozen=True)
class Done:
    """What became of a task."""

    task: Task
    value: Any = None
    error: Exception | None = None


Settle = Callable[[list[Done], float | None], None]
"""Called on the loop with what became of a group, and how many seconds its commit took; None where there was none."""


class Writer:
    """Owns the store. Tasks come by `put`; answers leave on the loop."""

    def __init__(
        self,
        path: Path | None,
        window_s: float,
        batch: int,
        loop: asyncio.AbstractEventLoop,
        settle: Settle,
        clock: Callable[[], float],
    ) -> None:
        self._path, self._window_s, self._batch = path, window_s, batch
        self._loop, self._settle, self._clock = loop, settle, clock
        self._tasks: SimpleQueue[Task] = SimpleQueue()

    async def start(self) -> float:
        """Open the journal; the latest time that it knows of. Raises `JournalError`."""
        opened: asyncio.Future[float] = self._loop.create_future()
        opening = Task("read", lambda store: store.last_noted(), opened)
        self._thread = threading.Thread(target=self._work, args=(opening,), name="drumline-journal", daemon=True)
        self._thread.start()
        return await opened

    async def close(self) -> None:
        """Write what was put before, and close the journal."""
        closed = self._loop.create_future()
        self.put(Task("close", lambda store: store.close(), closed))
        await closed
        self._thread.join()

    def put(self, task: Task) -> None:
        """Hand a task over; never waits."""
        self._tasks.put(task)

    def _work(self, opened: Task) -> None:
        try:
            store = Store.open(self._path)
        except Exception as error:
            self._on_loop(answer_all, [Done(opened, error=error)])
            return
        self._on_loop(answer_all, [_attempt(opened, store)])
        group: list[Task] = []
        while not (group and group[-1].kind == "close"):
            group = self._gather(store)
            self._write(store, [task for task in group if task.kind != "close"])
        self._on_loop(answer_all, [_attempt(group[-1], store)])

    def _gather(self, store: Store) -> list[Task]:
        """The next group; reads are answered meanwhile."""
        group: list[Task] = []
        closes_at = 0.0
        while len(group) < self._batch and not (group and group[-1].kind in ("flush", "close")):
            try:
                task = self._tasks.get(timeout=max(0.0, closes_at - time.monotonic()) if group else None)
            except Empty:
                break
            if task.kind == "read":
                self._on_loop(answer_all, [_attempt(task, store)])
                if group and time.monotonic() >= closes_at:  # many readers must not keep writers waiting
                    break
                continue
            if not group:
                closes_at = time.monotonic() + self._window_s
            group.append(task)
        return group

    def _write(self, store: Store, group: list[Task]) -> None:
        """One transaction. What goes wrong with it as a whole goes wrong with each task."""
        if all(task.kind == "flush" for task in group):
            self._on_loop(answer_all, [Done(task) for task in group])
            return
        started = time.perf_counter()
        try:
            with store.transaction():
                done = [_attempt(task, store, store.event) for task in group]
                store.note(self._clock())
        except Exception as error:
            self._on_loop(self._settle, [Done(task, error=error) for task in group], None)
        else:
            self._on_loop(self._settle, done, time.perf_counter() - started)

    def _on_loop(self, call: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # a loop that was closed without leaving the journal: nobody listens
            self._loop.call_soon_threadsafe(call, *arguments)


def _attempt(task: Task, store: Store, within: Callable[[], AbstractContextManager[None]] = nullcontext) -> Done:
    """Do a task; what it raises is its own, but for the errors that end the transaction."""
    try:
        with within():
            value = task.do(store)
    except Exception as error:
        if task.kind == "write" and isinstance(error, sqlite3.Error):
            raise
        return Done(task, error=error)
    return Done(task, value)


def answer_all(done: Iterable[Done]) -> None:
    """On the loop: wake those who wait."""
    for each in done:
        answer = each.task.answer
        if answer is None or answer.done():  # done: its caller was cancelled
            continue
        if each.error is None:
            answer.set_result(each.value)
        else:
            answer.set_exception(each.error)
