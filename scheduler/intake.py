"""Taking requests: each is checked, then queued or ended at once, and known until its end."""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Several
from contextlib import nullcontext
from itertools import takewhile

from drumline.cache_pool.pool import CachePool
from drumline.model.errors import InvalidRequest
from drumline.model.language_model import LanguageModel
from drumline.model.stop_reason import StopReason
from drumline.scheduler.admission import Admission, Admitted
from drumline.scheduler.config import SchedulerConfig
from drumline.scheduler.job import GenerationJob
from drumline.scheduler.live_rows import LiveRows
from drumline.scheduler.progress import Progress, check_progress
from drumline.scheduler.queue import RequestQueue
from drumline.scheduler.reporting import Reporting
from drumline.scheduler.request import Request
from drumline.scheduler.sequence import Sequence
from drumline.scheduler.submit_line import SubmitLine


class Intake:
    """The jobs of a scheduler, from request to end. `check_open` raises where nothing is taken (any more); `wake`
    tells the loop that it has something to do, `changed` that what waits is not what it was."""

    def __init__(
        self,
        model: LanguageModel,
        config: SchedulerConfig,
        pool: CachePool,
        queue: RequestQueue[Sequence],
        rows: LiveRows,
        reporting: Reporting,
        clock: Callable[[], float],
        check_open: Callable[[], None],
        wake: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        self._model, self._config, self._pool, self._queue, self._rows = model, config, pool, queue, rows
        self._reporting, self._clock, self._check_open = reporting, clock, check_open
        self._wake, self._changed = wake, changed
        self._admission = Admission(model, config.rows)
        self.line = SubmitLine(self._enqueue, clock)
        """Callers who wait for room."""
        self.jobs: dict[str, GenerationJob] = {}
        """All that have not ended, by id."""
        self.quiet = asyncio.Event()
        """Set while there are none."""
        self.quiet.set()

    async def take(
        self, request: Request, wait: bool, progress: Several[Progress], label: str | None, accepted: bool
    ) -> GenerationJob:
        """Accept a request; see `Scheduler.submit`."""
        with nullcontext() if accepted else self._reporting.refusals_counted(request, label):
            self._check_open()
            job = await self._admit(request, progress, label, accepted)
            return await self.line.enter(job) if wait else self._enqueue(job)

    def take_at_once(self, request: Request) -> GenerationJob:
        """Accept a request without a moment for others; see `Scheduler.submit_nowait`."""
        with self._reporting.refusals_counted(request):
            self._check_open()
            return self._enqueue(self._make_job(self._admission.admit(request)))

    async def check(self, request: Request) -> Request:
        """The request with its seed; see `Scheduler.check`."""
        self._check_open()
        return request.with_seed((await self._admit(request)).seed)

    async def settle(
        self, request: Request, reason: StopReason, progress: Several[Progress], label: str | None
    ) -> GenerationJob:
        """A job that ends at once; see `Scheduler.settle`."""
        job = await self._admit(request, progress, label, accepted=True)
        job.settle(reason)
        self._check_new(job)
        self._register(job)
        return job

    def queue_position(self, job_id: str) -> int | None:
        """How many jobs came before a queued one; see `Scheduler.queue_position`."""
        job = self.jobs.get(job_id)
        if job is None or job.state != "queued":
            return None
        ahead = takewhile(lambda other: other is not job, (sequence.job for sequence in self._queue))
        return len({other.id for other in ahead})

    def _register(self, job: GenerationJob) -> None:
        """The job is ours now; what needs no row ends at once."""
        self.jobs[job.id] = job
        self.quiet.clear()
        self._reporting.accepted(job)
        for choice, reason in job.settled.items():
            self._rows.end_unseated(job.sequences[choice], reason)

    def sequence_ended(self, sequence: Sequence) -> None:
        """A choice has ended; with the last of them its job is done."""
        job = sequence.job
        result = job.finish(self._clock())
        if result is None:
            return
        del self.jobs[job.id]
        self._reporting.ended(job, result)
        if not self.jobs:
            self.quiet.set()

    def _make_job(self, admitted: Admitted, label: str | None = None, accepted: bool = False) -> GenerationJob:
        return GenerationJob(admitted, self._model, self._clock(), self._cancel_asked, label, accepted)

    async def _admit(
        self, request: Request, progress: Several[Progress] = (), label: str | None = None, accepted: bool = False
    ) -> GenerationJob:
        job = self._make_job(await self._admission.admit_without_blocking(request), label, accepted)
        check_progress(request, progress, self._model.config.vocab_size)
        job.go_on_from(progress)
        return job

    def _enqueue(self, job: GenerationJob) -> GenerationJob:
        """Put a job in the queue, or end it where it needs no row; raises `QueueFull`."""
        self._check_open()
        self._check_new(job)
        if self._config.refuse_late:
            ahead = 0 if self._pool.free else self._queue.tokens_before(job.request.priority)
            self._reporting.check_deadline(job, ahead)
        if job.request.max_tokens == 0:  # legal, and done: no row is needed to generate nothing
            job.settle("budget")
        elif job.expired(self._clock()):
            job.settle("deadline")
        self._rows.enqueue([sequence for sequence in job.sequences if sequence.choice not in job.settled])
        self._register(job)
        self._changed()
        return job

    def _check_new(self, job: GenerationJob) -> None:
        if job.id in self.jobs:
            raise InvalidRequest("id", f"a job {job.id} is queued or running")

    def _cancel_asked(self, job: GenerationJob) -> None:
        self._rows.cancel_asked.append(job)
        self._wake()
