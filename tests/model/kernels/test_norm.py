"""Residual, norm, rotation and rounding against float64."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.model.kernels.norm import normalise
from drumline.model.kernels.store import padded
from tests.model.kernels.judge import assert_codes, rotated, same_bits, zeros_behind

EPS = np.float32(1e-5)


class Case:
    """A step's arrays, longer than its tokens: what lies behind is NaN before, and is left alone."""

    def __init__(self, width: int, tokens: int, rotation: int = 1, centred: bool = False, seed: int = 0) -> None:
        dice = np.random.default_rng(seed)
        self.width, self.tokens, self.rotation, self.centred = width, tokens, rotation, centred

        def lines(scale: float) -> np.ndarray:
            return zeros_behind(dice.normal(size=(tokens, width)) * scale)

        self.hidden, self.update = lines(3.0) + np.float32(0), lines(1.0)
        self.hidden[:, : max(1, width // 8)] *= 20  # outliers, as real models have
        self.update_bias, self.bias = (zeros_behind(dice.normal(size=width)) for _ in range(2))
        self.weight = zeros_behind(1 + 0.3 * dice.normal(size=width))

    def run(self, updated: bool = True, threads: int = 1, code_type: type[np.generic] = np.int16):
        """Hidden states, codes and scales afterwards, all lines of the buffers but the spare ones."""
        length, room = padded(self.width), self.tokens + 2
        hidden, update = (np.full((room, length), np.nan, np.float32) for _ in range(2))
        hidden[: self.tokens], update[: self.tokens] = self.hidden, self.update
        codes, scales = np.full((room, length), 99, code_type), np.full(room, 99, np.float32)
        scratch = np.full((threads, length + 16), np.nan, np.float32)
        normalise(
            self.tokens, threads, updated, hidden, update, self.update_bias, self.weight, self.bias, EPS, self.width,
            self.centred, self.rotation, scratch, codes, scales,
        )  # fmt: skip
        assert np.isnan(hidden[self.tokens :]).all()
        assert (codes[self.tokens :] == 99).all()
        assert (scales[self.tokens :] == 99).all()
        return hidden[: self.tokens], codes[: self.tokens], scales[: self.tokens]

    def wanted(self, updated: bool = True) -> np.ndarray:
        x = self.hidden.astype(np.float64)
        if updated:
            x = x + self.update + self.update_bias
        x = x[:, : self.width]
        if self.centred:
            x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + float(EPS)) * self.weight[: self.width]
        return rotated(x + self.bias[: self.width] if self.centred else x, self.rotation)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rotation = draw(st.sampled_from((1, 2, 4, 8, 16, 32, 64)))
    width = rotation * draw(st.integers(1, max(2, 200 // rotation)))
    return Case(width, draw(st.integers(1, 9)), rotation, draw(st.booleans()), draw(st.integers(0, 2**32 - 1)))


@given(cases(), st.booleans(), st.integers(1, 3))
@settings(deadline=None, max_examples=80)
def test_against_float64(case: Case, updated: bool, threads: int):
    hidden, codes, scales = case.run(updated, threads)
    assert_codes(codes, scales, case.wanted(updated))
    moved = case.hidden + (case.update + case.update_bias) if updated else case.hidden
    assert same_bits(hidden, moved)


@given(cases(), st.integers(1, 3))
@settings(deadline=None, max_examples=40)
def test_a_token_s_bits_are_its_own(case: Case, threads: int):
    hidden, codes, scales = case.run(threads=threads)
    for t in range(case.tokens):
        alone = Case(case.width, 1, case.rotation, case.centred)
        alone.weight, alone.bias, alone.update_bias = case.weight, case.bias, case.update_bias
        alone.hidden, alone.update = case.hidden[t : t + 1], case.update[t : t + 1]
        single = alone.run()
        assert all(same_bits(x[0], y[t]) for x, y in zip(single, (hidden, codes, scales), strict=True))


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("width", [32, 40])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_poison_stays_with_its_token(centred: bool, width: int, poison: float):
    case = Case(width, 5, 8, centred)
    clean = case.run()
    for place in (0, width - 1):
        poisoned = Case(width, 5, 8, centred)
        poisoned.hidden[2, place] = poison
        _, codes, scales = poisoned.run()
        others = np.arange(5) != 2
        assert math.isnan(scales[2])
        assert same_bits(codes[others], clean[1][others])
        assert same_bits(scales[others], clean[2][others])


@pytest.mark.parametrize("centred", [False, True])
def test_poison_behind_the_end_is_not_read(centred: bool):
    """A token with a NaN scale leaves NaN in the padding of its product, and so in its line of the hidden states."""
    case = Case(24, 3, 8, centred)
    _, codes, scales = case.run()
    case.hidden[:, 24:] = case.update[:, 24:] = math.nan
    _, same_codes, same_scales = case.run()
    assert same_bits(codes, same_codes)
    assert same_bits(scales, same_scales)


@pytest.mark.parametrize("centred", [False, True])
def test_a_token_of_zeros(centred: bool):
    case = Case(24, 2, 8, centred)
    case.hidden[0] = 0
    _, codes, scales = case.run(updated=False)
    assert_codes(codes, scales, case.wanted(updated=False))


def test_a_large_mean_is_taken_off_before_the_squares():
    case = Case(96, 3, 32, centred=True)
    case.hidden[:, :96] += 3_000
    _, codes, scales = case.run()
    assert_codes(codes, scales, case.wanted(), error=2e-4)
