"""Products of stored matrices with one or more vectors, for CPUs with AVX2 and FMA.

Arguments as in `kernels_avx512.py`, but tables spread the values: `levels` is the address of the table of the format.
Activations are float32, or int8. Quantised kernels leave out the scale of the token; their sums need no correction.

For one token, some kernels take a row of the first and one of the second half of the rows together. Both rows use the
same activations once they are read, and the memory is read in two streams. bitmask-int8 gains nothing from it.

The loops over groups are written out here and for AVX-512: a machine with both runs both in one process, where tests
compare them. One frame that takes the operations as arguments would have to give the same machine code on both kinds of
processor. The code of each kind can be timed on that kind alone.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numpy.typing import NDArray

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
    Value,
    add_scaled,
    count_bits,
    from_bfloat,
    fused,
    operation,
    plus,
    prefetch,
    read_bfloat,
    read_half,
    read_halves8,
    read_long,
    read_mask,
    sum8,
    write_real,
    write_sums,
    zero_reals8,
    zeros,
)
from iobs.inference.vectors import call as _call
from iobs.inference.vectors import constant as _constant
from iobs.inference.vectors import fused_code as _fused
from iobs.inference.vectors import read as _read
from iobs.inference.vectors import splat as _splat

# ---- Operations for CPUs with AVX2: the rows of a table say which stored value goes to which lane
# A table has a row for each byte of a mask. `weights` are 32 columns as float32 vectors, or 64 as int8 vectors.

_BIT, _BYTE, _HALF, _WORD, _LONG = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
_FOUR, _TWO = Tile(F32x8, 4), Tile(I8x32, 2)
_DOUBLE = ir.DoubleType()
_PLACES = ir.VectorType(_WORD, 32)


def _places(builder: Code, first: Code, bits: Code, size: int) -> list[tuple[Code, Code]]:
    """For each byte of a mask of 32 bits: the byte, and the address of its first value, of `size` bytes."""
    places, wide = [], builder.zext(bits, _LONG)
    for part in range(4):
        byte = builder.and_(builder.lshr(wide, _LONG(8 * part)), _LONG(0xFF))
        places.append((byte, first))
        count = _call(builder, "llvm.ctpop.i64", _LONG, [byte])
        first = builder.add(first, builder.mul(count, _LONG(size)))
    return places


@operation(_FOUR, Address, Address, types.uint32)
def spread_bfloats(builder: Code, _: Code, table: Code, address: Code, mask: Code) -> Code:
    """The next bfloat16 values at an address, spread over the set bits of a mask, as float32.

    Args:
        table: see `table_of_bfloats`.
        address: of the values; 16 bytes behind the last are read too.
        mask: of 32 columns.
    """
    result = ir.Constant(_FOUR.llvm, None)
    twice = ir.Constant(_PLACES, [*range(16), *range(16)])
    for part, (byte, place) in enumerate(_places(builder, address, mask, 2)):
        values = _read(builder, place, I8x16.llvm)
        order = _read(builder, builder.add(table, builder.mul(byte, _LONG(32))), I8x32.llvm, 32)
        both = builder.shuffle_vector(values, values, twice)
        spread = _call(builder, "llvm.x86.avx2.pshuf.b", I8x32.llvm, [both, order])
        result = builder.insert_value(result, builder.bitcast(spread, F32x8.llvm), part)
    return result


@operation(_FOUR, Address)
def widen_bfloats(builder: Code, _: Code, address: Code) -> Code:
    """32 bfloat16 values at an address as float32: those of even columns, then those of odd ones."""
    result, words = ir.Constant(_FOUR.llvm, None), I32x8.llvm
    for half in range(2):
        bits = _read(builder, builder.add(address, _LONG(32 * half)), words)
        even, odd = builder.shl(bits, _constant(words, 16)), builder.and_(bits, _constant(words, -65536))
        result = builder.insert_value(result, builder.bitcast(even, F32x8.llvm), half)
        result = builder.insert_value(result, builder.bitcast(odd, F32x8.llvm), 2 + half)
    return result


@operation(_TWO, Address, Address, types.uint64)
def spread_bytes(builder: Code, _: Code, table: Code, address: Code, mask: Code) -> Code:
    """The next bytes at an address, spread over the set bits of a mask.

    16 columns take one read of 16 bytes. Of its order, the second half depends on the number of values in the first.

    Args:
        table: see `table_of_bytes`.
        address: of the values; 16 bytes behind the last are read too.
        mask: of 64 columns.
    """
    result, pair = ir.Constant(_TWO.llvm, None), ir.VectorType(_DOUBLE, 2)
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
        result = builder.insert_value(result, _call(builder, "llvm.x86.avx2.pshuf.b", I8x32.llvm, wide), part)
    return result


@operation(types.void, Address, Address, Address)
def write_levels(builder: Code, _: Code, levels: Code, address: Code, output: Code) -> None:
    """Store the levels of 32 codes of 4 bits, one byte each.

    Args:
        levels: address of 16 levels of int8.
        address: of the codes, the low half of each byte first; 16 bytes are read.
        output: address of 32 bytes.
    """
    sixteen = _read(builder, levels, I8x16.llvm)
    both = builder.shuffle_vector(sixteen, sixteen, ir.Constant(_PLACES, [*range(16), *range(16)]))
    codes = builder.zext(_read(builder, address, I8x16.llvm), I16x16.llvm)
    pairs = builder.or_(codes, builder.shl(codes, _constant(I16x16.llvm, 4)))
    order = builder.bitcast(builder.and_(pairs, _constant(I16x16.llvm, 0x0F0F)), I8x32.llvm)
    spread = _call(builder, "llvm.x86.avx2.pshuf.b", I8x32.llvm, [both, order])
    builder.store(spread, builder.inttoptr(output, I8x32.llvm.as_pointer()), align=1)


@operation(F32x8, Address, I16x8)
def gather8(builder: Code, _: Code, base: Code, columns: Code) -> Code:
    """The float32 values of 8 unsigned 16-bit columns (vgatherdps)."""
    index = builder.zext(columns, I32x8.llvm)
    place = builder.inttoptr(base, _BYTE.as_pointer())
    every = builder.bitcast(_constant(I32x8.llvm, -1), F32x8.llvm)
    arguments = [ir.Constant(F32x8.llvm, None), place, index, every, _BYTE(4)]
    return _call(builder, "llvm.x86.avx2.gather.d.ps.256", F32x8.llvm, arguments)


# ---- tiles: one or more accumulators for each token; as in `kernels_avx512.py`
real_tile8 = zeros(F32x8, lambda tokens: max(1, 4 // tokens))
scaled_tile8 = zeros(F32x8)
integer_tile8 = zeros(I32x8)


@operation(lambda tile, tokens, offset, weights: tile)
def add_reals8(builder: Code, signed: Code, tile: Code, tokens: Code, offset: Code, weights: Code) -> Code:
    """Add the products of 32 weights with each token's float32 activations at `offset` bytes."""
    number = signed.args[1].count
    each = signed.args[0].count // number
    for token in range(number):
        start = builder.add(builder.extract_value(tokens, token), offset)
        for part in range(4):
            place = token * each + part % each
            activations = _read(builder, builder.add(start, _LONG(32 * part)), F32x8.llvm, 4)
            old, weight = builder.extract_value(tile, place), builder.extract_value(weights, part)
            tile = builder.insert_value(tile, _fused(builder, weight, activations, old), place)
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
            activations = _read(builder, builder.add(place, _LONG(32 * part)), I8x32.llvm)
            turned = _call(builder, "llvm.x86.avx2.psign.b", I8x32.llvm, [activations, some])
            pairs = _call(builder, "llvm.x86.avx2.pmadd.ub.sw", I16x16.llvm, [magnitude, turned])
            words = _call(builder, "llvm.x86.avx2.pmadd.wd", I32x8.llvm, [pairs, ones])
            tile = builder.insert_value(tile, builder.add(builder.extract_value(tile, token), words), token)
    return tile


