"""The forward pass as plainly as it can be written: one sequence, no padding, no batch, an optional K/V cache.

The reference judges with it, and calibration watches the inputs of the linear layers through it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from drumline.model.config import ModelConfig
from drumline.model.layers import (
    causal_attention,
    inner_states,
    linear,
    normalise,
    project_qkv,
    quantise_rows,
    rope_tables,
    rotate,
)
from drumline.model.weights import Weights

if TYPE_CHECKING:
    from drumline.model.exact_reference import ExactRow

Watch = Callable[[int, str, Tensor], None]
"""Called with a layer's index, the name of a linear slot and what the slot is about to read, `[time, in]`."""


@dataclass
class Cache:
    """One (K, V) a layer, each `[1, kv_heads, tokens, head_dim]`; empty before the first call."""

    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    exact: "ExactRow | None" = None
    """What an exact model's kernels keep instead."""

    @property
    def length(self) -> int:
        """Tokens cached."""
        if self.exact is not None:
            return self.exact.length
        return self.layers[0][0].shape[2] if self.layers else 0

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new keys and values of one layer and return all of them."""
        if layer == len(self.layers):
            self.layers.append((key, value))
        else:
            keys, values = self.layers[layer]
            self.layers[layer] = (torch.cat((keys, key), dim=2), torch.cat((values, value), dim=2))
        return self.layers[layer]


def hidden_states(
    config: ModelConfig,
    weights: Weights,
    ids: Sequence[int],
    kv_dtype: torch.dtype,
    cache: Cache | None = None,
    watch: Watch | None = None,
) -> Tensor:
    """What the head reads, `[time, width]`, in the weights' dtype, for ids behind what `cache` holds; it grows by them.

    Raises `ValueError` for no ids, and past the model's window.
    """
    start = cache.length if cache is not None else 0
    end = start + len(ids)
    if not ids or end > config.window:
        raise ValueError(f"{len(ids)} ids at position {start} do not fit a window of 1 … {config.window} tokens")
    watch = watch or _watch_nothing
    device = weights.embedding.device
    hidden = functional.embedding(torch.tensor(ids, device=device), weights.embedding)
    if weights.position_embedding is not None:
        hidden = hidden + weights.position_embedding[start:end]
    rope = rope_tables(config.rope, config.head_dim, end, device) if config.rope is not None else None
    for index, layer in enumerate(weights.layers):
        normed = normalise(config, hidden, layer.attention_norm, layer.attention_norm_bias)
        watch(index, "qkv", normed)
        query, key, value = project_qkv(config, layer, normed)
        if rope is not None:
            cosine, sine = rope[0][start:], rope[1][start:]
            query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        query, key, value = (states.transpose(0, 1)[None] for states in (query, key, value))
        key, value = stored(key, kv_dtype), stored(value, kv_dtype)
        if cache is not None:
            key, value = cache.extend(index, key, value)
        mixed = causal_attention(query, key.to(query.dtype), value.to(query.dtype), start)
        mixed = mixed[0].transpose(0, 1).flatten(1)
        watch(index, "output", mixed)
        hidden = hidden + linear(mixed, layer.output, layer.output_bias)
        normed = normalise(config, hidden, layer.mlp_norm, layer.mlp_norm_bias)
        watch(index, "up", normed)
        inner = inner_states(config, layer, normed)
        watch(index, "down", inner)
        hidden = hidden + linear(inner, layer.down, layer.down_bias)
    return normalise(config, hidden, weights.final_norm, weights.final_norm_bias)


def stored(states: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values as a cache of `dtype` keeps them; int8, with one scale a token and head, is given back widened."""
    if dtype != torch.int8:
        return states.to(dtype)
    codes, scales = quantise_rows(states)
    return codes * scales


def _watch_nothing(layer: int, slot: str, states: Tensor) -> None:
    pass
