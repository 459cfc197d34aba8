"""Choosing the next token of all rows of a step, each by itself: what `model/distribution.py` says, without a sort.

Weights are whole numbers, so the sums that decide what stays and what is drawn are exact in any order, and a row's
token is that of the full sort however it is found: from a short sorted list where the row's best tokens suffice, else
from all of its live tokens.
"""

import math

import numpy as np
from numba import prange

from drumline.model.kernels import vectors64 as w
from drumline.model.kernels.compile import inlined, kernel, parallel_kernel
from drumline.model.kernels.selection import (
    BLOCK,
    SHORT,
    change,
    find_best,
    find_maxima,
    first_of,
    highest_of,
    keep_within,
    last_within,
    list_live,
    of_thread,
    read_block,
    replace,
    stand_apart,
    weigh,
    weigh_block,
    weigh_blocks,
)
from drumline.model.kernels.whole_numbers import philox_draw, product_shifted
from drumline.model.random_state import DRAW_BITS

OK, NOT_FINITE, ALL_MASKED = 0, 1, 2
"""How a row ended."""

ROW = np.dtype(
    [
        ("logits", np.int64),
        ("greedy", np.int64),
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.uint64),
        ("top_p_shift", np.uint64),
        ("least", np.float64),
        ("farthest", np.float64),
        ("seed", np.uint64),
        ("choice", np.uint64),
        ("index", np.uint64),
        ("changes", np.int64),
        ("changes_end", np.int64),
        ("replaced", np.int64),
        ("logprobs", np.int64),
        ("status", np.int64),
        ("chosen", np.int64),
        ("logprob", np.float32),
    ]
)
"""One row's work and its outcome.

- `logits`: the row's place in the logits
- `top_k`: 0 keeps all; `top_p` / 2^`top_p_shift` is p exactly, the shift below 128; p = 1 is 1 / 2^0
- `least`: the smallest weight that min_p keeps, at least 1
- `farthest`: (score − highest) / temperature below which no weight reaches `least`
- `changes`, `changes_end`: where its changed scores lie
- `replaced`: which full row of scores takes the logits' place, −1 for none
- `logprobs`: how many of the likeliest to tell, −1 for no log-probabilities at all
- `status`, `chosen`, `logprob`: the outcome
"""

_DRAW_SHIFT = np.uint64(DRAW_BITS)
_LOWEST = float(np.finfo(np.float32).min)


@inlined
def _token(row, logits, scratch):
    """The chosen id of a row whose scores stand ready, −1 where all are masked."""
    stand_apart()
    highest = highest_of(scratch.maxima)
    if highest == -np.inf:
        return -1
    if row.greedy:
        return first_of(logits, scratch, highest)
    uniform = philox_draw(row.seed, row.choice, row.index)
    if 0 < row.top_k <= SHORT:
        return _token_of_list(row, logits, scratch, highest, uniform, row.top_k, np.int64(-1))
    if row.top_k == 0:
        mass = weigh_blocks(logits, scratch, highest, row.temperature, row.least, row.farthest)
        if row.top_p_shift == 0:
            return _token_of_all(row, logits, scratch, highest, uniform, mass)
        for count in (32, SHORT):
            chosen = _token_of_list(row, logits, scratch, highest, uniform, count, mass)
            if chosen >= 0:
                return chosen
    return _token_of_live(row, logits, scratch, highest, uniform)


@inlined
def _threshold(uniform, mass):
    """A whole running sum exceeds u · mass where it exceeds its whole part."""
    return np.int64(product_shifted(uniform, np.uint64(mass), _DRAW_SHIFT))


@inlined
def _mass_within(row, mass):
    """The whole part of p · mass."""
    return np.int64(product_shifted(row.top_p, np.uint64(mass), row.top_p_shift))


@inlined
def _token_of_all(row, logits, scratch, highest, uniform, mass):
    """The draw where only weights decide what stays."""
    stand_apart()
    sums, weights = scratch.sums, scratch.weights
    threshold, running, block = _threshold(uniform, mass), np.int64(0), 0
    while running + sums[block] <= threshold:
        running += sums[block]
        block += 1
    weigh_block(
        block, logits, scratch.slots, scratch.changed, scratch.scores, highest, row.temperature, row.least, weights
    )
    i = 0
    while True:
        running += np.int64(weights[i])
        if running > threshold:
            return block * BLOCK + i
        i += 1


@inlined
def _token_of_list(row, logits, scratch, highest, uniform, count, mass):
    """The draw from the best `count` tokens; −1 where top-p would keep more of them. `mass` −1: theirs is the whole."""
    stand_apart()
    found = find_best(logits, scratch, count)
    scores, weights, ids = scratch.best_scores, scratch.best_weights, scratch.best_ids
    padded = (found + 15) // 16 * 16
    for i in range(found, padded):
        scores[i] = -np.inf
    listed = weigh(scores, 0, padded, highest, row.temperature, row.least, weights)
    if mass < 0:
        mass = listed
    if row.top_p_shift > 0:
        limit, before, kept = _mass_within(row, mass), np.int64(0), 0
        while kept < found and before <= limit:
            before += np.int64(weights[kept])
            kept += 1
        if before <= limit and listed < mass:
            return np.int64(-1)
        found, mass = kept, before
    _sort_by_id(ids, weights, found)
    threshold, running, i = _threshold(uniform, mass), np.int64(0), 0
    while True:
        running += np.int64(weights[i])
        if running > threshold:
            return ids[i]
        i += 1