@operation(_TWO, Address)
def read_bytes(builder: Code, _: Code, address: Code) -> Code:
    """64 int8 weights at an address."""
    result = ir.Constant(_TWO.llvm, None)
    for part in range(2):
        some = _read(builder, builder.add(address, _LONG(32 * part)), I8x32.llvm)
        result = builder.insert_value(result, some, part)
    return result


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
        widened = builder.sitofp(builder.extract_value(weights, part), reals)
        place = builder.inttoptr(builder.add(address, _LONG(128 * part)), reals.as_pointer())
        builder.store(builder.fmul(widened, _splat(builder, scale, 32)), place, align=4)


_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_word = types.uint32
_AHEAD = 1024  # bytes of values that are fetched ahead; 512 to 4,096 take equal times, within the noise
_TABLE = 9 * 256 * 8  # bytes of the table of bytes; the 16 levels of a matrix stand behind it


@njit(inline="always")
def _with_block(tile: Value, tokens: Value, table: Value, offset: Value, place: Value, bits: Value) -> Value:
    """A tile after 64 columns of a bitmask-bf16 row, whose activations lie at an offset."""
    low = spread_bfloats(table, place, _word(bits))
    tile = add_reals8(tile, tokens, offset, low)
    high = spread_bfloats(table, place + 2 * count_bits(bits & _LOW), _word(bits >> _HALF))
    return add_reals8(tile, tokens, offset + 128, high)


