"""Vector registers as numba values, and an operation of LLVM on them per function.

`Vector` is a numba type whose value is an LLVM vector, so compiled Python code holds vectors in local variables.
`Tile` is a row of equal vectors, one or more for each token. Memory is read by address, so that a memory-mapped file
works as it is; callers check bounds before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

Code = Any  # a value, a type or a builder of LLVM code: llvmlite has no static types
Value = Any  # a value of compiled code, whose type numba infers
_ELEMENTS = {
    "f32": ir.FloatType(),
    "i8": ir.IntType(8),
    "i16": ir.IntType(16),
    "i32": ir.IntType(32),
}
_BIT, _BYTE, _HALF, _WORD, _LONG = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
_REAL = ir.FloatType()


class Vector(types.Type):
    """A vector of `lanes` elements: "f32", "i8", "i16" or "i32"."""

    def __init__(self, lanes: int, element: str) -> None:
        self.lanes, self.element = lanes, element
        super().__init__(name=f"Vector({lanes}, {element})")

    @property
    def llvm(self) -> ir.VectorType:
        """The type in LLVM."""
        return ir.VectorType(_ELEMENTS[self.element], self.lanes)

    @property
    def suffix(self) -> str:
        """The end of the names of LLVM's functions for this type."""
        return f"v{self.lanes}{self.element}"


class Tile(types.Type):
    """`count` vectors of one type: accumulators of several tokens."""

    def __init__(self, vector: Vector, count: int) -> None:
        self.vector, self.count = vector, count
        super().__init__(name=f"Tile({vector.name}, {count})")

    @property
    def llvm(self) -> ir.ArrayType:
        """The type in LLVM."""
        return ir.ArrayType(self.vector.llvm, self.count)


@register_model(Vector)
@register_model(Tile)
class _AsLlvm(models.PrimitiveModel):
    def __init__(self, manager: Code, kind: Vector | Tile) -> None:
        super().__init__(manager, kind, kind.llvm)  # type: ignore[no-untyped-call]


F32x16, F32x8 = Vector(16, "f32"), Vector(8, "f32")
I32x16, I32x8 = Vector(16, "i32"), Vector(8, "i32")
I16x32, I16x16, I16x8 = Vector(32, "i16"), Vector(16, "i16"), Vector(8, "i16")
I8x64, I8x32, I8x16 = Vector(64, "i8"), Vector(32, "i8"), Vector(16, "i8")
Address = types.int64


def operation(result: Code, *arguments: Code) -> Callable[[Callable[..., Code]], Code]:
    """Make a function of compiled code from a function that builds LLVM code.

    Args:
        result: type of the result, or a function of the arguments' types.
        arguments: types of the arguments; None where `result` is a function.
    """

    def decorate(build: Callable[..., Code]) -> Code:
        def typed(*argument_types: Code) -> Code:
            kind = result if isinstance(result, types.Type) else result(*argument_types)
            signature = kind(*(arguments or argument_types))

            def generate(context: Code, builder: Code, signed: Code, values: Sequence[Code]) -> Code:
                made = build(builder, signed, *values)
                return context.get_dummy_value() if signed.return_type is types.void else made

            return signature, generate

        described = _WITH_CONTEXT[build.__code__.co_argcount - 2](typed)
        described.__name__ = described.__qualname__ = build.__name__
        described.__doc__ = build.__doc__
        return intrinsic(described)

    return decorate


# numba reads the number of arguments from the signature, so each number needs a function of its own.
_WITH_CONTEXT: list[Callable[[Callable[..., Code]], Code]] = [
    lambda typed: lambda context: typed(),
    lambda typed: lambda context, a: typed(a),
    lambda typed: lambda context, a, b: typed(a, b),
    lambda typed: lambda context, a, b, c: typed(a, b, c),
    lambda typed: lambda context, a, b, c, d: typed(a, b, c, d),
    lambda typed: lambda context, a, b, c, d, e: typed(a, b, c, d, e),
]


def zeros(lanes: Code, each: Callable[[int], int] = lambda tokens: 1) -> Code:
    """An operation that makes a tile of zeros from the addresses of the tokens' activations.

    Args:
        lanes: type of an accumulator.
        each: number of tokens -> accumulators for each of them.
    """

    def tile(_: Code, signed: Code, tokens: Code) -> Code:
        return ir.Constant(signed.return_type.llvm, None)

    return operation(lambda tokens: Tile(lanes, len(tokens) * each(len(tokens))))(tile)


def _function(builder: Code, kind: Code, name: str) -> Code:
    return cgutils.get_or_insert_function(builder.module, kind, name)  # type: ignore[no-untyped-call]


def call(builder: Code, name: str, result: Code, values: Sequence[Code]) -> Code:
    """Call a function of LLVM."""
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(_function(builder, kind, name), values)


