"""Whole numbers in kernels: 128-bit products, float64 as keys that sort, and Philox."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from drumline.model.kernels.compile import inlined, kernel
from drumline.model.kernels.vectors import I64, Builder, Value
from drumline.model.random_state import DRAW_BITS, MULTIPLIERS, ROUNDS, WEYL

_I128 = ir.IntType(128)
_M0, _M1 = (np.uint64(word) for word in MULTIPLIERS)
_W0, _W1 = (np.uint64(word) for word in WEYL)
_HIGH = np.uint64(64)
_UNUSED_BITS = np.uint64(64 - DRAW_BITS)


@intrinsic
def product_shifted(typing: Any, x: Any, y: Any, shift: Any) -> Any:
    """(x · y) >> shift for uint64 x and y, exact, of which the low 64 bits; the shift must be below 128."""

    def code(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        x, y, shift = (b.zext(argument, _I128) for argument in arguments)
        return b.trunc(b.lshr(b.mul(x, y), shift), I64)

    return types.uint64(types.uint64, types.uint64, types.uint64), code


@intrinsic
def sorting_key(typing: Any, x: Any) -> Any:
    """uint64 keys in the order of the float64 they stand for; −0 and 0 have one key."""

    def code(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        bits = b.bitcast(b.fadd(arguments[0], ir.Constant(ir.DoubleType(), 0.0)), I64)  # −0 + 0 is 0
        negative = b.ashr(bits, ir.Constant(I64, 63))
        return b.xor(bits, b.or_(negative, ir.Constant(I64, 1 << 63)))

    return types.uint64(types.float64), code


@inlined
def philox_draw(seed, choice, index):
    """`RandomState(seed, choice, index).draw()` for uint64 arguments."""
    k0, k1 = seed, choice
    a, b, c, d = index, np.uint64(0), np.uint64(0), np.uint64(0)
    for _ in range(ROUNDS):
        a, b, c, d = (
            product_shifted(_M1, c, _HIGH) ^ b ^ k0,
            _M1 * c,
            product_shifted(_M0, a, _HIGH) ^ d ^ k1,
            _M0 * a,
        )
        k0, k1 = k0 + _W0, k1 + _W1
    return a >> _UNUSED_BITS


@kernel
def philox_draws(seeds, choices, indices, draws):
    """One draw for each of uint64 `[draws]` seeds, choices and indices."""
    for i in range(len(draws)):
        draws[i] = philox_draw(seeds[i], choices[i], indices[i])
