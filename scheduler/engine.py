"""What the MQTT edge (and later the journal) needs of a scheduler, so that a remote engine can stand in for it."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from drumline.model.stop_reason import StopReason
from drumline.scheduler.outcomes import Outcomes
from drumline.scheduler.progress import Progress
from drumline.scheduler.request import Chunk, Request, Result


@dataclass(frozen=True)
class Statistics:
    """A snapshot: what waits and runs now, and totals since start.

    Cells are query-key pairs of attention, with and without padding; `step_s` is the wall time of all steps, of which
    `forward_s` and `sample_s` were the model's own.
    """

    model: str
    rows: int
    live: int
    queued: int
    queued_tokens: int
    kv_tokens: int
    kv_capacity_tokens: int
    finished: int
    draining: bool
    healthy: bool
    steps: int
    row_steps: int
    prompt_tokens: int
    generated_tokens: int
    padded_cells: int
    real_cells: int
    forward_s: float
    sample_s: float
    step_s: float


class Job(Protocol):
    """An accepted request."""

    started_at: float | None
    """When it got its first row; None before."""

    @property
    def id(self) -> str:
        """The request's id, or one made up for it."""

    @property
    def state(self) -> str:
        """`queued`, `running` or `done`."""

    @property
    def generated(self) -> int:
        """Tokens generated so far, over all choices."""

    def __aiter__(self) -> AsyncIterator[Chunk]:
        """Chunks as they come; a second iterator raises."""

    async def result(self) -> Result:
        """Wait for the end; never raises for the row's own end."""

    def cancel(self) -> None:
        """Free the row at the next step boundary."""


class Engine(Protocol):
    """Takes requests and runs them."""

    outcomes: Outcomes
    """Where jobs are counted by who accepts or refuses them in the engine's stead."""

    @property
    def fingerprint(self) -> str:
        """A hash of all that bits depend on besides the request."""

    async def check(self, request: Request) -> Request:
        """The request with its seed; raises `InvalidRequest` for one that could never run."""

    async def submit(
        self,
        request: Request,
        *,
        wait: bool = True,
        progress: Sequence[Progress] = (),
        label: str | None = None,
        accepted: bool = False,
    ) -> Job:
        """Accept, and go on behind `progress`. Waits for room in the queue, unless `wait` is False: then a full one
        raises `QueueFull`. People are shown `label` in place of the id.

        Where the caller has `accepted` it already, it counts how that ends, in `outcomes`.

        Raises `InvalidRequest`, `SchedulerClosed`, `EngineFailed`.
        """

    async def settle(
        self, request: Request, reason: StopReason, progress: Sequence[Progress] = (), label: str | None = None
    ) -> Result:
        """The result of a request that ends for this reason without having run (any further)."""

    async def drain(self, timeout: float | None = None) -> None:
        """Take no more, finish what runs and waits; at the timeout the rest ends `cancelled`."""

    def queue_position(self, job_id: str) -> int | None:
        """How many requests are ahead of a queued one; None once it runs."""

    def statistics(self) -> Statistics:
        """A snapshot of the counts."""
