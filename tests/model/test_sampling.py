import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from drumline.model.distribution import WEIGHT_BITS, distribution, draw
from drumline.model.errors import EngineFailed, InvalidRequest
from drumline.model.penalties import penalised
from drumline.model.random_state import RandomState
from drumline.model.sampling import choose, log_probabilities
from drumline.model.sampling_params import SamplingParams

FIVE_THREE_TWO = np.log([0.5, 0.3, 0.2])
RANDOM = RandomState(seed=0)


def probabilities(scores: Sequence[float], **fields: object) -> dict[int, float]:
    params = SamplingParams(**{"temperature": 1.0, **fields})
    kept, weights = distribution(np.asarray(scores, dtype=np.float64), params)
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


class FixedDraw(RandomState):
    """`index` is the draw itself."""

    def draw(self) -> int:
        return self.index


class TestDraw:
    @pytest.mark.parametrize(
        ("index", "chosen"),
        [
            (0, 3),
            (2**52 - 1, 3),
            (2**52, 8),
            (2**52 + 1, 8),
            (2**52 + 2**51 - 1, 8),
            (2**52 + 2**51, 9),
            (2**53 - 1, 9),
        ],
    )
    def test_running_sum_must_exceed_u_times_the_total(self, index: int, chosen: int):
        kept, weights = np.array([3, 8, 9]), np.array([2, 1, 1]) * 2**37
        assert draw(kept, weights, FixedDraw(0, 0, index)) == chosen

    def test_total_that_is_no_power_of_two(self):
        kept, weights = np.array([0, 1]), np.array([1, 2])
        third = 2**53 // 3  # u · 3 is just below 1, and just above
        assert draw(kept, weights, FixedDraw(0, 0, third)) == 0
        assert draw(kept, weights, FixedDraw(0, 0, third + 1)) == 1


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
        assert SamplingParams(temperature=0, top_k=0, top_p=1.0, min_p=1.0, seed=2**64 - 1).seed == 2**64 - 1
        assert SamplingParams(top_p=1e-12, seed=0).top_p == 1e-12

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
