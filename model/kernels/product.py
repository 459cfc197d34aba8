"""The exact integer product on AVX2: int16 codes times int8 weights, summed in int32, 16 outputs at a time.

`vpmaddwd` multiplies pairs of int16 and adds each pair in int32: no sum can saturate (127² · 2 is far below 2^31), and
integer sums are the same in any order. Weights lie in panels of 16 outputs, `[outputs / 16, inputs / 2, 16, 2]`: one
step down a panel takes two inputs of 16 outputs.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from drumline.model.kernels.compile import kernel, parallel_kernel
from drumline.model.kernels.functions import call_one_of
from drumline.model.kernels.vectors import F32, I8, I32, I64, address, request_line

PANEL = 16
"""Outputs of one panel."""
_HALF = 8
_SUMS, _PAIRS, _WEIGHTS, _FLOATS = (
    ir.VectorType(*kind) for kind in ((I32, _HALF), (ir.IntType(16), 16), (I8, 16), (F32, _HALF))
)
_ROWS = 6
"""Tokens of one tile: 6 · 2 sums, 2 weights and 1 code fill the 16 registers of AVX2."""

_FEW = 2
"""Up to so many tokens, the product waits for memory: the panels are asked for ahead of the CPU's own guess."""
_AHEAD = 2_048  # bytes; 1,024 to 4,096 gain a tenth


def _at(value: int) -> Any:
    return ir.Constant(I64, value)


@intrinsic
def _tile(
    typing: Any, rows: Any, codes: Any, token: Any, token_scales: Any, panels: Any, panel: Any, scales: Any, out: Any
) -> Any:  # fmt: skip
    """`rows` (1 to 6) tokens from `token` on times one panel, into `out`, each output times its own scale."""

    def code(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        rows_v, codes_v, token_v, token_scales_v, panels_v, panel_v, scales_v, out_v = arguments
        kinds = signature.args
        inputs, outputs = (
            b.extract_value(context.make_array(kind)(context, b, value).shape, 1)
            for kind, value in ((kinds[1], codes_v), (kinds[7], out_v))
        )
        column = b.mul(panel_v, _at(PANEL))
        handed = (
            b.sdiv(inputs, _at(2)),
            outputs,
            address(context, b, kinds[1], codes_v, b.mul(token_v, inputs), I32),
            address(context, b, kinds[4], panels_v, b.mul(column, inputs), I8),
            address(context, b, kinds[3], token_scales_v, token_v, F32),
            address(context, b, kinds[6], scales_v, column, F32),
            address(context, b, kinds[7], out_v, b.add(b.mul(token_v, outputs), column), F32),
        )
        bodies = {count: partial(_build_tile, count) for count in range(1, _ROWS + 1)}
        call_one_of(b, rows_v, "drumline_product", bodies, handed)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, codes, i64, token_scales, panels, i64, scales, out), code


def _build_tile(rows: int, b: Any, arguments: Sequence[Any]) -> None:
    pairs, outputs, codes, weights, token_scales, scales, out = arguments
    sums = _accumulate(b, rows, codes, weights, pairs)
    scale_vectors = [_vector(b, scales, _at(half * _HALF)) for half in range(2)]
    for row in range(rows):
        token_scale = _spread(b, b.load(b.gep(token_scales, [_at(row)])), _FLOATS)
        for half in range(2):
            value = b.fmul(
                b.fmul(b.sitofp(sums[row][half], _FLOATS), b.load(scale_vectors[half], align=4)), token_scale
            )
            place = b.add(b.mul(outputs, _at(row)), _at(half * _HALF))
            b.store(value, _vector(b, out, place), align=4)


def _vector(b: Any, floats: Any, index: Any) -> Any:
    return b.bitcast(b.gep(floats, [index]), _FLOATS.as_pointer())


def _spread(b: Any, x: Any, kind: Any) -> Any:
    """A scalar in all lanes of a vector type."""
    undefined = ir.Constant(kind, ir.Undefined)
    first = b.insert_element(undefined, x, ir.Constant(I32, 0))
    return b.shuffle_vector(first, undefined, ir.Constant(_SUMS, [0] * _HALF))


def _accumulate(b: Any, rows: int, codes: Any, weights: Any, pairs: Any) -> list[list[Any]]:
    """The loop down a panel: int32 sums of `rows` tokens, two vectors of 8 outputs each."""
    signature = ir.FunctionType(_SUMS, [_PAIRS, _PAIRS])
    multiply_pairs = cgutils.get_or_insert_function(b.module, signature, "llvm.x86.avx2.pmadd.wd")
    lines = [b.gep(codes, [b.mul(pairs, _at(row))]) for row in range(rows)]
    before, loop, after = b.block, b.append_basic_block("inputs"), b.append_basic_block("summed")
    b.branch(loop)
    b.position_at_end(loop)
    step = b.phi(I64)
    step.add_incoming(_at(0), before)
    sums = [[b.phi(_SUMS) for _ in range(2)] for _ in range(rows)]
    line = b.gep(weights, [b.mul(step, _at(2 * PANEL))])
    halves = [
        b.sext(b.load(b.bitcast(b.gep(line, [_at(half * 16)]), _WEIGHTS.as_pointer()), align=1), _PAIRS)
        for half in range(2)
    ]
    if rows <= _FEW:
        request_line(b, b.gep(line, [_at(_AHEAD)]))
    for row in range(rows):
        pair = b.bitcast(_spread(b, b.load(b.gep(lines[row], [step]), align=2), _SUMS), _PAIRS)
        for half in range(2):
            new = b.add(sums[row][half], b.call(multiply_pairs, [halves[half], pair]))
            sums[row][half].add_incoming(ir.Constant(_SUMS, [0] * _HALF), before)
            sums[row][half].add_incoming(new, loop)
            sums[row][half] = new
    following = b.add(step, _at(1))
    step.add_incoming(following, loop)
    b.cbranch(b.icmp_signed("<", following, pairs), loop, after)
    b.position_at_end(after)
    return sums


@parallel_kernel
def product(tokens, codes, token_scales, panels, scales, out):
    """out[t, n] = float32(Σ_k codes[t, k] · weights[n, k]) · scales[n] · token_scales[t] for the first `tokens` tokens.

    `codes` int16 [≥ tokens, inputs], `panels` int8, flat, `scales` float32 [outputs], `out` [≥ tokens, outputs]; inputs
    are even, outputs a multiple of 16. A panel stays in the first cache while all tokens pass by.
    """
    for panel in prange(out.shape[1] // PANEL):
        for t in range(0, tokens, _ROWS):
            _tile(min(_ROWS, tokens - t), codes, t, token_scales, panels, panel, scales, out)


@kernel
def _fill_panels(weights, panels):
    outputs, inputs = weights.shape
    for panel in range(outputs // PANEL):
        for pair in range(inputs // 2):
            place = (panel * (inputs // 2) + pair) * 2 * PANEL
            for lane in range(PANEL):
                panels[place + 2 * lane] = weights[panel * PANEL + lane, 2 * pair]
                panels[place + 2 * lane + 1] = weights[panel * PANEL + lane, 2 * pair + 1]


def pack_panels(weights: NDArray[np.int8], panels: NDArray[np.int8]) -> None:
    """int8 `[outputs, inputs]` (a multiple of 16, an even number) as flat panels."""
    _fill_panels(np.ascontiguousarray(weights), panels)
