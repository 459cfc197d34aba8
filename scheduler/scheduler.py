"""The scheduler: an asyncio loop that seats, plans, steps and commits. It owns only the loop."""

import asyncio
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Several
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from types import TracebackType
from typing import Any, Self

from prometheus_client import CollectorRegistry

from drumline.cache_pool.pool import CachePool
from drumline.cache_pool.store import make_kv
from drumline.metrics.loop_lag import watch_loop_lag
from drumline.model.backends import make_backend
from drumline.model.backends.fingerprint import fingerprint
from drumline.model.errors import EngineFailed, InvalidRequest, SchedulerClosed
from drumline.model.language_model import LanguageModel
from drumline.model.stop_reason import StopReason
from drumline.scheduler.config import DRAFT_TOKENS, STALL_S, VERSION, SchedulerConfig
from drumline.scheduler.engine import Statistics
from drumline.scheduler.intake import Intake
from drumline.scheduler.job import GenerationJob
from drumline.scheduler.live_rows import LiveRows
from drumline.scheduler.live_view import LiveView, live_rows
from drumline.scheduler.log import Event
from drumline.scheduler.outcomes import Outcomes
from drumline.scheduler.pins import Pin, pin_prompt
from drumline.scheduler.plan import plan_step
from drumline.scheduler.policy import Policy, checked_policy
from drumline.scheduler.progress import Progress
from drumline.scheduler.queue import RequestQueue
from drumline.scheduler.reporting import Reporting
from drumline.scheduler.request import Request, Result
from drumline.scheduler.sequence import Sequence
from drumline.scheduler.step import StepFailed, StepRunner, StepTimes
from drumline.scheduler.trace import Trace

_log = logging.getLogger("drumline")


