import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.model.errors import EngineFailed, InvalidRequest
from drumline.model.random_state import DRAW_BITS, RandomState
from drumline.model.sampling import WEIGHT_BITS, choose, distribution, draw, log_probabilities, penalised
from drumline.model.sampling_params import SamplingParams

FIVE_THREE_TWO = np.log([0.5, 0.3, 0.2])
RANDOM = RandomState(seed=0)


def probabilities(scores: Sequence[float], **fields: object) -> dict[int, float]:
    kept, weights = distribution(np.asarray(scores, dtype=np.float64), SamplingParams(temperature=1.0) if not fields
                                 else SamplingParams(**{"temperature": 1.0, **fields}))
    return {int(i): float(w) / float(weights.sum()) for i, w in zip(kept, weights, strict=True)}


def choose_simply(logits: Sequence[float], ids: Sequence[int] = (), prompt_length: int = 0, **fields: object) -> int:
    return choose(np.asarray(logits, dtype=np.float32), SamplingParams(**fields), list(ids), prompt_length, RANDOM)


class Look:
    """A processor that notes the scores it is given, and may put others in their place."""

    def __init__(self, instead: Sequence[float] | None = None) -> None:
        self.seen: list[float] = []
        self.ids: list[int] = []
        self.instead = instead

    def __call__(self, ids, scores):
        self.seen, self.ids = scores.tolist(), list(ids)
        return scores if self.instead is None else np.array(self.instead)


class TestWorkedValues:
    def test_top_k(self):
        assert probabilities(FIVE_THREE_TWO, top_k=2) == {0: pytest.approx(0.625), 1: pytest.approx(0.375)}

    def test_temperature_flattens_and_sharpens(self):
        flat = [math.sqrt(p) for p in (0.5, 0.3, 0.2)]
        sharp = [p * p for p in (0.5, 0.3, 0.2)]
        assert list(probabilities(FIVE_THREE_TWO, temperature=2.0).values()) == pytest.approx(
            [value / sum(flat) for value in flat]
        )
        assert list(probabilities(FIVE_THREE_TWO, temperature=0.5).values()) == pytest.approx(
            [value / sum(sharp) for value in sharp]
        )
        assert list(probabilities(FIVE_THREE_TWO, temperature=2.0).values()) == pytest.approx(
            [0.4154, 0.3218, 0.2628], abs=1e-4
        )
        assert list(probabilities(FIVE_THREE_TWO, temperature=0.5).values()) == pytest.approx(
            [0.6579, 0.2368, 0.1053], abs=1e-4
        )

    def test_top_p_keeps_the_boundary_token(self):
        kept = probabilities(np.log([0.60, 0.25, 0.10, 0.05]), top_p=0.8)
        assert kept == {0: pytest.approx(0.60 / 0.85), 1: pytest.approx(0.25 / 0.85)}

    def test_repetition_penalty_divides_and_multiplies(self):
        params = SamplingParams(repetition_penalty=1.2)
        scores = penalised(np.array([4.0, -2.0, 1.0]), params, [0, 1], prompt_length=1)
        assert scores == pytest.approx([4.0 / 1.2, -2.4, 1.0])
        assert scores[0] == pytest.approx(3.33, abs=0.01)


class TestPenalties:
    def test_repetition_counts_an_id_once_and_spares_exempt_ids(self):
        params = SamplingParams(repetition_penalty=2.0, exempt_ids=(2,))
        scores = penalised(np.array([4.0, -2.0, 6.0, 5.0]), params, [0, 0, 1, 2, 0], prompt_length=2)
        assert scores.tolist() == [2.0, -4.0, 6.0, 5.0]

    def test_presence_and_frequency_see_generated_ids_only(self):
        params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
        scores = penalised(np.array([1.0, 1.0, 1.0, 1.0]), params, [0, 0, 1, 2, 2], prompt_length=2)
        assert scores.tolist() == [1.0, 0.25, 0.0, 1.0]

    def test_logit_bias(self):
        scores = penalised(np.array([1.0, 1.0]), SamplingParams(logit_bias={1: -3.0}), [], 0)
        assert scores.tolist() == [1.0, -2.0]

    def test_raw_logits_stay_as_they_are(self):
        logits = np.array([1.0, 2.0, 3.0], dtype=np.float32)
        params = SamplingParams(
            repetition_penalty=2.0, presence_penalty=1.0, logit_bias={0: 5.0}, banned_ids=(1,), temperature=1.0
        )
        choose(logits, params, [0, 1, 2], 1, RANDOM, blocked=(2,))
        assert logits.tolist() == [1.0, 2.0, 3.0]


