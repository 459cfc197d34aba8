"""Activation, rotation, int8 between the two products of a feed-forward block, token by token."""

import math

import numpy as np
from numba import prange

from drumline.model.kernels import vectors as v
from drumline.model.kernels.compile import inlined, parallel_kernel
from drumline.model.kernels.quantise import ZERO, activate, quantise, rotate


@inlined
def feed_tokens(
    first, last, worker, up, bias, width, gated, activation, multiplier, rotation, scratch, codes, scales
):  # fmt: skip
    """Tokens first … last − 1: codes and scale of act(gate) · up, or of act(up) · multiplier where not gated."""
    start, length, zero = worker * scratch.shape[1], codes.shape[1], v.broadcast(ZERO)
    for t in range(first, last):
        row = t * up.shape[1]
        for i in range(0, length, 16):
            x = activate(v.add(v.load(up, row + i), v.load(bias, i)), activation)
            y = v.add(v.load(up, row + width + i), v.load(bias, width + i)) if gated else v.load(multiplier, i)
            v.store(scratch, start + i, v.first_lanes(v.multiply(x, y), width - i, zero))
        rotate(scratch, start, length, rotation)
        step = quantise(scratch, start, length, codes, t * length)
        scales[t] = step / np.float32(math.sqrt(rotation))


@parallel_kernel
def feed(tokens, threads, up, bias, width, gated, activation, multiplier, rotation, scratch, codes, scales):
    """`feed_tokens` for all tokens: `up` float32 [tokens, gate | up, padded] → codes [tokens, padded ffn width]."""
    if threads == 1:
        zero = np.int64(0)
        feed_tokens(
            zero, tokens, zero, up, bias, width, gated, activation, multiplier, rotation, scratch, codes, scales
        )  # fmt: skip
        return
    for share in prange(threads):
        worker = np.int64(share)
        feed_tokens(
            worker * tokens // threads, (worker + 1) * tokens // threads, worker, up, bias, width, gated, activation,
            multiplier, rotation, scratch, codes, scales,
        )  # fmt: skip