class Scheduler:
    """Generates for many requests at once on one model.

    Use it as `async with Scheduler(model, rows=16) as scheduler`; entering it loads the kernels of an exact backend
    (the very first time they are compiled, which takes a minute), leaving it cancels what still runs (call `drain`
    first to finish it). All methods are called from the event loop that entered the block. Raises
    `InvalidRequest` for a setting out of range, a backend that does not exist or is not exact where `require_exact`
    asks for it, a pool that does not fit the memory, or a `name` already used in `registry`. One that is never entered
    keeps its pool and its name until `close`.

    `policy` decides who is next (`policy.py`; default: priority, then fair share between tenants, then arrival).
    `draft_tokens` is how many tokens an exact backend drafts ahead for a row that runs nearly alone; 0: none. A step
    that runs for more than `stall_s` seconds counts as hanging (`health`).
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
        stall_s: float = STALL_S,
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
            stall_s=stall_s,
            name=name,
        )
        self.model = model
        self.backend = make_backend(backend, model)
        if require_exact and not self.backend.exact:
            raise InvalidRequest(
                "require_exact", f"precision {model.precision} on the {self.backend.name} backend is not exact"
            )
        self.registry = CollectorRegistry() if registry is None else registry
        self._clock, self._made_at = clock, clock()
        self._draft_tokens = draft_tokens if self.backend.exact else 0  # elsewhere they would change roundings
        self._pool = CachePool(model, rows, make_kv(self.backend.name, model, rows), reuse)
        self._queue: RequestQueue[Sequence] = RequestQueue(queue_requests, queue_tokens, checked_policy(policy))
        self._runner = StepRunner(self.backend, self._pool)
        self._reporting = Reporting(self.registry, name, clock, stall_s)
        self.instruments = self._reporting.instruments
        self.outcomes: Outcomes = self._reporting.outcomes
        self.trace: Trace = self._reporting.trace
        self._identity: dict[str, Any] = {
            "version": VERSION,
            "model": model.name,
            "precision": model.precision,
            "backend": self.backend.name,
        }
        self.instruments.identify(**self._identity)
        self._wake = asyncio.Event()
        self._rows = LiveRows(
            model.config,
            self._pool,
            self._queue,
            self._reporting,
            clock,
            lambda ended: self._intake.sequence_ended(ended),
        )
        self._intake = Intake(
            model,
            self.config,
            self._pool,
            self._queue,
            self._rows,
            self._reporting,
            clock,
            self._check_open,
            self._wake.set,
            self._changed,
        )
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
            asyncio.create_task(watch_loop_lag(self._beat), name=f"drumline-{self.config.name}-lag"),
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

    def health(self) -> list[str]:
        """What is wrong with it, in words; empty where the event loop and the engine move. For any thread."""
        return [*([f"the engine failed: {self._failure}"] if self._failure else []), *self._reporting.pulse.troubles()]

    @property
    def ready(self) -> bool:
        """Whether a request would be taken now."""
        return self.healthy and bool(self._tasks) and not self._draining

    async def submit(
        self,
        request: Request,
        *,
        wait: bool = True,
        progress: Several[Progress] = (),
        label: str | None = None,
        accepted: bool = False,
    ) -> GenerationJob:
        """Accept a request, waiting while the queue is full; with `wait=False` that raises `QueueFull`. Logs, traces,
        exemplars and live views show `label` in place of the job's id.

        It goes on behind `progress`, tokens that it led to in another process: where fingerprints are equal and the
        backend is exact, the answer is the one it would have had there. Raises `InvalidRequest`, `SchedulerClosed`,
        `EngineFailed`. Whatever takes long to read is read in a thread. A deadline that passes while there is no room
        ends the job like any other. Where the caller has `accepted` the job before, it counts how that ends, in
        `outcomes`; else the scheduler does.
        """
        return await self._intake.take(request, wait, progress, label, accepted)

    async def check(self, request: Request) -> Request:
        """The request as it would run: with a seed. Raises `InvalidRequest` for one that never could, and what else
        `submit` raises, but for a full queue."""
        return await self._intake.check(request)

    async def settle(
        self, request: Request, reason: StopReason, progress: Several[Progress] = (), label: str | None = None
    ) -> Result:
        """The result of an accepted request that ends for this reason behind its `progress`, without a row; for its
        caller to count. Raises `InvalidRequest`."""
        return await (await self._intake.settle(request, reason, progress, label)).result()

    def submit_nowait(self, request: Request) -> GenerationJob:
        """Accept a request at once; raises `QueueFull` besides what `submit` raises.

        A grammar is compiled here and now, which `submit` does in a thread.
        """
        return self._intake.take_at_once(request)

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
        self._intake.line.advance()
        try:
            await asyncio.wait_for(self._intake.quiet.wait(), timeout)
        except TimeoutError:
            for job in self._intake.jobs.values():
                job.cancel()
            await self._intake.quiet.wait()

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
        self._reporting.pulse.stop()
        recording = self.trace.end()
        try:
            if recording is not None:
                await asyncio.get_running_loop().run_in_executor(self._torch, recording.wait)
        finally:
            self._torch.shutdown()
            self.instruments.close()

    def queue_position(self, job_id: str) -> int | None:
        """How many of the waiting jobs came before a queued one; None once it runs or when it is unknown.

        The policy may take it earlier or later than that.
        """
        return self._intake.queue_position(job_id)

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

    def live(self, *, show_text: bool = False) -> LiveView:
        """A picture of rows, queue and recent answers for people to look at. Call it on the event loop."""
        now, troubles = self._clock(), self.health()
        return LiveView(
            name=self.config.name,
            **self._identity,
            state="failed" if troubles else "draining" if self._draining else "ready" if self.ready else "starting",
            troubles=tuple(troubles),
            uptime_s=now - self._made_at,
            capacity=self.config.rows,
            rows=live_rows(self._rows.by_row, self._pool, now),
            queued=dict(self._queue.by_priority),
            oldest_queued_s=self._reporting.oldest_queued_s(self._queue),
            kv_tokens=self._pool.kv_tokens,
            kv_capacity_tokens=self.config.rows * self.model.window,
            finished=self._reporting.totals.finished,
            steps=self._reporting.totals.steps,
            **self._reporting.recent.as_dict(show_text),
        )

    def check_integrity(self) -> None:
        """Raise `RuntimeError` if pool, queue and rows contradict one another. Call it between steps."""
        self._pool.check_integrity()
        self._queue.check_integrity()
        alive = {row for row in range(self._pool.rows) if self._pool.alive[row]}
        if alive != set(self._rows.by_row):
            raise RuntimeError(f"pool says rows {sorted(alive)} live, the scheduler {sorted(self._rows.by_row)}")

    def _check_open(self) -> None:
        if self._failure is not None:
            raise EngineFailed(self._failure)
        if self._draining or self._closed or not self._tasks:
            raise SchedulerClosed("the scheduler is draining or closed" if self._tasks else "enter the scheduler first")

    async def _run(self) -> None:
        try:
            while True:
                try:
                    if not await self._turn():
                        await self._wake.wait()
                    self._wake.clear()
                except StepFailed as failure:
                    if not self._restarts_left:
                        raise failure.reason from None
                    self._restart(failure.reason)
        except Exception as error:  # nothing may leave callers waiting for ever
            reason = f"{type(error).__name__}: {error}"
            _log.exception(Event("engine failed", error=reason, jobs=len(self._intake.jobs)))
            self._fail(reason)
        except BaseException:
            self._fail("the scheduler's loop was cancelled")
            raise

    def _restart(self, reason: Exception) -> None:
        """Go on after a step that raised: it changed nothing but keys and values, which are computed again."""
        self._restarts_left -= 1
        _log.error(Event("engine restarted", restarts_left=self._restarts_left), exc_info=reason)
        self._rows.restart()
        self.instruments.restarted()

    async def _turn(self) -> bool:
        """One turn of the loop: sweep, seat, plan, step, commit. False when there was nothing to step."""
        started = time.perf_counter()
        self._rows.sweep()
        self._rows.seat()
        plan = plan_step(self._rows.backlogs(), self.config.step_tokens)
        plan = self._rows.with_drafts(plan, self._draft_tokens)
        self._intake.line.advance()
        self._publish_levels()
        if not plan:
            return False
        planned = time.perf_counter()
        loop = asyncio.get_running_loop()
        try:
            with self._reporting.pulse.stepping():
                report = await loop.run_in_executor(self._torch, self._runner.run, plan, dict(self._rows.by_row))
        except Exception as error:
            raise StepFailed(error) from error
        computed = time.perf_counter()
        self._reporting.computed(report, self._rows.by_row, planned, computed)
        generated = self._rows.commit(report.outcomes)
        self._reporting.stepped(report, generated, StepTimes(started, planned, computed, time.perf_counter()))
        return True

    def _beat(self, late_s: float) -> None:
        """The event loop is alive, also while a step takes long: how long others have waited goes on."""
        self._reporting.loop_lag(late_s)
        self._publish_levels()

    def _changed(self) -> None:
        """The loop has something new to do."""
        self._wake.set()
        self._publish_levels()

    def _publish_levels(self) -> None:
        self._reporting.levels(self._queue, len(self._rows.by_row), self._pool)

    def _fail(self, reason: str) -> None:
        if self._closed:  # it was `close` that ended the loop, when nothing was left to run
            return
        self._failure = reason
        unfinished = [s for job in self._intake.jobs.values() for s in job.sequences if s.stop_reason is None]
        self._rows.fail_all(unfinished, reason)
        self._intake.line.advance()
        self._publish_levels()
