"""Integer products against int64, and the check that tells a wrong one from a right one."""

import math
from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.model.backends import products
from drumline.model.backends.products import (
    PRODUCTS,
    FloatProduct,
    NoExactProduct,
    OneDnnProduct,
    PanelProduct,
    Product,
    choose_product,
    why_not_exact,
)
from drumline.model.kernels.store import padded
from drumline.model.weights import QuantisedWeight
from tests.model.kernels.judge import same_bits

HAS_AVX2 = torch.cpu._is_avx2_supported()
HAS_VNNI = torch.cpu._is_vnni_supported()
EXACT = [product for product in PRODUCTS if why_not_exact(product) is None]
BY_NAME = pytest.mark.parametrize("product", EXACT, ids=[product.name for product in EXACT])


def multiplied(
    product: Product,
    weights: Sequence[np.ndarray],
    layer: int,
    codes: np.ndarray,
    scales: np.ndarray,
    steps: np.ndarray,
) -> np.ndarray:
    """Codes `[tokens, inputs]` through a stack of all `weights`, in buffers longer than needed and full of NaN."""
    stack = product.stack([QuantisedWeight(torch.from_numpy(w), torch.from_numpy(scales)) for w in weights])
    tokens, (outputs, inputs) = len(codes), weights[layer].shape
    zero_point = 128 if product.code_type == np.uint8 else 0
    given_codes = np.full((tokens + 3, padded(inputs)), zero_point, product.code_type)
    given_codes[:tokens, :inputs] = codes + zero_point
    out = np.full((tokens + 3, padded(outputs)), np.nan, np.float32)
    given_steps = np.concatenate([steps, np.full(3, np.nan, np.float32)])
    stack.multiply(layer, tokens, given_codes, given_steps, out)
    assert np.isnan(out[tokens:]).all(), "lines of other tokens are left alone"
    assert not out[:tokens, outputs:].any(), "zeros behind the outputs"
    return out[:tokens, :outputs]


