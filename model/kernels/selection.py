"""The best few of a row, and the row's shortest heads, without sorting it.

A row is looked at in blocks of 64 scores. Each block's highest score is known, so a block in which nothing can count is
never read again.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from drumline.model.kernels import vectors as v
from drumline.model.kernels import vectors64 as w
from drumline.model.kernels.compile import inlined
from drumline.model.kernels.whole_numbers import sorting_key


@intrinsic
def stand_apart(typing: Any) -> Any:
    """Called in a helper, it keeps LLVM from copying that helper into its callers: compiling takes half the time."""

    def code(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        b.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), code


BLOCK = 64
"""Scores of a block."""
SHORT = 256
"""Up to this many of the best are kept as a sorted list."""
_BITS = 11
_ZERO, _ONE = np.uint64(0), np.uint64(1)
_NONE = -1

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


class Scratch(NamedTuple):
    """What choosing one row writes; with a leading axis `[threads, …]`, that of all threads.

    `maxima`, `slots`, `sums` `[blocks]`: each block's highest score, where its changed scores lie (−1 for nowhere), and
    its weight. `changed` `[blocks · 64]` holds the scores of blocks in which some differ from the logits. `scores`,
    `weights` `[64]`: the block at hand. `best_*` `[at least 256]`: the sorted list. `key`, `weight`, `token`, `member`
    `[blocks · 64]`: the row's live tokens, used when the list is too short. `histogram` `[2048]`.
    """

    maxima: Floats
    slots: Whole
    sums: Whole
    changed: Floats
    scores: Floats
    weights: Floats
    best_scores: Floats
    best_weights: Floats
    best_ids: Whole
    keys: NDArray[np.uint64]
    live_weights: Whole
    live_ids: Whole
    members: Whole
    histogram: Whole


def make_scratch(threads: int, vocab: int, best: int) -> Scratch:
    """Scratch of all threads for rows of `vocab` logits and lists of up to `best` tokens."""
    blocks = -(-vocab // BLOCK)
    lengths = [*[blocks] * 3, blocks * BLOCK, BLOCK, BLOCK, *[best] * 3, *[blocks * BLOCK] * 4, 1 << _BITS]
    kinds = [np.float64, np.int64, np.int64, *[np.float64] * 5, np.int64, np.uint64, *[np.int64] * 4]
    arrays = [np.empty((threads, length), kind) for length, kind in zip(lengths, kinds, strict=True)]
    return Scratch(*arrays)


@inlined
def of_thread(scratch, thread):
    """One thread's part of `scratch`."""
    return Scratch(
        scratch.maxima[thread], scratch.slots[thread], scratch.sums[thread], scratch.changed[thread],
        scratch.scores[thread], scratch.weights[thread], scratch.best_scores[thread], scratch.best_weights[thread],
        scratch.best_ids[thread], scratch.keys[thread], scratch.live_weights[thread], scratch.live_ids[thread],
        scratch.members[thread], scratch.histogram[thread],
    )  # fmt: skip