class TestOrder:
    def test_processors_come_after_penalties_and_bias(self):
        look = Look()
        params = SamplingParams(
            repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={0: 10.0}, banned_ids=(3,)
        )
        logits = np.array([4.0, -2.0, 1.0, 9.0], dtype=np.float32)
        chosen = choose(logits, params, [1, 0, 0], 1, RANDOM, processors=[look])
        assert look.ids == [1, 0, 0]
        assert look.seen == [4.0 / 2 - 1.0 + 10.0, -4.0, 1.0, 9.0]  # the ban comes later
        assert chosen == 0

    def test_penalising_after_the_bias_would_choose_another(self):
        # (-1 + 3) / 2 = 1 would lose against 1.5; (-1 · 2) + 3.6 = 1.6 wins.
        assert choose_simply([-1.0, 1.5], [0], 1, repetition_penalty=2.0, logit_bias={0: 3.6}) == 0

    def test_processors_run_one_after_the_other(self):
        first, second = Look([0.0, 1.0, 2.0]), Look()
        choose(np.zeros(3), SamplingParams(), [], 0, RANDOM, processors=[first, second])
        assert second.seen == [0.0, 1.0, 2.0]

    def test_masks_come_after_processors(self):
        params = SamplingParams(banned_ids=(2,), allowed_ids=(0, 1, 3))
        look = Look([0.0, 1.0, 50.0, 40.0])
        assert choose(np.zeros(4), params, [], 0, RANDOM, blocked=(3,), processors=[look]) == 1

    def test_temperature_comes_before_the_filters(self):
        # At temperature 4 the head is flat enough for the second token; unscaled, it holds 0.88 > 0.7 alone.
        assert set(probabilities([2.0, 0.0], top_p=0.7)) == {0}
        assert set(probabilities([2.0, 0.0], top_p=0.7, temperature=4.0)) == {0, 1}

    def test_top_k_comes_before_top_p(self):
        # Of the first two the first alone holds 0.625 > 0.6; of all three it holds only 0.5.
        assert set(probabilities(FIVE_THREE_TWO, top_k=2, top_p=0.6)) == {0}
        assert set(probabilities(FIVE_THREE_TWO, top_p=0.6)) == {0, 1}

    def test_min_p_comes_before_top_p(self):
        # Without the last token the first two hold all mass: .625 and .375.
        assert set(probabilities(FIVE_THREE_TWO, min_p=0.5, top_p=0.6)) == {0}


class TestTies:
    def test_greedy_takes_the_smallest_id(self):
        assert choose_simply([1.0, 3.0, 3.0, 3.0]) == 1

    def test_top_k_keeps_the_smaller_ids(self):
        assert set(probabilities([1.0, 2.0, 1.0, 2.0, 1.0], top_k=3)) == {0, 1, 3}

    def test_top_p_keeps_the_smaller_ids(self):
        assert set(probabilities([0.0, 0.0, 0.0, 0.0], top_p=0.3)) == {0, 1}

    def test_mass_before_equal_to_p_stays(self):
        assert set(probabilities([0.0, 0.0, 0.0, 0.0], top_p=0.5)) == {0, 1, 2}


class TestGreedy:
    @pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-4])
    def test_small_temperatures_do_not_divide(self, temperature: float):
        seeds = {
            choose(np.array([1.0, 1.00001]), SamplingParams(temperature=temperature), [], 0, RandomState(seed))
            for seed in range(20)
        }
        assert seeds == {1}

    def test_just_above_is_a_draw(self):
        seeds = {
            choose(np.array([1.0, 1.00001]), SamplingParams(temperature=2e-4), [], 0, RandomState(seed))
            for seed in range(20)
        }
        assert seeds == {0, 1}

    def test_filters_do_not_change_it(self):
        assert choose_simply([0.0, 5.0, 4.0], top_k=1, top_p=0.01, min_p=1.0) == 1


