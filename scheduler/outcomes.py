"""How requests end, counted once each: by the scheduler for its callers, or by who accepted them in its stead."""

from drumline.metrics.definitions import Outcome, RejectReason
from drumline.metrics.instruments import Instruments
from drumline.model.errors import DrumlineError, EngineFailed, InvalidRequest, QueueFull
from drumline.scheduler.request import Result
from drumline.scheduler.trace import Trace


def reject_reason(error: DrumlineError) -> RejectReason:
    """What a refusal by the scheduler counts as."""
    if isinstance(error, EngineFailed):
        return "failed"
    if isinstance(error, QueueFull):
        return "queue_full"
    if isinstance(error, InvalidRequest):
        return "duplicate_id" if error.field == "id" else "invalid"
    return "draining"


class Outcomes:
    """Called on the event loop."""

    def __init__(self, instruments: Instruments, trace: Trace) -> None:
        self._instruments, self._trace = instruments, trace

    def refused(self, reason: RejectReason, label: str | None) -> None:
        """A request was not accepted, and whoever sent it is told so."""
        self._instruments.rejected(reason)
        self._trace.refused(reason, label)

    def ended(self, label: str, outcome: Outcome, result: Result | None, seated: bool) -> None:
        """An accepted job has ended so, and whoever sent it is told. `result` is what the scheduler made of it, if it
        ever had it; `seated`, whether it had a row."""
        if result is None:
            self._instruments.request_lost(outcome)
            return
        timings, usage = result.timings, result.usage
        self._instruments.request_done(
            outcome,
            timings.queued_s if seated else None,
            timings.first_token_s,
            timings.total_s,
            usage.prompt_tokens,
            usage.generated_tokens,
            label,
        )
