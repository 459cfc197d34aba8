"""Vectors of 16 float64 lanes as a numba type, and the exponential function: see `vectors.py`."""

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from drumline.model.kernels.vectors import F32, F64, I8, I32, I64, LANES, VF32, VI32, Builder, Value, address, constant

VF64, VI64 = (ir.VectorType(element, LANES) for element in (F64, I64))
_UNDEFINED = ir.Constant(VF64, ir.Undefined)

_ROUNDER = 6_755_399_441_055_744.0  # 1.5 · 2^52: a whole number added to it stands in the sum's low bits
_LOG2_HIGH = 0.693147180369123816490  # log 2 in two parts; the first ends in 21 zero bits, so that n times it is exact
_LOG2_LOW = 1.90821492927058770002e-10
_TERMS = 13
_LIMIT = 700.0


class _V64(types.Type):
    def __init__(self) -> None:
        super().__init__("V16x64")


v64 = _V64()


@register_model(_V64)
class _V64Model(models.PrimitiveModel):
    def __init__(self, manager: Any, frontend: Any) -> None:
        super().__init__(manager, frontend, VF64)


def _fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    signature = ir.FunctionType(VF64, [VF64] * 3)
    return b.call(cgutils.get_or_insert_function(b.module, signature, "llvm.fma.v16f64"), (x, y, z))


def _rint(b: Builder, x: Value) -> Value:
    signature = ir.FunctionType(VF64, [VF64])
    return b.call(cgutils.get_or_insert_function(b.module, signature, "llvm.rint.v16f64"), (x,))


def _splat(b: Builder, x: Value) -> Value:
    first = b.insert_element(_UNDEFINED, x, ir.Constant(I32, 0))
    return b.shuffle_vector(first, _UNDEFINED, ir.Constant(VI32, [0] * LANES))


def _exponential(b: Builder, x: Value) -> Value:
    """e^x within 1 unit in the last place for |x| ≤ 700 (beyond, that of ±700); a NaN stays one.

    x = n · log 2 + r with |r| ≤ ½ log 2; the series of e^r, whose first missing term is below 5e-18; times 2^n.
    """
    low, high = constant(-_LIMIT, F64), constant(_LIMIT, F64)
    x = b.select(b.fcmp_ordered("<", x, low), low, x)
    x = b.select(b.fcmp_ordered(">", x, high), high, x)
    n = _rint(b, b.fmul(x, constant(math.log2(math.e), F64)))
    r = _fma(b, n, constant(-_LOG2_HIGH, F64), x)
    r = _fma(b, n, constant(-_LOG2_LOW, F64), r)
    series = constant(1 / math.factorial(_TERMS), F64)
    for power in range(_TERMS - 1, -1, -1):
        series = _fma(b, series, r, constant(1 / math.factorial(power), F64))
    exponent = b.shl(b.bitcast(b.fadd(n, constant(_ROUNDER, F64)), VI64), constant(52, I64))
    result = b.bitcast(b.add(b.bitcast(series, VI64), exponent), VF64)
    return b.select(b.fcmp_unordered("uno", x, x), x, result)


def _total(b: Builder, v: Value) -> Value:
    """The sum of all lanes along one fixed tree: 8 apart, then 4, 2, 1."""
    for step in (8, 4, 2, 1):
        turned = ir.Constant(VI32, [(lane + step) % LANES for lane in range(LANES)])
        v = b.fadd(v, b.shuffle_vector(v, _UNDEFINED, turned))
    return b.extract_element(v, ir.Constant(I32, 0))


@intrinsic
def broadcast(typing: Any, x: Any) -> Any:
    """A float64 in all lanes."""
    return v64(types.float64), lambda context, b, signature, arguments: _splat(b, *arguments)


@intrinsic
def add(typing: Any, x: Any, y: Any) -> Any:
    """x + y."""
    return v64(v64, v64), lambda context, b, signature, arguments: b.fadd(*arguments)


@intrinsic
def subtract(typing: Any, x: Any, y: Any) -> Any:
    """x − y."""
    return v64(v64, v64), lambda context, b, signature, arguments: b.fsub(*arguments)


@intrinsic
def multiply(typing: Any, x: Any, y: Any) -> Any:
    """x · y."""
    return v64(v64, v64), lambda context, b, signature, arguments: b.fmul(*arguments)


@intrinsic
def divide(typing: Any, x: Any, y: Any) -> Any:
    """x / y."""
    return v64(v64, v64), lambda context, b, signature, arguments: b.fdiv(*arguments)


@intrinsic
def whole(typing: Any, x: Any) -> Any:
    """The nearest whole number, ties to even."""
    return v64(v64), lambda context, b, signature, arguments: _rint(b, *arguments)


@intrinsic
def exponential(typing: Any, x: Any) -> Any:
    """e^x within 1 unit in the last place for |x| ≤ 700 (beyond, that of ±700); a NaN stays one."""
    return v64(v64), lambda context, b, signature, arguments: _exponential(b, *arguments)


@intrinsic
def zero_below(typing: Any, x: Any, least: Any) -> Any:
    """x where it is at least `least`, else zero; a NaN stays one."""

    def code(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        x, least = arguments
        return b.select(b.fcmp_ordered("<", x, least), constant(0.0, F64), x)

    return v64(v64, v64), code


@intrinsic
def total(typing: Any, x: Any) -> Any:
    """The sum of all lanes along one fixed tree."""
    return types.float64(v64), lambda context, b, signature, arguments: _total(b, *arguments)


@intrinsic
def load(typing: Any, array: Any, index: Any) -> Any:
    """16 values of a float32 or float64 array from a flat index on."""

    def code(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        kind = signature.args[0]
        narrow = kind.dtype == types.float32
        pointer = address(context, b, kind, arguments[0], arguments[1], F32 if narrow else F64)
        if narrow:
            return b.fpext(b.load(b.bitcast(pointer, VF32.as_pointer()), align=1), VF64)
        return b.load(b.bitcast(pointer, VF64.as_pointer()), align=1)

    if array.dtype not in (types.float32, types.float64):
        raise TypeError(f"no float64 vector load of {array.dtype}")
    return v64(array, types.int64), code


@intrinsic
def store(typing: Any, array: Any, index: Any, v: Any) -> Any:
    """16 values of a float64 array from a flat index on."""

    def code(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        pointer = address(context, b, signature.args[0], arguments[0], arguments[1], I8)
        b.store(arguments[2], b.bitcast(pointer, VF64.as_pointer()), align=1)
        return context.get_dummy_value()

    if array.dtype != types.float64:
        raise TypeError(f"no float64 vector store to {array.dtype}")
    return types.void(array, types.int64, v64), code
