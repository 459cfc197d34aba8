"""The selecting kernel against the full sort: the same id for every row, whatever runs beside it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drumline.model.distribution import distribution, draw, exponential, least_weight
from drumline.model.errors import EngineFailed
from drumline.model.kernels.selection import SHORT
from drumline.model.kernels.whole_numbers import philox_draws
from drumline.model.penalties import masked, penalised, processed
from drumline.model.random_state import RandomState
from drumline.model.sampling import Choice, RowChoice, choose, choose_rows, log_probabilities
from drumline.model.sampling_params import SamplingParams

GREEDY = SamplingParams()


def judged(logits: np.ndarray, row: RowChoice) -> int | str:
    """The choice by a full sort, or the text of the row's error."""
    if not np.isfinite(logits).all():
        return "the model's logits are not finite"
    try:
        scores = penalised(logits, row.params, row.ids, row.prompt_length)
        scores = masked(processed(scores, row.ids, row.processors), row.params, row.blocked)
    except EngineFailed as error:
        return str(error)
    if scores.max() == -math.inf:
        return "every token is masked"
    if row.params.greedy:
        return int(scores.argmax())
    return draw(*distribution(scores, row.params), row.random)


def told(outcome: Choice | Exception) -> int | str:
    if isinstance(outcome, EngineFailed):
        return str(outcome)
    assert isinstance(outcome, Choice)
    return outcome.token_id


def simple(seed: int = 0, **fields: object) -> RowChoice:
    return RowChoice(SamplingParams(**fields), (), 0, RandomState(seed))


def lower_a_few(ids: Sequence[int], scores: np.ndarray) -> np.ndarray:
    scores[::3] -= 1.5
    scores[::5] = -math.inf
    return scores


SHAPES = ("normal", "peaked", "flat", "equal", "ties", "rising", "falling", "wide", "clustered", "zeros")


def make_logits(shape: str, vocab: int, seed: int) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(size=vocab)
    ramp = np.linspace(-9, 9, vocab)
    logits = {
        "normal": 4 * noise,
        "peaked": 2 * noise + 20 * (noise == noise.max()),
        "flat": 0.01 * noise,
        "equal": np.full(vocab, 3.25),
        "ties": np.rint(2 * noise) / 2,
        "rising": ramp,
        "falling": -ramp,
        "wide": np.sign(noise) * 10.0 ** (12 * noise).clip(-37, 37),
        "clustered": 5 + 1e-6 * np.rint(3 * noise) - 40 * (noise > 2),
        "zeros": np.where(noise > 0, 0.0, -0.0),
    }[shape]
    return logits.astype(np.float32)


VOCABULARIES = (1, 3, 17, 64, 65, 259, 1_000, 4_096, 5_003)
temperatures = st.sampled_from([0.0, 1e-4, 1.1e-4, 0.05, 0.7, 0.8, 1.0, 2.5, 100.0, 1e300])
top_ks = st.sampled_from([0, 0, 1, 2, 40, SHORT - 1, SHORT, SHORT + 1, 700, 10**6, 2**62])
top_ps = st.one_of(st.sampled_from([1.0, 1.0, 0.5, 0.9, 0.999, 1e-3, 1e-30, 5e-324]), st.floats(1e-6, 1.0))
min_ps = st.one_of(st.sampled_from([0.0, 0.0, 0.05, 1.0, 1e-12, 5e-324]), st.floats(0.0, 1.0))


@st.composite
def rows(draw: st.DrawFn, vocab: int) -> RowChoice:
    ids = st.integers(0, vocab - 1)
    params = SamplingParams(temperature=draw(temperatures), top_k=draw(top_ks), top_p=draw(top_ps), min_p=draw(min_ps))
    row = RowChoice(params, draw(st.lists(ids, max_size=30)), 0, RandomState(draw(st.integers(0, 2**64 - 1))))
    kind = draw(st.sampled_from(["plain", "plain", "changed", "masked", "replaced"]))
    if kind == "changed":
        fields = {
            "repetition_penalty": draw(st.sampled_from([1.0, 1.3, 0.5])),
            "presence_penalty": draw(st.sampled_from([0.0, 0.5, -2.0])),
            "frequency_penalty": draw(st.sampled_from([0.0, 0.25])),
            "logit_bias": draw(st.dictionaries(ids, st.sampled_from([-100.0, 0.1, 5.0, 1e30]), max_size=3)),
        }
        prompt = draw(st.integers(0, len(row.ids)))
        row = replace(row, params=params.model_copy(update=fields), prompt_length=prompt)
    if kind in ("changed", "masked"):
        row = replace(row, blocked=tuple(draw(st.lists(ids, max_size=6))))
    if kind == "replaced":
        row = replace(row, processors=draw(st.sampled_from([(lower_a_few,), (), (lower_a_few, lower_a_few)])))
        allowed = draw(st.one_of(st.none(), st.lists(ids, min_size=1, max_size=9).map(tuple)))
        row = replace(row, params=params.model_copy(update={"allowed_ids": allowed}))
    return row


