"""Residual, norm, rotation, int8: from the last product's outputs to the next product's codes, token by token."""

import math

import numpy as np
from numba import prange

from drumline.model.kernels import vectors as v
from drumline.model.kernels.compile import inlined, parallel_kernel
from drumline.model.kernels.quantise import ONE, ZERO, quantise, rotate


@inlined
def _add_update(t, hidden, update, bias):
    """hidden[t] += update[t] + bias: what a block adds to the residual stream."""
    length = hidden.shape[1]
    for i in range(0, length, 16):
        x = v.add(v.load(update, t * length + i), v.load(bias, i))
        v.store(hidden, t * length + i, v.add(v.load(hidden, t * length + i), x))


@inlined
def _normalise_token(t, worker, hidden, weight, bias, eps, width, centred, rotation, scratch, codes, scales):
    """Codes and scale of the normed and rotated hidden[t].

    RMSNorm's factor, and the rotation's, are one number a token: they go into its scale, after rounding.
    """
    length, start, row = hidden.shape[1], worker * scratch.shape[1], t * hidden.shape[1]
    zero = v.broadcast(ZERO)
    mean = zero
    if centred:
        for i in range(0, length, 16):
            mean = v.add(mean, v.first_lanes(v.load(hidden, row + i), width - i, zero))
        mean = v.broadcast(v.total(mean) / np.float32(width))
    squares = zero
    for i in range(0, length, 16):
        x = v.first_lanes(v.subtract(v.load(hidden, row + i), mean), width - i, zero)
        squares = v.multiply_add(x, x, squares)
        v.store(scratch, start + i, v.multiply(x, v.load(weight, i)))
    factor = ONE / np.float32(math.sqrt(v.total(squares) / np.float32(width) + eps))
    if centred:
        spread = v.broadcast(factor)
        for i in range(0, length, 16):
            v.store(scratch, start + i, v.multiply_add(v.load(scratch, start + i), spread, v.load(bias, i)))
        factor = ONE
    rotate(scratch, start, length, rotation)
    step = quantise(scratch, start, length, codes, t * codes.shape[1])
    scales[t] = step * factor / np.float32(math.sqrt(rotation))


@inlined
def normalise_tokens(
    first, last, worker, updated, hidden, update, update_bias, weight, bias, eps, width, centred, rotation,
    scratch, codes, scales,
):  # fmt: skip
    """Tokens first … last − 1: add the update where there is one, norm, rotate, quantise."""
    for t in range(first, last):
        if updated:
            _add_update(t, hidden, update, update_bias)
        _normalise_token(t, worker, hidden, weight, bias, eps, width, centred, rotation, scratch, codes, scales)


@parallel_kernel
def normalise(
    tokens, threads, updated, hidden, update, update_bias, weight, bias, eps, width, centred, rotation, scratch,
    codes, scales,
):  # fmt: skip
    """`normalise_tokens` for all tokens; one thread is this one, without the others being woken.

    `hidden` and `update`, the last product's output, are float32 [tokens, padded width]; `codes` [tokens, padded width]
    and `scales` [tokens] are what the next product takes. What stands in padding columns is never read.
    """
    if threads == 1:
        zero = np.int64(0)
        normalise_tokens(
            zero, tokens, zero, updated, hidden, update, update_bias, weight, bias, eps, width, centred, rotation,
            scratch, codes, scales,
        )  # fmt: skip
        return
    for share in prange(threads):
        worker = np.int64(share)
        normalise_tokens(
            worker * tokens // threads, (worker + 1) * tokens // threads, worker, updated, hidden, update, update_bias,
            weight, bias, eps, width, centred, rotation, scratch, codes, scales,
        )  # fmt: skip