def read(builder: Code, address: Code, kind: Code, align: int = 1) -> Code:
    """Read a value of a type at an address."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def constant(kind: Code, value: int) -> Code:
    """A vector with the same value in all lanes."""
    return ir.Constant(kind, [value] * kind.count)


def splat(builder: Code, value: Code, lanes: int) -> Code:
    """A vector of `lanes` copies of a value known at run time."""
    kind = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _WORD(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_WORD, lanes), [0] * lanes))


def _added(builder: Code, vector: Code) -> Code:
    """The sum of the lanes of float32 vectors, in any order."""
    name = f"llvm.vector.reduce.fadd.v{vector.type.count}f32"
    kind = ir.FunctionType(_REAL, [_REAL, vector.type])
    return builder.call(_function(builder, kind, name), [ir.Constant(_REAL, 0.0), vector], fastmath=("reassoc",))


def fused_code(builder: Code, first: Code, second: Code, third: Code) -> Code:
    """The code of first * second + third."""
    return call(builder, f"llvm.fma.v{first.type.count}f32", first.type, [first, second, third])


# ---- scalars
@operation(types.uint64, Address)
def read_mask(builder: Code, _: Code, address: Code) -> Code:
    """The 64 mask bits at an address."""
    return read(builder, address, _LONG, 8)


@operation(Address, Address)
def read_long(builder: Code, _: Code, address: Code) -> Code:
    """The int64 at an address."""
    return read(builder, address, _LONG, 8)


@operation(Address, Address)
def read_half(builder: Code, _: Code, address: Code) -> Code:
    """The uint16 at an address."""
    return builder.zext(read(builder, address, _HALF, 2), _LONG)


@operation(types.float32, Address)
def read_real(builder: Code, _: Code, address: Code) -> Code:
    """The float32 at an address."""
    return read(builder, address, _REAL, 4)


@operation(types.float32, Address)
def read_bfloat(builder: Code, _: Code, address: Code) -> Code:
    """The bfloat16 at an address, as float32."""
    word = builder.zext(read(builder, address, _HALF, 2), _WORD)
    return builder.bitcast(builder.shl(word, _WORD(16)), _REAL)


@operation(types.void, Address, types.float32)
def write_real(builder: Code, _: Code, address: Code, value: Code) -> None:
    """Store a float32."""
    builder.store(value, builder.inttoptr(address, _REAL.as_pointer()), align=4)


@operation(types.void, Address)
def prefetch(builder: Code, _: Code, address: Code) -> None:
    """Bring a cache line near, before it is needed."""
    place = builder.inttoptr(address, _BYTE.as_pointer())
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [place, _WORD(0), _WORD(3), _WORD(1)])


@operation(Address, types.uint64)
def count_bits(builder: Code, _: Code, mask: Code) -> Code:
    """Number of set bits."""
    return call(builder, "llvm.ctpop.i64", _LONG, [mask])


# ---- vectors of any CPU
def reader(vector: Vector) -> Code:
    """A function of compiled code that reads a vector at an address."""

    @operation(vector, Address)
    def read_vector(builder: Code, _: Code, address: Code) -> Code:
        return read(builder, address, vector.llvm)

    return read_vector


read_bytes64, read_halves32, read_halves16 = reader(I8x64), reader(I16x32), reader(I16x16)
read_halves8 = reader(I16x8)


@operation(lambda value: Vector(value.lanes, "f32"))
def from_bfloat(builder: Code, signed: Code, value: Code) -> Code:
    """Vector of bfloat16 bits, in order, as float32."""
    words = ir.VectorType(_WORD, signed.args[0].lanes)
    return builder.bitcast(builder.shl(builder.zext(value, words), constant(words, 16)), signed.return_type.llvm)


@operation(lambda first, second, third: first)
def fused(builder: Code, _: Code, first: Code, second: Code, third: Code) -> Code:
    """first * second + third."""
    return fused_code(builder, first, second, third)


@operation(lambda first, second: first)
def plus(builder: Code, signed: Code, first: Code, second: Code) -> Code:
    """The sum of two vectors."""
    real = signed.return_type.element == "f32"
    return builder.fadd(first, second) if real else builder.add(first, second)


@operation(types.float32, F32x16)
def sum16(builder: Code, _: Code, vector: Code) -> Code:
    """The sum of 16 lanes."""
    return _added(builder, vector)


@operation(types.float32, F32x8)
def sum8(builder: Code, _: Code, vector: Code) -> Code:
    """The sum of 8 lanes."""
    return _added(builder, vector)


def zero(vector: Vector) -> Code:
    """A function of compiled code that gives a vector of zeros."""

    @operation(vector)
    def zeros(builder: Code, _: Code) -> Code:
        return ir.Constant(vector.llvm, None)

    return zeros


zero_reals16, zero_reals8 = zero(F32x16), zero(F32x8)


# ---- tiles: one or more accumulators for each token
@operation(lambda tile, sums, scale: tile)
def add_scaled(builder: Code, signed: Code, tile: Code, sums: Code, scale: Code) -> Code:
    """Add integer sums times a scale."""
    kind = signed.args[0].vector
    scales = splat(builder, scale, kind.lanes)
    for token in range(signed.args[0].count):
        real = builder.sitofp(builder.extract_value(sums, token), kind.llvm)
        new = fused_code(builder, real, scales, builder.extract_value(tile, token))
        tile = builder.insert_value(tile, new, token)
    return tile


@operation(lambda tile, tokens, output, stride: types.void)
def write_sums(builder: Code, signed: Code, tile: Code, tokens: Code, output: Code, stride: Code) -> None:
    """Store the sum of each token's accumulators at `output`, a token every `stride` bytes."""
    number = signed.args[1].count
    each = signed.args[0].count // number
    for token in range(number):
        total = builder.extract_value(tile, token * each)
        for part in range(1, each):
            total = builder.fadd(total, builder.extract_value(tile, token * each + part))
        place = builder.add(output, builder.mul(stride, _LONG(token)))
        builder.store(_added(builder, total), builder.inttoptr(place, _REAL.as_pointer()), align=4)
