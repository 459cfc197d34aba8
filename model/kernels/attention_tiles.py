"""The inner loop of attention, for up to six query vectors of one K/V head at once, as LLVM code.

Scores and mixed values are the same sums: numbers of each query (of its vector; of its weights) times vectors that all
of them share (a step through a tile of keys; the values of a token). Each has one chain of fused multiply-adds in
ascending order: how many queries and runs share the registers changes no bit.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from drumline.model.kernels.functions import call_one_of
from drumline.model.kernels.vectors import (
    F32,
    I8,
    I64,
    LANES,
    VF32,
    address,
    constant,
    fma,
    from_stored,
    request_line,
    splat,
)  # fmt: skip

QUERIES = 6
"""Query vectors of one block: 6 of 16 lanes are 12 of AVX2's 16 registers."""
WIDE = 3
"""Up to so many queries, two runs of 16 lanes are taken at once."""


def _at(value: int) -> Any:
    return ir.Constant(I64, value)


def _sums(most: int, runs: int) -> Any:
    """An intrinsic: out[q, 16 r + lane] = Σ_s left[q, s] · right[s, r, lane] for 1 to `most` queries, `runs` runs.

    Lines of `left` and `out` lie `left_line` and `out_line` apart, steps and runs of `right` `step` and `run`. Each
    step asks for `ahead_step` more of `ahead`, which is read next: rows are too short for the CPU to guess it.
    """

    @intrinsic
    def sums(
        typing: Any, queries: Any, left: Any, left_at: Any, left_line: Any, right: Any, right_at: Any, step: Any,
        run: Any, steps: Any, out: Any, out_at: Any, out_line: Any, ahead: Any, ahead_at: Any, ahead_step: Any,
    ) -> Any:  # fmt: skip
        def code(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
            def start(array: int, element: ir.Type) -> Any:
                return address(context, b, signature.args[array], arguments[array], arguments[array + 1], element)

            stored, coming = signature.args[4].dtype, signature.args[12].dtype
            handed = (
                start(1, F32), arguments[3], start(4, I8), _bytes(b, stored, arguments[6]),
                _bytes(b, stored, arguments[7]), arguments[8], start(9, F32), arguments[11], start(12, I8),
                _bytes(b, coming, arguments[14]),
            )  # fmt: skip
            bodies = {count: partial(_build, count, runs, stored) for count in range(1, most + 1)}
            call_one_of(b, arguments[0], f"drumline_sums_{stored}_{runs}", bodies, handed)
            return context.get_dummy_value()

        i64 = types.int64
        kinds = (i64, left, i64, i64, right, i64, i64, i64, i64, out, i64, i64, ahead, i64, i64)
        return types.void(*kinds), code

    return sums


def _bytes(b: Any, element: Any, count: Any) -> Any:
    return b.mul(count, _at(element.bitwidth // 8))


def _build(queries: int, runs: int, stored: types.Type, b: Any, arguments: Sequence[Any]) -> None:
    """The function: pointers, and how far apart things lie (of `right` and `ahead` in bytes)."""
    left, left_line, right, step, run, steps, out, out_line, ahead, ahead_step = arguments
    lines = [b.gep(left, [b.mul(left_line, _at(query))]) for query in range(queries)]
    before, loop, after = b.block, b.append_basic_block("step"), b.append_basic_block("stepped")
    b.branch(loop)
    b.position_at_end(loop)
    done, here, soon = b.phi(I64), b.phi(right.type), b.phi(ahead.type)
    chains = [[b.phi(VF32) for _ in range(runs)] for _ in range(queries)]
    request_line(b, soon)
    shared = [from_stored(b, stored, b.gep(here, [b.mul(run, _at(r))])) for r in range(runs)]
    results = []
    for line, chain in zip(lines, chains, strict=True):
        x = splat(b, b.load(b.gep(line, [done]), align=4))
        results.append([fma(b, x, vector, value) for vector, value in zip(shared, chain, strict=True)])
    following = b.add(done, _at(1))
    carried = [(done, _at(0), following), (here, right, b.gep(here, [step])), (soon, ahead, b.gep(soon, [ahead_step]))]
    for chain, result in zip(chains, results, strict=True):
        carried += [(value, constant(0.0), then) for value, then in zip(chain, result, strict=True)]
    for value, first, then in carried:
        value.add_incoming(first, before)
        value.add_incoming(then, loop)
    b.cbranch(b.icmp_signed("<", following, steps), loop, after)
    b.position_at_end(after)
    for query, result in enumerate(results):
        for r, value in enumerate(result):
            index = b.add(b.mul(out_line, _at(query)), _at(r * LANES))
            b.store(value, b.bitcast(b.gep(out, [index]), VF32.as_pointer()), align=4)


sums = _sums(QUERIES, 1)
sums_wide = _sums(WIDE, 2)
