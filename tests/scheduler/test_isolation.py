"""One row's trouble is its own: the others' tokens are those of a quiet run, and so are the next tenant's."""

import asyncio
import math
from dataclasses import replace

import pytest
import torch

from drumline import EngineFailed, Request, Result, SamplingParams, Scheduler
from drumline.model.language_model import LanguageModel
from tests.drive import Gate, generate
from tests.tiny import FAMILIES, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

BAD = 77
"""An id whose embedding is broken in `broken_model`; nothing else ever uses it."""


def broken_model(family: str = "llama", value: float = math.nan, window: int = 64) -> LanguageModel:
    """A model with a head of its own and one embedding that is not finite."""
    model = tiny_model(family, window)
    embedding = model.weights.embedding.clone()
    embedding[BAD] = value
    return replace(model, weights=replace(model.weights, embedding=embedding))


def good(seed: int, **fields: object) -> Request:
    prompt = [3 + (seed * 37 + place * 11) % 70 for place in range(3 + 5 * seed)]
    fields = {"max_tokens": 10, "sampling": SamplingParams(temperature=0.8, seed=seed, banned_ids=(BAD,)), **fields}
    return Request(prompt_ids=prompt, ignore_eos=True, **fields)


GOOD = [good(seed) for seed in range(4)]


async def quiet(model: LanguageModel) -> list[tuple[int, ...]]:
    return [result.token_ids for result in await generate(model, *GOOD, rows=4)]


def assert_undisturbed(results: list[Result], expected: list[tuple[int, ...]]) -> None:
    assert [result.stop_reason for result in results] == ["budget"] * len(expected)
    assert [result.token_ids for result in results] == expected


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("family", FAMILIES)
async def test_row_with_nan_ends_alone(family: str, value: float):
    model = broken_model(family, value)
    expected = await quiet(model)
    bad = [Request(prompt_ids=[5, BAD, 6], max_tokens=10), Request(prompt_ids=[BAD], max_tokens=10)]
    mixed = [bad[0], GOOD[0], GOOD[1], bad[1], GOOD[2], bad[0], GOOD[3], bad[1]]
    results = await generate(model, *mixed, rows=3, step_tokens=16)  # tenants follow one another
    failed = [result for result in results if result.stop_reason == "error"]
    assert len(failed) == 4
    for result in failed:
        assert result.status == "failed"
        assert result.error == "the model's logits are not finite"
        assert result.token_ids == ()
    assert_undisturbed([result for result in results if result.stop_reason != "error"], expected)


@pytest.mark.parametrize("leave", ["cancel", "preempt", "deadline"])
async def test_next_tenant_of_a_row_that_left_before_its_nan_showed(leave: str):
    """A chunked prompt has broken keys in the cache, and is stopped before it comes to its logits."""
    model, now = broken_model(), 0.0
    expected = await quiet(model)
    async with Scheduler(model, rows=2, step_tokens=17, clock=lambda: now) as scheduler:
        gate = Gate()
        await scheduler.submit(Request(prompt="h", max_tokens=6, ignore_eos=True, processors=[gate]))
        await gate.arrived()
        poisoned = await scheduler.submit(Request(prompt_ids=[BAD] * 60, max_tokens=4, deadline_s=5.0))
        gate.step()
        await gate.arrived()
        if leave == "cancel":
            poisoned.cancel()
        elif leave == "preempt":
            scheduler.preempt(poisoned)
        else:
            now = 6.0
        gate.open()
        results = [await (await scheduler.submit(request)).result() for request in GOOD]
        ended = await poisoned.result()
        scheduler.check_integrity()
    assert ended.stop_reason == {"cancel": "cancelled", "preempt": "error", "deadline": "deadline"}[leave]
    assert ended.token_ids == ()
    assert_undisturbed(results, expected)


@pytest.mark.parametrize(
    "processor",
    [
        lambda ids, scores: 1 / 0,
        lambda ids, scores: scores[:-1],
        lambda ids, scores: scores * math.nan,
        lambda ids, scores: scores + math.inf,
        lambda ids, scores: None,
    ],
    ids=["raises", "shape", "nan", "inf", "none"],
)
async def test_processor_that_fails_ends_its_row_alone(processor):
    model = tiny_model(window=64)
    expected = await quiet(model)

    def fails_at_the_fourth(ids, scores):
        return processor(ids, scores) if len(ids) == 6 else scores

    failing = Request(prompt="abc", max_tokens=10, ignore_eos=True, processors=[fails_at_the_fourth])
    results = await generate(model, GOOD[0], GOOD[1], failing, GOOD[2], GOOD[3], failing, rows=4)
    for index in (5, 2):
        broken = results.pop(index)
        assert (broken.stop_reason, len(broken.token_ids)) == ("error", 3)
        assert "logits processor" in (broken.error or "")
        with pytest.raises(EngineFailed, match="logits processor"):
            broken.raise_for_status()
    assert_undisturbed(results, expected)


async def test_all_masked_ends_its_row_alone():
    model = tiny_model(window=64)
    expected = await quiet(model)
    sampling = SamplingParams(allowed_ids=(1,), temperature=1.0)
    masked = Request(prompt="abc", max_tokens=10, min_tokens=2, sampling=sampling)  # EOS is all there is, and blocked
    results = await generate(model, *GOOD, masked, rows=5)
    last = results.pop()
    assert (last.stop_reason, last.error) == ("error", "every token is masked")
    assert_undisturbed(results, expected)


