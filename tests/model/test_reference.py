from dataclasses import replace

import pytest
import torch

from drumline.model.errors import EngineFailed, InvalidRequest
from drumline.model.language_model import LanguageModel
from drumline.model.random_state import RandomState
from drumline.model.reference import (
    Cache,
    StepRecord,
    compare,
    forward,
    generate_cached,
    generate_uncached,
    stream_cached,
    uncached_logits,
    uncached_positions,
    uncached_steps,
)
from drumline.model.sampling import choose
from drumline.model.sampling_params import SamplingParams
from drumline.model.transformer_lm import CourseConfig, TransformerLM, to_language_model
from drumline.model.word_tokenizer import WordTokenizer
from tests.oracle import assert_matches_reference
from tests.tiny import FAMILIES, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = 12
WORDS = "the sun warms a small stone by the river and an old frog sleeps on it"
GENERATORS = pytest.mark.parametrize("generate", [generate_cached, generate_uncached])


def course_model(window: int = WINDOW, seed: int = 3) -> LanguageModel:
    vocabulary = WordTokenizer.from_text(WORDS)
    torch.manual_seed(seed)
    model = TransformerLM(CourseConfig(vocabulary.vocab_size, width=16, layers=2, heads=2, block_size=window))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(20)  # random weights as they start are nearly undecided
    return to_language_model(model, vocabulary)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return course_model()


def prompt(model: LanguageModel, length: int) -> list[int]:
    words = (WORDS.split() * 3)[: length - 1]
    return [model.tokenizer.bos_id, *model.tokenizer.encode(" ".join(words))]


def forced(model: LanguageModel, *ids: int) -> SamplingParams:
    """Greedy among `ids` alone."""
    return SamplingParams(allowed_ids=ids)


def cached_records(prompt_tokens: int, generated: int, window: int = WINDOW) -> tuple[StepRecord, ...]:
    """First the whole prompt, then one token at a time, then whole windows."""
    first = min(prompt_tokens, window)
    records = [StepRecord(first, 0, first)]
    records += [StepRecord(1, held, held + 1) for held in range(first, window)]
    records += [StepRecord(window, 0, window)] * generated
    return tuple(records[:generated])


def test_a_cache_changes_no_logits(model):
    ids = prompt(model, WINDOW)
    whole = uncached_logits(model, ids)
    assert whole.shape == (WINDOW, model.config.vocab_size)
    assert whole.dtype == torch.float32
    for first in range(1, WINDOW):
        cache = Cache()
        parts = [forward(model, ids[:first], cache)]
        parts += [forward(model, [token_id], cache) for token_id in ids[first:]]
        torch.testing.assert_close(torch.cat(parts), whole, atol=1e-4, rtol=0)
        assert cache.length == WINDOW


def test_keys_and_values_are_rounded_to_the_pools_dtype(model):
    ids = prompt(model, WINDOW)
    rounded = replace(model, kv_dtype=torch.bfloat16)
    cache = Cache()
    logits = torch.cat([forward(rounded, [token_id], cache) for token_id in ids])
    assert cache.layers[0][0].dtype == torch.bfloat16
    torch.testing.assert_close(logits, uncached_logits(rounded, ids), atol=1e-2, rtol=0)
    assert float((uncached_logits(rounded, ids) - uncached_logits(model, ids)).abs().max()) > 1e-4


def test_what_does_not_fit_the_window_is_refused(model):
    with pytest.raises(ValueError, match="13 ids at position 0"):
        uncached_logits(model, [1] * 13)
    with pytest.raises(ValueError, match="0 ids"):
        uncached_logits(model, [])


