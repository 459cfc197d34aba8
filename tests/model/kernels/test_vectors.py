"""Exponentials, activations and roundings lane by lane, against float64 and torch, extremes included."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.model.kernels.quantise import GELU, GELU_TANH, SILU
from tests.model.kernels.judge import bfloat16_bits, same_bits
from tests.model.kernels.probes import activation_of, convert, exp2_of

TINY = np.float32(1e-45)  # the smallest denormal
EXTREMES = np.array(
    [0, -0.0, TINY, -TINY, 1e-38, -1e-38, 1.0, -1.0, 1e4, -1e4, 1e13, -1e13, 1e20, -1e20, 3.4e38, -3.4e38],
    np.float32,
)


def of(probe, x: np.ndarray, *arguments: object) -> np.ndarray:
    line = np.zeros(-(-len(x) // 16) * 16, np.float32)
    line[: len(x)] = x
    out = np.empty_like(line)
    probe(line, *arguments, out)
    return out[: len(x)]


class TestExp2:
    def test_a_sweep(self):
        x = np.linspace(-126, 126, 200_001).astype(np.float32)
        wanted = np.exp2(x.astype(np.float64))
        assert np.max(np.abs(of(exp2_of, x) / wanted - 1)) < 2e-7

    def test_whole_numbers_are_exact(self):
        x = np.arange(-126, 127).astype(np.float32)
        assert np.array_equal(of(exp2_of, x), np.exp2(x))

    def test_beyond_the_limits(self):
        x = np.array([127, 3.4e38, math.inf, -127, -3.4e38, -math.inf], np.float32)
        assert np.array_equal(of(exp2_of, x), np.exp2(np.clip(x, -126, 126)))

    def test_nan_stays_nan_and_its_neighbours_do_not_notice(self):
        x = np.zeros(16, np.float32)
        x[5] = math.nan
        assert np.flatnonzero(np.isnan(of(exp2_of, x))).tolist() == [5]

    def test_monotone_across_the_pieces(self):
        """The polynomial is joined at each half: no step down there that float32 could show more than once."""
        x = np.linspace(-3, 3, 600_001).astype(np.float32)
        y = of(exp2_of, x).astype(np.float64)
        assert np.min(np.diff(y) / y[1:]) > -2.5e-7


def judged(x: np.ndarray, activation: int) -> np.ndarray:
    wide = torch.from_numpy(x.astype(np.float64))
    if activation == SILU:
        return torch.nn.functional.silu(wide).numpy()
    return torch.nn.functional.gelu(wide, approximate="tanh" if activation == GELU_TANH else "none").numpy()


@pytest.mark.parametrize("activation", [SILU, GELU_TANH, GELU], ids=["silu", "gelu_tanh", "gelu"])
class TestActivations:
    def test_a_sweep(self, activation: int):
        x = np.linspace(-40, 40, 400_001).astype(np.float32)
        error = np.abs(of(activation_of, x, activation) - judged(x, activation))
        assert np.max(error / np.maximum(1, np.abs(x))) < 5e-7

    def test_denormals_and_what_overflows(self, activation: int):
        given_, wanted = of(activation_of, EXTREMES, activation), judged(EXTREMES, activation)
        assert np.isfinite(given_).all()
        assert np.max(np.abs(given_ - wanted) / np.maximum(1, np.abs(EXTREMES))) < 5e-7

    def test_an_infinity_never_becomes_a_number(self, activation: int):
        x = np.array([math.inf, -math.inf, math.nan], np.float32)
        assert not np.isfinite(of(activation_of, x, activation)).any()

    def test_nan_stays_in_its_lane(self, activation: int):
        x = np.ones(16, np.float32)
        x[3] = math.nan
        assert np.flatnonzero(np.isnan(of(activation_of, x, activation))).tolist() == [3]


def as_bfloat16(x: np.ndarray) -> np.ndarray:
    out = np.zeros(len(x), np.uint16)
    convert(x, out)
    return out


class TestBfloat16:
    @given(st.lists(st.integers(0, 2**32 - 1), min_size=16, max_size=16))
    @settings(deadline=None, max_examples=200)
    def test_any_bits_round_as_torch_rounds_them(self, words: list[int]):
        x = np.array(words, np.uint32).view(np.float32)
        numbers = ~np.isnan(x)
        assert np.array_equal(as_bfloat16(x)[numbers], bfloat16_bits(x)[numbers])
        assert np.isnan(torch.from_numpy(as_bfloat16(x)).view(torch.bfloat16).float().numpy()[~numbers]).all()

    def test_ties_go_to_even(self):
        x = (np.arange(0x3F80, 0x3FA0, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
        assert np.array_equal(as_bfloat16(x), bfloat16_bits(x))
        assert not (as_bfloat16(x) & 1).any()

    @pytest.mark.parametrize("sign", [0, 0x8000_0000])
    def test_a_nan_of_any_payload_stays_nan(self, sign: int):
        """Rounding alone would carry 0x7fffffff over into −0, and cut 0x7f800001 down to infinity."""
        payloads = [1, 2, 0x7FFF, 0x8000, 0xFFFF, 0x1_0000, 0x3F_FFFF, 0x40_0000, 0x40_0001, 0x7F_8000, 0x7F_FFFF]
        x = np.zeros(16, np.uint32)
        x[: len(payloads)] = [sign | 0x7F80_0000 | payload for payload in payloads]
        kept = torch.from_numpy(as_bfloat16(x.view(np.float32))).view(torch.bfloat16)
        assert kept[: len(payloads)].isnan().all()
        assert not kept[len(payloads) :].isnan().any()

    def test_there_and_back_again(self):
        bits = np.arange(2**16, dtype=np.uint16)
        wide = np.zeros(len(bits), np.float32)
        convert(bits, wide)
        assert same_bits(wide, (bits.astype(np.uint32) << 16).view(np.float32))
