"""What the scheduler tells: metrics, totals, and how fast it has been."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry

from drumline.cache_pool.pool import CachePool
from drumline.metrics.instruments import Instruments, RejectReason
from drumline.model.errors import DrumlineError, EngineFailed, InvalidRequest
from drumline.scheduler.estimate import Estimate
from drumline.scheduler.job import GenerationJob
from drumline.scheduler.queue import RequestQueue
from drumline.scheduler.request import Result
from drumline.scheduler.sequence import Sequence
from drumline.scheduler.step import StepReport
from drumline.scheduler.totals import StepTotals


class Reporting:
    """Turns what happened into instruments and sums. Raises `InvalidRequest` for a name that the registry knows."""

    def __init__(self, registry: CollectorRegistry, name: str, clock: Callable[[], float]) -> None:
        try:
            self.instruments = Instruments(registry, name)
        except ValueError as error:
            raise InvalidRequest("name", str(error).removeprefix("name: ")) from None
        self.totals = StepTotals()
        self.estimate = Estimate()
        self._clock = clock

    def stepped(self, report: StepReport, generated: int, plan_s: float, commit_s: float, step_s: float) -> None:
        """One step is done, wall time `step_s`."""
        self.totals.add(report, generated, step_s)
        self.estimate.observe(len(report.outcomes), report.prompt_tokens, generated, step_s)
        self.instruments.prompt_computed(report.prompt_tokens)
        self.instruments.generated(generated)
        self.instruments.step(
            len(report.outcomes),
            report.tokens,
            report.padding_ratio,
            {"plan": plan_s, "forward": report.forward_s, "sample": report.sample_s, "commit": commit_s},
        )

    def levels(self, queue: RequestQueue[Sequence], live: int, pool: CachePool) -> None:
        """What waits and runs now."""
        since = queue.waiting_since
        self.instruments.levels(
            queued=queue.by_priority,
            oldest_queued_s=0.0 if since is None else self._clock() - since,
            rows_live=live,
            rows_capacity=pool.rows,
            kv_tokens=pool.kv_tokens,
            kv_capacity=pool.rows * pool.window,
        )

    def check_deadline(self, job: GenerationJob, ahead_tokens: int) -> None:
        """Raise `InvalidRequest` for a job that cannot be expected to end in time, behind so many tokens of others."""
        if job.deadline_at is None:
            return
        sequence = job.sequences[0]
        seconds = self.estimate.seconds(ahead_tokens, sequence.prompt_length, sequence.rules.budget)
        if seconds is not None and self._clock() + seconds > job.deadline_at:
            raise InvalidRequest("deadline_s", f"cannot be met: this takes about {seconds:.1f} s at present")

    @contextmanager
    def refusals_counted(self) -> Iterator[None]:
        """Count what is refused in this block by its reason."""
        try:
            yield
        except DrumlineError as error:
            reason: RejectReason = "draining"
            if isinstance(error, EngineFailed):
                reason = "failed"
            elif isinstance(error, InvalidRequest):
                reason = "duplicate_id" if error.field == "id" else "invalid"
            self.instruments.rejected(reason)
            raise

    def ended(self, job: GenerationJob, result: Result) -> None:
        """A job has its result."""
        self.totals.finished += 1
        timings, usage = result.timings, result.usage
        self.instruments.request_done(
            result.status,
            None if job.started_at is None else timings.queued_s,
            timings.first_token_s,
            timings.total_s,
            usage.prompt_tokens,
            usage.generated_tokens,
        )
