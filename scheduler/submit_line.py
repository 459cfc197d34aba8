"""Callers of `submit` whose jobs found the queue full: first come, first served, before anybody who comes later."""

import asyncio
from collections import deque
from collections.abc import Callable

from drumline.model.errors import QueueFull
from drumline.scheduler.job import GenerationJob


class SubmitLine:
    """Holds what is not accepted yet, so only their callers bound it. `enqueue` accepts a job, ends it where its
    deadline has passed, or raises `QueueFull` where it has to wait on."""

    def __init__(self, enqueue: Callable[[GenerationJob], GenerationJob], clock: Callable[[], float]) -> None:
        self._enqueue, self._clock = enqueue, clock
        self._line: deque[tuple[GenerationJob, asyncio.Future[GenerationJob]]] = deque()

    async def enter(self, job: GenerationJob) -> GenerationJob:
        """Wait until the job is accepted; raises what `enqueue` raises, but `QueueFull`."""
        if not self._line:
            try:
                return self._enqueue(job)
            except QueueFull:
                pass
        accepted: asyncio.Future[GenerationJob] = asyncio.get_running_loop().create_future()
        self._line.append((job, accepted))
        try:
            return await accepted
        except asyncio.CancelledError:
            if accepted.done() and not accepted.cancelled() and accepted.exception() is None:
                job.cancel()  # accepted in the very moment in which its caller gave up: nobody would have it
            raise

    def advance(self) -> None:
        """There may be room, or time has passed, or nothing is accepted any more: look at all who wait."""
        waiting, self._line = self._line, deque()
        full = False
        for job, accepted in waiting:
            if accepted.done():  # cancelled
                continue
            if not full or job.expired(self._clock()):
                try:
                    accepted.set_result(self._enqueue(job))
                    continue
                except QueueFull:
                    full = True
                except Exception as error:  # its caller's to hear, as if it had not had to wait
                    accepted.set_exception(error)
                    continue
            self._line.append((job, accepted))