async def test_numbers_beyond_their_range_end_their_row_alone():
    model = tiny_model(window=64)
    expected = await quiet(model)
    wild = Request(prompt="abc", max_tokens=10, sampling=SamplingParams(repetition_penalty=1e-308))
    results = await generate(model, *GOOD, wild, rows=5)
    last = results.pop()
    assert last.stop_reason == "error"
    assert "beyond the range" in (last.error or "")
    assert_undisturbed(results, expected)


async def test_poison_behind_a_shared_prefix_stays_where_it_is():
    """Rows that take over, copy or wait for what a poisoned row computed before its poison."""
    model = broken_model(window=128)
    shared = [3 + place * 7 % 70 for place in range(40)]
    sound = [good(seed) for seed in range(4)]
    sound = [request.model_copy(update={"prompt_ids": (*shared, *request.prompt_ids)}) for request in sound]
    poisoned = [Request(prompt_ids=(*shared, *tail), max_tokens=10) for tail in ([BAD], [5, BAD, 6], [5, 6, BAD])]
    expected = [result.token_ids for result in await generate(model, *sound, rows=1, reuse=False)]
    for rows, order in ((1, (0, 4, 1, 5, 2, 6, 3)), (3, (4, 0, 5, 1, 6, 2, 3)), (8, (4, 5, 6, 0, 1, 2, 3))):
        asked = [(*sound, *poisoned)[place] for place in order]
        results = await generate(model, *asked, rows=rows, step_tokens=16)
        assert [result.stop_reason for result in results] == ["budget" if place < 4 else "error" for place in order]
        assert [result.token_ids for place, result in sorted(zip(order, results, strict=True)) if place < 4] == expected
        assert sum(result.usage.reused_tokens for result in results) >= 39


async def test_neighbours_of_every_kind_leave_a_row_as_it_is():
    model = tiny_model(window=64)
    expected = await quiet(model)
    for neighbours in (
        [good(9, sampling=SamplingParams(), stop=["e"])],
        [good(7, max_tokens=1), good(6, max_tokens=40), good(8, n=2, overflow="slide", max_tokens=60)],
    ):
        results = await generate(model, *neighbours, *GOOD, rows=6, step_tokens=19)
        assert_undisturbed(results[len(neighbours) :], expected)


class TestEngineFailure:
    """A step that raises is nobody's own trouble: everything ends with `error`, and nothing hangs."""

    @staticmethod
    def breaking_model() -> LanguageModel:
        """A model with one weight of a wrong shape, which shows once the first step runs."""
        model = tiny_model()
        layer = replace(model.weights.layers[1], down=torch.zeros(32, 7))
        return replace(model, weights=replace(model.weights, layers=(model.weights.layers[0], layer)))

    async def test_everything_ends_with_error_and_nothing_more_is_taken(self):
        async with Scheduler(self.breaking_model(), rows=2, queue_requests=2) as scheduler:
            jobs = [await scheduler.submit(Request(prompt="abc", n=2, id="first"))]
            jobs += [await scheduler.submit(Request(prompt="abc")) for _ in range(2)]  # these wait for room, or a row
            results = [await job.result() for job in jobs]
            for result in results:
                assert {choice.stop_reason for choice in result.choices} == {"error"}
                assert "RuntimeError" in (result.error or "")
                assert result.status == "failed"
                assert [chunk async for chunk in jobs[results.index(result)]] == []
            assert not scheduler.healthy
            assert not scheduler.ready
            assert not scheduler.statistics().healthy
            assert scheduler.statistics().live == scheduler.statistics().queued == 0
            with pytest.raises(EngineFailed, match="RuntimeError"):
                await scheduler.submit(Request(prompt="abc"))
            with pytest.raises(EngineFailed, match="RuntimeError"):
                scheduler.submit_nowait(Request(prompt="abc"))
            scheduler.check_integrity()
            await scheduler.drain()
        failed = scheduler.statistics().finished
        assert failed == 3

    async def test_waiting_submitters_hear_of_it(self):
        async with Scheduler(self.breaking_model(), rows=1, queue_requests=1) as scheduler:
            first = scheduler.submit_nowait(Request(prompt="abc"))
            second = asyncio.ensure_future(scheduler.submit(Request(prompt="abc")))
            third = asyncio.ensure_future(scheduler.submit(Request(prompt="abc")))
            assert (await first.result()).stop_reason == "error"
            ends = await asyncio.gather(second, third, return_exceptions=True)
            for end in ends:
                if not isinstance(end, EngineFailed):
                    assert (await end.result()).stop_reason == "error"
            assert any(isinstance(end, EngineFailed) for end in ends)

    async def test_another_scheduler_of_the_process_goes_on(self):
        expected = await generate(tiny_model(), Request(prompt="abc", max_tokens=6))
        async with Scheduler(tiny_model()) as healthy, Scheduler(self.breaking_model()) as broken:
            ended = await (await broken.submit(Request(prompt="abc"))).result()
            result = await (await healthy.submit(Request(prompt="abc", max_tokens=6))).result()
        assert ended.stop_reason == "error"
        assert healthy.healthy
        assert result.token_ids == expected[0].token_ids