@inlined
def _sort_by_id(ids, weights, count):
    for i in range(1, count):
        token, weight, place = ids[i], weights[i], i
        while place > 0 and ids[place - 1] > token:
            ids[place], weights[place] = ids[place - 1], weights[place - 1]
            place -= 1
        ids[place], weights[place] = token, weight


@inlined
def _token_of_live(row, logits, scratch, highest, uniform):
    """The draw from all tokens that can weigh enough: long top-k, or top-p of a flat row."""
    stand_apart()
    count = list_live(logits, scratch, highest, row.temperature, row.least, row.farthest)
    if 0 < row.top_k < count:
        key, place = last_within(scratch, count, row.top_k - 1, True)
        count = keep_within(scratch, count, key, place)
    count, mass = _keep_weighty(scratch, count)
    if row.top_p_shift > 0:
        key, place = last_within(scratch, count, _mass_within(row, mass), False)
        count, mass = _keep_weighty(scratch, keep_within(scratch, count, key, place))
    weights, threshold, running, i = scratch.live_weights, _threshold(uniform, mass), np.int64(0), 0
    while True:
        running += weights[i]
        if running > threshold:
            return scratch.live_ids[i]
        i += 1


@inlined
def _keep_weighty(scratch, count):
    """Drop the live tokens without weight; how many stay, and their sum."""
    keys, weights, ids = scratch.keys, scratch.live_weights, scratch.live_ids
    kept, mass = 0, np.int64(0)
    for i in range(count):
        if weights[i] > 0:
            keys[kept], weights[kept], ids[kept] = keys[i], weights[i], ids[i]
            mass += weights[i]
            kept += 1
    return kept, mass


@inlined
def _log_probabilities(row, logits, scratch, top_ids, top_values):
    """log_softmax of raw logits, whose maxima stand ready: the chosen token's, and those of the likeliest.

    Exponentials are summed lane by lane, block after block, in float64; only the values are rounded to float32.
    """
    stand_apart()
    maxima, slots, changed, scores = scratch.maxima, scratch.slots, scratch.changed, scratch.scores
    highest = highest_of(maxima)
    top, sums = w.broadcast(highest), w.broadcast(0.0)
    for block in range(len(maxima)):
        read_block(block, logits, slots, changed, scores)
        for i in range(0, BLOCK, 16):
            sums = w.add(sums, w.exponential(w.subtract(w.load(scores, i), top)))
    logarithm = math.log(w.total(sums))
    row.logprob = _rounded(np.float64(logits[row.chosen]) - highest - logarithm)
    if row.logprobs > 0:
        found = find_best(logits, scratch, min(row.logprobs, len(logits)))
        for i in range(found):
            top_ids[i] = scratch.best_ids[i]
            top_values[i] = _rounded(scratch.best_scores[i] - highest - logarithm)


@inlined
def _rounded(value):
    """As float32, but finite: −inf is no number in JSON."""
    return np.float32(max(value, _LOWEST))


@inlined
def _finish_row(i, logits, vocab, rows, ids, values, replaced, top_ids, top_values, scratch):
    row = rows[i]
    own = logits[row.logits, :vocab]
    if not find_maxima(own, scratch):
        row.status = NOT_FINITE
        return
    if row.replaced >= 0:
        replace(own, scratch, replaced[row.replaced])
    elif row.changes_end > row.changes:
        change(own, scratch, ids, values, row.changes, row.changes_end)
    if row.chosen < 0:
        row.chosen = _token(row, own, scratch)
    row.status = OK if row.chosen >= 0 else ALL_MASKED
    if row.status == OK and row.logprobs >= 0:
        if row.replaced >= 0 or row.changes_end > row.changes:
            find_maxima(own, scratch)
        _log_probabilities(row, own, scratch, top_ids[i], top_values[i])


@parallel_kernel
def finish_rows(threads, logits, vocab, rows, ids, values, replaced, top_ids, top_values, scratch):
    """Choose each row's token and tell its log-probabilities, the rows shared out among threads.

    - `logits` float32 `[rows of the step, vocab or more]`
    - `rows` `[rows]` of `ROW`, whose outcomes are filled in; one with `chosen` ≥ 0 is only told its log-probabilities
    - `ids` int64 and `values` float64 `[changes]`: scores that differ from the logits; −inf masks
    - `replaced` float64 `[replaced rows, vocab]`: full rows of scores
    - `top_ids` int64 and `top_values` float32 `[rows, at least the row's logprobs]`: filled in
    - `scratch`: that of `make_scratch(threads, vocab, best)`, best ≥ 256 and ≥ the largest `logprobs`
    """
    stand_apart()
    for share in prange(threads):
        thread = np.int64(share)
        own = of_thread(scratch, thread)
        for i in range(thread, len(rows), threads):
            _finish_row(i, logits, vocab, rows, ids, values, replaced, top_ids, top_values, own)


@kernel
def exponentials(values):
    """Replace float64 values `[a multiple of 16]` by their exponentials: the one exp that weights are made with."""
    for i in range(0, len(values), 16):
        w.store(values, i, w.exponential(w.load(values, i)))
