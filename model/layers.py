"""The arithmetic of a decoder block, once: the torch backend, the course model and the reference all call it."""

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from drumline.model.config import ModelConfig, RopeConfig
from drumline.model.weights import LayerWeights, LinearWeight, QuantisedWeight

EXACT_IN_FLOAT32 = 1_024
"""So many products of two numbers of magnitude ≤ 127 sum to less than 2²⁴: every partial sum is exact in float32."""


def normalise(config: ModelConfig, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """RMSNorm (Zhang & Sennrich 2019) or LayerNorm over the last dimension; RMS statistics are float32."""
    if config.norm == "layer":
        return functional.layer_norm(hidden, (hidden.shape[-1],), weight, bias, config.norm_eps)
    return rms_norm(hidden, weight, config.norm_eps)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`hidden / sqrt(mean(hidden²) + eps) · weight`, statistics in float32 (float64 stays float64)."""
    wide = hidden if hidden.dtype == torch.float64 else hidden.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(hidden.dtype)


def linear(states: Tensor, weight: LinearWeight, bias: Tensor | None = None) -> Tensor:
    """`states · weightᵀ + bias` for `[tokens, in]` and `[out, in]`.

    Few tokens times a large float32 weight is up to twice as fast on a CPU with the weight as the left factor: BLAS
    blocks its left side, and tokens are too few to be blocked.
    """
    if isinstance(weight, QuantisedWeight):
        product = _quantised_linear(states, weight)
    elif states.dtype != torch.float32 or states.device.type != "cpu" or len(states) == 1:
        return functional.linear(states, weight, bias)
    else:
        product = torch.mm(weight, states.t()).t().contiguous()
    return product if bias is None else product + bias


def _quantised_linear(states: Tensor, weight: QuantisedWeight) -> Tensor:
    """What `QuantisedWeight` says, in float64 for float64 states, else in float32.

    A token with a NaN or an infinity in it becomes NaN as a whole: its scale is, so no rounding can hide it.
    """
    wide = states if states.dtype == torch.float64 else states.float()
    if weight.multiplier is not None:
        wide = wide * weight.multiplier
    codes, scales = quantise_rows(hadamard(wide, weight.rotation))
    return (_integer_product(codes, weight.codes) * weight.scales * scales).to(states.dtype)


def quantise_rows(states: Tensor) -> tuple[Tensor, Tensor]:
    """`[..., n]` as whole numbers −127 … 127 (in the dtype of `states`) and scales `[..., 1]`, max|x| / 127.

    A row of zeros has scale 0; one that holds a NaN or an infinity has scale NaN.
    """
    peaks = states.abs().amax(-1, keepdim=True)
    scales = torch.where(peaks.isfinite(), peaks / 127, math.nan)
    codes = (states / torch.where(scales > 0, scales, 1)).round()
    return codes.clamp(-127, 127), scales  # a subnormal scale may be too small by rounding


def hadamard(states: Tensor, width: int) -> Tensor:
    """The orthonormal Hadamard transform (Sylvester's order) of each block of `width` values of the last dimension.

    It is its own inverse. `width` is a power of two that divides the dimension; 1 changes nothing.
    """
    if width == 1:
        return states
    matrix = _hadamard_matrix(width, states.dtype, states.device)
    return (states.reshape(*states.shape[:-1], -1, width) @ matrix).reshape(states.shape)


@lru_cache(maxsize=32)
def _hadamard_matrix(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < width:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (matrix / math.sqrt(width)).to(device, dtype)


def _integer_product(left: Tensor, codes: Tensor) -> Tensor:
    """`left · codesᵀ` of whole numbers of magnitude ≤ 127, exact, in the dtype of `left` (float32 rounds it once)."""
    if left.dtype == torch.float64:
        return left @ codes.t().double()
    blocks = torch.split(left, EXACT_IN_FLOAT32, -1), torch.split(codes, EXACT_IN_FLOAT32, -1)
    products = [block @ block_codes.t().to(left.dtype) for block, block_codes in zip(*blocks, strict=True)]
    if len(products) == 1:
        return products[0]
    return torch.stack([product.double() for product in products]).sum(0).to(left.dtype)


def feed_forward(config: ModelConfig, layer: LayerWeights, hidden: Tensor) -> Tensor:
    """`down(act(up(x)))`, or SwiGLU `down(act(gate(x)) · up(x))` (Shazeer 2020) where the family is gated."""
    return linear(inner_states(config, layer, hidden), layer.down, layer.down_bias)


def inner_states(config: ModelConfig, layer: LayerWeights, hidden: Tensor) -> Tensor:
    """What `down` reads: `[tokens, ffn_width]`."""
    up = linear(hidden, layer.up, layer.up_bias)
    if config.gated:
        gate, up = up.chunk(2, dim=-1)
        return _activate(config, gate) * up
    return _activate(config, up)


def _activate(config: ModelConfig, hidden: Tensor) -> Tensor:
    if config.activation == "silu":
        return functional.silu(hidden)
    return functional.gelu(hidden, approximate="tanh" if config.activation == "gelu_tanh" else "none")


def project_qkv(config: ModelConfig, layer: LayerWeights, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `[..., heads, head_dim]`, keys and values `[..., kv_heads, head_dim]`, q/k-normed but not rotated."""
    stacked = linear(hidden, layer.qkv, layer.qkv_bias)
    stacked = stacked.view(*stacked.shape[:-1], -1, config.head_dim)
    query, key, value = torch.split(stacked, [config.heads, config.kv_heads, config.kv_heads], dim=-2)
    if layer.query_norm is not None and layer.key_norm is not None:
        query = rms_norm(query, layer.query_norm, config.norm_eps)
        key = rms_norm(key, layer.key_norm, config.norm_eps)
    return query, key, value


def causal_attention(query: Tensor, key: Tensor, value: Tensor, query_offset: int) -> Tensor:
    """Explicit causal attention: query row i sees the keys j ≤ query_offset + i.

    `query` is `[batch, heads, time, head_dim]`, `key` and `value` `[batch, kv_heads, total, head_dim]`; each K/V head
    serves heads / kv_heads query heads. With two new tokens over five cached, the first sees six keys, the second
    seven. Returns `[batch, heads, time, head_dim]`. Raises `ValueError` when the keys do not cover the queries.
    """
    time, total = query.shape[-2], key.shape[-2]
    if query_offset < 0 or query_offset + time > total:
        raise ValueError(f"{time} queries at offset {query_offset} need {query_offset + time} keys, there are {total}")
    group = query.shape[-3] // key.shape[-3]
    key, value = key.repeat_interleave(group, dim=-3), value.repeat_interleave(group, dim=-3)
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    last_visible = query_offset + torch.arange(time, device=query.device)
    visible = torch.arange(total, device=query.device) <= last_visible[:, None]
    return scores.masked_fill(~visible, float("-inf")).softmax(-1) @ value


def rope_tables(rope: RopeConfig, head_dim: int, window: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[window, head_dim / 2]`, float32, already scaled by yarn's attention factor."""
    inverse, scale = rope_frequencies(rope, head_dim)
    angles = torch.arange(window, dtype=torch.float32)[:, None] * inverse
    return (angles.cos() * scale).to(device), (angles.sin() * scale).to(device)


def rotate(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim/2) of `[..., time, heads, head_dim]` by tables `[time, head_dim / 2]`."""
    cosine, sine = cosine[:, None].to(states.dtype), sine[:, None].to(states.dtype)
    first, second = states.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies `[head_dim / 2]` after scaling, and the factor on cosines and sines."""
    inverse = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.frequency_factors is not None:
        inverse = inverse / torch.tensor(rope.frequency_factors, dtype=torch.float32)
    if rope.scaling == "linear":
        return inverse / rope.factor, 1.0
    if rope.scaling == "llama3":
        return _llama3(rope, inverse), 1.0
    if rope.scaling == "yarn":
        return _yarn(rope, inverse, head_dim), _yarn_attention_factor(rope)
    return inverse, 1.0


def _llama3(rope: RopeConfig, inverse: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    turns = rope.original_window * inverse / (2 * math.pi)  # rotations within the original window
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inverse / rope.factor + smooth * inverse


def _yarn(rope: RopeConfig, inverse: Tensor, head_dim: int) -> Tensor:
    """YaRN (Peng et al. 2023): dimensions that turn often keep their frequency, the others are interpolated."""

    def dimension(rotations: float) -> float:
        return head_dim * math.log(rope.original_window / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    interpolated = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return inverse / rope.factor * interpolated + inverse * (1 - interpolated)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