def judged(weight: np.ndarray, codes: np.ndarray, scales: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Whole numbers in int64, then the two scales in float32, one after the other."""
    sums = codes.astype(np.int64) @ weight.astype(np.int64).T
    return sums.astype(np.float32) * scales * steps[:, None]


@st.composite
def problems(draw: st.DrawFn, largest: int = 127) -> tuple[list[np.ndarray], int, np.ndarray, np.ndarray, np.ndarray]:
    outputs, inputs = (
        draw(st.integers(1, 70)),
        draw(st.one_of(st.integers(1, 130), st.sampled_from([1024, 1025, 2049]))),
    )
    tokens, layers = draw(st.integers(1, 70)), draw(st.integers(1, 3))
    dice = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    extreme = draw(st.booleans())

    def whole(*shape: int) -> np.ndarray:
        if extreme:
            return np.where(dice.random(shape) < 0.1, -largest, largest)
        return dice.integers(-largest, largest + 1, shape)

    weights = [whole(outputs, inputs).astype(np.int8) for _ in range(layers)]
    scales, steps = (dice.uniform(1e-4, 1e-2, size).astype(np.float32) for size in (outputs, tokens))
    return weights, draw(st.integers(0, layers - 1)), whole(tokens, inputs), scales, steps


class TestExactProducts:
    def test_each_cpu_has_one(self):
        names = [product.name for product in EXACT]
        assert "float32" in names
        assert ("avx2" in names) == HAS_AVX2
        assert choose_product() is EXACT[0]

    @BY_NAME
    @given(problem=problems())
    @settings(deadline=None, max_examples=40)
    def test_against_int64(self, product: Product, problem):
        weights, layer, codes, scales, steps = problem
        wanted = judged(weights[layer], codes, scales, steps)
        assert same_bits(multiplied(product, weights, layer, codes, scales, steps), wanted)

    @BY_NAME
    def test_the_largest_sums(self, product: Product):
        """As many inputs as the widest layers of small models have, all of them at the limit."""
        weight = np.full((17, 20_000), 127, np.int8)
        weight[1::2] = -127
        codes = np.full((5, 20_000), -127)
        ones = np.ones(17, np.float32), np.ones(5, np.float32)
        assert same_bits(multiplied(product, [weight], 0, codes, *ones), judged(weight, codes, *ones))

    @BY_NAME
    @pytest.mark.parametrize("step", [math.nan, math.inf])
    def test_a_bad_token_scale_reaches_that_token_alone(self, product: Product, step: float):
        dice = np.random.default_rng(0)
        weight, codes = dice.integers(-127, 128, (48, 64)).astype(np.int8), dice.integers(-127, 128, (9, 64))
        codes[:, 0] |= 1
        scales, steps = np.full(48, 0.01, np.float32), np.full(9, 0.1, np.float32)
        clean = multiplied(product, [weight], 0, codes, scales, steps)
        steps[4] = step
        bad = multiplied(product, [weight], 0, codes, scales, steps)
        others = np.arange(9) != 4
        assert same_bits(bad[others], clean[others])
        assert not np.isfinite(bad[4]).any()

    @BY_NAME
    def test_whatever_codes_a_poisoned_token_has(self, product: Product):
        """A quantiser may leave anything in the codes of a token whose scale is NaN."""
        dice = np.random.default_rng(0)
        weight, codes = dice.integers(-127, 128, (48, 64)).astype(np.int8), dice.integers(-127, 128, (9, 64))
        scales, steps = np.full(48, 0.01, np.float32), np.full(9, 0.1, np.float32)
        clean = multiplied(product, [weight], 0, codes, scales, steps)
        steps[4], zero_point = np.nan, 128 if product.code_type == np.uint8 else 0
        if product.code_type == np.float32:
            codes = codes.astype(np.float32)
            codes[4] = np.nan
        else:
            codes[4] = np.iinfo(product.code_type).min - zero_point
        bad = multiplied(product, [weight], 0, codes, scales, steps)
        others = np.arange(9) != 4
        assert same_bits(bad[others], clean[others])
        assert np.isnan(bad[4]).all()

    @BY_NAME
    def test_no_tokens_are_none(self, product: Product):
        weight, ones = np.ones((16, 16), np.int8), np.ones(16, np.float32)
        nothing = np.zeros((0, 16), np.int64)
        assert multiplied(product, [weight], 0, nothing, ones, np.zeros(0, np.float32)).shape == (0, 16)


class TestOneDnn:
    @given(problem=problems(largest=63))
    @settings(deadline=None, max_examples=40)
    def test_is_wired_right(self, problem):
        """On values too small to saturate: a pair of u8 · s8 products is (63 + 128) · 63 · 2 < 2^15."""
        weights, layer, codes, scales, steps = problem
        wanted = judged(weights[layer], codes, scales, steps)
        assert same_bits(multiplied(OneDnnProduct(), weights, layer, codes, scales, steps), wanted)

    @pytest.mark.skipif(HAS_VNNI, reason="with VNNI its sums are exact")
    def test_is_found_to_saturate(self):
        reason = why_not_exact(OneDnnProduct())
        assert reason is not None
        assert "is not exact" in reason


class _Off(FloatProduct):
    """Right but for one output of one number of tokens."""

    name = "off"

    def __init__(self, tokens: int, output: int = -1, line: int = -1) -> None:
        self.wrong = tokens, output, line

    def stack(self, weights):
        stack, (wrong_tokens, output, line) = super().stack(weights), self.wrong
        multiply = stack.multiply

        def off(layer, tokens, codes, token_scales, out):
            multiply(layer, tokens, codes, token_scales, out)
            if tokens == wrong_tokens:
                out[line, output] += 1

        stack.multiply = off
        return stack


class _Raises(FloatProduct):
    name = "raises"

    def stack(self, weights):
        raise RuntimeError("no such operator\nand a long trace")


class _Silent(FloatProduct):
    """Leaves everything as it was."""

    def stack(self, weights):
        stack = super().stack(weights)
        stack.multiply = lambda *arguments: None
        return stack


class TestTheCheck:
    @pytest.mark.parametrize("tokens", [1, 2, 3, 5, 7, 8, 16, 31, 33, 64])
    def test_off_by_one_for_one_number_of_tokens(self, tokens: int):
        assert why_not_exact(_Off(tokens)) == f"{tokens} × 64 times 48 outputs is not exact"

    @pytest.mark.parametrize(("output", "line"), [(0, 0), (15, 6), (16, 7), (-1, 0)])
    def test_off_by_one_anywhere(self, output: int, line: int):
        assert why_not_exact(_Off(8, output, line)) is not None

    def test_what_is_raised_is_the_reason(self):
        assert why_not_exact(_Raises()) == "RuntimeError: no such operator"

    @pytest.mark.filterwarnings("error")
    def test_a_product_that_writes_nothing(self):
        assert why_not_exact(_Silent()) is not None

    def test_a_product_that_adds_in_float32(self):
        """Without blocks partial sums pass 2^24 and are rounded: seen where large values of one sign are odd sums."""
        with patch.object(products, "BLOCK", 1 << 20):
            assert why_not_exact(FloatProduct()) is not None

    def test_a_product_that_wraps_in_int16(self):
        class Wraps(FloatProduct):
            def stack(self, weights):
                stack = super().stack(weights)
                multiply = stack.multiply

                def wrapped(layer, tokens, codes, token_scales, out):
                    multiply(layer, tokens, codes, token_scales, out)
                    out[:tokens] = out[:tokens].astype(np.int64).astype(np.int16)

                stack.multiply = wrapped
                return stack

        assert why_not_exact(Wraps()) is not None


class TestTheChoice:
    def choice(self, *candidates: Product) -> Product:
        with patch.object(products, "PRODUCTS", candidates):
            return choose_product.__wrapped__()

    def test_the_first_that_passes(self):
        right = FloatProduct()
        assert self.choice(_Raises(), _Off(3), right, _Raises()) is right

    def test_every_reason_is_named(self):
        with pytest.raises(NoExactProduct) as caught:
            self.choice(_Raises(), _Off(7))
        message = str(caught.value)
        assert "raises: RuntimeError: no such operator" in message
        assert "off: 7 × 64 times 48 outputs is not exact" in message

    def test_the_panel_kernel_says_what_it_needs(self):
        with patch("torch.cpu._is_avx2_supported", return_value=False):
            assert why_not_exact(PanelProduct()) == "RuntimeError: the CPU has no AVX2"

    def test_it_is_made_once(self):
        assert choose_product() is choose_product()
