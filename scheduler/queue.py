"""The bounded queue in front of the rows: first come, first served."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from drumline.model.errors import QueueFull


class Queued(Protocol):
    """What the queue needs to know of an entry."""

    @property
    def cost_tokens(self) -> int:
        """Prompt tokens and token budget: what the entry counts for in the token bound."""


T = TypeVar("T", bound=Queued)


class RequestQueue(Generic[T]):
    """A FIFO bounded by entries and by tokens. A request for n choices is n entries, taken together or not at all."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self.tokens = 0
        self._entries: deque[T] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        return iter(self._entries)

    @property
    def head(self) -> T | None:
        """The next entry, which is also the oldest; None when nothing waits."""
        return self._entries[0] if self._entries else None

    def check_room(self, entries: list[T]) -> None:
        """Raise `QueueFull` naming the bound that these entries would break.

        An empty queue takes any single request: one that is larger than the token bound could otherwise never run.
        """
        if not self._entries:
            return
        if len(self._entries) + len(entries) > self.max_requests:
            raise QueueFull("requests", self.max_requests, len(self._entries))
        if self.tokens + sum(entry.cost_tokens for entry in entries) > self.max_tokens:
            raise QueueFull("tokens", self.max_tokens, len(self._entries))

    def push(self, entries: list[T]) -> None:
        """Append entries; raises `QueueFull` and appends none when they do not fit."""
        self.check_room(entries)
        self._entries.extend(entries)
        self.tokens += sum(entry.cost_tokens for entry in entries)

    def push_front(self, entry: T) -> None:
        """Put back an entry that already ran (preemption): it was accepted once, so no bound applies."""
        self._entries.appendleft(entry)
        self.tokens += entry.cost_tokens

    def pop(self) -> T:
        """Take the next entry; raises `IndexError` when there is none."""
        entry = self._entries.popleft()
        self.tokens -= entry.cost_tokens
        return entry

    def take_out(self, leaves: Callable[[T], bool]) -> list[T]:
        """Remove and return the entries for which `leaves` is true (cancelled, expired)."""
        gone = [entry for entry in self._entries if leaves(entry)]
        if gone:
            self._entries = deque(entry for entry in self._entries if not leaves(entry))
            self.tokens -= sum(entry.cost_tokens for entry in gone)
        return gone

    def check_integrity(self) -> None:
        """Raise `RuntimeError` when the token count is not the sum of the entries'."""
        counted = sum(entry.cost_tokens for entry in self._entries)
        if counted != self.tokens:
            raise RuntimeError(f"queue counts {self.tokens} tokens, its entries hold {counted}")
