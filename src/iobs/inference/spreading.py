"""Operations for CPUs with AVX2: the rows of a table say which stored value goes to which lane.

A table has a row for each byte of a mask. `weights` are 32 columns as float32 vectors, or 64 as int8 vectors.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from iobs.inference.vectors import (
    Address,
    Code,
    F32x8,
    I8x16,
    I8x32,
    I16x8,
    I16x16,
    I32x8,
    Tile,
    operation,
)
from iobs.inference.vectors import call as _call
from iobs.inference.vectors import constant as _constant
from iobs.inference.vectors import fused_code as _fused
from iobs.inference.vectors import read as _read
from iobs.inference.vectors import splat as _splat

_BIT, _BYTE, _HALF, _WORD, _LONG = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
_FOUR, _TWO = Tile(F32x8, 4), Tile(I8x32, 2)
_DOUBLE = ir.DoubleType()
_PLACES = ir.VectorType(_WORD, 32)


def _places(builder: Code, first: Code, bits: Code, size: int) -> list[tuple[Code, Code]]:
    """For each byte of a mask of 32 bits: the byte, and the address of its first value, of `size` bytes."""
    found, wide = [], builder.zext(bits, _LONG)
    for part in range(4):
        byte = builder.and_(builder.lshr(wide, _LONG(8 * part)), _LONG(0xFF))
        found.append((byte, first))
        count = _call(builder, "llvm.ctpop.i64", _LONG, [byte])
        first = builder.add(first, builder.mul(count, _LONG(size)))
    return found


@operation(_FOUR, Address, Address, types.uint32)
def spread_bfloats(builder: Code, _: Code, table: Code, address: Code, mask: Code) -> Code:
    """The next bfloat16 values at an address, spread over the set bits of a mask, as float32.

    Args:
        table: see `table_of_bfloats`.
        address: of the values; 16 bytes behind the last are read too.
        mask: of 32 columns.
    """
    found = ir.Constant(_FOUR.llvm, None)
    twice = ir.Constant(_PLACES, [*range(16), *range(16)])
    for part, (byte, place) in enumerate(_places(builder, address, mask, 2)):
        values = _read(builder, place, I8x16.llvm)
        order = _read(builder, builder.add(table, builder.mul(byte, _LONG(32))), I8x32.llvm, 32)
        both = builder.shuffle_vector(values, values, twice)
        spread = _call(builder, "llvm.x86.avx2.pshuf.b", I8x32.llvm, [both, order])
        found = builder.insert_value(found, builder.bitcast(spread, F32x8.llvm), part)
    return found


@operation(_FOUR, Address)
def widen_bfloats(builder: Code, _: Code, address: Code) -> Code:
    """32 bfloat16 values at an address as float32: those of even columns, then those of odd ones."""
    found, words = ir.Constant(_FOUR.llvm, None), I32x8.llvm
    for half in range(2):
        bits = _read(builder, builder.add(address, _LONG(32 * half)), words)
        even, odd = builder.shl(bits, _constant(words, 16)), builder.and_(bits, _constant(words, -65536))
        found = builder.insert_value(found, builder.bitcast(even, F32x8.llvm), half)
        found = builder.insert_value(found, builder.bitcast(odd, F32x8.llvm), 2 + half)
    return found


@operation(_TWO, Address, Address, types.uint64)
def spread_bytes(builder: Code, _: Code, table: Code, address: Code, mask: Code) -> Code:
    """The next bytes at an address, spread over the set bits of a mask.

    16 columns take one read of 16 bytes. Of its order, the second half depends on the number of values in the first.

    Args:
        table: see `table_of_bytes`.
        address: of the values; 16 bytes behind the last are read too.
        mask: of 64 columns.
    """
    found, pair = ir.Constant(_TWO.llvm, None), ir.VectorType(_DOUBLE, 2)
    for part in range(2):
        halves = []
        for bits in (builder.lshr(mask, _LONG(32 * part)), builder.lshr(mask, _LONG(32 * part + 16))):
            low, high = builder.and_(bits, _LONG(0xFF)), builder.and_(builder.lshr(bits, _LONG(8)), _LONG(0xFF))
            begun = _call(builder, "llvm.ctpop.i64", _LONG, [low])
            first = builder.add(table, builder.mul(low, _LONG(8)))
            second = builder.add(table, builder.add(builder.mul(begun, _LONG(2048)), builder.mul(high, _LONG(8))))
            order = ir.Constant(pair, ir.Undefined)
            order = builder.insert_element(order, _read(builder, first, _DOUBLE, 8), _WORD(0))
            order = builder.insert_element(order, _read(builder, second, _DOUBLE, 8), _WORD(1))
            halves.append((_read(builder, address, I8x16.llvm), builder.bitcast(order, I8x16.llvm)))
            address = builder.add(address, _call(builder, "llvm.ctpop.i64", _LONG, [builder.and_(bits, _LONG(0xFFFF))]))
        both = ir.Constant(_PLACES, list(range(32)))
        wide = [builder.shuffle_vector(low, high, both) for low, high in zip(*halves, strict=True)]
        found = builder.insert_value(found, _call(builder, "llvm.x86.avx2.pshuf.b", I8x32.llvm, wide), part)
    return found


@operation(types.void, Address, Address, Address)
def write_levels(builder: Code, _: Code, levels: Code, address: Code, found: Code) -> None:
    """Store the levels of 32 codes of 4 bits, one byte each.

    Args:
        levels: address of 16 levels of int8.
        address: of the codes, the low half of each byte first; 16 bytes are read.
        found: address of 32 bytes.
    """
    sixteen = _read(builder, levels, I8x16.llvm)
    both = builder.shuffle_vector(sixteen, sixteen, ir.Constant(_PLACES, [*range(16), *range(16)]))
    codes = builder.zext(_read(builder, address, I8x16.llvm), I16x16.llvm)
    pairs = builder.or_(codes, builder.shl(codes, _constant(I16x16.llvm, 4)))
    order = builder.bitcast(builder.and_(pairs, _constant(I16x16.llvm, 0x0F0F)), I8x32.llvm)
    spread = _call(builder, "llvm.x86.avx2.pshuf.b", I8x32.llvm, [both, order])
    builder.store(spread, builder.inttoptr(found, I8x32.llvm.as_pointer()), align=1)


@operation(F32x8, Address, I16x8)
def gather8(builder: Code, _: Code, base: Code, columns: Code) -> Code:
    """The float32 values of 8 unsigned 16-bit columns (vgatherdps)."""
    index = builder.zext(columns, I32x8.llvm)
    place = builder.inttoptr(base, _BYTE.as_pointer())
    every = builder.bitcast(_constant(I32x8.llvm, -1), F32x8.llvm)
    given = [ir.Constant(F32x8.llvm, None), place, index, every, _BYTE(4)]
    return _call(builder, "llvm.x86.avx2.gather.d.ps.256", F32x8.llvm, given)


# ---- tiles: one or more accumulators for each token; `tokens` are the addresses of the tokens' activations
@operation(lambda tokens: Tile(F32x8, len(tokens) * max(1, 4 // len(tokens))))
def real_tile8(_: Code, signed: Code, tokens: Code) -> Code:
    """Zeros: float32 accumulators, enough of them to hide the latency of a multiply-add."""
    return ir.Constant(signed.return_type.llvm, None)


@operation(lambda tokens: Tile(F32x8, len(tokens)))
def scaled_tile8(_: Code, signed: Code, tokens: Code) -> Code:
    """Zeros: a float32 accumulator for each token, for scaled sums of integers."""
    return ir.Constant(signed.return_type.llvm, None)


@operation(lambda tokens: Tile(I32x8, len(tokens)))
def integer_tile8(_: Code, signed: Code, tokens: Code) -> Code:
    """Zeros: an int32 accumulator for each token."""
    return ir.Constant(signed.return_type.llvm, None)


@operation(lambda tile, tokens, offset, weights: tile)
def add_reals8(builder: Code, signed: Code, tile: Code, tokens: Code, offset: Code, weights: Code) -> Code:
    """Add the products of 32 weights with each token's float32 activations at `offset` bytes."""
    number = signed.args[1].count
    each = signed.args[0].count // number
    for token in range(number):
        start = builder.add(builder.extract_value(tokens, token), offset)
        for part in range(4):
            place = token * each + part % each
            given = _read(builder, builder.add(start, _LONG(32 * part)), F32x8.llvm, 4)
            old = builder.extract_value(tile, place)
            tile = builder.insert_value(tile, _fused(builder, builder.extract_value(weights, part), given, old), place)
    return tile


