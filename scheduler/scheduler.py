"""The scheduler: an asyncio loop that seats, plans, steps and commits. It owns only the loop."""

import asyncio
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Several
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import takewhile
from types import TracebackType
from typing import Self
from uuid import uuid4

from prometheus_client import CollectorRegistry

from drumline.cache_pool.pool import CachePool
from drumline.cache_pool.store import make_kv
from drumline.metrics.instruments import watch_loop_lag
from drumline.model.backends import make_backend
from drumline.model.backends.fingerprint import fingerprint
from drumline.model.errors import EngineFailed, InvalidRequest, QueueFull, SchedulerClosed
from drumline.model.language_model import LanguageModel
from drumline.model.stop_reason import StopReason
from drumline.scheduler.admission import Admission, Admitted
from drumline.scheduler.config import DRAFT_TOKENS, VERSION, SchedulerConfig
from drumline.scheduler.engine import Statistics
from drumline.scheduler.job import GenerationJob
from drumline.scheduler.live_rows import LiveRows
from drumline.scheduler.pins import Pin, pin_prompt
from drumline.scheduler.plan import plan_step
from drumline.scheduler.policy import Policy, checked_policy
from drumline.scheduler.progress import Progress, check_progress
from drumline.scheduler.queue import RequestQueue
from drumline.scheduler.reporting import Reporting
from drumline.scheduler.request import Request, Result
from drumline.scheduler.sequence import Sequence
from drumline.scheduler.step import StepRunner
from drumline.scheduler.submit_line import SubmitLine

_log = logging.getLogger("drumline")