@inlined
def find_maxima(logits, scratch):
    """Fill `maxima` from a row's float32 logits, forget what was changed, and say whether all logits are finite."""
    stand_apart()
    maxima, slots, vocab = scratch.maxima, scratch.slots, len(logits)
    for block in range(len(maxima)):
        slots[block] = _NONE
    zero = v.broadcast(np.float32(0.0))
    poison, tail = zero, np.float32(0.0)  # x · 0 is 0, unless x is no finite number
    for block in range(vocab // BLOCK):
        i = block * BLOCK
        a, b, c, d = v.load(logits, i), v.load(logits, i + 16), v.load(logits, i + 32), v.load(logits, i + 48)
        maxima[block] = v.highest(v.larger(v.larger(a, b), v.larger(c, d)))
        products = v.add(v.multiply_add(a, zero, v.multiply(b, zero)), v.multiply_add(c, zero, v.multiply(d, zero)))
        poison = v.add(poison, products)
    if vocab % BLOCK:
        highest = np.float32(-np.inf)
        for i in range(vocab // BLOCK * BLOCK, vocab):
            highest = max(highest, logits[i])
            tail += logits[i] * np.float32(0.0)
        maxima[vocab // BLOCK] = highest
    return v.total(poison) + tail == 0


@inlined
def read_block(block, logits, slots, changed, scores):
    """Put a block's 64 scores into `scores`, −inf behind the vocabulary's end.

    What is called for each block takes the arrays it needs: handing on all of `Scratch` would cost more than it does.
    """
    stand_apart()
    slot, start, vocab = slots[block], block * BLOCK, len(logits)
    if slot >= 0:
        for i in range(0, BLOCK, 16):
            w.store(scores, i, w.load(changed, slot * BLOCK + i))
    elif start + BLOCK <= vocab:
        for i in range(0, BLOCK, 16):
            w.store(scores, i, w.load(logits, start + i))
    else:
        for i in range(BLOCK):
            scores[i] = logits[start + i] if start + i < vocab else -np.inf


@inlined
def change(logits, scratch, ids, values, first, end):
    """Put `values[first:end]` in the place of the logits of `ids[first:end]`; of two for one id the later counts."""
    stand_apart()
    slots, changed, scores, used = scratch.slots, scratch.changed, scratch.scores, 0
    for i in range(first, end):
        block = ids[i] // BLOCK
        if slots[block] == _NONE:
            read_block(block, logits, slots, changed, scores)
            for j in range(BLOCK):
                changed[used * BLOCK + j] = scores[j]
            slots[block] = used
            used += 1
        changed[slots[block] * BLOCK + ids[i] % BLOCK] = values[i]
    _find_changed_maxima(scratch)


@inlined
def replace(logits, scratch, scores):
    """Put other scores, float64 `[vocab]`, in the place of all logits."""
    stand_apart()
    slots, changed = scratch.slots, scratch.changed
    for i in range(len(changed)):
        changed[i] = scores[i] if i < len(scores) else -np.inf
    for block in range(len(slots)):
        slots[block] = block
    _find_changed_maxima(scratch)


@inlined
def _find_changed_maxima(scratch):
    slots, changed, maxima = scratch.slots, scratch.changed, scratch.maxima
    for block in range(len(slots)):
        slot = slots[block]
        if slot >= 0:
            highest = -np.inf
            for i in range(slot * BLOCK, (slot + 1) * BLOCK):
                highest = max(highest, changed[i])
            maxima[block] = highest


@inlined
def highest_of(maxima):
    """The row's highest score."""
    highest = -np.inf
    for block in range(len(maxima)):
        highest = max(highest, maxima[block])
    return highest


@inlined
def first_of(logits, scratch, score):
    """The smallest id whose score is `score`, which some block has as its highest."""
    stand_apart()
    block = 0
    while scratch.maxima[block] != score:
        block += 1
    scores = scratch.scores
    read_block(block, logits, scratch.slots, scratch.changed, scores)
    i = 0
    while scores[i] != score:
        i += 1
    return block * BLOCK + i


@inlined
def find_best(logits, scratch, count):
    """List the `count` best tokens, the smaller id first on ties, and return how many there are; −inf is none."""
    stand_apart()
    maxima, slots, changed, scores = scratch.maxima, scratch.slots, scratch.changed, scratch.scores
    best_scores, best_ids = scratch.best_scores, scratch.best_ids
    floor, found = _floor(maxima, count), 0
    for block in range(len(maxima)):
        if maxima[block] < floor or (found == count and maxima[block] <= best_scores[found - 1]):
            continue
        read_block(block, logits, slots, changed, scores)
        for i in range(BLOCK):
            score = scores[i]
            if score < floor or score == -np.inf or (found == count and score <= best_scores[found - 1]):
                continue
            place = found if found < count else found - 1
            while place > 0 and best_scores[place - 1] < score:
                best_scores[place], best_ids[place] = best_scores[place - 1], best_ids[place - 1]
                place -= 1
            best_scores[place], best_ids[place] = score, block * BLOCK + i
            found = min(found + 1, count)
    return found


@inlined
def _floor(maxima, count):
    """A score that at least `count` blocks, hence tokens, reach, and not many more; −inf where there is none."""
    stand_apart()
    low, high, reached = np.inf, -np.inf, 0
    for block in range(len(maxima)):
        if maxima[block] > -np.inf:
            low, high, reached = min(low, maxima[block]), max(high, maxima[block]), reached + 1
    if reached < count:
        return -np.inf
    rounds = 0
    while rounds < 16 and reached > count + count // 4:
        rounds += 1
        middle = low / 2 + high / 2
        above = 0
        for block in range(len(maxima)):
            above += maxima[block] >= middle
        if above >= count:
            low, reached = middle, above
        else:
            high = middle
    return low


@inlined
def weigh(scores, start, count, highest, temperature, least, weights):
    """Whole-number weights rint(2^37 · exp((score − highest) / temperature)), zero for those below `least`, and their
    sum, of `count` scores, a multiple of 16; exact while the sum stays below 2^53."""
    stand_apart()
    top, divisor, smallest = w.broadcast(highest), w.broadcast(temperature), w.broadcast(least)
    unit, sums = w.broadcast(2.0**37), w.broadcast(0.0)
    for i in range(start, start + count, 16):
        power = w.exponential(w.divide(w.subtract(w.load(scores, i), top), divisor))
        weight = w.zero_below(w.whole(w.multiply(power, unit)), smallest)
        w.store(weights, i - start, weight)
        sums = w.add(sums, weight)
    return np.int64(w.total(sums))


@inlined
def weigh_block(block, logits, slots, changed, scores, highest, temperature, least, weights):
    """`weigh` for one block."""
    slot, start = slots[block], block * BLOCK
    if slot >= 0:
        return weigh(changed, slot * BLOCK, BLOCK, highest, temperature, least, weights)
    if start + BLOCK <= len(logits):
        return weigh(logits, start, BLOCK, highest, temperature, least, weights)
    read_block(block, logits, slots, changed, scores)
    return weigh(scores, 0, BLOCK, highest, temperature, least, weights)


@inlined
def last_within(scratch, count, limit, counted):
    """The last token, best first, before which lies at most `limit`, as its key and its place among the `count` live
    tokens: what stays are the keys above its own, and its own up to that place. `counted`: each token weighs 1.

    Needs `limit` below the whole weight. Each round takes 11 bits more of the keys, so there are 6 rounds at most.
    """
    stand_apart()
    keys, weights, members, histogram = scratch.keys, scratch.live_weights, scratch.members, scratch.histogram
    for i in range(count):
        members[i] = i
    before = np.int64(0)
    while True:
        low, high = keys[members[0]], keys[members[0]]
        for j in range(count):
            low, high = min(low, keys[members[j]]), max(high, keys[members[j]])
        if low == high:
            break
        shift = _ZERO
        while (high - low) >> shift >= np.uint64(1 << _BITS):
            shift += _ONE
        for j in range(len(histogram)):
            histogram[j] = 0
        for j in range(count):
            i = members[j]
            histogram[np.int64((high - keys[i]) >> shift)] += 1 if counted else weights[i]
        bucket = 0
        while before + histogram[bucket] <= limit:
            before += histogram[bucket]
            bucket += 1
        kept = 0
        for j in range(count):
            i = members[j]
            if np.int64((high - keys[i]) >> shift) == bucket:
                members[kept] = i
                kept += 1
        count = kept
    j = 0
    while True:
        before += 1 if counted else weights[members[j]]
        if before > limit:
            return low, members[j]
        j += 1


@inlined
def keep_within(scratch, count, key, place):
    """Drop the live tokens that are worse than the one with this key at this place; return how many stay."""
    stand_apart()
    keys, weights, ids = scratch.keys, scratch.live_weights, scratch.live_ids
    kept = 0
    for i in range(count):
        if keys[i] > key or (keys[i] == key and i <= place):
            keys[kept], weights[kept], ids[kept] = keys[i], weights[i], ids[i]
            kept += 1
    return kept


@inlined
def list_live(logits, scratch, highest, temperature, least, farthest):
    """List the tokens of all blocks within reach, in ascending order of their ids; return how many there are."""
    stand_apart()
    maxima, slots, changed = scratch.maxima, scratch.slots, scratch.changed
    scores, weights = scratch.scores, scratch.weights
    keys, live_weights, live_ids, count = scratch.keys, scratch.live_weights, scratch.live_ids, 0
    for block in range(len(maxima)):
        if (maxima[block] - highest) / temperature < farthest:
            continue
        read_block(block, logits, slots, changed, scores)
        weigh(scores, 0, BLOCK, highest, temperature, least, weights)
        for i in range(BLOCK):
            if scores[i] > -np.inf:
                keys[count], live_weights[count] = sorting_key(scores[i]), np.int64(weights[i])
                live_ids[count] = block * BLOCK + i
                count += 1
    return count


@inlined
def weigh_blocks(logits, scratch, highest, temperature, least, farthest):
    """Each block's weight, into `sums`, and the sum of them all. No token of a block below `farthest` can weigh."""
    stand_apart()
    maxima, slots, changed, sums = scratch.maxima, scratch.slots, scratch.changed, scratch.sums
    scores, weights, mass = scratch.scores, scratch.weights, np.int64(0)
    for block in range(len(maxima)):
        sums[block] = 0
        if (maxima[block] - highest) / temperature >= farthest:
            sums[block] = weigh_block(block, logits, slots, changed, scores, highest, temperature, least, weights)
            mass += sums[block]
    return mass