@st.composite
def steps(draw: st.DrawFn) -> tuple[np.ndarray, list[RowChoice]]:
    vocab = draw(st.sampled_from(VOCABULARIES))
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5))
    logits = np.stack([make_logits(shape, vocab, draw(st.integers(0, 999))) for shape in shapes])
    for row in range(len(shapes)):
        if draw(st.integers(0, 15)) == 0:
            logits[row, draw(st.integers(0, vocab - 1))] = draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    return logits, [draw(rows(vocab)) for _ in shapes]


@pytest.fixture(params=[1, 2], ids=["one-thread", "two-threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
def test_every_row_is_chosen_as_the_judge_chooses_it():
    @settings(deadline=None, max_examples=150)
    @given(step=steps())
    def check(step: tuple[np.ndarray, list[RowChoice]]):
        logits, asked = step
        before = logits.copy()
        expected = [judged(line, row) for line, row in zip(logits, asked, strict=True)]
        assert [told(outcome) for outcome in choose_rows(logits, asked)] == expected
        assert logits.tobytes() == before.tobytes()

    check()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 0.9},
        {"top_p": 0.999, "min_p": 1e-4},
        {"top_k": 3_000},
        {"top_k": 3_000, "top_p": 0.7},
        {"top_k": SHORT, "top_p": 0.95},
        {"min_p": 0.3},
        {},
    ],
    ids=str,
)
def test_large_vocabularies(shape: str, fields: dict):
    for vocab, temperature in ((49_152, 0.8), (49_999, 30.0)):
        logits = np.stack([make_logits(shape, vocab, seed) for seed in range(4)])
        asked = [simple(seed, temperature=temperature, **fields) for seed in range(4)]
        expected = [judged(line, row) for line, row in zip(logits, asked, strict=True)]
        assert [told(outcome) for outcome in choose_rows(logits, asked)] == expected


def test_masses_beyond_float64s_whole_numbers():
    # 2^17 tokens of 2^37 each are 2^54, whose odd neighbours float64 does not have.
    logits = np.zeros((1, 2**17), dtype=np.float32)
    for seed in range(5):
        for fields in ({}, {"top_p": 0.1 + 1e-17}, {"top_p": math.nextafter(0.5, 0)}, {"top_k": 99_999}):
            row = simple(seed, temperature=1.0, **fields)
            assert told(choose_rows(logits, [row])[0]) == judged(logits[0], row)


def test_a_row_does_not_know_its_neighbours():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(7, 2_000)).astype(np.float32) * 3
    asked = [
        replace(simple(seed, temperature=0.9, top_p=0.95), logprobs=seed, blocked=(seed,) if seed % 2 else ())
        for seed in range(7)
    ]
    together = choose_rows(logits, asked)
    assert [choose_rows(line[None], [row])[0] for line, row in zip(logits, asked, strict=True)] == together
    order = rng.permutation(7)
    assert choose_rows(logits[order], [asked[i] for i in order]) == [together[i] for i in order]


@pytest.mark.parametrize("poison", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 63, 64, 999, 1_000], ids=str)  # the last two lie in the block that is not full
@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}], ids=str)
def test_a_poisoned_row_errs_alone(poison: float, place: int, fields: dict):
    logits = np.random.default_rng(place).normal(size=(3, 1_001)).astype(np.float32)
    asked = [replace(simple(seed, **fields), logprobs=2) for seed in range(3)]
    healthy = choose_rows(logits, asked)
    logits[1, place] = poison
    first, second, third = choose_rows(logits, asked)
    assert (first, third) == (healthy[0], healthy[2])
    assert isinstance(second, EngineFailed)
    assert "not finite" in str(second)


def test_padded_and_turned_logits():
    wide = np.random.default_rng(2).normal(size=(5, 144)).astype(np.float32)
    wide[:, 130:] = math.nan
    asked = [replace(simple(seed, temperature=1.0), logprobs=130) for seed in range(4)]
    for logits in (wide[:4, :130], wide[::-1, :130][:4], wide[:4, 129::-1], wide[::2, :130][:2]):
        assert choose_rows(logits, asked[: len(logits)]) == choose_rows(logits.copy(), asked[: len(logits)])


def test_a_row_whose_own_data_are_wrong_errs_alone():
    logits = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32)
    wrong = [
        replace(simple(), blocked=(50,)),
        replace(simple(repetition_penalty=2.0), ids=(50,)),
        RowChoice(GREEDY, (), 0, RandomState(0), processors=(lambda ids, scores: scores[1:],)),
    ]
    *failed, good = choose_rows(logits, [*wrong, simple()])
    assert [type(outcome) for outcome in failed] == [IndexError, IndexError, EngineFailed]
    assert good == Choice(int(logits[3].argmax()))