class _StepFailed(Exception):
    """The backend raised `reason`."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(reason)
        self.reason = reason


class Scheduler:
    """Generates for many requests at once on one model.

    Use it as `async with Scheduler(model, rows=16) as scheduler`; entering it loads the kernels of an exact backend
    (the very first time they are compiled, which takes a minute), leaving it cancels what still runs (call `drain`
    first to finish it). All methods are called from the event loop that entered the block. Raises
    `InvalidRequest` for a setting out of range, a backend that does not exist or is not exact where `require_exact`
    asks for it, a pool that does not fit the memory, or a `name` already used in `registry`. One that is never entered
    keeps its pool and its name until `close`.

    `policy` decides who is next (`policy.py`; default: priority, then fair share between tenants, then arrival).
    `draft_tokens` is how many tokens an exact backend drafts ahead for a row that runs nearly alone; 0: none.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        rows: int = 16,
        step_tokens: int = 256,
        queue_requests: int = 1024,
        queue_tokens: int = 4_000_000,
        backend: str | None = None,
        require_exact: bool = False,
        draft_tokens: int = DRAFT_TOKENS,
        reuse: bool = True,
        refuse_late: bool = False,
        restarts: int = 0,
        registry: CollectorRegistry | None = None,
        name: str = "main",
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = SchedulerConfig(
            rows=rows,
            step_tokens=step_tokens,
            queue_requests=queue_requests,
            queue_tokens=queue_tokens,
            backend=backend,
            require_exact=require_exact,
            draft_tokens=draft_tokens,
            reuse=reuse,
            refuse_late=refuse_late,
            restarts=restarts,
            name=name,
        )
        self.model = model
        self.backend = make_backend(backend, model)
        if require_exact and not self.backend.exact:
            raise InvalidRequest(
                "require_exact", f"precision {model.precision} on the {self.backend.name} backend is not exact"
            )
        self.registry = CollectorRegistry() if registry is None else registry
        self._clock = clock
        self._draft_tokens = draft_tokens if self.backend.exact else 0  # elsewhere they would change roundings
        self._pool = CachePool(model, rows, make_kv(self.backend.name, model, rows), reuse)
        self._queue: RequestQueue[Sequence] = RequestQueue(queue_requests, queue_tokens, checked_policy(policy))
        self._admission = Admission(model, rows)
        self._runner = StepRunner(self.backend, self._pool)
        self._reporting = Reporting(self.registry, name, clock)
        self.instruments = self._reporting.instruments
        self.instruments.identify(
            version=VERSION, model=model.name, precision=model.precision, backend=self.backend.name
        )
        self._rows = LiveRows(model.config, self._pool, self._queue, self.instruments, clock, self._sequence_ended)
        self._jobs: dict[str, GenerationJob] = {}
        self._line = SubmitLine(self._enqueue, clock)
        self._wake, self._quiet = asyncio.Event(), asyncio.Event()
        self._quiet.set()
        self._closed = self._draining = False
        self._failure: str | None = None
        self._restarts_left = restarts
        self._torch = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"drumline-{name}")
        self._tasks: list[asyncio.Task[None]] = []
        self._publish_levels()

    async def __aenter__(self) -> Self:
        if self._tasks or self._closed:
            raise SchedulerClosed("a scheduler can be entered once")
        if self.backend.exact:
            await asyncio.get_running_loop().run_in_executor(self._torch, self._runner.warm_up)
        self._tasks = [
            asyncio.create_task(self._run(), name=f"drumline-{self.config.name}-loop"),
            asyncio.create_task(watch_loop_lag(self.instruments.loop_lag), name=f"drumline-{self.config.name}-lag"),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that bits depend on besides the request; equal ones owe equal answers where the backend is
        exact."""
        return fingerprint(self.model, self.backend.arithmetic)

    @property
    def healthy(self) -> bool:
        """False once a step has failed: the scheduler takes no request any more."""
        return self._failure is None

    @property
    def ready(self) -> bool:
        """Whether a request would be taken now."""
        return self.healthy and bool(self._tasks) and not self._draining

    async def submit(self, request: Request, *, wait: bool = True, progress: Several[Progress] = ()) -> GenerationJob:
        """Accept a request, waiting while the queue is full; with `wait=False` that raises `QueueFull`.

        It goes on behind `progress`, tokens that it led to in another process: where fingerprints are equal and the
        backend is exact, the answer is the one it would have had there. Raises `InvalidRequest`, `SchedulerClosed`,
        `EngineFailed`. Whatever takes long to read is read in a thread. A deadline that passes while there is no room
        ends the job like any other.
        """
        with self._reporting.refusals_counted():
            self._check_open()
            job = await self._admit(request, progress)
        return await self._line.enter(job) if wait else self._enqueue_at_once(job)

    async def check(self, request: Request) -> Request:
        """The request as it would run: with a seed. Raises `InvalidRequest` for one that never could, and what else
        `submit` raises, but for a full queue."""
        with self._reporting.refusals_counted():
            self._check_open()
            return request.with_seed((await self._admit(request)).seed)

    async def settle(self, request: Request, reason: StopReason, progress: Several[Progress] = ()) -> Result:
        """The result of a request that ends for this reason behind its `progress`, without a row; counted like any
        other. Raises `InvalidRequest`."""
        job = await self._admit(request, progress)
        job.settle(reason)
        self._check_new(job)
        self._register(job)
        return await job.result()

    def submit_nowait(self, request: Request) -> GenerationJob:
        """Accept a request at once; raises `QueueFull` besides what `submit` raises.

        A grammar is compiled here and now, which `submit` does in a thread.
        """
        with self._reporting.refusals_counted():
            self._check_open()
            job = self._make_job(self._admission.admit(request))
        return self._enqueue_at_once(job)

    def preempt(self, job: GenerationJob) -> None:
        """Take a running job's rows at the next step boundary and put it back in the queue.

        It goes on from its tokens and random state: what is already out stays, and the answer is the one it would have
        given. It stands at the head of its tenant's line in its class. Nothing happens to a job that has no row.
        """
        self._rows.preempt(job)

    async def pin(self, request: Request) -> Pin:
        """Compute the prompt of a request and keep it in a row of its own, for all that begin alike, until it is
        released.

        Raises `InvalidRequest` where that would leave no row to run in, where prompts are not reused, and for a prompt
        of fewer than 16 tokens; else what `submit` raises, and `Result.raise_for_status`.
        """
        return await pin_prompt(self, self._rows, self._pool, request)

    async def drain(self, timeout: float | None = None) -> None:
        """Take no more requests and finish all that were accepted; at `timeout` (seconds) the rest ends `cancelled`."""
        self._draining = True
        self._line.advance()
        try:
            await asyncio.wait_for(self._quiet.wait(), timeout)
        except TimeoutError:
            for job in self._jobs.values():
                job.cancel()
            await self._quiet.wait()

    async def close(self) -> None:
        """Cancel what runs, stop the loop and free the threads, the pool's name and its metrics. Twice is harmless."""
        if self._closed:
            return
        if self._tasks:
            await self.drain(timeout=0)
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._torch.shutdown()
        self.instruments.close()

    def queue_position(self, job_id: str) -> int | None:
        """How many of the waiting jobs came before a queued one; None once it runs or when it is unknown.

        The policy may take it earlier or later than that.
        """
        job = self._jobs.get(job_id)
        if job is None or job.state != "queued":
            return None
        ahead = takewhile(lambda other: other is not job, (sequence.job for sequence in self._queue))
        return len({other.id for other in ahead})

    def statistics(self) -> Statistics:
        """A snapshot of levels and totals."""
        return Statistics(
            model=self.model.name,
            rows=self.config.rows,
            live=len(self._rows.by_row),
            queued=len(self._queue),
            queued_tokens=self._queue.tokens,
            kv_tokens=self._pool.kv_tokens,
            kv_capacity_tokens=self.config.rows * self.model.window,
            draining=self._draining,
            healthy=self.healthy,
            **self._reporting.totals.as_dict(),
        )

    def check_integrity(self) -> None:
        """Raise `RuntimeError` if pool, queue and rows contradict one another. Call it between steps."""
        self._pool.check_integrity()
        self._queue.check_integrity()
        alive = {row for row in range(self._pool.rows) if self._pool.alive[row]}
        if alive != set(self._rows.by_row):
            raise RuntimeError(f"pool says rows {sorted(alive)} live, the scheduler {sorted(self._rows.by_row)}")

    def _make_job(self, admitted: Admitted) -> GenerationJob:
        job_id = admitted.request.id or uuid4().hex
        return GenerationJob(job_id, admitted, self.model, self._clock(), self._cancel_asked)

    async def _admit(self, request: Request, progress: Several[Progress] = ()) -> GenerationJob:
        job = self._make_job(await self._admission.admit_without_blocking(request))
        check_progress(request, progress, self.model.config.vocab_size)
        job.go_on_from(progress)
        return job

    def _enqueue_at_once(self, job: GenerationJob) -> GenerationJob:
        try:
            return self._enqueue(job)
        except QueueFull:
            self.instruments.rejected("queue_full")
            raise

    def _enqueue(self, job: GenerationJob) -> GenerationJob:
        """Put a job in the queue, or end it where it needs no row; raises `QueueFull`."""
        with self._reporting.refusals_counted():
            self._check_open()
            self._check_new(job)
            if self.config.refuse_late:
                ahead = 0 if self._pool.free else self._queue.tokens_before(job.request.priority)
                self._reporting.check_deadline(job, ahead)
        if job.request.max_tokens == 0:  # legal, and done: no row is needed to generate nothing
            job.settle("budget")
        elif job.expired(self._clock()):
            job.settle("deadline")
        self._rows.enqueue([sequence for sequence in job.sequences if sequence.choice not in job.settled])
        self._register(job)
        self._wake.set()
        self._publish_levels()
        return job

    def _check_new(self, job: GenerationJob) -> None:
        if job.id in self._jobs:
            raise InvalidRequest("id", f"a job {job.id} is queued or running")

    def _register(self, job: GenerationJob) -> None:
        """The job is ours now; what needs no row ends at once."""
        self._jobs[job.id] = job
        self._quiet.clear()
        for choice, reason in job.settled.items():
            self._rows.end_unseated(job.sequences[choice], reason)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise EngineFailed(self._failure)
        if self._draining or self._closed or not self._tasks:
            raise SchedulerClosed("the scheduler is draining or closed" if self._tasks else "enter the scheduler first")

    def _cancel_asked(self, job: GenerationJob) -> None:
        self._rows.cancel_asked.append(job)
        self._wake.set()

    async def _run(self) -> None:
        try:
            while True:
                try:
                    if not await self._turn():
                        await self._wake.wait()
                    self._wake.clear()
                except _StepFailed as failure:
                    if not self._restarts_left:
                        raise failure.reason from None
                    self._restart(failure.reason)
        except Exception as error:  # nothing may leave callers waiting for ever
            _log.exception("the engine failed; everything that runs or waits ends with an error")
            self._fail(f"{type(error).__name__}: {error}")
        except BaseException:
            self._fail("the scheduler's loop was cancelled")
            raise

    def _restart(self, reason: Exception) -> None:
        """Go on after a step that raised: it changed nothing but keys and values, which are computed again."""
        _log.error("a step failed; what ran goes on from its tokens", exc_info=reason)
        self._restarts_left -= 1
        self._rows.restart()
        self.instruments.restarted()

    async def _turn(self) -> bool:
        """One turn of the loop: sweep, seat, plan, step, commit. False when there was nothing to step."""
        started = time.perf_counter()
        self._rows.sweep()
        self._rows.seat()
        plan = plan_step(self._rows.backlogs(), self.config.step_tokens)
        plan = self._rows.with_drafts(plan, self._draft_tokens)
        self._line.advance()
        self._publish_levels()
        if not plan:
            return False
        planned = time.perf_counter()
        loop = asyncio.get_running_loop()
        try:
            report = await loop.run_in_executor(self._torch, self._runner.run, plan, dict(self._rows.by_row))
        except Exception as error:
            raise _StepFailed(error) from error
        stepped = time.perf_counter()
        generated = self._rows.commit(report.outcomes)
        self._reporting.stepped(
            report, generated, planned - started, time.perf_counter() - stepped, time.perf_counter() - started
        )
        return True

    def _publish_levels(self) -> None:
        self._reporting.levels(self._queue, len(self._rows.by_row), self._pool)

    def _sequence_ended(self, sequence: Sequence) -> None:
        job = sequence.job
        result = job.finish(self._clock())
        if result is None:
            return
        del self._jobs[job.id]
        self._reporting.ended(job, result)
        if not self._jobs:
            self._quiet.set()

    def _fail(self, reason: str) -> None:
        if self._closed:  # it was `close` that ended the loop, when nothing was left to run
            return
        self._failure = reason
        unfinished = [s for job in self._jobs.values() for s in job.sequences if s.stop_reason is None]
        self._rows.fail_all(unfinished, reason)
        self._line.advance()
        self._publish_levels()