@njit(cache=True, nogil=True, error_model="numpy")
def bitmask_bf16(matrix: Value, tokens: Value, output: Value, stride: Value, first: Value, last: Value) -> None:
    """Rows of a bitmask-bf16 matrix times each token, in pairs for one token."""
    half = (last - first) // 2 if len(tokens) == 1 else 0
    for row in range(first, first + half):
        place = matrix.values + read_long(matrix.starts + 8 * row)
        other = matrix.values + read_long(matrix.starts + 8 * (row + half))
        mask = matrix.mask + 8 * matrix.blocks * row
        more = matrix.mask + 8 * matrix.blocks * (row + half)
        tile, twin = real_tile8(tokens), real_tile8(tokens)
        for block in range(matrix.blocks):
            bits, lots = read_mask(mask + 8 * block), read_mask(more + 8 * block)
            prefetch(place + _AHEAD)
            prefetch(other + _AHEAD)
            tile = _with_block(tile, tokens, matrix.levels, 256 * block, place, bits)
            twin = _with_block(twin, tokens, matrix.levels, 256 * block, other, lots)
            place += 2 * count_bits(bits)
            other += 2 * count_bits(lots)
        write_sums(tile, tokens, output + 4 * row, stride)
        write_sums(twin, tokens, output + 4 * (row + half), stride)
    for row in range(first + 2 * half, last):
        place = matrix.values + read_long(matrix.starts + 8 * row)
        mask = matrix.mask + 8 * matrix.blocks * row
        tile = real_tile8(tokens)
        for block in range(matrix.blocks):
            bits = read_mask(mask + 8 * block)
            prefetch(place + _AHEAD)
            tile = _with_block(tile, tokens, matrix.levels, 256 * block, place, bits)
            place += 2 * count_bits(bits)
        write_sums(tile, tokens, output + 4 * row, stride)


