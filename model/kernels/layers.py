"""All layers of a step in one call, so that a lone token does not pay for three hundred calls from Python."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from drumline.model.kernels.attention import attend, quantise_mixed
from drumline.model.kernels.compile import kernel
from drumline.model.kernels.feed_forward import feed
from drumline.model.kernels.norm import normalise
from drumline.model.kernels.product import product
from drumline.model.kernels.rope import write

Floats = NDArray[np.float32]
Whole = NDArray[np.int64]
Codes = NDArray[Any]


class Shape(NamedTuple):
    """What of a model's description the kernels need, as plain numbers."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_width: int
    eps: np.float32
    centred: bool
    gated: bool
    activation: int
    rotary: bool
    head_normed: bool
    query_scale: np.float32
    """1 / √head_dim · log2 e: softmax is taken to base 2."""
    qkv_rotation: int
    output_rotation: int
    up_rotation: int
    down_rotation: int


class Vectors(NamedTuple):
    """Norms and biases of all layers, float32 `[layers, padded width]`; zeros (or ones) where the family has none."""

    attention_norm: Floats
    attention_norm_bias: Floats
    qkv_bias: Floats
    query_norm: Floats
    key_norm: Floats
    output_bias: Floats
    mlp_norm: Floats
    mlp_norm_bias: Floats
    up_bias: Floats
    down_bias: Floats
    down_multiplier: Floats
    cosine: Floats
    sine: Floats


class Panels(NamedTuple):
    """int8 weights of all layers as panels `[layers, bytes]`, and the scales of their outputs `[layers, outputs]`."""

    qkv: Codes
    qkv_scales: Floats
    output: Codes
    output_scales: Floats
    up: Codes
    up_scales: Floats
    down: Codes
    down_scales: Floats


class Buffers(NamedTuple):
    """Where a step computes; each holds `[tokens, …]` for as many tokens as a step has had."""

    hidden: Floats
    codes: Codes
    """Of normed states; `mixed_codes` and `ffn_codes` are what the output and the down projection take."""
    mixed_codes: Codes
    ffn_codes: Codes
    scales: Floats
    """Of whichever codes are next to be multiplied."""
    qkv: Floats
    queries: Floats
    mixed: Floats
    update: Floats
    up: Floats
    last_hidden: Floats
    """Of the tokens whose logits are wanted; `last_update` is what the last layer adds to them."""
    last_update: Floats
    scratch: Floats
    staging: Codes
    scores: Floats


class Work(NamedTuple):
    """What the tokens of a step are: rows and positions int64 `[tokens]`, attention's tasks and their `order`, longest
    first."""

    rows: Whole
    positions: Whole
    tasks: Whole
    order: Whole


class Store(NamedTuple):
    """The arrays of a `TiledKV`."""

    keys: Codes
    values: Codes
    key_scales: Floats
    value_scales: Floats
    scaled: bool


FEW = 2
"""Up to so many tokens, waking the other threads for a norm costs more than it saves."""


@kernel
def run_layers(tokens, threads, shape, vectors, panels, buffers, work, store):
    """Every layer over the tokens in `buffers.hidden`; what the last one adds is left in `buffers.update`.

    The same kernels in the same order as `CpuBackend._run_layer`.
    """
    s, v, p, b, few = shape, vectors, panels, buffers, 1 if tokens <= FEW else threads
    for layer in range(s.layers):
        keys, values = store.keys[layer], store.values[layer]
        key_scales, value_scales = store.key_scales[layer], store.value_scales[layer]
        normalise(
            tokens, few, layer > 0, b.hidden, b.update, v.down_bias[max(layer - 1, 0)], v.attention_norm[layer],
            v.attention_norm_bias[layer], s.eps, s.width, s.centred, s.qkv_rotation, b.scratch, b.codes, b.scales,
        )  # fmt: skip
        product(tokens, b.codes, b.scales, p.qkv[layer], p.qkv_scales[layer], b.qkv)
        write(
            tokens, few, b.qkv, v.qkv_bias[layer], s.heads, s.kv_heads, s.head_dim, s.query_scale, v.query_norm[layer],
            v.key_norm[layer], s.eps, s.head_normed, s.rotary, v.cosine, v.sine, work.rows, work.positions, b.scratch,
            b.staging, b.queries, keys, values, key_scales, value_scales, store.scaled,
        )  # fmt: skip
        attend(
            threads, work.tasks, work.order, s.head_dim, b.queries, keys, values, key_scales, value_scales,
            store.scaled, b.scores, b.mixed,
        )  # fmt: skip
        quantise_mixed(tokens, few, b.mixed, s.head_dim, s.output_rotation, b.scratch, b.mixed_codes, b.scales)
        product(tokens, b.mixed_codes, b.scales, p.output[layer], p.output_scales[layer], b.update)
        normalise(
            tokens, few, np.bool_(True), b.hidden, b.update, v.output_bias[layer], v.mlp_norm[layer],
            v.mlp_norm_bias[layer], s.eps, s.width, s.centred, s.up_rotation, b.scratch, b.codes, b.scales,
        )  # fmt: skip
        product(tokens, b.codes, b.scales, p.up[layer], p.up_scales[layer], b.up)
        feed(
            tokens, few, b.up, v.up_bias[layer], s.ffn_width, s.gated, s.activation, v.down_multiplier[layer],
            s.down_rotation, b.scratch, b.ffn_codes, b.scales,
        )  # fmt: skip
        product(tokens, b.ffn_codes, b.scales, p.down[layer], p.down_scales[layer], b.update)
