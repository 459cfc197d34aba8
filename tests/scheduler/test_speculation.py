"""Drafts: what is guessed, what of it counts, and that no answer shows it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drumline import InvalidRequest, Request, Result, SamplingParams, Scheduler
from drumline.model.language_model import LanguageModel
from drumline.scheduler.speculation import MOST_READ, TILE_TOKENS, PromptLookup, most_drafts
from tests.compositions import answer
from tests.tiny import FAMILIES, tiny_model

LOOP = (5, 6, 7, 8) * 4
FEW_IDS = SamplingParams(allowed_ids=(5, 6, 7), temperature=0.9, seed=4)
"""Few ids, drawn: many drafts, of which some are right."""


def trusted() -> PromptLookup:
    lookup = PromptLookup()
    lookup.told(8, 8)
    return lookup


class TestLookup:
    @pytest.mark.parametrize(
        ("ids", "drafts"),
        [
            ([1, 2, 3, 9, 8, 1, 2, 3], [9, 8, 1]),  # three tokens that stood together before
            ([4, 2, 3, 9, 8, 1, 2, 3], [9, 8, 1]),  # two of them did
            ([1, 2, 7, 1, 2, 9, 4, 1, 2], [9, 4, 1]),  # the latest place counts
            ([0, 1, 2, 7, 3, 1, 2, 9, 0, 1, 2], [7, 3, 1]),  # but the longer match before it
            ([5, 6, 5, 6], [5, 6, 5]),  # a loop goes on
            ([5, 5, 5], [5, 5, 5]),
            ([1, 2, 3, 4], []),
            ([7], []),
        ],
    )
    def test_what_follows_the_same_tokens(self, ids: list[int], drafts: list[int]):
        assert trusted().drafts(ids, 3) == drafts

    def test_trust_grows_with_success(self):
        lookup, given = PromptLookup(), []
        for accepted in (1, 2, 4, 3, 0, 1):  # of as many as were drafted, but for the 3 of 8 and the 0 of 3
            drafted = len(lookup.drafts(LOOP, 100))
            given.append(drafted)
            lookup.told(drafted, accepted)
        assert given == [1, 2, 4, 8, 3, 1]

    def test_a_short_step_costs_no_trust(self):
        lookup = trusted()
        lookup.told(1, 1)
        assert len(lookup.drafts(LOOP, 100)) == 16

    @given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 6), st.integers(1, 40))
    def test_the_pieces_it_was_shown_do_not_matter(self, ids: list[int], most: int, cut: int):
        """Shown a row as it grows, or all at once: the same drafts, no more than asked for, all of them known ids."""
        grown, whole = trusted(), trusted()
        if cut < len(ids):
            grown.drafts(ids[:cut], most)
        drafts = grown.drafts(ids, most)
        assert drafts == whole.drafts(ids, most)
        assert len(drafts) in (0, most)
        assert set(drafts) <= set(ids)

    def test_a_long_prompt_is_read_in_pieces(self):
        ids, lookup = [*range(10, 2 * MOST_READ), 10, 11, 12], trusted()
        assert [lookup.drafts(ids, 2) for _ in range(3)] == [[], [13, 14], [13, 14]]

    def test_none_where_rows_fill_the_step(self):
        assert [most_drafts(rows, 15) for rows in range(8)] == [0, 5, 2, 1, 0, 0, 0, 0]
        assert most_drafts(1, 3) == 3
        assert most_drafts(1, 0) == 0
        assert all(rows * (1 + most_drafts(rows, 99)) <= max(rows, TILE_TOKENS) for rows in range(1, 50))


@dataclass
class Counts:
    """What the metrics page says after a run."""

    accepted: int
    rejected: int
    generated: int
    preemptions: int


def counts_of(scheduler: Scheduler) -> Counts:
    def of(name: str, **labels: str) -> int:
        return int(scheduler.registry.get_sample_value(f"drumline_{name}", {"scheduler": "main", **labels}) or 0)

    accepted, rejected = (of("draft_tokens_total", outcome=outcome) for outcome in ("accepted", "rejected"))
    return Counts(accepted, rejected, of("generated_tokens_total"), of("preemptions_total"))


async def run(model: LanguageModel, requests: Sequence[Request], drafts: int) -> tuple[list[Result], Counts]:
    async with Scheduler(model, rows=sum(request.n for request in requests), draft_tokens=drafts) as scheduler:
        jobs = [await scheduler.submit(request) for request in requests]
        results = [await job.result() for job in jobs]
        scheduler.check_integrity()
        counts = counts_of(scheduler)
    assert counts.generated == sum(result.usage.generated_tokens for result in results)
    return results, counts


async def compared(model: LanguageModel, *requests: Request) -> tuple[list[Result], Counts]:
    """The results with drafts: answers as without, and steps that account for every token and every draft."""
    without, none = await run(model, requests, 0)
    results, counts = await run(model, requests, 5)
    assert (none.accepted, none.rejected) == (0, 0)
    assert list(map(answer, results)) == list(map(answer, without))
    for before, after in zip(without, results, strict=True):
        for plain, choice in zip(before.choices, after.choices, strict=True):
            assert all(
                step.cache_before == last.cache_after for last, step in pairwise(choice.steps) if step.cache_before
            )
            if choice.steps and not after.usage.window_recomputes:
                assert choice.steps[-1].cache_after == plain.steps[-1].cache_after
            assert len(choice.token_times_s) == len(choice.token_ids)
    fed = [sum(result.usage.evaluated_positions for result in runs) for runs in (without, results)]
    assert fed[1] - fed[0] == counts.rejected
    return results, counts


def looping(**settings: object) -> Request:
    return Request(**{"prompt_ids": LOOP, "max_tokens": 60, "logprobs": 2, "sampling": FEW_IDS, **settings})


@pytest.fixture(scope="module")
def tiny() -> LanguageModel:
    return tiny_model("llama", precision="int8", window=128)


class TestAnswers:
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8, torch.float32])
    async def test_the_same_in_fewer_steps(self, family: str, kv_dtype: torch.dtype):
        model = replace(tiny_model(family, precision="int8", window=128), kv_dtype=kv_dtype)
        (result,), counts = await compared(model, looping())
        assert min(counts.accepted, counts.rejected) > 0
        assert len(result.choices[0].steps) == 60 - counts.accepted

    @pytest.mark.parametrize("tokens", range(1, 9))
    async def test_a_budget_is_never_passed(self, tiny: LanguageModel, tokens: int):
        (result,), _ = await compared(tiny, looping(max_tokens=tokens))
        assert (result.usage.generated_tokens, result.stop_reason) == (tokens, "budget")

    async def test_the_window_ends_or_slides_as_ever(self):
        model = tiny_model("llama", precision="int8")
        for overflow in ("stop", "slide"):
            (result,), counts = await compared(model, looping(overflow=overflow))
            assert counts.accepted > 0
            assert (result.stop_reason == "window") == (overflow == "stop")

    @pytest.mark.parametrize("seed", range(2))
    async def test_what_ends_a_row_among_its_drafts(self, tiny: LanguageModel, seed: int):
        """Stop ids, EOS and stop strings at every place; nothing behind them counts, or is fed."""
        sampling = FEW_IDS.model_copy(update={"seed": seed})
        (whole,), _ = await run(tiny, [looping(sampling=sampling)], 0)
        texts = {whole.text[at : at + 4] for at in range(8, 40, 4)}
        endings = [
            *({"stop_ids": [stop], "min_tokens": least} for stop in (5, 6, 7) for least in (0, 9, 10, 11, 12)),
            *({"stop": [text], "keep_stop": keep} for text in texts for keep in (False, True)),
        ]
        accepted = 0
        for ending in endings:
            (result,), counts = await compared(tiny, looping(sampling=sampling, **ending))
            accepted += counts.accepted
            assert result.stop_reason in ("stop", "budget")
        assert accepted > 10

    async def test_an_end_is_not_drafted(self, tiny: LanguageModel):
        """Wherever the answer's tokens stood in the prompt, EOS came next: drafted, it would be rejected."""
        sampling = SamplingParams(allowed_ids=(5,))
        prompt = (5, 5, 1, 6, 5, 5, 5, 1, 6)
        (result,), counts = await compared(tiny, looping(prompt_ids=prompt, sampling=sampling, max_tokens=8))
        assert result.token_ids == (5,) * 8
        assert (counts.accepted > 0, counts.rejected) == (True, 0)

    @pytest.mark.parametrize(
        "sampling",
        [
            SamplingParams(logit_bias={5: 9.0, 6: 9.0}, temperature=0.9, seed=1),
            SamplingParams(allowed_ids=(5, 6, 7), temperature=1.0, top_k=3, seed=2),
            SamplingParams(logit_bias={5: 9.0, 6: 8.0}, repetition_penalty=1.1),
            SamplingParams(allowed_ids=(5, 6), presence_penalty=0.1, frequency_penalty=0.1, temperature=0.5, seed=3),
        ],
    )
    async def test_draws_and_penalties_at_their_own_place(self, tiny: LanguageModel, sampling: SamplingParams):
        _, counts = await compared(tiny, looping(sampling=sampling))
        assert min(counts.accepted, counts.rejected) > 0

    async def test_neighbours_and_choices_draft_each_for_itself(self, tiny: LanguageModel):
        others = [looping(prompt_ids=(9, 8, 7) * 5, sampling=SamplingParams(allowed_ids=(8,)))]
        results, counts = await compared(tiny, looping(), *others)
        assert all(len(result.choices[0].steps) < len(result.token_ids) for result in results)
        (pair,), _ = await compared(tiny, looping(n=2))
        assert pair.choices[0].token_ids == results[0].token_ids != pair.choices[1].token_ids
        assert all(len(choice.steps) < len(choice.token_ids) for choice in pair.choices)
        assert counts.accepted > 10

    async def test_one_chunk_a_step(self, tiny: LanguageModel):
        async with Scheduler(tiny, rows=1) as scheduler:
            job = await scheduler.submit(looping())
            chunks = [chunk async for chunk in job]
            result = await job.result()
        places = [(chunk.first_token, chunk.first_token + len(chunk.token_ids)) for chunk in chunks]
        assert [end for _, end in places[:-1]] == [start for start, _ in places[1:]]
        assert places[-1][1] == 60
        assert len(chunks) <= len(result.choices[0].steps) < 60
        assert len(result.choices[0].gaps_s) == len(result.choices[0].steps) - 1
        assert min(result.choices[0].gaps_s) > 0

    async def test_a_processor_is_called_once_a_token(self, tiny: LanguageModel):
        calls: list[int] = []

        def count(ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
            calls.append(len(ids))
            return logits

        (result,), counts = await run(tiny, [looping(processors=(count,))], 5)
        assert (len(calls), counts.accepted) == (result.usage.generated_tokens, 0)

    async def test_a_preempted_row_drafts_on(self, tiny: LanguageModel):
        (expected,), _ = await run(tiny, [looping()], 0)
        async with Scheduler(tiny, rows=1) as scheduler:
            job = await scheduler.submit(looping())
            async for chunk in job:
                if chunk.first_token < 30:
                    scheduler.preempt(job)
            result = await job.result()
            counts = counts_of(scheduler)
        assert answer(result) == answer(expected)
        assert counts.preemptions > 1
        last_start = max(at for at, step in enumerate(result.choices[0].steps) if step.cache_before == 0)
        assert any(step.cache_after > step.cache_before + 1 for step in result.choices[0].steps[last_start + 1 :])

    async def test_a_cancelled_row_keeps_what_it_has(self, tiny: LanguageModel):
        (expected,), _ = await run(tiny, [looping()], 0)
        async with Scheduler(tiny, rows=1) as scheduler:
            job = await scheduler.submit(looping())
            async for chunk in job:
                if chunk.first_token > 20:
                    job.cancel()
            result = await job.result()
            scheduler.check_integrity()
        assert result.stop_reason == "cancelled"
        assert 20 < len(result.token_ids) < 60
        assert result.token_ids == expected.token_ids[: len(result.token_ids)]

    async def test_text_of_the_real_model(self, smollm2_int8: LanguageModel):
        """It repeats a list; a stop string lies within what one step accepts."""
        prompt = "red, green, blue, red, green, blue, red, green, blue, red,"
        sampled = SamplingParams(temperature=0.7, top_p=0.9, seed=5)
        for sampling in (SamplingParams(), sampled):
            request = Request(prompt=prompt, max_tokens=24, logprobs=1, sampling=sampling)
            _, counts = await compared(smollm2_int8, request)
            assert counts.accepted > 4
        (result,), _ = await compared(smollm2_int8, Request(prompt=prompt, max_tokens=24, stop=["blue, red"]))
        assert (result.stop_reason, "blue, red" in result.choices[0].text) == ("stop", False)


class TestTrouble:
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    async def test_a_draft_without_numbers_harms_no_token_before_it(self, value: float):
        """The row ends where it would have ended: at the place whose own state is not finite."""
        accepted = 0
        for place in range(18, 30, 3):
            model = tiny_model("gpt2", precision="int8", window=64)
            broken = model.weights.position_embedding.clone()
            broken[place] = value
            model = replace(model, weights=replace(model.weights, position_embedding=broken))
            results, counts = await compared(model, looping(), looping(max_tokens=3))
            assert [result.stop_reason for result in results] == ["error", "budget"]
            assert len(results[0].token_ids) == place + 1 - len(LOOP)
            accepted += counts.accepted
        assert accepted > 2

    async def test_a_token_that_is_no_text(self, tiny: LanguageModel):
        (whole,), _ = await run(tiny, [looping()], 0)

        class Failing(type(tiny.tokenizer)):
            token_bytes: Callable[[object, int], bytes]

            def token_bytes(self, token_id: int) -> bytes:
                self.told = getattr(self, "told", 0) + 1
                if self.told > 25:
                    raise LookupError("no such token")
                return super().token_bytes(token_id)

        tokens = []
        for drafts in (0, 5):
            (result,), _ = await run(replace(tiny, tokenizer=Failing()), [looping()], drafts)
            assert result.stop_reason == "error"
            tokens.append(result.token_ids)
        assert tokens[0] == tokens[1] == whole.token_ids[: len(tokens[0])]


async def test_a_backend_that_is_not_exact_drafts_nothing():
    """Its products round differently for more tokens."""
    _, counts = await run(tiny_model("llama", window=128), [looping()], 5)
    assert (counts.accepted, counts.rejected) == (0, 0)


async def test_no_row_drafts_beside_a_prompt(tiny: LanguageModel):
    """A step with a prompt in it is long enough."""
    async with Scheduler(tiny, rows=2, step_tokens=16) as scheduler:
        first = await scheduler.submit(looping())
        async for chunk in first:
            if chunk.first_token == 0:
                second = await scheduler.submit(looping(prompt_ids=(9,) * 100, max_tokens=1))
        results = await asyncio.gather(first.result(), second.result())
    chunks = len(results[1].choices[0].steps)
    assert chunks >= 7
    steps = results[0].choices[0].steps
    assert sum(step.input_length == 1 for step in steps) >= chunks - 1


@pytest.mark.parametrize("drafts", [-1, TILE_TOKENS])
def test_the_setting_has_bounds(tiny: LanguageModel, drafts: int):
    with pytest.raises(InvalidRequest, match="draft_tokens"):
        Scheduler(tiny, draft_tokens=drafts)