def test_poison_is_told_before_penalties_and_processors():
    def never(ids, scores):
        raise AssertionError("a processor must not see logits that are no numbers")

    logits = np.array([1.0, math.nan, 2.0], dtype=np.float32)
    for row in (
        RowChoice(SamplingParams(logit_bias={0: 1.7e308, 1: 1.0}), (), 0, RandomState(0)),
        RowChoice(GREEDY, (), 0, RandomState(0), processors=(never,)),
    ):
        assert told(choose_rows(logits[None], [row])[0]) == "the model's logits are not finite"


class TestWholeNumbers:
    @settings(deadline=None, max_examples=200)
    @given(values=st.lists(st.floats(-700, 700), min_size=1, max_size=40))
    def test_exponential(self, values: list[float]):
        for value, ours in zip(values, exponential(np.array(values)).tolist(), strict=True):
            assert abs(ours - math.exp(value)) <= 2 * math.ulp(math.exp(value))

    def test_exponential_of_edges(self):
        zero, small, beyond, lowest, nan = exponential(np.array([0.0, -1e-300, -1e308, -math.inf, math.nan])).tolist()
        assert zero == small == 1.0
        assert 0 < beyond == lowest < 1e-300
        assert math.isnan(nan)

    @settings(deadline=None, max_examples=200)
    @given(min_p=st.floats(0.0, 1.0))
    @example(min_p=2.0**-37)
    def test_least_weight(self, min_p: float):
        least = least_weight(min_p)
        assert 1 <= least <= 2**37
        assert least / 2**37 >= min_p
        assert least == 1 or (least - 1) / 2**37 < min_p

    @settings(deadline=None, max_examples=100)
    @given(states=st.lists(st.builds(RandomState, *[st.integers(0, 2**64 - 1)] * 3), min_size=1, max_size=5))
    def test_philox_draws(self, states: list[RandomState]):
        seeds, choices, indices = (
            np.array([getattr(state, name) for state in states], dtype=np.uint64)
            for name in ("seed", "choice", "index")
        )
        draws = np.empty(len(states), dtype=np.uint64)
        philox_draws(seeds, choices, indices, draws)
        assert draws.tolist() == [state.draw() for state in states]


class TestLogProbabilities:
    @settings(deadline=None, max_examples=100)
    @given(
        shape=st.sampled_from(SHAPES),
        vocab=st.sampled_from(VOCABULARIES),
        seed=st.integers(0, 99),
        top=st.sampled_from([0, 1, 5, 20, 300]),
        chosen=st.integers(0, 4_999),
    )
    def test_against_float64(self, shape: str, vocab: int, seed: int, top: int, chosen: int):
        logits, chosen = make_logits(shape, vocab, seed), chosen % vocab
        wide = logits.astype(np.float64)
        shifted = wide - wide.max()
        expected = np.maximum(shifted - math.log(math.fsum(np.exp(shifted))), np.finfo(np.float32).min)
        value, likeliest = log_probabilities(logits, chosen, top)
        assert value == pytest.approx(expected[chosen], rel=1e-7, abs=1e-12)
        order = np.argsort(-wide, kind="stable")[:top].tolist()
        assert [token_id for token_id, _ in likeliest] == order
        assert [logprob for _, logprob in likeliest] == pytest.approx(expected[order].tolist(), rel=1e-7, abs=1e-12)

    def test_of_raw_logits_whatever_was_changed(self):
        logits = np.random.default_rng(5).normal(size=(3, 300)).astype(np.float32)
        best = int(logits[0].argmax())
        logits[:] = logits[0]
        asked = [
            replace(simple(), logprobs=3, blocked=(best,)),
            replace(simple(repetition_penalty=1.5), logprobs=3, ids=(1, 2, 3)),
            replace(simple(), logprobs=3, processors=(lower_a_few,)),
        ]
        for outcome in choose_rows(logits, asked):
            assert isinstance(outcome, Choice)
            assert (outcome.logprob, outcome.top) == log_probabilities(logits[0], outcome.token_id, 3)
            assert outcome.top[0][0] == best

    def test_no_numbers(self):
        with pytest.raises(EngineFailed, match="not finite"):
            log_probabilities(np.array([0.0, math.nan], dtype=np.float32), 0, 1)
        with pytest.raises(IndexError):
            log_probabilities(np.zeros(2, dtype=np.float32), 2, 1)


def test_a_kernel_that_draws_wrongly_would_be_noticed():
    logits = np.random.default_rng(1).normal(size=(1, 500)).astype(np.float32)
    row = simple(7, temperature=1.0)
    with patch("tests.model.test_sampling_kernel.distribution", lambda scores, params: (np.array([0]), np.array([1]))):
        assert judged(logits[0], row) != told(choose_rows(logits, [row])[0])
    assert choose(logits[0], row.params, (), 0, row.random) == judged(logits[0], row)
