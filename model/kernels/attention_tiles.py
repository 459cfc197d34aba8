"""The two inner loops of attention, for up to six query vectors of one K/V head at once, as LLVM code.

A score and an output each have one chain of fused multiply-adds, over head_dim and over keys in ascending order: how
many vectors and tiles share the registers changes no bit.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

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
_WIDE = 3
"""Up to so many vectors, two tiles of keys (or two runs of 16 values) are taken at once."""


def _at(value: int) -> Any:
    return ir.Constant(I64, value)


def _loop(b: Any, count: Any, chains: int, body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """`chains` vectors that start at zero and go through `body(step, chains)` `count` (≥ 1) times."""
    before, loop, after = b.block, b.append_basic_block("step"), b.append_basic_block("stepped")
    b.branch(loop)
    b.position_at_end(loop)
    step = b.phi(I64)
    step.add_incoming(_at(0), before)
    values = [b.phi(VF32) for _ in range(chains)]
    changed = body(step, values)
    for value, new in zip(values, changed, strict=True):
        value.add_incoming(constant(0.0), before)
        value.add_incoming(new, b.block)
    following = b.add(step, _at(1))
    step.add_incoming(following, b.block)
    b.cbranch(b.icmp_signed("<", following, count), loop, after)
    b.position_at_end(after)
    return changed


def _ask_ahead(context: Any, b: Any, kind: Any, ahead: Any, step: Any) -> None:
    array, start, stride = ahead
    request_line(b, address(context, b, kind, array, b.add(start, b.mul(step, stride)), I8))


def _score_tiles(vectors: int, tiles: int) -> Any:
    """An intrinsic: `vectors` queries against `tiles` tiles of 16 keys, into `scores` [vectors, stride].

    Each step asks for `ahead_stride` more of `ahead`, which is read next: rows are too short for the CPU to guess it.
    """

    @intrinsic
    def score(
        typing: Any, queries: Any, query: Any, query_stride: Any, keys: Any, key: Any, head_dim: Any,
        scores: Any, place: Any, stride: Any, ahead: Any, ahead_start: Any, ahead_stride: Any,
    ) -> Any:  # fmt: skip
        def code(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
            queries_v, query_v, query_stride_v, keys_v, key_v, head_dim_v, scores_v, place_v, stride_v = arguments[:9]
            kinds = signature.args
            query_starts = [
                address(context, b, kinds[0], queries_v, b.add(query_v, b.mul(query_stride_v, _at(i))), F32)
                for i in range(vectors)
            ]
            tile_size = b.mul(head_dim_v, _at(LANES))

            def body(step: Any, sums: list[Any]) -> list[Any]:
                _ask_ahead(context, b, kinds[9], arguments[9:], step)
                line = b.add(key_v, b.mul(step, _at(LANES)))
                tile_values = [
                    from_stored(
                        b, kinds[3].dtype,
                        address(context, b, kinds[3], keys_v, b.add(line, b.mul(tile_size, _at(tile))), I8),
                    )
                    for tile in range(tiles)
                ]  # fmt: skip
                changed = []
                for i in range(vectors):
                    x = splat(b, b.load(b.gep(query_starts[i], [step]), align=4))
                    changed += [fma(b, x, tile_values[tile], sums[i * tiles + tile]) for tile in range(tiles)]
                return changed

            sums = _loop(b, head_dim_v, vectors * tiles, body)
            for i in range(vectors):
                for tile in range(tiles):
                    index = b.add(b.add(place_v, b.mul(stride_v, _at(i))), _at(tile * LANES))
                    b.store(sums[i * tiles + tile], address(context, b, kinds[6], scores_v, index, VF32), align=4)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(queries, i64, i64, keys, i64, i64, scores, i64, i64, ahead, i64, i64), code

    return score


def _mix_values(vectors: int, runs: int) -> Any:
    """An intrinsic: sums of `count` values, weighted by `weights` [vectors, stride], 16 · `runs` dimensions of them."""

    @intrinsic
    def mix(
        typing: Any, weights: Any, weight: Any, stride: Any, values: Any, value: Any, value_stride: Any, count: Any,
        out: Any, place: Any, out_stride: Any, ahead: Any, ahead_start: Any, ahead_stride: Any,
    ) -> Any:  # fmt: skip
        def code(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
            weights_v, weight_v, stride_v, values_v, value_v, value_stride_v, count_v, out_v, place_v, out_stride_v = (
                arguments[:10]
            )
            kinds = signature.args
            weight_starts = [
                address(context, b, kinds[0], weights_v, b.add(weight_v, b.mul(stride_v, _at(i))), F32)
                for i in range(vectors)
            ]

            def body(step: Any, sums: list[Any]) -> list[Any]:
                _ask_ahead(context, b, kinds[10], arguments[10:], step)
                line = b.add(value_v, b.mul(step, value_stride_v))
                loaded = [
                    from_stored(
                        b, kinds[3].dtype, address(context, b, kinds[3], values_v, b.add(line, _at(run * LANES)), I8)
                    )
                    for run in range(runs)
                ]
                changed = []
                for i in range(vectors):
                    x = splat(b, b.load(b.gep(weight_starts[i], [step]), align=4))
                    changed += [fma(b, x, loaded[run], sums[i * runs + run]) for run in range(runs)]
                return changed

            sums = _loop(b, count_v, vectors * runs, body)
            for i in range(vectors):
                for run in range(runs):
                    index = b.add(b.add(place_v, b.mul(out_stride_v, _at(i))), _at(run * LANES))
                    b.store(sums[i * runs + run], address(context, b, kinds[7], out_v, index, VF32), align=4)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(weights, i64, i64, values, i64, i64, i64, out, i64, i64, ahead, i64, i64), code

    return mix


score_1, score_2, score_3, score_4, score_5, score_6 = (_score_tiles(n, 1) for n in range(1, QUERIES + 1))
score_1_wide, score_2_wide, score_3_wide = (_score_tiles(n, 2) for n in range(1, _WIDE + 1))
mix_1, mix_2, mix_3, mix_4, mix_5, mix_6 = (_mix_values(n, 1) for n in range(1, QUERIES + 1))
mix_1_wide, mix_2_wide, mix_3_wide = (_mix_values(n, 2) for n in range(1, _WIDE + 1))
