"""Causal attention by each row's own length: a loop over rows and K/V heads, no padding and no mask.

A decoding token is a chunk of length 1. Work is cut into tasks of one K/V head and up to six query vectors (tokens ×
the query heads of its group); a task reads its own row's keys and values and nothing else.
"""

import math

import numpy as np
from numba import prange

from drumline.model.kernels import attention_tiles as tiles
from drumline.model.kernels import vectors as v
from drumline.model.kernels.compile import inlined, parallel_kernel
from drumline.model.kernels.quantise import ONE, ZERO, exp2, quantise, rotate

_LOW = np.float32(-np.inf)  # where no score is above it, the softmax is NaN, as it should be
_QUERIES = tiles.QUERIES


@inlined
def _sums(
    queries, left, left_at, left_line, right, right_at, step, run, runs, steps, out, out_at, out_line, ahead, ahead_at,
    ahead_step, ahead_wide_step, ahead_run,
):  # fmt: skip
    """out[q, 16 r + lane] = Σ_s left[q, s] · right[s, r, lane] for any number of runs: `attention_tiles`.

    Of `ahead`, what each run asks for lies `ahead_run` behind that of the one before; a step asks for `ahead_step`
    more, or for `ahead_wide_step` where two runs are taken at once.
    """
    r = 0
    while r < runs:
        x, y, soon = right_at + r * run, out_at + r * 16, ahead_at + r * ahead_run
        if queries <= tiles.WIDE and r + 2 <= runs:
            tiles.sums_wide(
                queries, left, left_at, left_line, right, x, step, run, steps, out, y, out_line, ahead, soon,
                ahead_wide_step,
            )  # fmt: skip
            r += 2
        else:
            tiles.sums(
                queries, left, left_at, left_line, right, x, step, run, steps, out, y, out_line, ahead, soon, ahead_step
            )
            r += 1


@inlined
def _softmax(scores, place, visible, end):
    """2^(s − max) of the `visible` first scores in place, zeros behind them up to `end`; returns 1 / their sum."""
    last = (visible - 1) // 16 * 16
    low, zero = v.broadcast(_LOW), v.broadcast(ZERO)
    top = v.first_lanes(v.load(scores, place + last), visible - last, low)
    for i in range(0, last, 16):
        top = v.larger(v.load(scores, place + i), top)
    top = v.broadcast(v.highest(top))
    mass = zero
    for i in range(0, last, 16):
        x = exp2(v.subtract(v.load(scores, place + i), top))
        v.store(scores, place + i, x)
        mass = v.add(mass, x)
    x = v.first_lanes(exp2(v.subtract(v.load(scores, place + last), top)), visible - last, zero)
    v.store(scores, place + last, x)
    for i in range(last + 16, end, 16):
        v.store(scores, place + i, zero)
    return ONE / v.total(v.add(mass, x))


@inlined
def _scale(scores, place, scales, start, end):
    for i in range(0, end, 16):
        v.store(scores, place + i, v.multiply(v.load(scores, place + i), v.load(scales, start + i)))


@inlined
def _mix_on(scratch, worker, i, values, value, width, first, last, out, at):
    """Go on with the sums in `out`, one query's, over the values first … last − 1: those that earlier tokens of the
    block do not see. Even weighted with zero a NaN among them would reach those."""
    for j in range(first, last):
        weight = v.broadcast(scratch[worker, i, j])
        for d in range(0, width, 16):
            mixed = v.multiply_add(weight, v.load(values, value + j * width + d), v.load(out, at + d))
            v.store(out, at + d, mixed)


