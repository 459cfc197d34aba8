"""Who is next: the order in which what waits gets rows. Plain Python; time is handed in."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Protocol, get_args, runtime_checkable

from drumline.metrics.definitions import Priority
from drumline.model.errors import InvalidRequest

PRIORITIES: tuple[Priority, ...] = get_args(Priority)
"""Lowest first."""
AGEING_S = 30.0
OVERDUE_EVERY = 4
MOST_AGED = 200
MOST_REMEMBERED = 1_000
"""Tenants that do not wait and whose share is remembered: memory must not grow with all that ever came."""
GENERATED_COST = 2.0
"""A generated token counts as two of a prompt (Sheng et al. 2024, "Fairness in Serving Large Language Models")."""


class Entry(Protocol):
    """What an order is made of."""

    @property
    def priority(self) -> Priority:
        """The class asked for."""

    @property
    def tenant(self) -> str:
        """Whose share it counts against."""


@runtime_checkable
class Policy(Protocol):
    """Keeps entries in an order of its own. Entries are told apart by identity."""

    def __len__(self) -> int:
        """How many wait."""

    def __iter__(self) -> Iterator[Entry]:
        """All that wait, in no promised order."""

    def add(self, entry: Entry, now: float) -> None:
        """A new entry, or (foremost of its equals) one that ran already: see `put_back`."""

    def put_back(self, entry: Entry, now: float) -> None:
        """An entry whose row was taken away: it goes before those that it went before when it was picked."""

    def remove(self, entry: Entry) -> None:
        """Take an entry out: it gets a row, or ended. Raises `KeyError` for one that does not wait."""

    def foremost(self, now: float) -> Entry | None:
        """Who is next; stays until it is removed."""

    def served(self, entry: Entry, prompt_tokens: int, generated_tokens: int) -> None:
        """What was computed for an entry that has a row."""

    def outranks(self, entry: Entry, running: Entry) -> bool:
        """Whether an entry that is next may take the row of one that runs."""


class FirstCome:
    """The order of arrival."""

    def __init__(self) -> None:
        self._line: OrderedDict[int, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._line.values())

    def add(self, entry: Entry, now: float) -> None:
        """At the end."""
        self._line[id(entry)] = entry

    def put_back(self, entry: Entry, now: float) -> None:
        """At the head."""
        self._line[id(entry)] = entry
        self._line.move_to_end(id(entry), last=False)

    def remove(self, entry: Entry) -> None:
        """Raises `KeyError` for one that does not wait."""
        del self._line[id(entry)]

    def foremost(self, now: float) -> Entry | None:
        """The one that came first."""
        return next(iter(self._line.values()), None)

    def served(self, entry: Entry, prompt_tokens: int, generated_tokens: int) -> None:
        """Nothing: arrival is all that counts."""

    def outranks(self, entry: Entry, running: Entry) -> bool:
        """Never."""
        return False


class Shares:
    """What each tenant has been served: tokens over its weight. One that comes (back) starts no lower than the tenant
    that was picked last, so that nobody saves up."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = {} if weights is None else dict(weights)
        for tenant, weight in self._weights.items():
            if not 0 < weight < math.inf:
                raise InvalidRequest("weights", f"that of {tenant} must be a number above 0, not {weight}")
        self._waiting: dict[str, int] = {}
        self._served: dict[str, float] = {}
        self._floor = 0.0

    def of(self, tenant: str) -> float:
        """What a tenant has been served."""
        return max(self._served.get(tenant, 0.0), 0.0 if tenant in self._waiting else self._floor)

    def come(self, tenant: str) -> None:
        """One more entry waits."""
        if tenant not in self._waiting:
            self._served[tenant] = self.of(tenant)
        self._waiting[tenant] = self._waiting.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """One entry fewer waits."""
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        if len(self._served) > 2 * len(self._waiting) + MOST_REMEMBERED:
            self._forget()

    def _forget(self) -> None:
        """Forgive the lower half of those who do not wait: the floor rises to the middle of them."""
        gone = sorted(had for tenant, had in self._served.items() if tenant not in self._waiting)
        self._floor = max(self._floor, gone[len(gone) // 2])
        self._served = {name: had for name, had in self._served.items() if name in self._waiting or had > self._floor}

    def picked(self, tenant: str) -> None:
        """An entry of this tenant is next."""
        self._floor = max(self._floor, self._served[tenant])

    def charge(self, tenant: str, tokens: float) -> None:
        """Tokens were computed for a tenant."""
        self._served[tenant] = self.of(tenant) + tokens / self._weights.get(tenant, 1.0)


class FairShare:
    """The tenant that was served least goes first, its own entries in the order of arrival."""

    def __init__(self, shares: Shares | None = None) -> None:
        self._shares = Shares() if shares is None else shares
        self._lines: dict[str, FirstCome] = {}
        self._tenants: list[tuple[float, int, str]] = []  # a heap; what was served since is made good when it is met
        self._ranked: set[str] = set()  # who is in it, once
        self._numbers = count()
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> Iterator[Entry]:
        return (entry for line in self._lines.values() for entry in line)

    def add(self, entry: Entry, now: float) -> None:
        """At the end of its tenant's line."""
        self._line(entry).add(entry, now)

    def put_back(self, entry: Entry, now: float) -> None:
        """At the head of its tenant's line."""
        self._line(entry).put_back(entry, now)

    def remove(self, entry: Entry) -> None:
        """Raises `KeyError` for one that does not wait."""
        line = self._lines[entry.tenant]
        line.remove(entry)
        if not line:
            del self._lines[entry.tenant]
            if len(self._tenants) > 2 * len(self._lines) + 100:  # those that left without having come to the top
                self._tenants = [ranked for ranked in self._tenants if ranked[2] in self._lines]
                self._ranked = set(self._lines)
                heapify(self._tenants)
        self._waiting -= 1
        self._shares.leave(entry.tenant)

    def foremost(self, now: float) -> Entry | None:
        """The least served tenant's first."""
        while self._tenants:
            served, _, tenant = self._tenants[0]
            line, current = self._lines.get(tenant), self._shares.of(tenant)
            if line is not None and served == current:
                self._shares.picked(tenant)
                return line.foremost(now)
            heappop(self._tenants)
            self._ranked.discard(tenant)
            if line is not None:
                self._rank(tenant)
        return None

    def served(self, entry: Entry, prompt_tokens: int, generated_tokens: int) -> None:
        """Count it against the entry's tenant."""
        self._shares.charge(entry.tenant, prompt_tokens + GENERATED_COST * generated_tokens)

    def outranks(self, entry: Entry, running: Entry) -> bool:
        """Never: who was served too much gets no new row, and keeps those it has."""
        return False

    def _line(self, entry: Entry) -> FirstCome:
        self._shares.come(entry.tenant)
        self._waiting += 1
        line = self._lines.get(entry.tenant)
        if line is None:
            line = self._lines[entry.tenant] = FirstCome()
            self._rank(entry.tenant)
        return line

    def _rank(self, tenant: str) -> None:
        if tenant not in self._ranked:
            self._ranked.add(tenant)
            heappush(self._tenants, (self._shares.of(tenant), next(self._numbers), tenant))


class PriorityClasses:
    """High before normal before low; one pick in four goes to what is overdue, where somebody is.

    Overdue is what has waited `ageing_s` seconds in high, twice that in normal, three times in low. So nothing starves:
    an entry that is overdue gets a row after at most four times as many picks as there are overdue ones before it.
    """

    def __init__(self, within: Callable[[], Policy] = FirstCome, ageing_s: float = AGEING_S) -> None:
        if not ageing_s > 0:
            raise InvalidRequest("ageing_s", f"must be above 0, not {ageing_s}")
        self._classes = [within() for _ in PRIORITIES]
        self._overdue = within()
        self._ageing_s = ageing_s
        self._line_of: dict[int, tuple[Entry, Policy, int]] = {}
        self._due: list[tuple[float, int, int]] = []  # a heap of (when it is overdue, arrival, identity)
        self._numbers = count()
        self._offered: Entry | None = None
        self._picks = 0

    def __len__(self) -> int:
        return len(self._line_of)

    def __iter__(self) -> Iterator[Entry]:
        return (entry for entry, _, _ in self._line_of.values())

    def add(self, entry: Entry, now: float) -> None:
        """Into the class that it asks for."""
        self._enter(entry, now).add(entry, now)

    def put_back(self, entry: Entry, now: float) -> None:
        """Foremost of its class; its waiting begins anew."""
        self._enter(entry, now).put_back(entry, now)

    def remove(self, entry: Entry) -> None:
        """Raises `KeyError` for one that does not wait."""
        _, line, _ = self._line_of.pop(id(entry))
        line.remove(entry)
        if entry is self._offered:
            self._picks += 1
        if len(self._due) > 2 * len(self._line_of) + 100:
            self._due = [due for due in self._due if self._waits(due)]
            heapify(self._due)

    def foremost(self, now: float) -> Entry | None:
        """The first of the highest class in which somebody waits, or of what is overdue where that has its turn."""
        self._age(now)
        lines = [*reversed(self._classes), self._overdue]
        if self._picks % OVERDUE_EVERY == OVERDUE_EVERY - 1:
            lines = [self._overdue, *reversed(self._classes)]
        self._offered = next((entry for line in lines if (entry := line.foremost(now)) is not None), None)
        return self._offered

    def served(self, entry: Entry, prompt_tokens: int, generated_tokens: int) -> None:
        """Told to the entry's own class."""
        self._classes[_level(entry)].served(entry, prompt_tokens, generated_tokens)

    def outranks(self, entry: Entry, running: Entry) -> bool:
        """A higher class does."""
        return _level(entry) > _level(running)

    def _enter(self, entry: Entry, now: float) -> Policy:
        arrival, level = next(self._numbers), _level(entry)
        line = self._classes[level]
        self._line_of[id(entry)] = (entry, line, arrival)
        due = now + self._ageing_s * (len(PRIORITIES) - level)
        if due < math.inf:
            heappush(self._due, (due, arrival, id(entry)))
        return line

    def _age(self, now: float) -> None:
        for _ in range(MOST_AGED):  # the rest at the next look: a hundred thousand would hold the event loop up
            if not self._due or self._due[0][0] > now:
                return
            due = heappop(self._due)
            if self._waits(due):
                entry, line, arrival = self._line_of[due[2]]
                self._overdue.add(entry, now)
                line.remove(entry)
                self._line_of[due[2]] = (entry, self._overdue, arrival)

    def _waits(self, due: tuple[float, int, int]) -> bool:
        """Whether the entry that this was noted of still waits since then."""
        waiting = self._line_of.get(due[2])
        return waiting is not None and waiting[2] == due[1]


def _level(entry: Entry) -> int:
    return PRIORITIES.index(entry.priority)


def checked_policy(policy: object) -> Policy:
    """The policy, the default one for None; raises `InvalidRequest` for what is none."""
    if policy is None:
        return default_policy()
    if not isinstance(policy, Policy):
        raise InvalidRequest("policy", f"must be a Policy, not {type(policy).__name__}")
    return policy


def default_policy(weights: Mapping[str, float] | None = None, ageing_s: float = AGEING_S) -> PriorityClasses:
    """Priority, then fair share between tenants over all classes together, then arrival."""
    shares = Shares(weights)
    return PriorityClasses(lambda: FairShare(shares), ageing_s)
