import asyncio
import math
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.open_loop import Served, Trial, judge, mixed_work, offer, percentiles, schedule, search
from benchmarks.peers.base import CHAT, Work
from drumline import Request, SamplingParams, Scheduler
from drumline.scheduler.job import GenerationJob
from tests.tiny import tiny_model

WORK = [Work((1,), 1)] * 4_000


@given(st.floats(0.1, 50), st.integers(0, 2**32))
def test_arrivals_are_ordered_and_depend_on_the_seed_alone(rate: float, seed: int):
    few = WORK[:20]
    due = [arrival.due_s for arrival in schedule(few, rate, seed)]
    assert due == [arrival.due_s for arrival in schedule(few, rate, seed)]
    assert due != [arrival.due_s for arrival in schedule(few, rate, seed + 1)]
    assert due[0] > 0
    assert all(earlier < later for earlier, later in pairwise(due))


@pytest.mark.parametrize("rate", [0.5, 8.0])
def test_gaps_are_exponential(rate: float):
    """Mean and deviation are 1 / rate, and a share of 1/e of the gaps is longer than that."""
    due = [0.0, *(arrival.due_s for arrival in schedule(WORK, rate, seed=3))]
    gaps = [(later - earlier) * rate for earlier, later in pairwise(due)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1, rel=0.05)
    assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) == pytest.approx(1, rel=0.06)
    assert sum(gap > 1 for gap in gaps) / len(gaps) == pytest.approx(1 / math.e, rel=0.06)


def test_work_is_like_mixed64s():
    work = mixed_work(2_000, seed=1, vocabulary=1_000, longest=2_048)
    assert work == mixed_work(2_000, seed=1, vocabulary=1_000, longest=2_048)
    prompts = sorted(len(request.prompt_ids) for request in work)
    answers = sorted(request.max_tokens for request in work)
    assert (prompts[0], prompts[-1], answers[0], answers[-1]) == (8, 768, 8, 256)
    assert prompts[1_000] == pytest.approx(math.exp(4.6), rel=0.1)
    assert answers[1_000] == pytest.approx(math.exp(4.3), rel=0.1)
    assert all(20 <= token < 1_000 for request in work for token in request.prompt_ids)


@given(st.integers(0, 1_000), st.integers(26, 900))
def test_work_fits_the_window(seed: int, longest: int):
    work = mixed_work(20, seed, 100, longest)
    assert all(len(request.prompt_ids) + request.max_tokens <= longest for request in work)


@given(st.lists(st.floats(0, 1e3) | st.just(math.inf), min_size=1, max_size=300))
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(values: list[float]):
    for part, found in percentiles(values).items():
        share = int(part[1:]) / 100
        assert found in values
        assert sum(value <= found for value in values) >= share * len(values) - 1e-9
        assert sum(value < found for value in values) < share * len(values)


def test_percentiles_of_known_values():
    assert percentiles([float(n) for n in range(100, 0, -1)]) == {"p50": 50, "p90": 90, "p99": 99}
    assert percentiles([]) == {}


def test_a_first_token_that_never_came_fails_the_trial():
    good = [Served(0.1, (0.01, 0.03))] * 99
    assert judge(2.0, good, 1.0) == Trial(
        2.0, 99, 0.0, dict.fromkeys(("p50", "p90", "p99"), 0.1), {"p50": 0.01, "p90": 0.03, "p99": 0.03}, True
    )
    failed = judge(2.0, [*good, Served(math.inf, ()), Served(math.inf, ())], 1.0)
    assert (failed.passed, failed.ttft_s["p99"]) == (False, math.inf)
    assert failed.late == pytest.approx(2 / 101)


@given(st.floats(0.05, 40), st.floats(0.2, 5))
def test_the_search_closes_in_from_below(capacity: float, first: float):
    def trial(rate: float) -> Trial:
        return Trial(rate, 1, 0.0, {}, {}, rate <= capacity)

    best, done = search(trial, first, trials=16)
    assert len(done) == 16
    assert best <= capacity < best * 1.2
    assert best == max(one.rate for one in done if one.passed)


def test_a_machine_that_passes_nothing():
    best, done = search(lambda rate: Trial(rate, 1, 1.0, {}, {}, False), 1.0, trials=3)
    assert (best, [one.rate for one in done]) == (0.0, [1.0, 0.5, 0.25])


@pytest.fixture
async def scheduler(one_thread: None) -> AsyncIterator[Scheduler]:
    """Three rows, already used once: kernels are compiled at their first use, which may take longer than the grace."""
    async with Scheduler(tiny_model(), rows=3) as started:
        warm_up = Request(prompt_ids=(5,), max_tokens=2, sampling=SamplingParams(**CHAT), ignore_eos=True)
        await (await started.submit(warm_up)).result()
        yield started


async def test_requests_are_offered_when_due_and_all_are_accounted_for(scheduler: Scheduler):
    work = [Work((5 + number, 9, 7), 6) for number in range(12)]
    served = await offer(scheduler, schedule(work, rate=400, seed=0), "chat")
    assert scheduler.statistics().finished == 13
    assert len(served) == 12
    assert all(0 < one.ttft_s < math.inf for one in served)
    assert all(len(one.gaps_s) <= 5 for one in served)
    assert len(served[0].gaps_s) > 0


async def test_time_counts_from_when_a_request_was_due(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch):
    """A submit that holds the sender up makes the next arrivals late, and that counts in their first tokens."""
    loop, submit, held_up_s = asyncio.get_running_loop(), scheduler.submit_nowait, 0.0
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + held_up_s)

    def slow(request: Request) -> GenerationJob:
        nonlocal held_up_s
        held_up_s += 20
        return submit(request)

    monkeypatch.setattr(scheduler, "submit_nowait", slow)
    served = await offer(scheduler, schedule([Work((5,), 2)] * 3, rate=1_000, seed=0), "greedy")
    assert [int(one.ttft_s // 19.9) for one in served] == [0, 1, 2]
