"""Who is next: priorities that age, fair shares, and that nobody starves."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from drumline.model.errors import InvalidRequest
from drumline.scheduler.policy import (
    MOST_AGED,
    MOST_REMEMBERED,
    OVERDUE_EVERY,
    PRIORITIES,
    FairShare,
    FirstCome,
    Policy,
    PriorityClasses,
    default_policy,
)

AGEING_S = 10.0


@dataclass(eq=False)
class Entry:
    priority: str = "normal"
    tenant: str = "default"
    name: str = ""


def taken(policy: Policy, now: float = 0.0) -> list[Entry]:
    """All entries in the order in which they would be picked."""
    order = []
    while (entry := policy.foremost(now)) is not None:
        policy.remove(entry)
        order.append(entry)
    assert len(policy) == 0
    return order


def filled(policy: Policy, *entries: Entry, now: float = 0.0) -> Policy:
    for entry in entries:
        policy.add(entry, now)
    return policy


class TestFirstCome:
    def test_arrival(self):
        entries = [Entry() for _ in range(4)]
        assert taken(filled(FirstCome(), *entries)) == entries

    def test_put_back_goes_first(self):
        first, second, third = entries = [Entry() for _ in range(3)]
        policy = filled(FirstCome(), *entries)
        policy.remove(first)
        policy.put_back(first, 1.0)
        policy.remove(second)
        assert taken(policy) == [first, third]

    def test_what_does_not_wait_cannot_leave(self):
        with pytest.raises(KeyError):
            FirstCome().remove(Entry())


class TestFairShare:
    def test_tenants_take_turns_whatever_they_queued(self):
        many, few = [Entry(tenant="many") for _ in range(9)], [Entry(tenant="few") for _ in range(3)]
        policy, order = filled(FairShare(), *many, *few), []
        while (entry := policy.foremost(0.0)) is not None:
            policy.remove(entry)
            policy.served(entry, prompt_tokens=10, generated_tokens=5)
            order.append(entry.tenant)
        assert order == ["many", "few"] * 3 + ["many"] * 6

    def test_weights(self):
        entries = [Entry(tenant=name) for name in ("heavy", "light") for _ in range(30)]
        policy = default_policy({"heavy": 3.0})
        counts = Counter()
        filled(policy, *entries)
        for _ in range(20):
            entry = policy.foremost(0.0)
            policy.remove(entry)
            policy.served(entry, 0, 10)
            counts[entry.tenant] += 1
        assert counts == {"heavy": 15, "light": 5}

    def test_nobody_saves_up(self):
        """A tenant that comes late starts level; its silence earns it no burst."""
        policy = FairShare()
        for _ in range(50):
            entry = Entry(tenant="busy")
            policy.add(entry, 0.0)
            assert policy.foremost(0.0) is entry
            policy.remove(entry)
            policy.served(entry, 100, 0)
        filled(policy, *(Entry(tenant=name) for name in ("busy", "late") for _ in range(6)))
        order = []
        while (entry := policy.foremost(0.0)) is not None:
            policy.remove(entry)
            policy.served(entry, 100, 0)
            order.append(entry.tenant)
        assert order[:2] == ["late", "busy"] or order[:3] == ["late", "late", "busy"]
        assert order[3:8].count("busy") >= 2

    def test_a_debt_outlives_an_empty_line(self):
        policy = FairShare()
        greedy, patient = Entry(tenant="greedy"), Entry(tenant="patient")
        filled(policy, patient, greedy)
        policy.remove(greedy)
        policy.served(greedy, 1_000, 0)
        policy.add(greedy, 0.0)
        others = [Entry(tenant="patient") for _ in range(3)]
        filled(policy, *others)
        assert taken(policy) == [patient, *others, greedy]

    def test_memory_does_not_grow_with_tenants_that_are_gone(self):
        policy = default_policy()
        for number in range(5_000):
            entry = Entry(tenant=f"t{number}")
            policy.add(entry, 0.0)
            policy.foremost(0.0)
            policy.remove(entry)
            policy.served(entry, 1, 1)
            assert len(policy._classes[1]._shares._served) <= MOST_REMEMBERED + 2
            assert len(policy._classes[1]._tenants) < 10


class TestPriorities:
    def test_high_first(self):
        entries = [Entry(priority) for priority in ("low", "normal", "high", "low", "high")]
        order = taken(filled(default_policy(), *entries))
        assert [entry.priority for entry in order] == ["high", "high", "normal", "low", "low"]

    @pytest.mark.parametrize("priority", PRIORITIES)
    def test_overdue_has_one_pick_in_four(self, priority: str):
        """High work that never ends leaves it its turn, once it has waited its time."""
        policy, victim = default_policy(ageing_s=AGEING_S), Entry(priority, "victim")
        policy.served(victim, 10**9, 0)  # its tenant had more than anybody will
        due = (3 - PRIORITIES.index(priority)) * AGEING_S
        policy.add(victim, 0.0)
        picks, now = 0, 0.0
        while True:
            policy.add(Entry("high", f"t{now:.1f}"), now)
            entry = policy.foremost(now)
            policy.remove(entry)
            picks += now >= due
            if entry is victim:
                break
            now += 0.1
        assert due <= now + 1e-9
        assert picks <= OVERDUE_EVERY + 1

    def test_a_flood_that_is_overdue_does_not_hold_up_what_comes(self):
        policy = default_policy(ageing_s=AGEING_S)
        flood = [Entry("normal", "many") for _ in range(300)]
        filled(policy, *flood)
        late = [Entry("normal", "few"), Entry("high", "few")]
        filled(policy, *late, now=100.0)
        order = []
        while len(order) < 8:
            entry = policy.foremost(100.0)
            policy.remove(entry)
            policy.served(entry, 10, 10)
            order.append(entry)
        assert order[0] is late[1]
        assert late[0] in order

    def test_the_overdue_share_among_themselves(self):
        policy = default_policy(ageing_s=AGEING_S)
        entries = [Entry("normal", "many") for _ in range(9)] + [Entry("normal", "few") for _ in range(3)]
        filled(policy, *entries)
        order = []
        while (entry := policy.foremost(1_000.0)) is not None:
            policy.remove(entry)
            policy.served(entry, 10, 0)
            order.append(entry.tenant)
        assert order[:6].count("few") == 3

    def test_a_hundred_thousand_age_bit_by_bit(self):
        policy = default_policy(ageing_s=AGEING_S)
        filled(policy, *(Entry() for _ in range(1_000)))
        policy.foremost(100.0)
        assert len(policy._overdue) == MOST_AGED
        policy.foremost(100.0)
        assert len(policy._overdue) == 2 * MOST_AGED

    def test_heaps_do_not_keep_what_has_left(self):
        policy = default_policy()
        policy.add(Entry("high", "stays"), 0.0)
        for number in range(3_000):
            entry = Entry("normal", f"t{number}")
            policy.add(entry, 0.0)
            policy.remove(entry)
        assert len(policy._due) < 200
        assert len(policy._classes[1]._tenants) < 200
        never = PriorityClasses(ageing_s=float("inf"))
        filled(never, *(Entry() for _ in range(10)))
        assert never._due == []

    @pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
    def test_bad_settings(self, weight: float):
        with pytest.raises(InvalidRequest, match="weights: that of a must be a number above 0"):
            default_policy({"a": weight})
        if weight != float("inf"):
            with pytest.raises(InvalidRequest, match="ageing_s: must be above 0"):
                default_policy(ageing_s=weight)

    def test_a_tenant_has_one_share_in_all_classes(self):
        policy = default_policy()
        spent, fresh = Entry("high", "a"), Entry("high", "b")
        low = Entry("low", "a")
        policy.add(low, 0.0)
        policy.served(low, 50, 0)
        filled(policy, spent, fresh)
        assert taken(policy) == [fresh, spent, low]


class Order(RuleBasedStateMachine):
    """The default policy against a plain account of what it promises."""

    @initialize(seed=st.integers(0, 2**16))
    def start(self, seed: int) -> None:
        self.policy = default_policy({"b": 2.0}, ageing_s=AGEING_S)
        self.since: dict[Entry, float] = {}
        self.left: list[Entry] = []
        self.returned: set[Entry] = set()
        self.passed_over = 0
        self.now = 0.0
        self.dice = random.Random(seed)

    @rule(priority=st.sampled_from(PRIORITIES), tenant=st.sampled_from("abc"))
    def add(self, priority: str, tenant: str) -> None:
        entry = Entry(priority, tenant)
        self.policy.add(entry, self.now)
        self.since[entry] = self.now

    @rule(seconds=st.sampled_from([0.5, 3.0, AGEING_S, 4 * AGEING_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.since)
    @rule(tokens=st.integers(0, 100))
    def pick(self, tokens: int) -> None:
        entry = self.policy.foremost(self.now)
        assert entry in self.since
        fresh = [other for other in self.since if not self.overdue(other)]
        if not self.overdue(entry):
            assert PRIORITIES.index(entry.priority) == max(PRIORITIES.index(other.priority) for other in fresh)
            self.passed_over += len(fresh) < len(self.since)
            assert self.passed_over < OVERDUE_EVERY
        else:
            self.passed_over = 0
        alike = [
            other
            for other in self.since
            if (other.tenant, other.priority) == (entry.tenant, entry.priority)
            and other not in self.returned
            and self.overdue(other) == self.overdue(entry)
        ]
        assert entry in self.returned or self.since[entry] == min(self.since[other] for other in alike)
        self.policy.remove(entry)
        del self.since[entry]
        self.policy.served(entry, tokens, tokens)
        self.left.append(entry)

    @precondition(lambda self: self.since)
    @rule()
    def leave(self) -> None:
        entry = self.dice.choice(list(self.since))
        self.policy.remove(entry)
        del self.since[entry]

    @precondition(lambda self: self.left)
    @rule()
    def come_back(self) -> None:
        entry = self.left.pop()
        self.policy.put_back(entry, self.now)
        self.returned.add(entry)
        self.since[entry] = self.now

    @invariant()
    def holds_what_waits(self) -> None:
        if hasattr(self, "policy"):
            assert set(self.policy) == set(self.since)
            assert len(self.policy) == len(self.since)

    def overdue(self, entry: Entry) -> bool:
        return self.now - self.since[entry] >= AGEING_S * (3 - PRIORITIES.index(entry.priority))


TestOrder = Order.TestCase
TestOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