@pytest.mark.parametrize("overflow", ["stop", "slide"])
@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens"),
    [(1, 1), (1, 5), (5, 1), (5, 7), (5, 8), (5, 9), (5, 30), (WINDOW - 1, 2), (WINDOW, 1), (WINDOW, 2), (WINDOW, 15)],
)
def test_both_generators_agree(model, prompt_tokens, max_tokens, overflow):
    ids = prompt(model, prompt_tokens)
    options = {"max_tokens": max_tokens, "ignore_eos": True, "overflow": overflow}
    cached, uncached = generate_cached(model, ids, **options), generate_uncached(model, ids, **options)
    room = WINDOW - prompt_tokens + 1
    generated = max_tokens if overflow == "slide" else min(max_tokens, room)
    recomputes = max(0, generated - room)
    for result in (cached, uncached):
        assert result.token_ids == cached.token_ids
        assert len(result.token_ids) == len(result.steps) == generated
        assert result.stop_reason == ("budget" if generated == max_tokens else "window")
        assert result.prompt_tokens == prompt_tokens
        assert result.window_recomputes == recomputes
        assert result.window_filled_step == (room - 1 if generated >= room else None)
        assert result.uncached_positions == uncached.evaluated_positions
        assert result.evaluated_positions == sum(step.input_length for step in result.steps)
        assert result.prefill_s > 0
    assert cached.steps == cached_records(prompt_tokens, generated)
    lengths = [min(prompt_tokens + step, WINDOW) for step in range(generated)]
    assert uncached.steps == tuple(StepRecord(length, 0, 0) for length in lengths)
    assert compare(model, ids, cached.token_ids) <= 1e-4
    assert_matches_reference(model, ids, cached.token_ids, ignore_eos=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_generators_agree_in_every_family(family):
    model, ids = tiny_model(family, window=16), [5, 70, 7, 90, 33]
    options = {"max_tokens": 20, "ignore_eos": True, "overflow": "slide"}
    cached, uncached = generate_cached(model, ids, **options), generate_uncached(model, ids, **options)
    assert cached.token_ids == uncached.token_ids
    assert cached.window_recomputes == uncached.window_recomputes == 20 - 12
    assert compare(model, ids, cached.token_ids) <= 1e-4


@GENERATORS
def test_an_empty_prompt_is_bos(model, generate):
    result = generate(model, [], max_tokens=4, ignore_eos=True)
    assert result.prompt_tokens == 1
    assert result.token_ids == generate(model, [model.tokenizer.bos_id], max_tokens=4, ignore_eos=True).token_ids


@GENERATORS
def test_a_zero_budget_computes_nothing(model, generate):
    result = generate(model, prompt(model, 3), max_tokens=0)
    assert (result.token_ids, result.stop_reason, result.steps) == ((), "budget", ())
    assert (result.evaluated_positions, result.uncached_positions, result.window_filled_step) == (0, 0, None)


@GENERATORS
def test_eos_ends_a_row_and_is_never_fed(model, generate):
    eos = model.tokenizer.eos_ids[0]
    sampled = (
        generate(model, prompt(model, 3), max_tokens=9, sampling=SamplingParams(temperature=9.0, seed=seed))
        for seed in range(200)
    )
    result = next(result for result in sampled if result.stop_reason == "eos" and len(result.token_ids) > 2)
    assert result.token_ids[-1] == eos
    assert eos not in result.token_ids[:-1]
    assert len(result.steps) == len(result.token_ids)
    fed = 3 + len(result.token_ids) - 1
    last = result.steps[-1]
    assert (last.cache_after or last.input_length) == fed


@GENERATORS
def test_an_eos_that_spends_the_budget_or_the_window_is_eos(model, generate):
    sampling = forced(model, model.tokenizer.eos_ids[0])
    assert generate(model, prompt(model, 3), max_tokens=1, sampling=sampling).stop_reason == "eos"
    full = generate(model, prompt(model, WINDOW), max_tokens=5, sampling=sampling, overflow="stop")
    assert (full.stop_reason, len(full.token_ids)) == ("eos", 1)


@GENERATORS
def test_with_eos_off_a_last_eos_is_budget(model, generate):
    eos = model.tokenizer.eos_ids[0]
    result = generate(model, prompt(model, 3), max_tokens=4, sampling=forced(model, eos), ignore_eos=True)
    assert (result.token_ids, result.stop_reason) == ((eos,) * 4, "budget")


@GENERATORS
def test_stop_ids(model, generate):
    free = generate(model, prompt(model, 3), max_tokens=6, ignore_eos=True)
    stop = free.token_ids[2]
    length = free.token_ids.index(stop) + 1
    result = generate(model, prompt(model, 3), max_tokens=6, ignore_eos=True, stop_ids=(stop,))
    assert (result.token_ids, result.stop_reason) == (free.token_ids[:length], "stop")


@GENERATORS
def test_min_tokens_holds_eos_back(model, generate):
    eos, other = model.tokenizer.eos_ids[0], model.tokenizer.encode("frog")[0]
    sampling = SamplingParams(allowed_ids=(eos, other), logit_bias={eos: 1e6})
    result = generate(model, prompt(model, 3), max_tokens=9, sampling=sampling, min_tokens=3)
    assert (result.token_ids, result.stop_reason) == ((other, other, other, eos), "eos")
    with pytest.raises(EngineFailed, match="masked"):
        generate(model, prompt(model, 3), max_tokens=9, sampling=forced(model, eos), min_tokens=3)


@GENERATORS
def test_the_courses_habit_is_to_slide(model, generate):
    ids = prompt(model, WINDOW + 5)
    result = generate(model, ids, max_tokens=3, ignore_eos=True)
    assert (result.stop_reason, result.window_recomputes, result.window_filled_step) == ("budget", 2, 0)
    assert [step.input_length for step in result.steps] == [WINDOW] * 3
    assert result.token_ids == generate(model, ids[-WINDOW:], max_tokens=3, ignore_eos=True).token_ids
    with pytest.raises(InvalidRequest, match="17 tokens are above the window of 12"):
        generate(model, ids, max_tokens=3, overflow="stop")
    assert (
        generate(replace(model, slides=False), prompt(model, WINDOW), max_tokens=3, ignore_eos=True).stop_reason
        == "window"
    )


@GENERATORS
def test_penalties_see_the_ids_that_slid_away(model, generate):
    ids = model.tokenizer.encode("the") * WINDOW
    logits = uncached_logits(model, ids, last=1)[0].numpy()
    gone, other = [token_id for token_id in logits.argsort()[::-1] if token_id not in ids][:2]
    assert logits[other] > 0
    sampling = SamplingParams(allowed_ids=(int(gone), int(other)), repetition_penalty=1e6)
    expected = choose(logits, sampling, [gone, *ids], WINDOW + 1, RandomState(0))
    assert expected == other != choose(logits, sampling, ids, WINDOW, RandomState(0))
    assert generate(model, [gone, *ids], max_tokens=1, sampling=sampling, ignore_eos=True).token_ids == (expected,)


@GENERATORS
def test_a_seed_names_the_draws(model, generate):
    def run(seed: int | None):
        sampling = SamplingParams(temperature=5.0, seed=seed)
        return generate(model, prompt(model, 3), max_tokens=20, sampling=sampling, ignore_eos=True)

    assert run(7).token_ids == run(7).token_ids
    assert run(7).token_ids != run(8).token_ids
    drawn = run(None)
    assert run(drawn.seed).token_ids == drawn.token_ids
    assert_matches_reference(
        model,
        prompt(model, 3),
        drawn.token_ids,
        sampling=SamplingParams(temperature=5.0, seed=drawn.seed),
        ignore_eos=True,
    )


@pytest.mark.parametrize(
    ("ids", "options", "field"),
    [
        ([1, 10_000], {"max_tokens": 1}, "prompt_ids"),
        ([-1], {"max_tokens": 1}, "prompt_ids"),
        ([1], {"max_tokens": -1}, "max_tokens"),
        ([1], {"max_tokens": 1, "min_tokens": 2}, "max_tokens"),
        ([1], {"max_tokens": 1, "stop_ids": (10_000,)}, "stop_ids"),
        ([1], {"max_tokens": 1, "overflow": "wrap"}, "overflow"),
        ([1], {"max_tokens": 1, "sampling": SamplingParams(banned_ids=(10_000,))}, "sampling.banned_ids"),
    ],
)
def test_bad_input_names_its_field(model, ids, options, field):
    for generate in (generate_cached, generate_uncached, stream_cached):
        with pytest.raises(InvalidRequest) as refusal:
            generate(model, ids, **options)
        assert refusal.value.field == field


def test_an_empty_prompt_without_bos_is_refused(model):
    class NoBos(WordTokenizer):
        bos_id = None

    words = NoBos.from_text(WORDS)
    with pytest.raises(InvalidRequest, match="no BOS"):
        generate_cached(replace(model, tokenizer=words), [], max_tokens=1)


def test_evaluated_positions_of_the_documents_example():
    assert uncached_positions(11, 500, window=1024) == 130_250
    model = course_model(window=512)
    options = {"max_tokens": 500, "ignore_eos": True}
    cached = generate_cached(model, prompt(model, 11), **options)
    assert (cached.evaluated_positions, cached.uncached_positions) == (510, 130_250)
    uncached = generate_uncached(model, prompt(model, 11), **options)
    assert (uncached.evaluated_positions, uncached.uncached_positions) == (130_250, 130_250)


def test_the_oracle_finds_a_wrong_id_and_wrong_logits(model):
    ids = prompt(model, 4)
    generated = generate_cached(model, ids, max_tokens=14, ignore_eos=True).token_ids
    logits = list(uncached_steps(model, ids, generated))
    ties = assert_matches_reference(model, ids, generated, logits, ignore_eos=True)
    assert (ties.steps, ties.count, ties.largest_difference) == (14, 0, 0.0)
    second = int(logits[2].topk(2).indices[1])
    with pytest.raises(AssertionError, match=f"step 2: id {second}"):
        assert_matches_reference(model, ids, (*generated[:2], second))
    logits[12] = logits[12] + 2e-4
    with pytest.raises(AssertionError, match=r"step 12: logits differ by 0\.0002"):
        assert_matches_reference(model, ids, generated, logits)


def test_the_oracle_counts_ties(model, capsys):
    ids = prompt(model, 4)
    logits = uncached_logits(model, ids, last=1)[0]
    best, second = logits.topk(2).indices.tolist()
    gap = float(logits[best] - logits[second])
    ties = assert_matches_reference(model, ids, [second], bound=gap)
    assert ties.differing == [0]
    assert "1 of 1 ids differ" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="step 0"):
        assert_matches_reference(model, ids, [second], bound=gap / 4)
