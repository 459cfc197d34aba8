"""Sampling against a slow twin: a full sort, and exact fractions wherever the engine sums."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.model.distribution import distribution, draw, exponential
from drumline.model.errors import EngineFailed
from drumline.model.random_state import DRAW_BITS, RandomState
from drumline.model.sampling import choose
from drumline.model.sampling_params import SamplingParams


def twin_distribution(scores: np.ndarray, params: SamplingParams) -> dict[int, int]:
    ids = [i for i, score in enumerate(scores) if score > -math.inf]
    highest = max(scores[i] for i in ids)
    scaled = {i: (scores[i] - highest) / params.temperature for i in ids}
    exponentials = dict(zip(ids, exponential(np.array([scaled[i] for i in ids])).tolist(), strict=True))
    weight = {i: int(np.rint(exponentials[i] * 2**37)) for i in ids}
    order = sorted(ids, key=lambda i: (-scores[i], i))
    if params.top_k:
        order = order[: params.top_k]
    order = [i for i in order if weight[i] > 0 and weight[i] >= Fraction(params.min_p) * weight[order[0]]]
    total, before, kept = sum(weight[i] for i in order), 0, []
    for i in order:
        if params.top_p == 1.0 or Fraction(before, total) <= Fraction(params.top_p):
            kept.append(i)
        before += weight[i]
    return {i: weight[i] for i in sorted(kept)}


def twin_draw(weights: dict[int, int], random: RandomState) -> int:
    u, running = Fraction(random.draw(), 2**DRAW_BITS), 0
    for token_id, weight in weights.items():
        running += weight
        if running > u * sum(weights.values()):
            return token_id
    raise AssertionError("u is below 1")


def twin_choose(
    logits: list[float],
    params: SamplingParams,
    ids: list[int],
    prompt_length: int,
    random: RandomState,
    blocked: tuple[int, ...],
) -> int:
    scores = list(logits)
    for token_id in set(ids) - set(params.exempt_ids):
        score = scores[token_id]
        scores[token_id] = score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
    for token_id, count in Counter(ids[prompt_length:]).items():
        scores[token_id] -= params.presence_penalty + params.frequency_penalty * count
    for token_id, bias in params.logit_bias.items():
        scores[token_id] += bias
    allowed = set(range(len(scores))) if params.allowed_ids is None else set(params.allowed_ids)
    allowed -= {*params.banned_ids, *blocked}
    if not allowed:
        raise EngineFailed("every token is masked")
    scores = [score if i in allowed else -math.inf for i, score in enumerate(scores)]
    if params.greedy:
        return scores.index(max(scores))
    return twin_draw(twin_distribution(np.array(scores), params), random)


# Quarters make ties; free floats make everything else.
logit = st.one_of(
    st.integers(-12, 12).map(lambda quarters: quarters / 4), st.floats(-30, 30, width=32, allow_subnormal=False)
)
temperature = st.sampled_from([2e-4, 0.1, 0.5, 0.8, 1.0, 1.7, 10.0])
top_k = st.sampled_from([0, 0, 1, 2, 3, 10, 100])
top_p = st.one_of(st.just(1.0), st.sampled_from([1e-9, 0.25, 0.5, 0.75, 0.9]), st.floats(0.01, 1.0))
min_p = st.one_of(st.just(0.0), st.sampled_from([0.1, 0.5, 1.0]), st.floats(0.0, 1.0))


@settings(deadline=None, max_examples=300)
@given(
    logits=st.lists(logit, min_size=1, max_size=40),
    params=st.builds(SamplingParams, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p),
    seed=st.integers(0, 2**64 - 1),
)
def test_distribution_equals_the_full_sort(logits: list[float], params: SamplingParams, seed: int):
    scores = np.array(logits, dtype=np.float64)
    kept, weights = distribution(scores, params)
    expected = twin_distribution(scores, params)
    assert dict(zip(kept.tolist(), weights.tolist(), strict=True)) == expected
    assert draw(kept, weights, RandomState(seed)) == twin_draw(expected, RandomState(seed))


@st.composite
def rows(draw: st.DrawFn) -> dict:
    size = draw(st.integers(2, 12))
    token_ids = st.integers(0, size - 1)
    banned = draw(st.frozensets(token_ids, max_size=3))
    allowed = draw(st.one_of(st.none(), st.frozensets(token_ids, min_size=1).map(lambda ids: ids - banned)))
    params = SamplingParams(
        temperature=draw(st.one_of(st.just(0.0), temperature)),
        top_k=draw(top_k),
        top_p=draw(top_p),
        min_p=draw(min_p),
        repetition_penalty=draw(st.sampled_from([1.0, 1.2, 0.8, 3.0])),
        exempt_ids=tuple(draw(st.frozensets(token_ids, max_size=2))),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.3, -0.2])),
        logit_bias=draw(st.dictionaries(token_ids, st.floats(-5, 5), max_size=3)),
        banned_ids=tuple(banned),
        allowed_ids=tuple(allowed) if allowed else None,
    )
    ids = draw(st.lists(token_ids, max_size=12))
    return {
        "logits": draw(st.lists(logit, min_size=size, max_size=size)),
        "params": params,
        "ids": ids,
        "prompt_length": draw(st.integers(0, len(ids))),
        "random": RandomState(draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 3)), draw(st.integers(0, 99))),
        "blocked": tuple(draw(st.frozensets(token_ids, max_size=2))),
    }


@settings(deadline=None, max_examples=150)
@given(row=rows())
def test_choice_equals_the_slow_twins(row: dict):
    def outcome(chooser, logits) -> int | str:
        try:
            return chooser(logits, **{name: value for name, value in row.items() if name != "logits"})
        except EngineFailed as error:
            return str(error)

    assert outcome(choose, np.array(row["logits"], dtype=np.float32)) == outcome(
        twin_choose, np.array(row["logits"], dtype=np.float32).astype(np.float64).tolist()
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [0.5, 0.3, 0.2]),
        ({"temperature": 2.0}, [0.4154, 0.3218, 0.2628]),
        ({"top_k": 2}, [0.625, 0.375, 0.0]),
        ({"top_p": 0.6}, [0.625, 0.375, 0.0]),
    ],
)
def test_frequencies_of_many_draws(fields: dict, expected: list[float]):
    params, count = SamplingParams(**{"temperature": 1.0, **fields}), 6_000
    drawn = Counter(choose(np.log([0.5, 0.3, 0.2]), params, [], 0, RandomState(5, 0, index)) for index in range(count))
    possible = [token_id for token_id, p in enumerate(expected) if p]
    assert set(drawn) == set(possible)
    chi_square = sum((drawn[i] - count * expected[i]) ** 2 / (count * expected[i]) for i in possible)
    assert chi_square < 13.8  # 0.1 % point for two degrees of freedom
