from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from drumline.model.errors import QueueFull
from drumline.scheduler.queue import RequestQueue


@dataclass(frozen=True)
class Entry:
    name: int
    cost_tokens: int


def test_bound_on_requests():
    queue: RequestQueue[Entry] = RequestQueue(2, 100)
    queue.push([Entry(0, 1)])
    queue.push([Entry(1, 1)])
    with pytest.raises(QueueFull) as caught:
        queue.push([Entry(2, 1)])
    assert (caught.value.bound, caught.value.limit, caught.value.queued) == ("requests", 2, 2)
    assert len(queue) == 2


def test_bound_on_tokens_holds_for_all_entries_of_a_request():
    queue: RequestQueue[Entry] = RequestQueue(10, 100)
    queue.push([Entry(0, 60)])
    with pytest.raises(QueueFull) as caught:
        queue.push([Entry(1, 20), Entry(1, 21)])
    assert (caught.value.bound, caught.value.limit, caught.value.queued) == ("tokens", 100, 1)
    assert (len(queue), queue.tokens) == (1, 60)
    queue.push([Entry(1, 20), Entry(1, 20)])


def test_empty_queue_takes_what_could_otherwise_never_run():
    queue: RequestQueue[Entry] = RequestQueue(2, 10)
    queue.push([Entry(0, 5)] * 3)
    assert (len(queue), queue.tokens) == (3, 15)


def test_empty_queue_has_nothing_to_pop():
    with pytest.raises(IndexError):
        RequestQueue(1, 1).pop()


def test_integrity_check_sees_a_wrong_count():
    queue: RequestQueue[Entry] = RequestQueue(2, 10)
    queue.push([Entry(0, 5)])
    queue.check_integrity()
    queue.tokens += 1
    with pytest.raises(RuntimeError, match="queue counts 6 tokens, its entries hold 5"):
        queue.check_integrity()


class QueueMachine(RuleBasedStateMachine):
    """The queue against a plain list."""

    @initialize(requests=st.integers(1, 6), tokens=st.integers(1, 60))
    def start(self, requests: int, tokens: int) -> None:
        self.queue: RequestQueue[Entry] = RequestQueue(requests, tokens)
        self.model: list[Entry] = []
        self.made = 0

    def make(self, costs: list[int]) -> list[Entry]:
        self.made += 1
        return [Entry(self.made, cost) for cost in costs]

    @rule(costs=st.lists(st.integers(0, 30), min_size=1, max_size=4))
    def push(self, costs: list[int]) -> None:
        entries = self.make(costs)
        tokens = sum(entry.cost_tokens for entry in [*self.model, *entries])
        too_many = len(self.model) + len(entries) > self.queue.max_requests
        if self.model and (too_many or tokens > self.queue.max_tokens):
            with pytest.raises(QueueFull) as caught:
                self.queue.push(entries)
            assert caught.value.bound == ("requests" if too_many else "tokens")
        else:
            self.queue.push(entries)
            self.model += entries

    @precondition(lambda self: self.model)
    @rule()
    def pop(self) -> None:
        assert self.queue.pop() == self.model.pop(0)

    @rule(cost=st.integers(0, 99))
    def push_front(self, cost: int) -> None:
        (entry,) = self.make([cost])
        self.queue.push_front(entry)
        self.model.insert(0, entry)

    @rule(divisor=st.integers(2, 5))
    def take_out(self, divisor: int) -> None:
        gone = self.queue.take_out(lambda entry: entry.name % divisor == 0)
        assert gone == [entry for entry in self.model if entry.name % divisor == 0]
        self.model = [entry for entry in self.model if entry.name % divisor]

    @invariant()
    def agrees(self) -> None:
        self.queue.check_integrity()
        assert list(self.queue) == self.model
        assert len(self.queue) == len(self.model)
        assert self.queue.tokens == sum(entry.cost_tokens for entry in self.model)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(deadline=None, max_examples=40, stateful_step_count=30)
