"""A float model to int8, offline and without a corpus: smooth, rotate, round.

Two changes that cancel out come before the rounding. SmoothQuant (Xiao et al. 2022) divides each input channel of a
linear layer by a factor and multiplies the weight's column by it, so that large activations shrink at the expense of
the weights. A Hadamard transform of both sides (QuaRot, Ashkboos et al. 2024) then spreads what is left of an outlier
over its block. Both are folded into the weights before the layer wherever something linear stands there; what cannot
be folded, `QuantisedWeight` keeps for the step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from drumline.model.config import ModelConfig
from drumline.model.errors import ModelLoadError
from drumline.model.layers import hadamard
from drumline.model.plain_forward import hidden_states
from drumline.model.weights import LayerWeights, LinearWeight, QuantisedWeight, Weights

FORMAT = 1
"""Counts the versions of what this module makes of a model, for caches of it."""

CALIBRATION_TOKENS = 512
_WIDEST_ROTATION = 64
_SMOOTHING = 0.5  # SmoothQuant's α: 0 leaves the activations as they are, 1 leaves all the difficulty to the weights
_STEPS_PER_OCTAVE = 4  # smoothing factors lie on a grid, so that the last bits of the statistics change nothing
_FAINTEST = 2.0**-20  # of the largest peak: below it all channels are smoothed alike

Finish = Callable[[Tensor, int, Tensor | None], LinearWeight]
"""Makes a linear slot of a smoothed and rotated weight (float64), its rotation and its multiplier."""


@dataclass(frozen=True)
class Peaks:
    """The largest magnitude that each input channel of each linear layer took; float32, one tensor a layer."""

    qkv: Sequence[Tensor]  # [width]
    output: Sequence[Tensor]  # [query_width]
    up: Sequence[Tensor]  # [width]
    down: Sequence[Tensor]  # [ffn_width]
    head: Tensor  # [width]


@torch.no_grad()
def quantise(weights: Weights, config: ModelConfig) -> Weights:
    """The model with every linear layer in int8; all else is float32, and a tied head becomes a weight of its own.

    Raises `ModelLoadError` where weights or activations are not finite.
    """
    folded = fold(weights, config, calibrate(weights, config), rounded)
    return folded.map(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor)


@torch.no_grad()
def calibrate(weights: Weights, config: ModelConfig) -> Peaks:
    """Watch one plain pass over random ids, always the same ones. They do nearly as well as text, and need none."""
    generator = torch.Generator().manual_seed(0)
    length = min(CALIBRATION_TOKENS, config.window)
    ids: list[int] = torch.randint(0, config.vocab_size, (length,), generator=generator).tolist()
    seen: dict[str, list[Tensor]] = {"qkv": [], "output": [], "up": [], "down": []}

    def watch(layer: int, slot: str, states: Tensor) -> None:
        seen[slot].append(states.abs().amax(0))

    hidden = hidden_states(config, weights, ids, weights.embedding.dtype, watch=watch)
    peaks = Peaks(**seen, head=hidden.abs().amax(0))
    for tensor in (*(tensor for tensors in seen.values() for tensor in tensors), peaks.head):
        if not tensor.isfinite().all():
            raise ModelLoadError("precision int8: this model has activations that are not finite")
    return peaks


def fold(weights: Weights, config: ModelConfig, peaks: Peaks, finish: Finish) -> Weights:
    """Smooth and rotate in float64, and let `finish` make the linear slots. Before rounding the model is the same."""
    head = _plain(weights.head)
    factors = _smoothing(peaks.head, _peaks(head, 0))
    return replace(
        weights,
        layers=tuple(_fold_layer(layer, config, peaks, index, finish) for index, layer in enumerate(weights.layers)),
        final_norm=weights.final_norm / factors,
        final_norm_bias=_divided(weights.final_norm_bias, factors),
        head=_rotated(head * factors, finish),
    )


def rounded(weight: Tensor, rotation: int, multiplier: Tensor | None) -> QuantisedWeight:
    """The nearest int8 weight with one scale a row, max|row| / 127. Raises `ModelLoadError` for what is not finite."""
    largest = _peaks(weight, 1)
    if not largest.isfinite().all():
        raise ModelLoadError("precision int8: this model has weights that are not finite")
    scales = (largest / 127).float()
    steps = torch.where(scales > 0, scales, 1).to(weight.dtype)
    codes = (weight / steps[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return QuantisedWeight(codes, scales, rotation, multiplier)


def rotation_width(channels: int) -> int:
    """The largest power of two that divides `channels`, at most 64."""
    return min(channels & -channels, _WIDEST_ROTATION)


def _fold_layer(layer: LayerWeights, config: ModelConfig, peaks: Peaks, index: int, finish: Finish) -> LayerWeights:
    """Each slot's factors go where its input comes from: norms, the rows that make values, the rows of `up`."""
    qkv, output, up, down = (_plain(slot) for slot in (layer.qkv, layer.output, layer.up, layer.down))
    for_qkv = _smoothing(peaks.qkv[index], _peaks(qkv, 0))
    for_output = _smoothing(*(_shared(config, tensor) for tensor in (peaks.output[index], _peaks(output, 0))))
    for_up = _smoothing(peaks.up[index], _peaks(up, 0))
    for_down = _smoothing(peaks.down[index], _peaks(down, 0))

    of_queries = for_output.repeat_interleave(config.group, 0).flatten()
    of_up_rows = torch.cat((torch.ones_like(for_down), for_down)) if config.gated else None
    return replace(
        layer,
        attention_norm=layer.attention_norm / for_qkv,
        attention_norm_bias=_divided(layer.attention_norm_bias, for_qkv),
        qkv=_rotated(_fold_values(config, qkv * for_qkv, for_output), finish),
        qkv_bias=None if layer.qkv_bias is None else _fold_values(config, layer.qkv_bias.double(), for_output),
        output=finish(hadamard(output * of_queries, rotation_width(config.head_dim)), 1, None),
        mlp_norm=layer.mlp_norm / for_up,
        mlp_norm_bias=_divided(layer.mlp_norm_bias, for_up),
        up=_rotated(up * for_up if of_up_rows is None else up * for_up / of_up_rows[:, None], finish),
        up_bias=layer.up_bias if of_up_rows is None else _divided(layer.up_bias, of_up_rows),
        down=_rotated(down * for_down, finish, 1 / for_down if of_up_rows is None else None),
    )