class TestFilters:
    def test_the_first_token_is_never_removed(self):
        assert set(probabilities([0.0, 9.0, 1.0], top_p=1e-9)) == {1}
        assert set(probabilities([0.0, 9.0, 1.0], min_p=1.0)) == {1}
        assert set(probabilities([0.0, 9.0, 1.0], top_k=1)) == {1}

    def test_top_k_larger_than_what_is_left_keeps_all(self):
        assert set(probabilities([1.0, -math.inf, 2.0], top_k=40)) == {0, 2}

    def test_min_p_is_relative_to_the_likeliest(self):
        assert set(probabilities(FIVE_THREE_TWO, min_p=0.5)) == {0, 1}
        assert set(probabilities(FIVE_THREE_TWO, min_p=0.7)) == {0}

    def test_weights_are_whole_and_the_likeliest_weighs_two_to_the_37(self):
        kept, weights = distribution(np.array([3.0, 7.0, -90.0]), SamplingParams(temperature=1.0))
        assert kept.tolist() == [0, 1]
        assert weights.tolist() == [round(2**37 * math.exp(-4.0)), 2**WEIGHT_BITS]

    def test_far_below_the_maximum_is_no_overflow(self):
        kept, _ = distribution(np.array([-1e308, 1e308, 0.0]), SamplingParams(temperature=2e-4, top_p=0.5))
        assert kept.tolist() == [1]


class TestTrouble:
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_logits_that_are_not_finite(self, bad: float, temperature: float):
        with pytest.raises(EngineFailed, match="not finite"):
            choose_simply([0.0, bad, 1.0], temperature=temperature)

    def test_all_masked(self):
        with pytest.raises(EngineFailed, match="every token is masked"):
            choose_simply([1.0, 2.0], banned_ids=(0, 1))
        with pytest.raises(EngineFailed, match="every token is masked"):
            choose(np.zeros(2), SamplingParams(allowed_ids=(1,), temperature=1.0), [], 0, RANDOM, blocked=(1,))

    def test_blocked_ids_are_not_chosen(self):
        logits = np.array([1.0, 5.0, 3.0])
        assert choose(logits, SamplingParams(), [], 0, RANDOM, blocked=(1,)) == 2
        assert choose(logits, SamplingParams(), [], 0, RANDOM) == 1

    @pytest.mark.parametrize(
        "fields",
        [
            {"repetition_penalty": 1e-308},
            {"logit_bias": {0: 1.7e308, 1: 1.0}, "presence_penalty": -1.7e308},
            {"frequency_penalty": -1.7e308},
        ],
    )
    def test_penalties_beyond_the_range_of_numbers(self, fields: dict):
        with pytest.raises(EngineFailed, match="beyond the range"):
            choose_simply([3e3, 1.0], [0, 0, 0], 1, **fields)

    @pytest.mark.parametrize(
        "broken",
        [
            lambda ids, scores: scores[:1],
            lambda ids, scores: np.full_like(scores, np.nan),
            lambda ids, scores: scores + np.inf,
            lambda ids, scores: "nothing",
            lambda ids, scores: 1 / 0,
            lambda ids, scores: None,
        ],
        ids=["shape", "nan", "inf", "text", "raises", "none"],
    )
    def test_processor_that_misbehaves(self, broken):
        with pytest.raises(EngineFailed, match="logits processor"):
            choose(np.zeros(3), SamplingParams(), [], 0, RANDOM, processors=[broken])

    def test_processor_may_mask(self):
        masks_first = Look([-math.inf, 0.0, -1.0])
        assert choose(np.array([9.0, 0.0, 0.0]), SamplingParams(), [], 0, RANDOM, processors=[masks_first]) == 1