@njit(cache=True, nogil=True, error_model="numpy")
def bf16(matrix: Value, tokens: Value, output: Value, stride: Value, first: Value, last: Value) -> None:
    """Rows of a bf16 matrix times each token, in pairs for one token; of 32 activations the even ones come first."""
    half = (last - first) // 2 if len(tokens) == 1 else 0
    for row in range(first, first + half):
        place = matrix.values + 128 * matrix.blocks * row
        other = matrix.values + 128 * matrix.blocks * (row + half)
        tile, twin = real_tile8(tokens), real_tile8(tokens)
        for block in range(2 * matrix.blocks):
            prefetch(place + _AHEAD)
            prefetch(other + _AHEAD)
            tile = add_reals8(tile, tokens, 128 * block, widen_bfloats(place))
            twin = add_reals8(twin, tokens, 128 * block, widen_bfloats(other))
            place += 64
            other += 64
        write_sums(tile, tokens, output + 4 * row, stride)
        write_sums(twin, tokens, output + 4 * (row + half), stride)
    for row in range(first + 2 * half, last):
        place = matrix.values + 128 * matrix.blocks * row
        tile = real_tile8(tokens)
        for block in range(2 * matrix.blocks):
            prefetch(place + _AHEAD)
            tile = add_reals8(tile, tokens, 128 * block, widen_bfloats(place))
            place += 64
        write_sums(tile, tokens, output + 4 * row, stride)


@njit(inline="always")
def groups_of(matrix: Value) -> Value:
    """Number of groups of 128 columns of a row; the last one may have 64."""
    return (matrix.blocks + 1) // 2


@njit(inline="always")
def _byte_row(matrix: Value, tokens: Value, row: Value, place: Value, odd: Value) -> Value:
    """The scaled sums of a masked row whose bytes begin at `place`; with `odd` 1 each block takes an even number."""
    groups, table = groups_of(matrix), matrix.levels
    mask, scale = matrix.mask + 8 * matrix.blocks * row, matrix.scales + 2 * groups * row
    tile = scaled_tile8(tokens)
    for group in range(groups):
        bits = read_mask(mask + 16 * group)
        prefetch(place + _AHEAD)
        sums = add_bytes8(integer_tile8(tokens), tokens, 128 * group, spread_bytes(table, place, bits))
        place += (count_bits(bits) + odd) & ~odd
        if 2 * group + 1 < matrix.blocks:
            bits = read_mask(mask + 16 * group + 8)
            sums = add_bytes8(sums, tokens, 128 * group + 64, spread_bytes(table, place, bits))
            place += (count_bits(bits) + odd) & ~odd
        tile = add_scaled(tile, sums, read_bfloat(scale + 2 * group))
    return tile


@njit(cache=True, nogil=True, error_model="numpy")
def bitmask_int8(matrix: Value, tokens: Value, output: Value, stride: Value, first: Value, last: Value) -> None:
    """Rows of a bitmask-int8 matrix times each token, without the scale of the token."""
    for row in range(first, last):
        place = matrix.values + read_long(matrix.starts + 8 * row)
        write_sums(_byte_row(matrix, tokens, row, place, 0), tokens, output + 4 * row, stride)


@njit(inline="always")
def _with_group(matrix: Value, tile: Value, tokens: Value, group: Value, place: Value, scale: Value) -> Value:
    """A tile after a group of columns of an int8 row."""
    prefetch(place + 2 * _AHEAD)
    prefetch(place + 2 * _AHEAD + 64)
    sums = add_bytes8(integer_tile8(tokens), tokens, 128 * group, read_bytes(place))
    if 2 * group + 1 < matrix.blocks:
        sums = add_bytes8(sums, tokens, 128 * group + 64, read_bytes(place + 64))
    return add_scaled(tile, sums, read_bfloat(scale + 2 * group))


