"""What one client may ask for, so that a device in a loop does not take the worker from all others."""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import Field

from drumline.metrics.definitions import Priority
from drumline.model.errors import DrumlineError, InvalidRequest
from drumline.model.validated import Validated
from drumline.scheduler.policy import PRIORITIES

MINUTE_S = 60.0
MOST_CLIENTS = 1_000
"""Whose last minute is remembered before it is looked whose is over."""


class QuotaExceeded(DrumlineError):
    """A client has as much of `bound` as it may: `jobs` or `tokens_per_minute`."""

    def __init__(self, bound: str, limit: int, used: int) -> None:
        super().__init__(f"{bound}: the limit of this client is {limit}, it has {used}")
        self.bound, self.limit, self.used = bound, limit, used


class Quota(Validated):
    """The bounds of one client; None: none but the worker's own."""

    jobs: int | None = Field(default=None, ge=1)
    """Accepted and not ended."""
    live: int | None = Field(default=None, ge=1)
    """In the scheduler at once; the others wait in the journal and let those of other clients pass."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Prompt and generated tokens of what ended in the last minute, and generated ones of what runs."""
    priority: Priority = "high"
    """The highest class that it gets, whatever it asks for."""


class Quotas(Validated):
    """Bounds by client; `default` is for all that are not named."""

    default: Quota = Quota()
    clients: Mapping[str, Quota] = Field(default_factory=dict)

    def of(self, client: str) -> Quota:
        """The bounds of a client."""
        return self.clients.get(client, self.default)


def read_quotas(path: Path) -> Quotas:
    """Read `{"default": {…}, "clients": {"NAME": {…}}}`; raises `InvalidRequest("--quotas")`."""
    try:
        return Quotas.from_json(path.read_bytes())
    except OSError as error:
        raise InvalidRequest("--quotas", f"{path} cannot be read: {error.strerror}") from None
    except InvalidRequest as error:
        where = "" if error.field == "request" else f"{error.field}: "
        raise InvalidRequest("--quotas", f"{path}: {where}{error.limit}") from None


class Usage:
    """What the clients have now, on an injected clock."""

    def __init__(self, quotas: Quotas, clock: Callable[[], float]) -> None:
        self._quotas, self._clock = quotas, clock
        self._jobs: Counter[str] = Counter()
        self._live: Counter[str] = Counter()
        self._spent: dict[str, deque[tuple[float, int]]] = {}

    def check(self, client: str, generating: Callable[[str], int]) -> None:
        """Raise `QuotaExceeded` where the client may not have another job; `generating` counts tokens of what runs."""
        quota = self._quotas.of(client)
        if quota.jobs is not None and self._jobs[client] >= quota.jobs:
            raise QuotaExceeded("jobs", quota.jobs, self._jobs[client])
        if quota.tokens_per_minute is not None:
            used = generating(client) + sum(tokens for _, tokens in self._recent(client))
            if used >= quota.tokens_per_minute:
                raise QuotaExceeded("tokens_per_minute", quota.tokens_per_minute, used)

    def may_run(self, client: str) -> bool:
        """Whether another of its jobs may go to the scheduler."""
        live = self._quotas.of(client).live
        return live is None or self._live[client] < live

    def capped(self, client: str, priority: Priority) -> Priority:
        """The class that it gets."""
        return min(priority, self._quotas.of(client).priority, key=PRIORITIES.index)

    def accepted(self, client: str) -> None:
        """Another job."""
        self._jobs[client] += 1

    def started(self, client: str) -> None:
        """One of its jobs went to the scheduler."""
        self._live[client] += 1

    def stopped(self, client: str) -> None:
        """And came back."""
        _count_down(self._live, client)

    def ended(self, client: str, tokens: int) -> None:
        """A job ended, and cost so many tokens."""
        _count_down(self._jobs, client)
        if self._quotas.of(client).tokens_per_minute is not None and tokens:
            self._spent.setdefault(client, deque()).append((self._clock(), tokens))
            if len(self._spent) > MOST_CLIENTS:
                for other in list(self._spent):
                    self._recent(other)

    def _recent(self, client: str) -> deque[tuple[float, int]]:
        spent = self._spent.get(client, deque())
        while spent and spent[0][0] <= self._clock() - MINUTE_S:
            spent.popleft()
        if not spent:
            self._spent.pop(client, None)
        return spent


def _count_down(counts: Counter[str], client: str) -> None:
    counts[client] -= 1
    if not counts[client]:
        del counts[client]