class TestParams:
    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({"temperature": math.nan}, "temperature"),
            ({"temperature": math.inf}, "temperature"),
            ({"temperature": -0.1}, "temperature"),
            ({"temperature": "1"}, "temperature"),
            ({"top_k": -1}, "top_k"),
            ({"top_k": 1.5}, "top_k"),
            ({"top_p": 0.0}, "top_p"),
            ({"top_p": 1.01}, "top_p"),
            ({"top_p": math.nan}, "top_p"),
            ({"min_p": -0.1}, "min_p"),
            ({"min_p": 1.1}, "min_p"),
            ({"repetition_penalty": 0.0}, "repetition_penalty"),
            ({"presence_penalty": math.nan}, "presence_penalty"),
            ({"frequency_penalty": math.inf}, "frequency_penalty"),
            ({"logit_bias": {3: math.nan}}, "logit_bias.3"),
            ({"logit_bias": {"x": 1.0}}, "logit_bias.x"),
            ({"banned_ids": ["1"]}, "banned_ids.0"),
            ({"allowed_ids": ()}, "allowed_ids"),
            ({"allowed_ids": (1, 2), "banned_ids": (2,)}, "allowed_ids"),
            ({"seed": -1}, "seed"),
            ({"seed": 2**64}, "seed"),
            ({"seed": True}, "seed"),
            ({"heat": 1.0}, "heat"),
            ({"self": 1.0}, "self"),
        ],
    )
    def test_bad_field_is_named(self, fields: dict, field: str):
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**fields)
        assert caught.value.field.removesuffix(".[key]") == field
        assert caught.value.limit

    def test_limits_are_legal(self):
        SamplingParams(temperature=0, top_k=0, top_p=1.0, min_p=1.0, seed=2**64 - 1)
        SamplingParams(top_p=1e-12, seed=0)

    @pytest.mark.parametrize("name", ["exempt_ids", "banned_ids", "allowed_ids"])
    @pytest.mark.parametrize("token_id", [-1, 10])
    def test_id_beyond_the_vocabulary(self, name: str, token_id: int):
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{name: (3, token_id)}).check_vocabulary(10)
        assert caught.value.field == f"sampling.{name}"
        assert f"{token_id} is outside 0 … 9" in caught.value.limit

    def test_bias_beyond_the_vocabulary(self):
        with pytest.raises(InvalidRequest, match=r"sampling\.logit_bias: id 10"):
            SamplingParams(logit_bias={10: 1.0}).check_vocabulary(10)

    def test_bias_survives_json(self):
        params = SamplingParams.from_json('{"logit_bias": {"5": 1.5, "7": -2}, "banned_ids": [1, 2]}')
        assert params == SamplingParams(logit_bias={5: 1.5, 7: -2.0}, banned_ids=(1, 2))
        assert SamplingParams.from_json(params.model_dump_json()) == params


class TestLogProbabilities:
    def test_against_torch(self):
        logits = np.random.default_rng(1).normal(size=400).astype(np.float32) * 5
        expected = torch.from_numpy(logits).log_softmax(-1)
        for chosen in (0, 17, int(logits.argmax())):
            value, top = log_probabilities(logits, chosen, top=5)
            assert value == pytest.approx(float(expected[chosen]), abs=2e-6)
            best = expected.topk(5)
            assert [token_id for token_id, _ in top] == best.indices.tolist()
            assert [logprob for _, logprob in top] == pytest.approx(best.values.tolist(), abs=2e-6)

    def test_values_are_float32_and_ties_go_to_smaller_ids(self):
        value, top = log_probabilities(np.zeros(4, dtype=np.float32), 3, top=2)
        assert value == float(np.float32(-math.log(4)))
        assert [token_id for token_id, _ in top] == [0, 1]

    def test_nothing_beside_the_chosen(self):
        assert log_probabilities(np.array([0.0, 1.0], dtype=np.float32), 0, top=0)[1] == ()


# The slow twin: a full sort, and exact fractions wherever the engine sums.


def twin_distribution(scores: np.ndarray, params: SamplingParams) -> dict[int, int]:
    ids = [i for i, score in enumerate(scores) if score > -math.inf]
    highest = max(scores[i] for i in ids)
    scaled = {i: (scores[i] - highest) / params.temperature for i in ids}
    exponentials = dict(zip(ids, np.exp([scaled[i] for i in ids]).tolist(), strict=True))
    weight = {i: int(np.rint(exponentials[i] * 2**37)) for i in ids}
    order = sorted(ids, key=lambda i: (-scaled[i], i))
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


@settings(deadline=None, max_examples=300)
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
    drawn = Counter(choose(FIVE_THREE_TWO, params, [], 0, RandomState(5, 0, index)) for index in range(count))
    possible = [token_id for token_id, p in enumerate(expected) if p]
    assert set(drawn) == set(possible)
    chi_square = sum((drawn[i] - count * expected[i]) ** 2 / (count * expected[i]) for i in possible)
    assert chi_square < 13.8  # 0.1 % point for two degrees of freedom
