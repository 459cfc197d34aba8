"""Inner loops as LLVM functions of their own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llvmlite import ir

Builder = Any
Value = Any
Body = Callable[[Builder, Sequence[Value]], None]


def call_apart(b: Builder, name: str, build: Body, arguments: Sequence[Value]) -> None:
    """Call the function `name`, which `build(builder, its arguments)` writes where the module has none yet.

    It is never inlined: among the many values of a whole kernel, the pointers of an innermost loop are kept on the
    stack and read again at each step, which costs the product a quarter of its speed. `name` says all that `build`
    depends on.
    """
    function, kind = b.module.globals.get(name), ir.FunctionType(ir.VoidType(), [given.type for given in arguments])
    if function is None:
        function = ir.Function(b.module, kind, name)
        function.linkage = "linkonce_odr"  # kernels that are linked into one may bring it twice
        for attribute in ("noinline", "nounwind", "optsize"):  # optsize: unrolled, its sums would be spilled
            function.attributes.add(attribute)
        inside = ir.IRBuilder(function.append_basic_block("entry"))
        build(inside, function.args)
        inside.ret_void()
    if function.function_type != kind:
        raise TypeError(f"{name} is a function of other arguments already")
    b.call(function, arguments)


def call_one_of(b: Builder, chosen: Value, name: str, bodies: Mapping[int, Body], arguments: Sequence[Value]) -> None:
    """Call `name`_`chosen`; where no body has that number, nothing happens."""
    after = b.append_basic_block("called")
    cases = b.switch(chosen, after)
    for number, build in bodies.items():
        block = b.append_basic_block(f"call_{number}")
        cases.add_case(ir.Constant(chosen.type, number), block)
        b.position_at_end(block)
        call_apart(b, f"{name}_{number}", build, arguments)
        b.branch(after)
    b.position_at_end(after)
