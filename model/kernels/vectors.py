"""Vectors of 16 float32 lanes as a numba type: what a kernel says is what the CPU does, on any vector width.

LLVM splits a vector of 16 into two of 8 on AVX2 and keeps it whole on AVX-512; each lane's chain of operations is the
same. Loads and stores take a flat index into a C-contiguous array. No operation here hides a NaN unless it says so.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16

F32, F64 = ir.FloatType(), ir.DoubleType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
VF32, VI32, VI16, VI8 = (ir.VectorType(element, LANES) for element in (F32, I32, I16, I8))
UNDEFINED = ir.Constant(VF32, ir.Undefined)
ROUNDER = 12_582_912.0  # 1.5 · 2^23: added to |x| < 2^21 it rounds to the nearest whole number, ties to even

Builder = Any
Value = Any


class _V16(types.Type):
    def __init__(self) -> None:
        super().__init__("V16")


v16 = _V16()


@register_model(_V16)
class _V16Model(models.PrimitiveModel):
    def __init__(self, manager: Any, frontend: Any) -> None:
        super().__init__(manager, frontend, VF32)


def constant(value: float, element: ir.Type = F32) -> Value:
    """The same number in all lanes."""
    return ir.Constant(ir.VectorType(element, LANES), [value] * LANES)


def splat(b: Builder, x: Value) -> Value:
    """A scalar in all lanes."""
    first = b.insert_element(UNDEFINED, x, ir.Constant(I32, 0))
    return b.shuffle_vector(first, UNDEFINED, ir.Constant(VI32, [0] * LANES))


def call(b: Builder, name: str, *arguments: Value) -> Value:
    """An LLVM intrinsic whose result has the type of its first argument."""
    signature = ir.FunctionType(arguments[0].type, [argument.type for argument in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, signature, name), arguments)


def fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    """x · y + z, rounded once."""
    return call(b, "llvm.fma.v16f32", x, y, z)


def address(context: Any, b: Builder, array: types.Array, value: Value, index: Value, element: ir.Type) -> Value:
    """Where the flat `index` of an array lies, as a pointer to `element`."""
    start = context.make_array(array)(context, b, value).data
    return b.bitcast(b.gep(start, [index]), element.as_pointer())


def _operation(signature: Any, build: Callable[..., Value]) -> Any:
    """An intrinsic of one, two or three arguments made by `build(builder, *values)`."""

    def code(context: Any, b: Builder, _: Any, arguments: Sequence[Value]) -> Value:
        return build(b, *arguments)

    def one(typing: Any, x: Any) -> Any:
        return signature, code

    def two(typing: Any, x: Any, y: Any) -> Any:
        return signature, code

    def three(typing: Any, x: Any, y: Any, z: Any) -> Any:
        return signature, code

    return intrinsic((one, two, three)[len(signature.args) - 1])


def _lane_mask(b: Builder, count: Value) -> Value:
    wide = b.shuffle_vector(
        b.insert_element(ir.Constant(VI32, ir.Undefined), b.trunc(count, I32), ir.Constant(I32, 0)),
        ir.Constant(VI32, ir.Undefined),
        ir.Constant(VI32, [0] * LANES),
    )
    return b.icmp_signed("<", ir.Constant(VI32, list(range(LANES))), wide)


def _larger(b: Builder, x: Value, y: Value) -> Value:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _folded(build: Callable[[Builder, Value, Value], Value]) -> Callable[[Builder, Value], Value]:
    """All lanes combined along one fixed tree: 8 apart, then 4, 2, 1."""

    def fold(b: Builder, v: Value) -> Value:
        for step in (8, 4, 2, 1):
            turned = ir.Constant(VI32, [(lane + step) % LANES for lane in range(LANES)])
            v = build(b, v, b.shuffle_vector(v, UNDEFINED, turned))
        return b.extract_element(v, ir.Constant(I32, 0))

    return fold


def _butterfly(distance: int) -> Callable[[Builder, Value], Value]:
    """One Hadamard stage inside a vector: lanes i and i xor distance become their sum and their difference."""
    signs = ir.Constant(VF32, [-1.0 if lane & distance else 1.0 for lane in range(LANES)])
    partners = ir.Constant(VI32, [lane ^ distance for lane in range(LANES)])
    return lambda b, v: fma(b, v, signs, b.shuffle_vector(v, UNDEFINED, partners))


def _power_of_two(b: Builder, x: Value) -> Value:
    """2^x of whole |x| ≤ 126, by writing the exponent's bits; of a NaN some number or other."""
    bits = b.bitcast(b.fadd(x, constant(ROUNDER)), VI32)
    return b.bitcast(b.add(b.shl(bits, constant(23, I32)), constant(0x3F80_0000, I32)), VF32)


