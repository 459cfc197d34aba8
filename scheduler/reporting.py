"""What happens in a scheduler, told to all who keep count of it: metrics, totals, recent answers, trace, pulse."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry

from drumline.cache_pool.pool import CachePool
from drumline.metrics.instruments import Instruments
from drumline.model.errors import DrumlineError, InvalidRequest
from drumline.scheduler.estimate import Estimate
from drumline.scheduler.job import GenerationJob
from drumline.scheduler.log import Event
from drumline.scheduler.outcomes import Outcomes, reject_reason
from drumline.scheduler.pulse import Pulse
from drumline.scheduler.queue import RequestQueue
from drumline.scheduler.recent import Recent
from drumline.scheduler.request import Result
from drumline.scheduler.sequence import Sequence
from drumline.scheduler.step import StepReport, StepTimes
from drumline.scheduler.totals import StepTotals
from drumline.scheduler.trace import Trace

_jobs_log = logging.getLogger("drumline.jobs")


def without_text(error: DrumlineError) -> str:
    """What is wrong, without what may repeat the user's own text: complaints about grammars and messages do."""
    if not isinstance(error, InvalidRequest):
        return str(error)
    return f"{error.field} cannot be used" if error.field.split(".")[0] in ("structured", "messages") else error.limit


class Reporting:
    """One verb an event, called on the event loop. Raises `InvalidRequest` for a name that the registry knows."""

    def __init__(self, registry: CollectorRegistry, name: str, clock: Callable[[], float], stall_s: float) -> None:
        try:
            self.instruments = Instruments(registry, name)
        except ValueError as error:
            raise InvalidRequest("name", str(error).removeprefix("name: ")) from None
        self.totals = StepTotals()
        self.estimate = Estimate()
        self.recent = Recent(clock)
        self.trace = Trace(name)
        self.outcomes = Outcomes(self.instruments, self.trace)
        self.pulse = Pulse(clock, stall_s)
        self._clock = clock

    def seated(self, row: int, sequence: Sequence, now: float) -> None:
        """A sequence got a row."""
        self.trace.seated(row, sequence, now - sequence.job.submitted_at)

    def left(self, row: int, sequence: Sequence, reason: str) -> None:
        """A sequence lost its row, to its end or to go on later."""
        self.trace.left(row, sequence, reason)

    def preempted(self, row: int, sequence: Sequence) -> None:
        """A sequence had to give its row to another."""
        self.instruments.preempted()
        _jobs_log.debug(Event("job preempted", job=sequence.job.label, tenant=sequence.tenant, row=row))
        self.left(row, sequence, "preempted")

    def computed(self, report: StepReport, sequences: Mapping[int, Sequence], began: float, ended: float) -> None:
        """The model is done with a step, of which nothing is committed yet."""
        self.trace.computed(report, sequences, began, ended)

    def stepped(self, report: StepReport, generated: int, times: StepTimes) -> None:
        """One step is done."""
        step_s = times.committed - times.started
        self.totals.add(report, generated, step_s)
        self.recent.tokens(report.prompt_tokens, generated)
        self.trace.stepped(report, times)
        self.estimate.observe(len(report.outcomes), report.prompt_tokens, generated, step_s)
        self.instruments.prompt_computed(report.prompt_tokens)
        self.instruments.generated(generated)
        self.instruments.step(
            len(report.outcomes),
            report.tokens,
            report.padding_ratio,
            {
                "plan": times.planned - times.started,
                "forward": report.forward_s,
                "sample": report.sample_s,
                "commit": times.committed - times.computed,
            },
        )

    def levels(self, queue: RequestQueue[Sequence], live: int, pool: CachePool) -> None:
        """What waits and runs now."""
        self.instruments.levels(
            queued=queue.by_priority,
            oldest_queued_s=self.oldest_queued_s(queue),
            rows_live=live,
            rows_capacity=pool.rows,
            kv_tokens=pool.kv_tokens,
            kv_capacity=pool.rows * pool.window,
        )

    def oldest_queued_s(self, queue: RequestQueue[Sequence]) -> float:
        """Age of the oldest that waits; 0 where none does."""
        since = queue.waiting_since
        return 0.0 if since is None else self._clock() - since

    def check_deadline(self, job: GenerationJob, ahead_tokens: int) -> None:
        """Raise `InvalidRequest` for a job that cannot be expected to end in time, behind so many tokens of others."""
        if job.deadline_at is None:
            return
        sequence = job.sequences[0]
        seconds = self.estimate.seconds(ahead_tokens, sequence.prompt_length, sequence.rules.budget)
        if seconds is not None and self._clock() + seconds > job.deadline_at:
            raise InvalidRequest("deadline_s", f"cannot be met: this takes about {seconds:.1f} s at present")

    @contextmanager
    def refusals_counted(self, request: object, label: str | None = None) -> Iterator[None]:
        """Count a request that is refused in this block, by the reason; it may be anything, and that may be why."""
        try:
            yield
        except DrumlineError as error:
            reason, name = reject_reason(error), label or getattr(request, "id", None)
            _jobs_log.info(Event("job rejected", job=name, reason=reason, error=without_text(error)))
            self.outcomes.refused(reason, name)
            raise

    def accepted(self, job: GenerationJob) -> None:
        """A request is a job now."""
        _jobs_log.debug(Event("job accepted", job=job.label, tenant=job.request.tenant, priority=job.request.priority))

    def loop_lag(self, seconds: float) -> None:
        """The event loop came back from a sleep, so much later than planned."""
        self.pulse.beat()
        self.instruments.loop_lag(seconds)
        self.trace.loop_lag(seconds)

    def ended(self, job: GenerationJob, result: Result) -> None:
        """A job has its result."""
        self.totals.finished += 1
        self.recent.ended(job, result)
        self.trace.ended(job, result)
        timings, usage = result.timings, result.usage
        _jobs_log.log(
            logging.DEBUG if job.accepted_elsewhere else logging.INFO,  # who accepted it says so under its own names
            Event(
                "job ended",
                job=job.label,
                tenant=job.request.tenant,
                outcome=result.status,
                stop_reason=result.stop_reason,
                prompt_tokens=usage.prompt_tokens,
                tokens=usage.generated_tokens,
                queued_s=timings.queued_s,
                first_token_s=timings.first_token_s,
                total_s=timings.total_s,
                error=result.error,
            ),
        )
        if not job.accepted_elsewhere:
            self.outcomes.ended(job.label, result.status, result, job.started_at is not None)
