"""Activation, gate, rotation and rounding against float64 and torch's activations."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from drumline.model.kernels.feed_forward import feed
from drumline.model.kernels.quantise import GELU, GELU_TANH, SILU
from drumline.model.kernels.store import padded
from tests.model.kernels.judge import assert_codes, rotated, same_bits, wider

ACTIVATIONS = (SILU, GELU_TANH, GELU)


class Case:
    """One slot's arrays; behind each end there is NaN, which must not be read into a result."""

    def __init__(
        self, width: int, tokens: int, rotation: int = 1, activation: int = SILU, gated: bool = True, seed: int = 0
    ) -> None:
        dice = np.random.default_rng(seed)
        self.width, self.tokens, self.rotation = width, tokens, rotation
        self.activation, self.gated = activation, gated
        rows = width * (2 if gated else 1)
        self.up, self.bias = dice.normal(size=(tokens, rows)) * 3, dice.normal(size=rows)
        self.multiplier = 2.0 ** dice.integers(-4, 5, width)

    def run(self, threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
        length, rows = padded(self.width), self.up.shape[1]
        up = np.full((self.tokens + 1, padded(rows)), np.nan, np.float32)
        up[: self.tokens, :rows] = self.up
        codes, scales = np.full((self.tokens, length), 99, np.int16), np.full(self.tokens, 99, np.float32)
        feed(
            self.tokens, threads, up, wider(self.bias, padded(rows) + 16), self.width, self.gated, self.activation,
            wider(self.multiplier, length), self.rotation, np.full((threads, length), np.nan, np.float32), codes,
            scales,
        )  # fmt: skip
        return codes, scales

    def wanted(self) -> np.ndarray:
        wide = torch.from_numpy(self.up.astype(np.float32)).double() + torch.from_numpy(self.bias.astype(np.float32))
        gate = wide[:, : self.width]
        if self.activation == SILU:
            gate = functional.silu(gate)
        else:
            gate = functional.gelu(gate, approximate="tanh" if self.activation == GELU_TANH else "none")
        other = wide[:, self.width :] if self.gated else torch.from_numpy(self.multiplier)
        return rotated((gate * other).numpy(), self.rotation)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rotation = draw(st.sampled_from((1, 2, 4, 8, 16, 32, 64)))
    return Case(
        rotation * draw(st.integers(1, max(2, 200 // rotation))),
        draw(st.integers(1, 9)),
        rotation,
        draw(st.sampled_from(ACTIVATIONS)),
        draw(st.booleans()),
        draw(st.integers(0, 2**32 - 1)),
    )


@given(cases(), st.integers(1, 3))
@settings(deadline=None, max_examples=80)
def test_against_float64(case: Case, threads: int):
    codes, scales = case.run(threads)
    assert_codes(codes, scales, case.wanted(), floor=0.3)


@given(cases(), st.integers(1, 3))
@settings(deadline=None, max_examples=40)
def test_a_token_s_bits_are_its_own(case: Case, threads: int):
    codes, scales = case.run(threads)
    together = case.up
    for t in range(case.tokens):
        case.up, case.tokens = together[t : t + 1], 1
        alone = case.run()
        assert same_bits(alone[0][0], codes[t])
        assert same_bits(alone[1][0], scales[t])


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_poison_stays_with_its_token(activation: int, gated: bool, poison: float):
    case = Case(24, 5, 8, activation, gated)
    clean = case.run()
    others = np.arange(5) != 2
    for place in (0, case.up.shape[1] - 1):  # of the gate and of what it gates
        poisoned = Case(24, 5, 8, activation, gated)
        poisoned.up[2, place] = poison
        codes, scales = poisoned.run()
        assert math.isnan(scales[2])
        assert same_bits(codes[others], clean[0][others])
        assert same_bits(scales[others], clean[1][others])
