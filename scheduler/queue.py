"""The bounded queue in front of the rows. Who is next is a policy's business; bounds, deadlines and counts are here."""

import math
from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, Protocol, TypeVar, cast

from drumline.metrics.definitions import Priority
from drumline.model.errors import QueueFull
from drumline.scheduler.policy import PRIORITIES, Entry, Policy


class Queued(Entry, Protocol):
    """What the queue needs to know of an entry."""

    @property
    def cost_tokens(self) -> int:
        """Prompt tokens and token budget: what the entry counts for in the token bound."""

    @property
    def deadline_at(self) -> float:
        """When it expires, on the clock of `now`; infinity for never."""


T = TypeVar("T", bound=Queued)


class RequestQueue(Generic[T]):
    """Bounded by entries and by tokens. A request for n choices is n entries, taken together or not at all.

    To push, pop and remove costs the logarithm of what waits.
    """

    def __init__(self, max_requests: int, max_tokens: int, policy: Policy) -> None:
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self.tokens = 0
        self.by_priority: dict[Priority, int] = dict.fromkeys(PRIORITIES, 0)
        self._tokens_of: dict[Priority, int] = dict.fromkeys(PRIORITIES, 0)
        self._policy = policy
        self._since: OrderedDict[int, tuple[T, float]] = OrderedDict()  # in the order of arrival
        self._expiries: list[tuple[float, int, T]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._since)

    def __iter__(self) -> Iterator[T]:
        return (entry for entry, _ in self._since.values())

    def __contains__(self, entry: object) -> bool:
        return id(entry) in self._since

    @property
    def waiting_since(self) -> float | None:
        """When the oldest entry came; None when nothing waits."""
        return next((since for _, since in self._since.values()), None)

    def tokens_before(self, priority: Priority) -> int:
        """Prompt tokens and budgets of what waits in this class and those above it."""
        return sum(self._tokens_of[other] for other in PRIORITIES[PRIORITIES.index(priority) :])

    def check_room(self, entries: list[T]) -> None:
        """Raise `QueueFull` naming the bound that these entries would break.

        An empty queue takes any single request: one that is larger than the token bound could otherwise never run.
        """
        if not self._since:
            return
        if len(self) + len(entries) > self.max_requests:
            raise QueueFull("requests", self.max_requests, len(self))
        if self.tokens + sum(entry.cost_tokens for entry in entries) > self.max_tokens:
            raise QueueFull("tokens", self.max_tokens, len(self))

    def push(self, entries: list[T], now: float) -> None:
        """Add entries; raises `QueueFull` and adds none when they do not fit."""
        self.check_room(entries)
        for entry in entries:
            self._count(entry, now)
            self._policy.add(entry, now)

    def put_back(self, entry: T, now: float) -> None:
        """Put back an entry that already ran (preemption): it was accepted once, so no bound applies."""
        self._count(entry, now)
        self._policy.put_back(entry, now)

    def foremost(self, now: float) -> T | None:
        """The next entry; None when nothing waits."""
        return cast("T | None", self._policy.foremost(now))

    def pop(self, now: float) -> T:
        """Take the next entry; raises `IndexError` when there is none."""
        entry = self.foremost(now)
        if entry is None:
            raise IndexError("nothing waits")
        self.remove(entry)
        return entry

    def remove(self, entry: T) -> None:
        """Take an entry out. Raises `KeyError` for one that does not wait."""
        del self._since[id(entry)]
        self._policy.remove(entry)
        self.tokens -= entry.cost_tokens
        self.by_priority[entry.priority] -= 1
        self._tokens_of[entry.priority] -= entry.cost_tokens
        if len(self._expiries) > 2 * len(self) + 100:  # deadlines of those that have left
            kept = {id(waiting): (at, number, waiting) for at, number, waiting in self._expiries if waiting in self}
            self._expiries = list(kept.values())
            heapify(self._expiries)

    def served(self, entry: T, prompt_tokens: int, generated_tokens: int) -> None:
        """Tell the policy what was computed for an entry that has a row."""
        self._policy.served(entry, prompt_tokens, generated_tokens)

    def outranks(self, entry: T, running: T) -> bool:
        """Whether the next entry may take the row of one that runs."""
        return self._policy.outranks(entry, running)

    def take_expired(self, now: float) -> list[T]:
        """Remove and return the entries whose deadline has passed."""
        expired = []
        while self._expiries and self._expiries[0][0] <= now:
            _, _, entry = heappop(self._expiries)
            if entry in self:
                self.remove(entry)
                expired.append(entry)
        return expired

    def take_all(self) -> list[T]:
        """Remove and return all entries."""
        entries = list(self)
        for entry in entries:
            self.remove(entry)
        return entries

    def check_integrity(self) -> None:
        """Raise `RuntimeError` when counts or policy contradict the entries."""
        counted = sum(entry.cost_tokens for entry in self)
        if counted != self.tokens:
            raise RuntimeError(f"queue counts {self.tokens} tokens, its entries hold {counted}")
        if {id(entry) for entry in self._policy} != set(self._since) or len(self._policy) != len(self):
            raise RuntimeError("the policy orders other entries than the queue holds")
        if sum(self.by_priority.values()) != len(self):
            raise RuntimeError(f"queue counts {self.by_priority} entries, it holds {len(self)}")

    def _count(self, entry: T, now: float) -> None:
        self._since[id(entry)] = (entry, now)
        self.tokens += entry.cost_tokens
        self.by_priority[entry.priority] += 1
        self._tokens_of[entry.priority] += entry.cost_tokens
        if entry.deadline_at < math.inf:
            heappush(self._expiries, (entry.deadline_at, next(self._numbers), entry))
