"""The exact integer product on AVX2: int16 codes times int8 weights, summed in int32, 16 outputs at a time.

`vpmaddwd` multiplies pairs of int16 and adds each pair in int32: no sum can saturate (127² · 2 is far below 2^31), and
integer sums are the same in any order. Weights lie in panels of 16 outputs, `[outputs / 16, inputs / 2, 16, 2]`: one
step down a panel takes two inputs of 16 outputs.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from drumline.model.kernels.compile import kernel, parallel_kernel
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


def _tile(rows: int) -> Any:
    """An intrinsic: `rows` tokens from `token` on times one panel, into `out`, each output times its own scale."""

    @intrinsic
    def tile(
        typing: Any, codes: Any, token: Any, token_scales: Any, panels: Any, panel: Any, scales: Any, out: Any
    ) -> Any:  # fmt: skip
        def code(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
            codes_v, token_v, token_scales_v, panels_v, panel_v, scales_v, out_v = arguments
            kinds = signature.args
            inputs, outputs = (
                b.extract_value(context.make_array(kind)(context, b, value).shape, 1)
                for kind, value in ((kinds[0], codes_v), (kinds[6], out_v))
            )
            pairs = b.sdiv(inputs, _at(2))
            code_row = address(context, b, kinds[0], codes_v, b.mul(token_v, inputs), I32)
            panel_start = b.mul(panel_v, b.mul(inputs, _at(PANEL)))
            weights = address(context, b, kinds[3], panels_v, panel_start, I8)
            sums = _accumulate(b, rows, code_row, weights, pairs)
            column = b.mul(panel_v, _at(PANEL))
            scale_vectors = [
                b.load(address(context, b, kinds[5], scales_v, b.add(column, _at(half * _HALF)), _FLOATS), align=4)
                for half in range(2)
            ]
            for row in range(rows):
                line = b.add(token_v, _at(row))
                token_scale = _spread(b, b.load(address(context, b, kinds[2], token_scales_v, line, F32)), _FLOATS)
                for half in range(2):
                    value = b.fmul(b.fmul(b.sitofp(sums[row][half], _FLOATS), scale_vectors[half]), token_scale)
                    place = b.add(b.mul(line, outputs), b.add(column, _at(half * _HALF)))
                    b.store(value, address(context, b, kinds[6], out_v, place, _FLOATS), align=4)
            return context.get_dummy_value()

        return types.void(codes, types.int64, token_scales, panels, types.int64, scales, out), code

    return tile


def _spread(b: Any, x: Any, kind: Any) -> Any:
    """A scalar in all lanes of a vector type."""
    undefined = ir.Constant(kind, ir.Undefined)
    first = b.insert_element(undefined, x, ir.Constant(I32, 0))
    return b.shuffle_vector(first, undefined, ir.Constant(_SUMS, [0] * _HALF))


def _accumulate(b: Any, rows: int, code_row: Any, weights: Any, pairs: Any) -> list[list[Any]]:
    """The loop down a panel: int32 sums of `rows` tokens, two vectors of 8 outputs each."""
    signature = ir.FunctionType(_SUMS, [_PAIRS, _PAIRS])
    multiply_pairs = cgutils.get_or_insert_function(b.module, signature, "llvm.x86.avx2.pmadd.wd")
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
        pair = b.load(b.gep(code_row, [b.add(b.mul(pairs, _at(row)), step)]), align=2)
        codes = b.bitcast(_spread(b, pair, _SUMS), _PAIRS)
        for half in range(2):
            new = b.add(sums[row][half], b.call(multiply_pairs, [halves[half], codes]))
            sums[row][half].add_incoming(ir.Constant(_SUMS, [0] * _HALF), before)
            sums[row][half].add_incoming(new, loop)
            sums[row][half] = new
    following = b.add(step, _at(1))
    step.add_incoming(following, loop)
    b.cbranch(b.icmp_signed("<", following, pairs), loop, after)
    b.position_at_end(after)
    return sums


_tile_1, _tile_2, _tile_3, _tile_4, _tile_5, _tile_6 = (_tile(rows) for rows in range(1, _ROWS + 1))


@parallel_kernel
def product(tokens, codes, token_scales, panels, scales, out):
    """out[t, n] = float32(Σ_k codes[t, k] · weights[n, k]) · scales[n] · token_scales[t] for the first `tokens` tokens.

    `codes` int16 [≥ tokens, inputs], `panels` int8, flat, `scales` float32 [outputs], `out` [≥ tokens, outputs]; inputs
    are even, outputs a multiple of 16. A panel stays in the first cache while all tokens pass by.
    """
    for panel in prange(out.shape[1] // PANEL):
        t = 0
        while t + 6 <= tokens:
            _tile_6(codes, t, token_scales, panels, panel, scales, out)
            t += 6
        rest = tokens - t
        if rest == 1:
            _tile_1(codes, t, token_scales, panels, panel, scales, out)
        elif rest == 2:
            _tile_2(codes, t, token_scales, panels, panel, scales, out)
        elif rest == 3:
            _tile_3(codes, t, token_scales, panels, panel, scales, out)
        elif rest == 4:
            _tile_4(codes, t, token_scales, panels, panel, scales, out)
        elif rest == 5:
            _tile_5(codes, t, token_scales, panels, panel, scales, out)


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
