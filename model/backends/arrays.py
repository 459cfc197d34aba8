"""A quantised model as the arrays that the CPU kernels take, padded to whole vectors, and a step's buffers."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drumline.model.config import ModelConfig
from drumline.model.kernels.attention_tiles import QUERIES
from drumline.model.kernels.layers import Buffers, Floats, Shape, Vectors
from drumline.model.kernels.quantise import GELU, GELU_TANH, SILU
from drumline.model.kernels.store import padded
from drumline.model.language_model import LanguageModel
from drumline.model.layers import rope_tables
from drumline.model.weights import LinearWeight, QuantisedWeight, Weights

MOST_INPUTS = 65_536
"""Of one product: 255 · 127 · 65,536 stays below 2^31, also where codes are kept as code + 128."""
_ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH, "gelu": GELU}


def quantised(weight: LinearWeight) -> QuantisedWeight:
    """The weight, which an int8 model has quantised; raises `ValueError` where kernels cannot multiply it."""
    if not isinstance(weight, QuantisedWeight):
        raise ValueError("the CPU kernels multiply int8 weights only")
    if weight.shape[1] > MOST_INPUTS:
        raise ValueError(f"a product of {weight.shape[1]} inputs may pass the range of int32; at most {MOST_INPUTS}")
    return weight


def slot(weights: Weights, name: str, multiplied: bool = False) -> list[QuantisedWeight]:
    """One linear slot of every layer; raises `ValueError` for what the kernels do not apply to that slot."""
    found = [quantised(getattr(layer, name)) for layer in weights.layers]
    for index, weight in enumerate(found):
        if weight.rotation != found[0].rotation:
            raise ValueError(f"layer {index}, {name}: rotation {weight.rotation}, layer 0 has {found[0].rotation}")
        if weight.multiplier is not None and not multiplied:
            raise ValueError(f"layer {index}, {name}: the CPU kernels take a multiplier only before an ungated `down`")
    return found


def describe(config: ModelConfig, weights: Weights) -> Shape:
    """The numbers of a description that kernels branch on."""
    first = weights.layers[0]
    return Shape(
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        ffn_width=config.ffn_width,
        eps=np.float32(config.norm_eps),
        centred=config.norm == "layer",
        gated=config.gated,
        activation=_ACTIVATIONS[config.activation],
        rotary=config.rope is not None,
        head_normed=config.qk_norm,
        query_scale=np.float32(math.log2(math.e) / math.sqrt(config.head_dim)),
        qkv_rotation=quantised(first.qkv).rotation,
        output_rotation=quantised(first.output).rotation,
        up_rotation=quantised(first.up).rotation,
        down_rotation=quantised(first.down).rotation,
    )


def layer_vectors(model: LanguageModel) -> Vectors:
    """Norms, biases and RoPE tables of all layers."""
    config, layers = model.config, model.weights.layers

    def lines(name: str, length: int, absent: float = 0.0) -> Floats:
        return stacked([getattr(layer, name) for layer in layers], length, absent)

    rope = config.rope and rope_tables(config.rope, config.head_dim, model.window, torch.device("cpu"))
    cosine, sine = (table.numpy() for table in rope) if rope else (np.zeros((1, 1), np.float32),) * 2
    up_width = config.ffn_width * (2 if config.gated else 1)
    return Vectors(
        attention_norm=lines("attention_norm", config.width),
        attention_norm_bias=lines("attention_norm_bias", config.width),
        qkv_bias=lines("qkv_bias", config.query_width + 2 * config.kv_width + 16),  # vectors may read beyond the end
        query_norm=lines("query_norm", config.head_dim, 1.0),
        key_norm=lines("key_norm", config.head_dim, 1.0),
        output_bias=lines("output_bias", config.width),
        mlp_norm=lines("mlp_norm", config.width),
        mlp_norm_bias=lines("mlp_norm_bias", config.width),
        up_bias=lines("up_bias", up_width + 16),
        down_bias=lines("down_bias", config.width),
        down_multiplier=stacked([quantised(layer.down).multiplier for layer in layers], config.ffn_width, 1.0),
        cosine=np.ascontiguousarray(cosine, np.float32),
        sine=np.ascontiguousarray(sine, np.float32),
    )


def stacked(tensors: Sequence[Tensor | None], length: int, absent: float = 0.0) -> Floats:
    """Float32 `[tensors, padded length]`, zeros behind each; `absent` where there is no tensor."""
    lines = np.zeros((len(tensors), padded(length)), np.float32)
    for line, tensor in zip(lines, tensors, strict=True):
        if tensor is None:
            line[:length] = absent
        else:
            line[: len(tensor)] = tensor.numpy()
    return lines


def make_buffers(config: ModelConfig, window: int, tokens: int, threads: int, code_type: Any, kv_type: Any) -> Buffers:
    """Room for a step of `tokens` tokens on `threads` threads."""
    width, ffn, queries = padded(config.width), padded(config.ffn_width), padded(config.query_width)
    up = padded(config.ffn_width * (2 if config.gated else 1))
    group, head = config.group, padded(config.head_dim)

    def floats(*shape: int) -> Floats:
        return np.zeros(shape, np.float32)

    return Buffers(
        hidden=floats(tokens, width),
        codes=np.zeros((tokens, width), code_type),
        mixed_codes=np.zeros((tokens, queries), code_type),
        ffn_codes=np.zeros((tokens, ffn), code_type),
        scales=floats(tokens),
        last_hidden=floats(tokens, width),
        last_update=floats(tokens, width),
        # One line more than tokens: a head's, or a gate's, last vector may read beyond it.
        qkv=floats(tokens + 1, padded(config.query_width + 2 * config.kv_width)),
        queries=floats(config.kv_heads, tokens, group, head),
        mixed=floats(config.kv_heads, tokens, group, head),
        update=floats(tokens, width),
        up=floats(tokens + 1, up),
        scratch=floats(threads, max(width, ffn, queries, head)),
        staging=np.zeros((threads, head), kv_type),
        scores=floats(threads, QUERIES, padded(window) + 16),
    )
