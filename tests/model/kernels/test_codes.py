"""The Hadamard transform, and what rounds a token's values to int8 codes of every type that a product takes."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.kernels.judge import assert_codes, rotated, zeros_behind
from tests.model.kernels.probes import quantise_all, rotate_all

CODE_TYPES = (np.int16, np.int8, np.uint8, np.float32)  # AVX2's product, K/V, oneDNN's, the float32 product
WIDTHS = (1, 2, 4, 8, 16, 32, 64)


def codes_of(x: np.ndarray, kind: type[np.generic] = np.int16) -> tuple[np.ndarray, float]:
    line = zeros_behind(x)
    codes = np.full(len(line), 99, kind)
    step = quantise_all(line, codes)
    return codes - np.float32(128) if kind == np.uint8 else codes, step


class TestRotation:
    @given(st.sampled_from(WIDTHS), st.integers(1, 5), st.integers(0, 2**32 - 1))
    @settings(deadline=None, max_examples=80)
    def test_is_the_hadamard_transform_without_its_factor(self, width: int, blocks: int, seed: int):
        x = np.random.default_rng(seed).normal(size=width * blocks)
        line = zeros_behind(x)
        rotate_all(line, width)
        wanted = rotated(x, width) * math.sqrt(width)
        np.testing.assert_allclose(line[: len(x)], wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())
        assert not line[len(x) :].any()

    @pytest.mark.parametrize("width", WIDTHS)
    def test_a_nan_stays_in_its_block(self, width: int):
        line = np.ones(192, np.float32)
        line[64] = math.nan
        rotate_all(line, width)
        assert np.flatnonzero(np.isnan(line)).tolist() == list(range(64, 64 + width))


class TestCodes:
    @pytest.mark.parametrize("kind", CODE_TYPES)
    @given(st.integers(1, 100), st.integers(-30, 30), st.integers(0, 2**32 - 1))
    @settings(deadline=None, max_examples=60)
    def test_are_the_nearest_whole_numbers(self, kind: type[np.generic], length: int, exponent: int, seed: int):
        x = (np.random.default_rng(seed).standard_cauchy(length) * 10.0**exponent).astype(np.float32)
        if np.abs(x).max() > 1e-29:
            codes, step = codes_of(x, kind)
            assert_codes(codes[None], np.array([step]), x[None].astype(np.float64), error=3e-7)

    @pytest.mark.parametrize("kind", CODE_TYPES)
    def test_the_largest_is_exactly_127(self, kind: type[np.generic]):
        for seed in range(200):
            x = np.random.default_rng(seed).normal(size=16).astype(np.float32)
            codes, _ = codes_of(x, kind)
            assert np.abs(codes).max() == 127

    def test_ties_go_to_even(self):
        x = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127], np.float32)
        codes, step = codes_of(x)
        assert codes[:8].tolist() == [127, 0, 2, 2, 0, -2, -2, -127]
        assert step == 1

    @pytest.mark.parametrize("kind", CODE_TYPES)
    @pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 9e-31])
    def test_next_to_nothing_is_nothing(self, kind: type[np.generic], size: float):
        codes, step = codes_of(np.full(20, size, np.float32), kind)
        assert not codes.any()
        assert 0 <= step < 1e-32

    @pytest.mark.parametrize("size", [2e-30, 1e30, 3.4e38])
    def test_extreme_sizes(self, size: float):
        x = (np.array([1, -1, 0.25, 0]) * size).astype(np.float32)
        codes, step = codes_of(x)
        assert codes[:4].tolist() == [127, -127, 32, 0]
        assert step == pytest.approx(size / 127, rel=1e-6)

    @given(st.integers(1, 70), st.data())
    @settings(deadline=None, max_examples=80)
    def test_nothing_that_is_not_finite_is_hidden(self, length: int, data: st.DataObject):
        x = np.ones(length, np.float32)
        x[data.draw(st.integers(0, length - 1))] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
        _, step = codes_of(x)
        assert math.isnan(step)