@njit(cache=True, nogil=True, error_model="numpy")
def int8(matrix: Value, tokens: Value, output: Value, stride: Value, first: Value, last: Value) -> None:
    """Rows of an int8 matrix times each token, in pairs for one token, without the scale of the token."""
    groups = groups_of(matrix)
    half = (last - first) // 2 if len(tokens) == 1 else 0
    for row in range(first, first + half):
        place, scale = matrix.values + 64 * matrix.blocks * row, matrix.scales + 2 * groups * row
        other, more = place + 64 * matrix.blocks * half, scale + 2 * groups * half
        tile, twin = scaled_tile8(tokens), scaled_tile8(tokens)
        for group in range(groups):
            tile = _with_group(matrix, tile, tokens, group, place + 128 * group, scale)
            twin = _with_group(matrix, twin, tokens, group, other + 128 * group, more)
        write_sums(tile, tokens, output + 4 * row, stride)
        write_sums(twin, tokens, output + 4 * (row + half), stride)
    for row in range(first + 2 * half, last):
        place, scale = matrix.values + 64 * matrix.blocks * row, matrix.scales + 2 * groups * row
        tile = scaled_tile8(tokens)
        for group in range(groups):
            tile = _with_group(matrix, tile, tokens, group, place + 128 * group, scale)
        write_sums(tile, tokens, output + 4 * row, stride)


@njit(cache=True, nogil=True, error_model="numpy")
def _levels_of(matrix: Value, row: Value, output: Value) -> None:
    """Store the levels of a row at `output`, a byte each; of an odd number in a block, the last is followed by another.

    The whole row comes first: a read of bytes that were just stored in two parts would wait for both.
    """
    place, end = read_long(matrix.starts + 8 * row), read_long(matrix.starts + 8 * row + 8)
    while place < end:
        write_levels(matrix.levels + _TABLE, matrix.values + place, output)
        place, output = place + 16, output + 32


@njit(cache=True, nogil=True, error_model="numpy")
def bitmask_int4(matrix: Value, tokens: Value, output: Value, stride: Value, first: Value, last: Value) -> None:
    """Rows of a bitmask-int4 matrix times each token, without the scale of the token."""
    scratch = np.zeros(64 * matrix.blocks + 64, np.uint8)
    for row in range(first, last):
        place = scratch.ctypes.data
        _levels_of(matrix, row, place)
        # A block of codes begins with a new byte, so its levels are an even number.
        write_sums(_byte_row(matrix, tokens, row, place, 1), tokens, output + 4 * row, stride)
    scratch[0] = 0  # the array must live until here


@njit(cache=True, nogil=True, error_model="numpy")
def index_bf16(matrix: Value, tokens: Value, output: Value, stride: Value, first: Value, last: Value) -> None:
    """Rows of an index-bf16 matrix times each token; entries of a row are a multiple of 16."""
    for token in range(len(tokens)):
        activations = tokens[token]
        for row in range(first, last):
            place, end = read_long(matrix.starts + 8 * row), read_long(matrix.starts + 8 * row + 8)
            even, odd = zero_reals8(), zero_reals8()
            while place < end:
                values, indices = matrix.values + place, matrix.indices + place
                prefetch(values + _AHEAD)
                prefetch(indices + _AHEAD)
                even = fused(from_bfloat(read_halves8(values)), gather8(activations, read_halves8(indices)), even)
                later = gather8(activations, read_halves8(indices + 16))
                odd = fused(from_bfloat(read_halves8(values + 16)), later, odd)
                place += 32
            write_real(output + stride * token + 4 * row, sum8(plus(even, odd)))


@njit(cache=True, nogil=True, error_model="numpy")
def unpack_bitmask_bf16(matrix: Value, output: Value, first: Value, last: Value) -> None:
    """Store rows as float32 at `output`, (last - first, filled columns)."""
    for row in range(first, last):
        place = matrix.values + read_long(matrix.starts + 8 * row)
        mask = matrix.mask + 8 * matrix.blocks * row
        for block in range(matrix.blocks):
            bits = read_mask(mask + 8 * block)
            write_reals(output, spread_bfloats(matrix.levels, place, _word(bits)))
            second = place + 2 * count_bits(bits & _LOW)
            write_reals(output + 128, spread_bfloats(matrix.levels, second, _word(bits >> _HALF)))
            place += 2 * count_bits(bits)
            output += 256


