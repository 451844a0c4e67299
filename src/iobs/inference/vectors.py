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
    def __init__(self, manager: Any, kind: Vector | Tile) -> None:
        super().__init__(manager, kind, kind.llvm)  # type: ignore[no-untyped-call]


F32x16, F32x8 = Vector(16, "f32"), Vector(8, "f32")
I32x16, I32x8 = Vector(16, "i32"), Vector(8, "i32")
I16x32, I16x16, I16x8 = Vector(32, "i16"), Vector(16, "i16"), Vector(8, "i16")
I8x64, I8x32, I8x16 = Vector(64, "i8"), Vector(32, "i8"), Vector(16, "i8")
Address = types.int64


def operation(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a function of compiled code from a function that builds LLVM code.

    Args:
        result: type of the result, or a function of the arguments' types.
        arguments: types of the arguments; None where `result` is a function.
    """

    def decorate(build: Callable[..., Any]) -> Any:
        def typed(*given: Any) -> Any:
            kind = result if isinstance(result, types.Type) else result(*given)
            signature = kind(*(arguments or given))

            def generate(context: Any, builder: Any, signed: Any, values: Sequence[Any]) -> Any:
                made = build(builder, signed, *values)
                return context.get_dummy_value() if signed.return_type is types.void else made

            return signature, generate

        described = _WITH_CONTEXT[build.__code__.co_argcount - 2](typed)
        described.__name__ = described.__qualname__ = build.__name__
        described.__doc__ = build.__doc__
        return intrinsic(described)

    return decorate


# numba reads the number of arguments from the signature, so each number needs a function of its own.
_WITH_CONTEXT: list[Callable[[Callable[..., Any]], Any]] = [
    lambda typed: lambda context: typed(),
    lambda typed: lambda context, a: typed(a),
    lambda typed: lambda context, a, b: typed(a, b),
    lambda typed: lambda context, a, b, c: typed(a, b, c),
    lambda typed: lambda context, a, b, c, d: typed(a, b, c, d),
    lambda typed: lambda context, a, b, c, d, e: typed(a, b, c, d, e),
]


def _function(builder: Any, kind: Any, name: str) -> Any:
    return cgutils.get_or_insert_function(builder.module, kind, name)  # type: ignore[no-untyped-call]


def _call(builder: Any, name: str, result: Any, values: Sequence[Any]) -> Any:
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(_function(builder, kind, name), values)


def _read(builder: Any, address: Any, kind: Any, align: int = 1) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def _constant(kind: Any, value: int) -> Any:
    """A vector with the same value in all lanes."""
    return ir.Constant(kind, [value] * kind.count)


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    """A vector of `lanes` copies of a value known at run time."""
    kind = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _WORD(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_WORD, lanes), [0] * lanes))


def _added(builder: Any, vector: Any) -> Any:
    """The sum of the lanes of float32 vectors, in any order."""
    name = f"llvm.vector.reduce.fadd.v{vector.type.count}f32"
    kind = ir.FunctionType(_REAL, [_REAL, vector.type])
    return builder.call(_function(builder, kind, name), [ir.Constant(_REAL, 0.0), vector], fastmath=("reassoc",))


def _fused(builder: Any, first: Any, second: Any, third: Any) -> Any:
    """first * second + third."""
    return _call(builder, f"llvm.fma.v{first.type.count}f32", first.type, [first, second, third])


# ---- scalars
@operation(types.uint64, Address)
def read_mask(builder: Any, _: Any, address: Any) -> Any:
    """The 64 mask bits at an address."""
    return _read(builder, address, _LONG, 8)


@operation(Address, Address)
def read_long(builder: Any, _: Any, address: Any) -> Any:
    """The int64 at an address."""
    return _read(builder, address, _LONG, 8)


@operation(Address, Address)
def read_byte(builder: Any, _: Any, address: Any) -> Any:
    """The uint8 at an address."""
    return builder.zext(_read(builder, address, _BYTE), _LONG)


@operation(types.float32, Address)
def read_real(builder: Any, _: Any, address: Any) -> Any:
    """The float32 at an address."""
    return _read(builder, address, _REAL, 4)


@operation(types.float32, Address)
def read_bfloat(builder: Any, _: Any, address: Any) -> Any:
    """The bfloat16 at an address, as float32."""
    word = builder.zext(_read(builder, address, _HALF, 2), _WORD)
    return builder.bitcast(builder.shl(word, _WORD(16)), _REAL)


@operation(types.void, Address, types.float32)
def write_real(builder: Any, _: Any, address: Any, value: Any) -> None:
    """Store a float32."""
    builder.store(value, builder.inttoptr(address, _REAL.as_pointer()), align=4)


@operation(types.void, Address)
def prefetch(builder: Any, _: Any, address: Any) -> None:
    """Bring a cache line near, before it is needed."""
    place = builder.inttoptr(address, _BYTE.as_pointer())
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), [place, _WORD(0), _WORD(3), _WORD(1)])


@operation(Address, types.uint64)
def count_bits(builder: Any, _: Any, mask: Any) -> Any:
    """Number of set bits."""
    return _call(builder, "llvm.ctpop.i64", _LONG, [mask])


# ---- vectors of any CPU
def reader(vector: Vector) -> Any:
    """A function of compiled code that reads a vector at an address."""

    @operation(vector, Address)
    def read_vector(builder: Any, _: Any, address: Any) -> Any:
        return _read(builder, address, vector.llvm)

    return read_vector


read_bytes64, read_halves32, read_halves16 = reader(I8x64), reader(I16x32), reader(I16x16)
read_reals8, read_halves8 = reader(F32x8), reader(I16x8)


@operation(lambda value: Vector(value.lanes, "f32"))
def from_bfloat(builder: Any, signed: Any, value: Any) -> Any:
    """Vector of bfloat16 bits, in order, as float32."""
    words = ir.VectorType(_WORD, signed.args[0].lanes)
    return builder.bitcast(builder.shl(builder.zext(value, words), _constant(words, 16)), signed.return_type.llvm)


@operation(lambda first, second, third: first)
def fused(builder: Any, _: Any, first: Any, second: Any, third: Any) -> Any:
    """first * second + third."""
    return _fused(builder, first, second, third)


@operation(lambda first, second: first)
def plus(builder: Any, signed: Any, first: Any, second: Any) -> Any:
    """The sum of two vectors."""
    real = signed.return_type.element == "f32"
    return builder.fadd(first, second) if real else builder.add(first, second)


@operation(types.float32, F32x16)
def sum16(builder: Any, _: Any, vector: Any) -> Any:
    """The sum of 16 lanes."""
    return _added(builder, vector)


@operation(types.float32, F32x8)
def sum8(builder: Any, _: Any, vector: Any) -> Any:
    """The sum of 8 lanes."""
    return _added(builder, vector)


def zero(vector: Vector) -> Any:
    """A function of compiled code that gives a vector of zeros."""

    @operation(vector)
    def zeros(builder: Any, _: Any) -> Any:
        return ir.Constant(vector.llvm, None)

    return zeros


zero_reals16, zero_reals8, zero_words8 = zero(F32x16), zero(F32x8), zero(I32x8)


# ---- tiles: one or more accumulators for each token; `tokens` are the addresses of the tokens' activations
def _for_each(tokens: Any) -> int:
    """Accumulators for each token: enough independent sums to hide the latency of a multiply-add."""
    return max(1, min(4, 8 // len(tokens)))


@operation(lambda tokens: Tile(F32x16, len(tokens) * _for_each(tokens)))
def real_tile(_: Any, signed: Any, tokens: Any) -> Any:
    """Zeros: float32 accumulators for bfloat16 weights."""
    return ir.Constant(signed.return_type.llvm, None)


@operation(lambda tokens: Tile(F32x16, len(tokens)))
def scaled_tile(_: Any, signed: Any, tokens: Any) -> Any:
    """Zeros: a float32 accumulator for each token, for scaled sums of integers."""
    return ir.Constant(signed.return_type.llvm, None)


@operation(lambda tokens: Tile(I32x16, len(tokens)))
def integer_tile(_: Any, signed: Any, tokens: Any) -> Any:
    """Zeros: an int32 accumulator for each token."""
    return ir.Constant(signed.return_type.llvm, None)


@operation(lambda tile, tokens, offset, low, high: tile)
def add_bfloats(builder: Any, signed: Any, tile: Any, tokens: Any, offset: Any, low: Any, high: Any) -> Any:
    """Add the products of 64 bfloat16 weights with each token's activations at `offset` bytes.

    Activations are float32, the even ones of each 32 before the odd ones: a shift and a mask widen the weights.
    """
    words, lanes = I32x16.llvm, F32x16.llvm
    widened = []
    for half in (low, high):
        bits = builder.bitcast(half, words)
        widened.append(builder.bitcast(builder.shl(bits, _constant(words, 16)), lanes))
        widened.append(builder.bitcast(builder.and_(bits, _constant(words, -65536)), lanes))
    number = signed.args[1].count
    each = signed.args[0].count // number
    for token in range(number):
        start = builder.add(builder.extract_value(tokens, token), offset)
        for part, weights in enumerate(widened):
            place = token * each + part % each
            given = _read(builder, builder.add(start, _LONG(64 * part)), lanes, 4)
            tile = builder.insert_value(
                tile, _fused(builder, weights, given, builder.extract_value(tile, place)), place
            )
    return tile


@operation(lambda tile, tokens, offset, weights: tile)
def add_bytes(builder: Any, signed: Any, tile: Any, tokens: Any, offset: Any, weights: Any) -> Any:
    """Add the products of 64 int8 weights with each token's uint8 activations at `offset` bytes (vpdpbusd)."""
    for token in range(signed.args[0].count):
        given = _read(builder, builder.add(builder.extract_value(tokens, token), offset), I8x64.llvm)
        old = builder.extract_value(tile, token)
        new = _call(builder, "llvm.x86.avx512.vpdpbusd.512", old.type, [old, given, weights])
        tile = builder.insert_value(tile, new, token)
    return tile


@operation(lambda tile, sums, scale: tile)
def add_scaled(builder: Any, signed: Any, tile: Any, sums: Any, scale: Any) -> Any:
    """Add integer sums times a scale."""
    scales = _splat(builder, scale, 16)
    for token in range(signed.args[0].count):
        real = builder.sitofp(builder.extract_value(sums, token), F32x16.llvm)
        new = _fused(builder, real, scales, builder.extract_value(tile, token))
        tile = builder.insert_value(tile, new, token)
    return tile


@operation(lambda tile, tokens, output, stride: types.void)
def write_sums(builder: Any, signed: Any, tile: Any, tokens: Any, output: Any, stride: Any) -> None:
    """Store the sum of each token's accumulators at `output`, a token every `stride` bytes."""
    number = signed.args[1].count
    each = signed.args[0].count // number
    for token in range(number):
        total = builder.extract_value(tile, token * each)
        for part in range(1, each):
            total = builder.fadd(total, builder.extract_value(tile, token * each + part))
        place = builder.add(output, builder.mul(stride, _LONG(token)))
        builder.store(_added(builder, total), builder.inttoptr(place, _REAL.as_pointer()), align=4)


# ---- AVX-512 (VBMI2): the next non-zero values go to the lanes of the set bits
@operation(I16x32, Address, types.uint32)
def expand_halves(builder: Any, _: Any, address: Any, mask: Any) -> Any:
    """The next 16-bit values at an address, spread over the lanes of the set bits; reads 64 bytes (vpexpandw)."""
    source = _read(builder, address, I16x32.llvm)
    lanes = builder.bitcast(mask, ir.VectorType(_BIT, 32))
    name = "llvm.x86.avx512.mask.expand.v32i16"
    return _call(builder, name, source.type, [source, ir.Constant(source.type, None), lanes])


def _expanded(builder: Any, source: Any, mask: Any) -> Any:
    lanes = builder.bitcast(mask, ir.VectorType(_BIT, 64))
    name = "llvm.x86.avx512.mask.expand.v64i8"
    return _call(builder, name, source.type, [source, ir.Constant(source.type, None), lanes])


@operation(I8x64, Address, types.uint64)
def expand_bytes(builder: Any, _: Any, address: Any, mask: Any) -> Any:
    """The next bytes at an address, spread over the lanes of the set bits; reads 64 bytes (vpexpandb)."""
    return _expanded(builder, _read(builder, address, I8x64.llvm), mask)


@operation(I8x64, I8x64, Address, types.uint64)
def expand_codes(builder: Any, _: Any, levels: Any, address: Any, mask: Any) -> Any:
    """The levels of the next 4-bit codes, spread over the lanes of the set bits; reads 32 bytes.

    Args:
        levels: 16 levels of int8, four times.
        address: of the codes, the low half of each byte first.
        mask: of 64 lanes.
    """
    source = builder.zext(_read(builder, address, I8x32.llvm), I16x32.llvm)
    pairs = builder.or_(source, builder.shl(source, _constant(I16x32.llvm, 4)))
    codes = builder.bitcast(builder.and_(pairs, _constant(I16x32.llvm, 0x0F0F)), I8x64.llvm)
    return _expanded(builder, _call(builder, "llvm.x86.avx512.pshuf.b.512", I8x64.llvm, [levels, codes]), mask)


@operation(F32x16, Address, I16x16)
def gather(builder: Any, _: Any, base: Any, columns: Any) -> Any:
    """The float32 values of 16 unsigned 16-bit columns (vgatherdps)."""
    index = builder.zext(columns, I32x16.llvm)
    place = builder.inttoptr(base, _BYTE.as_pointer())
    every = ir.Constant(ir.VectorType(_BIT, 16), [1] * 16)
    empty = ir.Constant(F32x16.llvm, None)
    return _call(builder, "llvm.x86.avx512.mask.gather.dps.512", F32x16.llvm, [empty, place, index, every, _WORD(4)])


@operation(types.void, Address, I16x32)
def write_widened(builder: Any, _: Any, address: Any, values: Any) -> None:
    """Store 32 bfloat16 values as float32."""
    words, reals = ir.VectorType(_WORD, 32), ir.VectorType(_REAL, 32)
    found = builder.bitcast(builder.shl(builder.zext(values, words), _constant(words, 16)), reals)
    builder.store(found, builder.inttoptr(address, reals.as_pointer()), align=4)


@operation(types.void, Address, I8x64, types.float32)
def write_scaled(builder: Any, _: Any, address: Any, values: Any, scale: Any) -> None:
    """Store 64 int8 values times a scale as float32."""
    reals = ir.VectorType(_REAL, 64)
    found = builder.fmul(builder.sitofp(values, reals), _splat(builder, scale, 64))
    builder.store(found, builder.inttoptr(address, reals.as_pointer()), align=4)


# ---- SSSE3 and AVX2: a table of 256 rows says which byte goes to which lane
@operation(I16x8, Address, Address)
def spread_halves(builder: Any, _: Any, address: Any, row: Any) -> Any:
    """The next 16-bit values at an address, spread over 8 lanes by a table's row of 16 bytes; reads 16 bytes."""
    source, order = _read(builder, address, I8x16.llvm), _read(builder, row, I8x16.llvm)
    return builder.bitcast(_call(builder, "llvm.x86.ssse3.pshuf.b.128", I8x16.llvm, [source, order]), I16x8.llvm)


@operation(I16x16, Address, Address, Address, Address)
def spread_bytes(builder: Any, _: Any, low: Any, low_row: Any, high: Any, high_row: Any) -> Any:
    """The next bytes at two addresses, each spread over 8 lanes by a table's row of 8 bytes, as int16."""
    pair = ir.VectorType(_LONG, 2)

    def half(address: Any, row: Any) -> Any:
        def narrow(place: Any) -> Any:
            word = _read(builder, place, _LONG)
            return builder.bitcast(builder.insert_element(ir.Constant(pair, [0, 0]), word, _WORD(0)), I8x16.llvm)

        found = _call(builder, "llvm.x86.ssse3.pshuf.b.128", I8x16.llvm, [narrow(address), narrow(row)])
        return builder.bitcast(found, pair)

    both = builder.shuffle_vector(
        half(low, low_row), half(high, high_row), ir.Constant(ir.VectorType(_WORD, 2), [0, 2])
    )
    return builder.sext(builder.bitcast(both, I8x16.llvm), I16x16.llvm)


@operation(I32x8, I32x8, I16x16, Address)
def add_pairs(builder: Any, _: Any, total: Any, weights: Any, activations: Any) -> Any:
    """Add the products of 16 int16 weights and 16 uint8 activations at an address, in pairs (vpmaddwd)."""
    given = builder.zext(_read(builder, activations, I8x16.llvm), I16x16.llvm)
    return builder.add(total, _call(builder, "llvm.x86.avx2.pmadd.wd", I32x8.llvm, [weights, given]))


@operation(I16x16, Address)
def widen_bytes(builder: Any, _: Any, address: Any) -> Any:
    """16 int8 values at an address, as int16."""
    return builder.sext(_read(builder, address, I8x16.llvm), I16x16.llvm)


@operation(F32x8, I32x8)
def to_reals8(builder: Any, _: Any, words: Any) -> Any:
    """8 int32 as float32."""
    return builder.sitofp(words, F32x8.llvm)


@operation(F32x8, types.float32)
def splat8(builder: Any, _: Any, value: Any) -> Any:
    """8 copies of a value."""
    return _splat(builder, value, 8)
