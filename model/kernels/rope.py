"""Queries, keys and values from the stacked product: bias, query/key norms, RoPE, and the write to the K/V store.

Layouts are those of `store.TiledKV`.
"""

import math

import numpy as np
from numba import prange

from drumline.model.kernels import vectors as v
from drumline.model.kernels.compile import inlined, parallel_kernel
from drumline.model.kernels.quantise import ONE, ZERO, quantise


@inlined
def _turn(x, worker, head_dim, cosine, sine, position):
    """Rotate the pairs (d, d + head_dim / 2) of a head by its position."""
    half = head_dim // 2
    start, angle = worker * x.shape[1], position * half
    whole = half // 16 * 16
    for d in range(0, whole, 16):
        a, b = v.load(x, start + d), v.load(x, start + half + d)
        c, s = v.load(cosine, angle + d), v.load(sine, angle + d)
        v.store(x, start + d, v.subtract(v.multiply(a, c), v.multiply(b, s)))
        v.store(x, start + half + d, v.add(v.multiply(b, c), v.multiply(a, s)))
    for d in range(whole, half):
        p, q = x[worker, d], x[worker, half + d]
        c, s = cosine[position, d], sine[position, d]
        x[worker, d] = p * c - q * s
        x[worker, half + d] = q * c + p * s


@inlined
def _head(t, qkv, bias, column, x, worker, head_dim, normed, weight, eps, rotary, cosine, sine, position):
    """One head of one token into x[worker]: biased, normed and turned as the family asks, zeros behind it."""
    start, row, zero = worker * x.shape[1], t * qkv.shape[1] + column, v.broadcast(ZERO)
    for d in range(0, head_dim, 16):
        a = v.add(v.load(qkv, row + d), v.load(bias, column + d))
        a = v.multiply_add(a, zero, a)  # an infinity becomes NaN: of infinite scores alone a softmax makes numbers
        v.store(x, start + d, v.first_lanes(a, head_dim - d, zero))
    if normed:
        squares = zero
        for d in range(0, head_dim, 16):
            a = v.load(x, start + d)
            squares = v.multiply_add(a, a, squares)
        factor = v.broadcast(ONE / np.float32(math.sqrt(v.total(squares) / np.float32(head_dim) + eps)))
        for d in range(0, head_dim, 16):
            v.store(x, start + d, v.multiply(v.multiply(v.load(x, start + d), factor), v.load(weight, d)))
    if rotary:
        _turn(x, worker, head_dim, cosine, sine, position)


@inlined
def _keep(x, worker, length, staging, scaled):
    """x[worker] as the store keeps it, in `staging[worker]`; returns the scale (1 where there is none)."""
    start, kept = worker * x.shape[1], worker * staging.shape[1]
    if scaled:
        return quantise(x, start, length, staging, kept)
    for d in range(0, length, 16):
        v.store(staging, kept + d, v.load(x, start + d))
    return ONE


@inlined
def write_tokens(
    first, last, worker, qkv, bias, heads, kv_heads, head_dim, query_scale, query_norm, key_norm, eps, normed,
    rotary, cosine, sine, rows, positions, scratch, staging, queries, keys, values, key_scales, value_scales, scaled,
):  # fmt: skip
    """Tokens first … last − 1: queries, scaled for a softmax to base 2, and keys and values in the store."""
    padded, group, start = queries.shape[3], heads // kv_heads, worker * scratch.shape[1]
    scale = v.broadcast(query_scale)
    for t in range(first, last):
        row, position = rows[t], positions[t]
        for head in range(heads):
            _head(t, qkv, bias, head * head_dim, scratch, worker, head_dim, normed, query_norm, eps, rotary, cosine,
                  sine, position)  # fmt: skip
            place = ((head // group * queries.shape[1] + t) * group + head % group) * padded
            for d in range(0, padded, 16):
                v.store(queries, place + d, v.multiply(v.load(scratch, start + d), scale))
        for head in range(kv_heads):
            column = (heads + head) * head_dim
            _head(t, qkv, bias, column, scratch, worker, head_dim, normed, key_norm, eps, rotary, cosine, sine,
                  position)  # fmt: skip
            step = _keep(scratch, worker, padded, staging, scaled)
            if scaled:
                key_scales[row, head, position] = step
            tile, lane = position // 16, position % 16
            for d in range(head_dim):
                keys[row, head, tile, d, lane] = staging[worker, d]
            column += kv_heads * head_dim
            _head(t, qkv, bias, column, scratch, worker, head_dim, np.bool_(False), key_norm, eps, np.bool_(False),
                  cosine, sine, position)  # fmt: skip
            step = _keep(scratch, worker, padded, staging, scaled)
            if scaled:
                value_scales[row, head, position] = step
            for d in range(padded):
                values[row, head, position, d] = staging[worker, d]


@parallel_kernel
def write(
    tokens, threads, qkv, bias, heads, kv_heads, head_dim, query_scale, query_norm, key_norm, eps, normed,
    rotary, cosine, sine, rows, positions, scratch, staging, queries, keys, values, key_scales, value_scales, scaled,
):  # fmt: skip
    """`write_tokens` for all tokens. `qkv` float32 [tokens, padded]; `queries` [kv_heads, tokens, group, padded]."""
    if threads == 1:
        zero = np.int64(0)
        write_tokens(
            zero, tokens, zero, qkv, bias, heads, kv_heads, head_dim, query_scale, query_norm, key_norm, eps, normed,
            rotary, cosine, sine, rows, positions, scratch, staging, queries, keys, values, key_scales, value_scales,
            scaled,
        )  # fmt: skip
        return
    for share in prange(threads):
        worker = np.int64(share)
        write_tokens(
            worker * tokens // threads, (worker + 1) * tokens // threads, worker, qkv, bias, heads, kv_heads, head_dim,
            query_scale, query_norm, key_norm, eps, normed, rotary, cosine, sine, rows, positions, scratch, staging,
            queries, keys, values, key_scales, value_scales, scaled,
        )  # fmt: skip