@njit(inline="always")
def _unpack_bytes(matrix: Value, row: Value, place: Value, output: Value, odd: Value) -> None:
    """Store a masked row of bytes, which begin at `place`, as float32; `odd` as of `_byte_row`."""
    mask, scale = matrix.mask + 8 * matrix.blocks * row, matrix.scales + 2 * groups_of(matrix) * row
    for block in range(matrix.blocks):
        bits = read_mask(mask + 8 * block)
        weights = spread_bytes(matrix.levels, place, bits)
        write_scaled8(output + 256 * block, weights, read_bfloat(scale + 2 * (block // 2)))
        place += (count_bits(bits) + odd) & ~odd


@njit(cache=True, nogil=True, error_model="numpy")
def unpack_bitmask_int8(matrix: Value, output: Value, first: Value, last: Value) -> None:
    """Store rows as float32 at `output`, (last - first, filled columns)."""
    for row in range(first, last):
        place = matrix.values + read_long(matrix.starts + 8 * row)
        _unpack_bytes(matrix, row, place, output + 256 * matrix.blocks * (row - first), 0)


@njit(cache=True, nogil=True, error_model="numpy")
def unpack_bitmask_int4(matrix: Value, output: Value, first: Value, last: Value) -> None:
    """Store rows as float32 at `output`, (last - first, filled columns)."""
    scratch = np.zeros(64 * matrix.blocks + 64, np.uint8)
    for row in range(first, last):
        place = scratch.ctypes.data
        _levels_of(matrix, row, place)
        _unpack_bytes(matrix, row, place, output + 256 * matrix.blocks * (row - first), 1)
    scratch[0] = 0  # the array must live until here


@njit(cache=True, nogil=True, error_model="numpy")
def unpack_int8(matrix: Value, output: Value, first: Value, last: Value) -> None:
    """Store rows as float32 at `output`, (last - first, filled columns)."""
    for row in range(first, last):
        place, scale = matrix.values + 64 * matrix.blocks * row, matrix.scales + 2 * groups_of(matrix) * row
        for block in range(matrix.blocks):
            write_scaled8(output, read_bytes(place), read_bfloat(scale + 2 * (block // 2)))
            place += 64
            output += 256


@njit(cache=True, nogil=True, error_model="numpy")
def unpack_index_bf16(matrix: Value, output: Value, first: Value, last: Value) -> None:
    """Store rows as float32 at `output`, (last - first, filled columns)."""
    for row in range(first, last):
        for column in range(64 * matrix.blocks):
            write_real(output + 4 * column, np.float32(0))
        for place in range(read_long(matrix.starts + 8 * row), read_long(matrix.starts + 8 * row + 8), 2):
            value, column = read_bfloat(matrix.values + place), read_half(matrix.indices + place)
            if value != 0:  # entries that fill the row up are zero, at column 0
                write_real(output + 4 * column, value)
        output += 256 * matrix.blocks


Table = NDArray[np.uint8]
_NONE = 128  # in a table: the lane becomes zero


def table_of_bfloats() -> Table:
    """The order that spreads bfloat16 values over the set bits of each byte, as float32: (256, 32)."""
    table = np.full((256, 32), _NONE, np.uint8)
    for bits in range(256):
        for count, lane in enumerate(_set(bits)):
            table[bits, 4 * lane + 2 : 4 * lane + 4] = 2 * count, 2 * count + 1
    return table


def table_of_bytes() -> Table:
    """The orders that spread bytes over the set bits of each byte, (9, 256, 8), after 0 to 8 bytes of others."""
    table = np.full((9, 256, 8), _NONE, np.uint8)
    for before in range(9):
        for bits in range(256):
            lanes = _set(bits)
            table[before, bits, lanes] = before + np.arange(len(lanes))
    return table


def _set(bits: int) -> list[int]:
    return [lane for lane in range(8) if bits >> lane & 1]