@inlined
def attend_block(
    head, token, tokens, row, position, next_head, next_row, worker, head_dim, queries, keys, values, key_scales,
    value_scales, scaled, scratch, out,
):  # fmt: skip
    """Attention of `tokens` consecutive tokens of one row, the first at `position`, for one K/V head."""
    group, width, window = queries.shape[2], queries.shape[3], values.shape[2]
    line = row * keys.shape[1] + head
    key, value = line * keys.shape[2] * head_dim * 16, line * window * width
    next_key = (next_row * keys.shape[1] + next_head) * keys.shape[2] * head_dim * 16
    first = (head * queries.shape[1] + token) * group
    stride, place = scratch.shape[2], worker * scratch.shape[1] * scratch.shape[2]
    done, vectors = 0, tokens * group
    while done < vectors:
        count = min(_QUERIES, vectors - done)
        least, most = position + 1 + done // group, position + 1 + (done + count - 1) // group
        end = (most + 15) // 16 * 16
        at = (first + done) * width
        _sums(
            count, queries, at, width, keys, key, 16, head_dim * 16, end // 16, head_dim, scratch, place, stride,
            values, value, 16, 32, head_dim * 16,
        )  # fmt: skip
        for i in range(count):
            visible = position + 1 + (done + i) // group
            if scaled:
                _scale(scratch, place + i * stride, key_scales, line * window, end)
            scratch[worker, i, stride - 1] = _softmax(scratch, place + i * stride, visible, end)
            if scaled:
                _scale(scratch, place + i * stride, value_scales, line * window, visible // 16 * 16)
                for j in range(visible // 16 * 16, visible):
                    scratch[worker, i, j] *= value_scales[row, head, j]
        _sums(
            count, scratch, place, stride, values, value, width, 16, width // 16, least, out, at, width, keys, next_key,
            width, width, 16,
        )  # fmt: skip
        for i in range(count):
            visible = position + 1 + (done + i) // group
            _mix_on(scratch, worker, i, values, value, width, least, visible, out, at + i * width)
            inverse = v.broadcast(scratch[worker, i, stride - 1])
            for d in range(at + i * width, at + (i + 1) * width, 16):
                v.store(out, d, v.multiply(v.load(out, d), inverse))
        done += count


@parallel_kernel
def attend(threads, tasks, order, head_dim, queries, keys, values, key_scales, value_scales, scaled, scratch, out):
    """`out` [kv_heads, tokens, group, width] of `queries` of the same shape.

    `tasks` int64 [tasks, 5]: K/V head, first token in the batch, tokens, row, position of the first; `order` lists them
    longest first, and workers take them in turn. `scratch` float32 [threads, 6, padded window + 16]: the last
    of a line keeps 1 / (the sum of its weights).
    """
    for share in prange(threads):
        worker = np.int64(share)
        for index in range(worker, len(order), threads):
            task, following = order[index], order[min(index + threads, len(order) - 1)]
            attend_block(
                tasks[task, 0], tasks[task, 1], tasks[task, 2], tasks[task, 3], tasks[task, 4], tasks[following, 0],
                tasks[following, 3], worker, head_dim, queries, keys, values, key_scales, value_scales, scaled, scratch,
                out,
            )  # fmt: skip


@inlined
def quantise_mixed_tokens(first, last, worker, mixed, head_dim, rotation, scratch, codes, scales):
    """Tokens first … last − 1: codes and scale of all heads side by side, as the output projection takes them."""
    kv_heads, group, width = mixed.shape[0], mixed.shape[2], mixed.shape[3]
    start, length, heads = worker * scratch.shape[1], codes.shape[1], kv_heads * group
    for t in range(first, last):
        for d in range(heads * head_dim, length):
            scratch[worker, d] = ZERO
        for head in range(heads):
            place = ((head // group * mixed.shape[1] + t) * group + head % group) * width
            if head_dim == width:
                for d in range(0, width, 16):
                    v.store(scratch, start + head * width + d, v.load(mixed, place + d))
            else:
                for d in range(head_dim):
                    scratch[worker, head * head_dim + d] = mixed[head // group, t, head % group, d]
        rotate(scratch, start, length, rotation)
        scales[t] = quantise(scratch, start, length, codes, t * length) / np.float32(math.sqrt(rotation))


@parallel_kernel
def quantise_mixed(tokens, threads, mixed, head_dim, rotation, scratch, codes, scales):
    """`quantise_mixed_tokens` for all: `mixed` as `attend` leaves it → codes [tokens, padded query width]."""
    if threads == 1:
        zero = np.int64(0)
        quantise_mixed_tokens(zero, tokens, zero, mixed, head_dim, rotation, scratch, codes, scales)
        return
    for share in prange(threads):
        worker = np.int64(share)
        quantise_mixed_tokens(
            worker * tokens // threads, (worker + 1) * tokens // threads, worker, mixed, head_dim, rotation, scratch,
            codes, scales,
        )  # fmt: skip
