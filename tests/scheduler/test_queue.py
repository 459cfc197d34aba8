import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from drumline.model.errors import QueueFull
from drumline.scheduler.policy import PRIORITIES, FirstCome, default_policy
from drumline.scheduler.queue import RequestQueue


@dataclass(eq=False)
class Entry:
    name: int
    cost_tokens: int
    priority: str = "normal"
    tenant: str = "default"
    deadline_at: float = math.inf


def make_queue(requests: int, tokens: int) -> RequestQueue[Entry]:
    return RequestQueue(requests, tokens, FirstCome())


def test_bound_on_requests():
    queue = make_queue(2, 100)
    queue.push([Entry(0, 1)], 0.0)
    queue.push([Entry(1, 1)], 0.0)
    with pytest.raises(QueueFull) as caught:
        queue.push([Entry(2, 1)], 0.0)
    assert (caught.value.bound, caught.value.limit, caught.value.queued) == ("requests", 2, 2)
    assert len(queue) == 2


def test_bound_on_tokens_holds_for_all_entries_of_a_request():
    queue = make_queue(10, 100)
    queue.push([Entry(0, 60)], 0.0)
    with pytest.raises(QueueFull) as caught:
        queue.push([Entry(1, 20), Entry(1, 21)], 0.0)
    assert (caught.value.bound, caught.value.limit, caught.value.queued) == ("tokens", 100, 1)
    assert (len(queue), queue.tokens) == (1, 60)
    queue.push([Entry(1, 20), Entry(1, 20)], 0.0)


def test_empty_queue_takes_what_could_otherwise_never_run():
    queue = make_queue(2, 10)
    queue.push([Entry(0, 5) for _ in range(3)], 0.0)
    assert (len(queue), queue.tokens) == (3, 15)


def test_empty_queue_has_nothing_to_pop():
    with pytest.raises(IndexError):
        make_queue(1, 1).pop(0.0)


def test_integrity_check_sees_a_wrong_count():
    queue = make_queue(2, 10)
    queue.push([Entry(0, 5)], 0.0)
    queue.check_integrity()
    queue.tokens += 1
    with pytest.raises(RuntimeError, match="queue counts 6 tokens, its entries hold 5"):
        queue.check_integrity()


def test_the_deadline_takes_out_and_nothing_else():
    queue = make_queue(9, 99)
    late, soon, never = Entry(0, 1, deadline_at=9.0), Entry(1, 1, deadline_at=5.0), Entry(2, 1)
    queue.push([late], 1.0)
    queue.push([soon, never], 2.0)
    assert queue.waiting_since == 1.0
    assert queue.take_expired(4.9) == []
    assert queue.take_expired(5.0) == [soon]
    queue.remove(late)
    assert queue.take_expired(100.0) == []
    assert (list(queue), queue.tokens) == ([never], 1)
    assert queue.waiting_since == 2.0


def test_counts_by_class():
    queue = RequestQueue(9, 99, default_policy())
    entries = [Entry(place, 1, priority) for place, priority in enumerate(("low", "high", "low"))]
    queue.push(entries, 0.0)
    assert queue.by_priority == {"low": 2, "normal": 0, "high": 1}
    assert queue.pop(0.0) is entries[1]
    assert queue.by_priority == {"low": 2, "normal": 0, "high": 0}
    assert entries[0] in queue
    assert entries[1] not in queue
    with pytest.raises(KeyError):
        queue.remove(entries[1])


class QueueMachine(RuleBasedStateMachine):
    """The queue, under both policies, against a plain list of what waits."""

    @initialize(requests=st.integers(1, 6), tokens=st.integers(1, 60), fair=st.booleans(), seed=st.integers(0, 999))
    def start(self, requests: int, tokens: int, fair: bool, seed: int) -> None:
        self.fair = fair
        self.queue: RequestQueue[Entry] = RequestQueue(requests, tokens, default_policy() if fair else FirstCome())
        self.model: list[Entry] = []
        self.made = 0
        self.now = 0.0
        self.dice = random.Random(seed)

    def make(self, costs: list[int]) -> list[Entry]:
        self.made += 1
        priority, tenant = self.dice.choice(PRIORITIES), self.dice.choice("ab")
        deadline_at = self.now + self.dice.choice((1.0, 20.0, math.inf))
        return [Entry(self.made, cost, priority, tenant, deadline_at) for cost in costs]

    @rule(costs=st.lists(st.integers(0, 30), min_size=1, max_size=4))
    def push(self, costs: list[int]) -> None:
        entries = self.make(costs)
        tokens = sum(entry.cost_tokens for entry in [*self.model, *entries])
        too_many = len(self.model) + len(entries) > self.queue.max_requests
        if self.model and (too_many or tokens > self.queue.max_tokens):
            with pytest.raises(QueueFull) as caught:
                self.queue.push(entries, self.now)
            assert caught.value.bound == ("requests" if too_many else "tokens")
        else:
            self.queue.push(entries, self.now)
            self.model += entries

    @precondition(lambda self: self.model)
    @rule()
    def pop(self) -> None:
        entry = self.queue.pop(self.now)
        assert self.fair or entry is self.model[0]
        self.model.remove(entry)

    @rule(cost=st.integers(0, 99))
    def put_back(self, cost: int) -> None:
        (entry,) = self.make([cost])
        self.queue.put_back(entry, self.now)
        self.model.insert(0, entry)

    @precondition(lambda self: self.model)
    @rule()
    def remove(self) -> None:
        entry = self.dice.choice(self.model)
        self.queue.remove(entry)
        self.model.remove(entry)

    @rule(seconds=st.sampled_from([0.5, 15.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        expired = self.queue.take_expired(self.now)
        assert set(expired) == {entry for entry in self.model if entry.deadline_at <= self.now}
        self.model = [entry for entry in self.model if entry.deadline_at > self.now]

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "queue"):
            return
        self.queue.check_integrity()
        assert set(self.queue) == set(self.model)
        assert len(self.queue) == len(self.model)
        assert self.queue.tokens == sum(entry.cost_tokens for entry in self.model)
        assert (self.queue.foremost(self.now) is None) == (not self.model)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(deadline=None, max_examples=40, stateful_step_count=30)
