"""Int8 weights: the product is exact, folding changes nothing, rounding is bounded, and no NaN is hidden."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drumline.model.errors import ModelLoadError
from drumline.model.layers import hadamard, linear, quantise_rows
from drumline.model.plain_forward import stored
from drumline.model.quantise import _smoothing, calibrate, fold, quantise, rotation_width, rounded
from drumline.model.reference import emulated_logits, uncached_logits
from drumline.model.weights import LinearWeight, QuantisedWeight, Weights
from tests.tiny import FAMILIES, tiny_config, tiny_model

SLOTS = ("qkv", "output", "up", "down")
FLOATS = (torch.float32, torch.float64)


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _double(weights: Weights) -> Weights:
    return weights.map(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def _codes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def _plain(weight: Tensor, rotation: int, multiplier: Tensor | None) -> Tensor:
    """The ordinary weight that does what a folded one does to the same input."""
    unrotated = hadamard(weight, rotation)
    return unrotated if multiplier is None else unrotated * multiplier


@pytest.mark.parametrize("family", FAMILIES)
def test_before_rounding_the_folded_model_is_the_model(family: str) -> None:
    model = replace(tiny_model(family), kv_dtype=torch.float64)
    weights = _double(model.weights)
    plain = replace(model, weights=fold(weights, model.config, calibrate(model.weights, model.config), _plain))
    expected = emulated_logits(model, range(3, 30))
    assert (emulated_logits(plain, range(3, 30)) - expected).abs().max() < 1e-9
    assert not torch.allclose(plain.weights.layers[0].qkv, weights.layers[0].qkv)


@pytest.mark.parametrize("family", FAMILIES)
def test_smoothing_and_rotation_leave_every_slot_an_int8_weight(family: str) -> None:
    model, config = tiny_model(family, precision="int8"), tiny_config(family)
    layer = model.weights.layers[1]
    rotations = {slot: getattr(layer, slot).rotation for slot in SLOTS} | {"head": model.weights.head.rotation}
    assert rotations == {"qkv": 32, "output": 1, "up": 32, "down": 16, "head": 32}
    assert (layer.down.multiplier is None) == config.gated
    assert all(getattr(layer, slot).multiplier is None for slot in ("qkv", "output", "up"))
    for weight in (layer.qkv, layer.output, layer.up, layer.down, model.weights.head):
        assert (weight.codes.dtype, weight.scales.dtype) == (torch.int8, torch.float32)
        assert weight.codes.min() >= -127
        assert (weight.codes.abs().amax(1) == 127).all()
        assert weight.nbytes == weight.codes.numel() + 4 * len(weight.scales) + (
            0 if weight.multiplier is None else weight.multiplier.nbytes
        )
    assert torch.equal(model.weights.embedding, tiny_model(family).weights.embedding)
    assert all(tensor.dtype in (torch.int8, torch.float32) for tensor in model.weights.tensors())


@pytest.mark.parametrize("family", FAMILIES)
def test_an_int8_model_says_nearly_what_the_float_model_says(family: str) -> None:
    exact, model = tiny_model(family), tiny_model(family, precision="int8")
    expected = uncached_logits(exact, range(3, 30)).log_softmax(-1)
    given = uncached_logits(model, range(3, 30)).log_softmax(-1)
    divergence = (expected.exp() * (expected - given)).sum(-1).mean()
    assert divergence < 0.01
    emulated = emulated_logits(model, range(3, 30)).log_softmax(-1)
    assert emulated.dtype == torch.float64
    assert (expected.exp() * (expected - emulated)).sum(-1).mean() < 0.01


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_channels_that_are_dead_or_of_no_weight_do_no_harm(family: str) -> None:
    model = tiny_model(family)
    first, rest = model.weights.layers[0], model.weights.layers[1:]
    assert isinstance(first.up, Tensor)
    assert isinstance(first.down, Tensor)
    up, down = first.up.clone(), first.down.clone()
    up[[2, -2]] = 0
    down[:, 7] = 0
    weights = replace(model.weights, layers=(replace(first, up=up, down=down), *rest))
    exact = replace(model, weights=weights)
    given = uncached_logits(replace(model, weights=quantise(weights, model.config)), range(3, 30)).log_softmax(-1)
    expected = uncached_logits(exact, range(3, 30)).log_softmax(-1)
    assert (expected.exp() * (expected - given)).sum(-1).mean() < 0.01


def test_a_channel_that_calibration_missed_does_not_drown_the_others() -> None:
    """One that is 2²⁰ times weaker than the strongest, or more, is smoothed as if it were just that."""
    peaks = torch.tensor([0.0, 1e-30, 1.0, 1024.0])
    assert _smoothing(peaks, torch.ones(4)).log2().tolist() == [-5.0, -5.0, 0.0, 5.0]
    assert _smoothing(torch.zeros(2), torch.zeros(2)).tolist() == [1.0, 1.0]


def test_quantising_twice_gives_the_same_bits() -> None:
    first, second = (tiny_model("gpt2", precision="int8").weights for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.tensors(), second.tensors(), strict=True))


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 10_000), st.floats(-30, 30))
@settings(deadline=None)
def test_rounding_moves_a_weight_by_at_most_half_a_step(inputs: int, outputs: int, seed: int, octaves: float) -> None:
    weight = _normal(outputs, inputs, seed=seed) * 2.0**octaves
    given = rounded(weight, 1, None)
    steps = given.scales.double()[:, None]
    assert ((given.codes * steps - weight).abs() <= steps * (0.5 + 1e-4)).all()
    assert given.codes.abs().max() == 127


def test_a_row_of_zeros_stays_zero() -> None:
    weight = _normal(3, 8)
    weight[1] = 0
    given = rounded(weight, 1, None)
    assert (given.scales[1], given.codes[1].abs().max()) == (0, 0)
    assert linear(_normal(2, 8), given)[:, 1].tolist() == [0, 0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("inputs", [1, 3, 64, 1_023, 1_024, 1_025, 2_048, 5_000])
def test_the_product_is_exact_on_extreme_values(inputs: int, dtype: torch.dtype) -> None:
    """With scales of one the output is the whole-number product itself, rounded once to float32."""
    states, codes = _codes(5, inputs), _codes(7, inputs, seed=1)
    states[0], codes[0], codes[1] = 127, 127, -127
    states[:, 0] = 127  # so that every token's scale is 1
    product = linear(states.to(dtype), QuantisedWeight(codes, torch.ones(7)))
    assert torch.equal(product, (states.long() @ codes.long().t()).to(dtype))
    assert product[0, 0] == torch.tensor(127 * 127 * inputs).to(dtype)


@given(
    st.integers(1, 9), st.sampled_from([1, 2, 24, 64, 192]), st.integers(1, 9), st.booleans(), st.integers(0, 10_000)
)
@settings(deadline=None)
def test_linear_does_what_its_description_says(
    tokens: int, inputs: int, outputs: int, multiplied: bool, seed: int
) -> None:
    """Step by step, on whole numbers in int64, with a matrix of our own for the rotation."""
    states, bias = _normal(tokens, inputs, seed=seed), _normal(outputs, seed=seed + 1)
    multiplier = _normal(inputs, seed=seed + 2).exp() if multiplied else None
    width = rotation_width(inputs)
    weight = QuantisedWeight(_codes(outputs, inputs), _normal(outputs).abs().float(), width, multiplier)
    signs = [[(-1) ** (row & column).bit_count() for column in range(width)] for row in range(width)]
    turned = (states if multiplier is None else states * multiplier).view(tokens, -1, width)
    turned = (turned @ torch.tensor(signs, dtype=torch.float64) / math.sqrt(width)).view(tokens, inputs)
    scales = turned.abs().amax(1, keepdim=True) / 127
    whole = torch.round(turned / scales).long() @ weight.codes.long().t()
    expected = whole * weight.scales.double() * scales + bias
    assert torch.allclose(linear(states, weight, bias), expected, rtol=1e-12)


@pytest.mark.parametrize("width", [1, 2, 8, 64])
def test_hadamard_is_its_own_inverse_and_keeps_lengths(width: int) -> None:
    states = _normal(3, 192)
    turned = hadamard(states, width)
    assert torch.allclose(hadamard(turned, width), states)
    assert torch.allclose(turned.norm(dim=1), states.norm(dim=1))
    assert torch.equal(turned, states) == (width == 1)


@pytest.mark.parametrize(
    ("channels", "width"), [(1, 1), (2, 2), (7, 1), (24, 8), (48, 16), (64, 64), (576, 64), (1_536, 64), (1_000, 8)]
)
def test_the_rotation_is_the_largest_power_of_two_that_divides(channels: int, width: int) -> None:
    assert rotation_width(channels) == width


def test_codes_round_ties_to_even() -> None:
    codes, scales = quantise_rows(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]]))
    assert scales.tolist() == [[1.0]]
    assert codes.tolist() == [[127.0, 0.0, 2.0, 2.0, -0.0, -2.0]]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_codes_stay_in_range_for_every_finite_token(values: list[float]) -> None:
    """Down to subnormal scales, which rounding makes too small."""
    codes, scales = quantise_rows(torch.tensor([values]))
    assert codes.isfinite().all()
    assert codes.abs().max() <= 127
    assert scales.isfinite().all()


def test_a_token_of_zeros_gives_zeros_and_the_bias() -> None:
    weight = rounded(_normal(4, 8), 8, None)
    states = torch.cat((torch.zeros(1, 8), torch.ones(1, 8)))
    assert linear(states, weight)[0].tolist() == [0.0] * 4
    assert linear(states, weight, torch.arange(4.0))[0].tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rotation", [1, 8])
def test_one_value_that_is_not_finite_makes_the_whole_token_nan(
    poison: float, rotation: int, dtype: torch.dtype
) -> None:
    """The other tokens keep their bits."""
    codes = _codes(6, 2_048)
    codes[0] = 0  # a row that would swallow it
    weight = QuantisedWeight(codes, torch.ones(6), rotation)
    states = _normal(3, 2_048).to(dtype)
    clean = linear(states, weight)
    states[1, 1_500] = poison
    given = linear(states, weight)
    assert given[1].isnan().all()
    assert torch.equal(given[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("slot", [*SLOTS, "head"])
def test_weights_that_are_not_finite_are_refused(slot: str) -> None:
    model = tiny_model()
    poisoned = getattr(model.weights if slot == "head" else model.weights.layers[1], slot).clone()
    poisoned[2, 5] = math.inf
    last = replace(model.weights.layers[1], **({} if slot == "head" else {slot: poisoned}))
    weights = replace(model.weights, layers=(model.weights.layers[0], last))
    if slot == "head":
        weights = replace(weights, head=poisoned)
    with pytest.raises(ModelLoadError, match=r"precision int8: .* not finite"):
        quantise(weights, model.config)


def test_map_and_tensors_reach_into_quantised_weights() -> None:
    model = tiny_model("gpt2", precision="int8")
    seen: list[Tensor] = []

    def count(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor.clone()

    copied = model.weights.map(count)
    tensors = list(model.weights.tensors())
    assert {id(tensor) for tensor in seen} == {id(tensor) for tensor in tensors}
    assert len(seen) == len(tensors)
    down: LinearWeight = copied.layers[0].down
    assert isinstance(down, QuantisedWeight)
    assert {id(down.codes), id(down.scales), id(down.multiplier)} <= {id(tensor) for tensor in copied.tensors()}
    assert torch.equal(down.codes, model.weights.layers[0].down.codes)


def test_int8_keys_and_values_round_to_half_a_step_of_their_own_scale() -> None:
    states = _normal(1, 2, 5, 16) * _normal(1, 2, 5, 1, seed=1)
    steps = states.abs().amax(-1, keepdim=True) / 127
    assert ((stored(states, torch.int8) - states).abs() <= steps * (0.5 + 1e-12)).all()
    assert not torch.equal(stored(states, torch.int8), states)
    assert stored(states, torch.bfloat16).dtype == torch.bfloat16


def test_an_int8_model_with_int8_keys_and_values_stays_close() -> None:
    model = tiny_model(precision="int8")
    wide, narrow = (emulated_logits(each, range(3, 30)) for each in (model, replace(model, kv_dtype=torch.int8)))
    assert 0 < (wide.log_softmax(-1) - narrow.log_softmax(-1)).abs().mean() < 0.1