def _fold_values(config: ModelConfig, stacked: Tensor, factors: Tensor) -> Tensor:
    """The rows of `stacked` (`qkv`, or its bias) that make values, divided by `factors` `[kv_heads, head_dim]` and
    rotated head by head: attention only adds values up, so `output` may count on both."""
    rest, values = torch.split(stacked, [config.query_width + config.kv_width, config.kv_width])
    heads = values.view(config.kv_heads, config.head_dim, -1) / factors[..., None]
    heads = hadamard(heads.transpose(1, 2), rotation_width(config.head_dim)).transpose(1, 2)
    return torch.cat((rest, heads.reshape(values.shape)))


def _rotated(weight: Tensor, finish: Finish, multiplier: Tensor | None = None) -> LinearWeight:
    rotation = rotation_width(weight.shape[1])
    return finish(hadamard(weight, rotation), rotation, multiplier)


def _smoothing(activations: Tensor, columns: Tensor) -> Tensor:
    """activation^α / weight^(1 − α) of each input channel, rounded to 2^(k/4); float64."""
    exponents = _SMOOTHING * _octaves(activations) - (1 - _SMOOTHING) * _octaves(columns)
    return ((exponents * _STEPS_PER_OCTAVE).round() / _STEPS_PER_OCTAVE).exp2()


def _octaves(peaks: Tensor) -> Tensor:
    """log2, floored: what calibration hardly saw may still come, and must not then drown the other channels."""
    wide = peaks.double()
    floor = max(float(wide.max()) * _FAINTEST, torch.finfo(torch.float32).tiny)
    return wide.clamp_min(floor).log2()


def _shared(config: ModelConfig, channels: Tensor) -> Tensor:
    """`[query_width]` to `[kv_heads, head_dim]`: the largest over the query heads that share values."""
    return channels.view(config.kv_heads, config.group, config.head_dim).amax(1)


def _peaks(weight: Tensor, dim: int) -> Tensor:
    return weight.abs().amax(dim)


def _divided(bias: Tensor | None, factors: Tensor) -> Tensor | None:
    return None if bias is None else bias / factors


def _plain(weight: LinearWeight) -> Tensor:
    if isinstance(weight, QuantisedWeight):
        raise TypeError("these weights are quantised already")
    return weight