_pair = v16(v16, v16)
broadcast = _operation(v16(types.float32), splat)
add = _operation(_pair, lambda b, x, y: b.fadd(x, y))
subtract = _operation(_pair, lambda b, x, y: b.fsub(x, y))
multiply = _operation(_pair, lambda b, x, y: b.fmul(x, y))
divide = _operation(_pair, lambda b, x, y: b.fdiv(x, y))
multiply_add = _operation(v16(v16, v16, v16), fma)
"""x · y + z, rounded once."""
larger = _operation(_pair, _larger)
"""The larger of two; the second where either is NaN."""
at_most = _operation(_pair, lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), y, x))
"""x, but no more than y; a NaN in x stays."""
at_least = _operation(_pair, lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), y, x))
"""x, but no less than y; a NaN in x stays."""
magnitude = _operation(v16(v16), lambda b, x: b.bitcast(b.and_(b.bitcast(x, VI32), constant(0x7FFF_FFFF, I32)), VF32))
copy_sign = _operation(_pair, lambda b, x, y: call(b, "llvm.copysign.v16f32", x, y))
whole = _operation(v16(v16), lambda b, x: call(b, "llvm.rint.v16f32", x))
power_of_two = _operation(v16(v16), _power_of_two)
first_lanes = _operation(
    v16(v16, types.int64, v16), lambda b, x, count, other: b.select(_lane_mask(b, count), x, other)
)
"""The first `count` lanes of x, the others of another vector."""
total = _operation(types.float32(v16), _folded(lambda b, x, y: b.fadd(x, y)))
highest = _operation(types.float32(v16), _folded(_larger))
butterfly_1, butterfly_2, butterfly_4, butterfly_8 = (_operation(v16(v16), _butterfly(d)) for d in (1, 2, 4, 8))


def to_bfloat16(b: Builder, v: Value) -> Value:
    """The upper 16 bits, rounded to nearest even; a NaN, which the rounding could turn into a number, stays one."""
    bits = b.bitcast(v, VI32)
    odd = b.and_(b.lshr(bits, constant(16, I32)), constant(1, I32))
    rounded = b.lshr(b.add(bits, b.add(constant(0x7FFF, I32), odd)), constant(16, I32))
    return b.trunc(b.select(b.fcmp_unordered("uno", v, v), constant(0x7FC0, I32), rounded), VI16)


def from_stored(b: Builder, element: types.Type, pointer: Value) -> Value:
    """16 values at a pointer as float32: of float32, bfloat16 (kept as uint16) or int8."""
    if element == types.float32:
        return b.load(b.bitcast(pointer, VF32.as_pointer()), align=1)
    if element == types.uint16:
        bits = b.zext(b.load(b.bitcast(pointer, VI16.as_pointer()), align=1), VI32)
        return b.bitcast(b.shl(bits, constant(16, I32)), VF32)
    if element == types.int8:
        return b.sitofp(b.sext(b.load(b.bitcast(pointer, VI8.as_pointer()), align=1), VI32), VF32)
    raise TypeError(f"no vector load of {element}")


def to_stored(b: Builder, element: types.Type, v: Value) -> Value:
    """16 float32 values as they are kept: float32, bfloat16 (uint16), or whole numbers int8, int16, uint8 (+ 128)."""
    if element == types.float32:
        return v
    if element == types.uint16:
        return to_bfloat16(b, v)
    bits = b.bitcast(b.fadd(v, constant(ROUNDER)), VI32)  # no fptosi: of a NaN that would be undefined
    if element == types.int16:
        return b.trunc(bits, VI16)
    if element == types.int8:
        return b.trunc(bits, VI8)
    if element == types.uint8:
        return b.trunc(b.add(bits, constant(128, I32)), VI8)
    raise TypeError(f"no vector store of {element}")


@intrinsic
def load(typing: Any, array: Any, index: Any) -> Any:
    """16 values from a flat index on, as float32."""

    def code(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        kind = signature.args[0]
        pointer = address(context, b, kind, arguments[0], arguments[1], I8)
        return from_stored(b, kind.dtype, pointer)

    return v16(array, types.int64), code


@intrinsic
def store(typing: Any, array: Any, index: Any, v: Any) -> Any:
    """16 values from a flat index on, rounded to the array's type."""

    def code(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        kind = signature.args[0]
        value = to_stored(b, kind.dtype, arguments[2])
        b.store(value, address(context, b, kind, arguments[0], arguments[1], value.type), align=1)
        return context.get_dummy_value()

    return types.void(array, types.int64, v16), code


def request_line(b: Builder, pointer: Value) -> None:
    """Ask for a cache line; an address that is not ours does no harm."""
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    b.call(function, [pointer, ir.Constant(I32, 0), ir.Constant(I32, 3), ir.Constant(I32, 1)])