@operation(lambda tile, tokens, offset, weights: tile)
def add_bytes8(builder: Code, signed: Code, tile: Code, tokens: Code, offset: Code, weights: Code) -> Code:
    """Add the products of 64 int8 weights with each token's int8 activations at `offset` bytes.

    vpmaddubsw wants one unsigned factor: |weight| * (sign of weight * activation). Two such products are at most
    2 * 128 * 127, so 16 bits hold their sum.
    """
    ones = _constant(I16x16.llvm, 1)
    for part in range(2):
        some = builder.extract_value(weights, part)
        magnitude = _call(builder, "llvm.abs.v32i8", I8x32.llvm, [some, _BIT(0)])
        for token in range(signed.args[0].count):
            place = builder.add(builder.extract_value(tokens, token), offset)
            given = _read(builder, builder.add(place, _LONG(32 * part)), I8x32.llvm)
            turned = _call(builder, "llvm.x86.avx2.psign.b", I8x32.llvm, [given, some])
            pairs = _call(builder, "llvm.x86.avx2.pmadd.ub.sw", I16x16.llvm, [magnitude, turned])
            words = _call(builder, "llvm.x86.avx2.pmadd.wd", I32x8.llvm, [pairs, ones])
            tile = builder.insert_value(tile, builder.add(builder.extract_value(tile, token), words), token)
    return tile


@operation(_TWO, Address)
def read_bytes(builder: Code, _: Code, address: Code) -> Code:
    """64 int8 weights at an address."""
    found = ir.Constant(_TWO.llvm, None)
    for part in range(2):
        some = _read(builder, builder.add(address, _LONG(32 * part)), I8x32.llvm)
        found = builder.insert_value(found, some, part)
    return found


# ---- unpacked rows
@operation(types.void, Address, _FOUR)
def write_reals(builder: Code, _: Code, address: Code, weights: Code) -> None:
    """Store 32 float32 weights."""
    for part in range(4):
        place = builder.inttoptr(builder.add(address, _LONG(32 * part)), F32x8.llvm.as_pointer())
        builder.store(builder.extract_value(weights, part), place, align=4)


@operation(types.void, Address, _TWO, types.float32)
def write_scaled8(builder: Code, _: Code, address: Code, weights: Code, scale: Code) -> None:
    """Store 64 int8 weights times a scale as float32."""
    reals = ir.VectorType(ir.FloatType(), 32)
    for part in range(2):
        found = builder.sitofp(builder.extract_value(weights, part), reals)
        place = builder.inttoptr(builder.add(address, _LONG(128 * part)), reals.as_pointer())
        builder.store(builder.fmul(found, _splat(builder, scale, 32)), place, align=4)
