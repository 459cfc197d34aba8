"""Who is next: priorities that age, fair shares, and that nobody starves."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from drumline.scheduler.policy import (
    MOST_REMEMBERED,
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

    def test_waiting_raises_a_class_at_a_time(self):
        policy = PriorityClasses(ageing_s=AGEING_S)
        low = Entry("low")
        policy.add(low, 0.0)
        for now, fresh in ((9.9, "normal"), (19.9, "high")):
            rival = Entry(fresh)
            policy.add(rival, now)
            assert policy.foremost(now) is rival
            policy.remove(rival)
        rival = Entry("normal")
        policy.add(rival, 20.0)
        assert policy.foremost(20.0) is low  # it counts as high now
        policy.add(Entry("high"), 20.1)
        assert policy.foremost(30.0) is low  # and now it is overdue

    @pytest.mark.parametrize("priority", PRIORITIES)
    def test_the_bound(self, priority: str):
        """Behind an entry that waited 3, 2 or 1 ageing times, nothing that comes later is served first."""
        policy, victim = default_policy(ageing_s=AGEING_S), Entry(priority, "victim")
        policy.served(victim, 10**9, 0)  # its tenant had more than anybody will
        bound = (3 - PRIORITIES.index(priority)) * AGEING_S
        policy.add(victim, 0.0)
        now = 0.0
        while True:
            policy.add(Entry("high", f"t{int(now * 10)}"), now)
            entry = policy.foremost(now)
            policy.remove(entry)
            if entry is victim:
                break
            now += 0.1
        assert now == pytest.approx(bound, abs=0.2)

    def test_overdue_is_first_come(self):
        policy = default_policy(ageing_s=AGEING_S)
        entries = [Entry("low"), Entry("high", "b"), Entry("normal", "c")]
        for place, entry in enumerate(entries):
            policy.add(entry, float(place))
        assert taken(policy, 100.0) == entries

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
        reached = {other: self.level(other) for other in self.since}
        assert reached[entry] == max(reached.values())
        if reached[entry] == len(PRIORITIES):
            assert self.since[entry] == min(self.since[o] for o, level in reached.items() if level == 3)
        alike = [
            o
            for o in self.since
            if (o.tenant, o.priority, reached[o]) == (entry.tenant, entry.priority, reached[entry])
        ]
        first = min((self.since[o] for o in alike if o not in self.returned), default=0.0)
        assert entry in self.returned or self.since[entry] == first
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

    @staticmethod
    def asked(entry: Entry) -> int:
        return PRIORITIES.index(entry.priority)

    def level(self, entry: Entry) -> int:
        risen = int((self.now - self.since[entry]) / AGEING_S + 1e-9)
        return min(len(PRIORITIES), self.asked(entry) + risen)


TestOrder = Order.TestCase
TestOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
