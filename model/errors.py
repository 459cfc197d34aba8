"""Every error that drumline raises on purpose, as one tree.

It stands at the bottom of the import graph because each layer raises from it.

    DrumlineError
    ├── InvalidRequest (also ValueError)  a field is wrong: which one, and the limit
    ├── QueueFull                         a bound was reached: which one, and how long the queue is
    ├── SchedulerClosed                   submitted after drain or close
    ├── JobCancelled                      the job ended `cancelled`
    ├── DeadlineExceeded                  the job ended `deadline`
    ├── EngineFailed                      the job ended `error`, or the engine itself broke
    └── ModelLoadError                    a model file cannot be served: which file or tensor, and why
"""


class DrumlineError(Exception):
    """Root of the tree: catch it to catch whatever drumline raises on purpose."""


class InvalidRequest(DrumlineError, ValueError):
    """A request that cannot be accepted as it is.

    `field` is the dotted name of the offending field, `limit` the text of the rule it breaks.
    """

    def __init__(self, field: str, limit: str) -> None:
        super().__init__(f"{field}: {limit}")
        self.field = field
        self.limit = limit


class QueueFull(DrumlineError):
    """The bounded queue has no room: `bound` names the bound (`requests` or `tokens`), `limit` its size."""

    def __init__(self, bound: str, limit: int, queued: int) -> None:
        super().__init__(f"queue is full: {queued} requests queued, the bound is {limit} {bound}")
        self.bound = bound
        self.limit = limit
        self.queued = queued


class SchedulerClosed(DrumlineError):
    """The scheduler drains or is closed and takes no new request."""


class JobCancelled(DrumlineError):
    """Raised by `Result.raise_for_status()` for a job that was cancelled."""


class DeadlineExceeded(DrumlineError):
    """Raised by `Result.raise_for_status()` for a job that ran out of time."""


class EngineFailed(DrumlineError):
    """The row, or the engine as a whole, ended with an error of ours or of the model."""


class ModelLoadError(DrumlineError):
    """A model that cannot be loaded: the message names the file, tensor or setting."""
