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
from numba import njit, types
from numpy.typing import NDArray

from iobs.inference.spreading import (
    add_bytes8,
    add_reals8,
    gather8,
    integer_tile8,
    read_bytes,
    real_tile8,
    scaled_tile8,
    spread_bfloats,
    spread_bytes,
    widen_bfloats,
    write_levels,
    write_reals,
    write_scaled8,
)
from iobs.inference.vectors import (
    Value,
    add_scaled,
    count_bits,
    from_bfloat,
    fused,
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
)

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_word = types.uint32
_AHEAD = 1024  # bytes of values that are fetched ahead
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


@njit(cache=True, nogil=True, error_model="numpy")
def bitmask_int8(matrix: Value, tokens: Value, output: Value, stride: Value, first: Value, last: Value) -> None:
    """Rows of a bitmask-int8 matrix times each token, without the scale of the token."""
    groups, table = (matrix.blocks + 1) // 2, matrix.levels
    for row in range(first, last):
        place = matrix.values + read_long(matrix.starts + 8 * row)
        mask, scale = matrix.mask + 8 * matrix.blocks * row, matrix.scales + 2 * groups * row
        tile = scaled_tile8(tokens)
        for group in range(matrix.blocks // 2):
            bits, more = read_mask(mask + 16 * group), read_mask(mask + 16 * group + 8)
            prefetch(place + _AHEAD)
            second = place + count_bits(bits)
            sums = add_bytes8(integer_tile8(tokens), tokens, 128 * group, spread_bytes(table, place, bits))
            sums = add_bytes8(sums, tokens, 128 * group + 64, spread_bytes(table, second, more))
            tile = add_scaled(tile, sums, read_bfloat(scale + 2 * group))
            place = second + count_bits(more)
        if matrix.blocks % 2:
            group = groups - 1
            expanded = spread_bytes(table, place, read_mask(mask + 16 * group))
            sums = add_bytes8(integer_tile8(tokens), tokens, 128 * group, expanded)
            tile = add_scaled(tile, sums, read_bfloat(scale + 2 * group))
        write_sums(tile, tokens, output + 4 * row, stride)


@njit(inline="always")
def _with_group(tile: Value, tokens: Value, group: Value, place: Value, scale: Value) -> Value:
    """A tile after the 128 columns of a group of an int8 row."""
    prefetch(place + 2 * _AHEAD)
    prefetch(place + 2 * _AHEAD + 64)
    sums = add_bytes8(integer_tile8(tokens), tokens, 128 * group, read_bytes(place))
    sums = add_bytes8(sums, tokens, 128 * group + 64, read_bytes(place + 64))
    return add_scaled(tile, sums, read_bfloat(scale + 2 * group))


@njit(inline="always")
def _with_half(tile: Value, tokens: Value, group: Value, place: Value, scale: Value) -> Value:
    """A tile after the 64 columns of the last group of an int8 row."""
    sums = add_bytes8(integer_tile8(tokens), tokens, 128 * group, read_bytes(place))
    return add_scaled(tile, sums, read_bfloat(scale + 2 * group))


@njit(cache=True, nogil=True, error_model="numpy")
def int8(matrix: Value, tokens: Value, output: Value, stride: Value, first: Value, last: Value) -> None:
    """Rows of an int8 matrix times each token, in pairs for one token, without the scale of the token."""
    groups, pairs = (matrix.blocks + 1) // 2, matrix.blocks // 2
    half = (last - first) // 2 if len(tokens) == 1 else 0
    for row in range(first, first + half):
        place, scale = matrix.values + 64 * matrix.blocks * row, matrix.scales + 2 * groups * row
        other, more = place + 64 * matrix.blocks * half, scale + 2 * groups * half
        tile, twin = scaled_tile8(tokens), scaled_tile8(tokens)
        for group in range(pairs):
            tile = _with_group(tile, tokens, group, place + 128 * group, scale)
            twin = _with_group(twin, tokens, group, other + 128 * group, more)
        if matrix.blocks % 2:
            tile = _with_half(tile, tokens, pairs, place + 128 * pairs, scale)
            twin = _with_half(twin, tokens, pairs, other + 128 * pairs, more)
        write_sums(tile, tokens, output + 4 * row, stride)
        write_sums(twin, tokens, output + 4 * (row + half), stride)
    for row in range(first + 2 * half, last):
        place, scale = matrix.values + 64 * matrix.blocks * row, matrix.scales + 2 * groups * row
        tile = scaled_tile8(tokens)
        for group in range(pairs):
            tile = _with_group(tile, tokens, group, place + 128 * group, scale)
        if matrix.blocks % 2:
            tile = _with_half(tile, tokens, pairs, place + 128 * pairs, scale)
        write_sums(tile, tokens, output + 4 * row, stride)


@njit(cache=True, nogil=True, error_model="numpy")
def _levels_of(matrix: Value, row: Value, found: Value) -> None:
    """Store the levels of a row at `found`, a byte each; of an odd number in a block, the last is followed by another.

    The whole row comes first: a read of bytes that were just stored in two parts would wait for both.
    """
    place, end = read_long(matrix.starts + 8 * row), read_long(matrix.starts + 8 * row + 8)
    while place < end:
        write_levels(matrix.levels + _TABLE, matrix.values + place, found)
        place, found = place + 16, found + 32


@njit(cache=True, nogil=True, error_model="numpy")
def bitmask_int4(matrix: Value, tokens: Value, output: Value, stride: Value, first: Value, last: Value) -> None:
    """Rows of a bitmask-int4 matrix times each token, without the scale of the token."""
    groups, table = (matrix.blocks + 1) // 2, matrix.levels
    scratch = np.zeros(64 * matrix.blocks + 64, np.uint8)
    for row in range(first, last):
        place = scratch.ctypes.data
        _levels_of(matrix, row, place)
        mask, scale = matrix.mask + 8 * matrix.blocks * row, matrix.scales + 2 * groups * row
        tile = scaled_tile8(tokens)
        for group in range(matrix.blocks // 2):
            bits, more = read_mask(mask + 16 * group), read_mask(mask + 16 * group + 8)
            second = place + _even(count_bits(bits))
            sums = add_bytes8(integer_tile8(tokens), tokens, 128 * group, spread_bytes(table, place, bits))
            sums = add_bytes8(sums, tokens, 128 * group + 64, spread_bytes(table, second, more))
            tile = add_scaled(tile, sums, read_bfloat(scale + 2 * group))
            place = second + _even(count_bits(more))
        if matrix.blocks % 2:
            group = groups - 1
            expanded = spread_bytes(table, place, read_mask(mask + 16 * group))
            sums = add_bytes8(integer_tile8(tokens), tokens, 128 * group, expanded)
            tile = add_scaled(tile, sums, read_bfloat(scale + 2 * group))
        write_sums(tile, tokens, output + 4 * row, stride)
    scratch[0] = 0  # the array must live until here


@njit(inline="always")
def _even(count: Value) -> Value:
    """The next even number: a block of codes begins with a new byte."""
    return (count + 1) & ~1


@njit(cache=True, nogil=True, error_model="numpy")
def index_bf16(matrix: Value, tokens: Value, output: Value, stride: Value, first: Value, last: Value) -> None:
    """Rows of an index-bf16 matrix times each token; entries of a row are a multiple of 16."""
    for token in range(len(tokens)):
        given = tokens[token]
        for row in range(first, last):
            place, end = read_long(matrix.starts + 8 * row), read_long(matrix.starts + 8 * row + 8)
            even, odd = zero_reals8(), zero_reals8()
            while place < end:
                values, indices = matrix.values + place, matrix.indices + place
                prefetch(values + _AHEAD)
                prefetch(indices + _AHEAD)
                even = fused(from_bfloat(read_halves8(values)), gather8(given, read_halves8(indices)), even)
                odd = fused(from_bfloat(read_halves8(values + 16)), gather8(given, read_halves8(indices + 16)), odd)
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


@njit(cache=True, nogil=True, error_model="numpy")
def unpack_bitmask_int8(matrix: Value, output: Value, first: Value, last: Value) -> None:
    """Store rows as float32 at `output`, (last - first, filled columns)."""
    for row in range(first, last):
        place = matrix.values + read_long(matrix.starts + 8 * row)
        mask, scale = matrix.mask + 8 * matrix.blocks * row, matrix.scales + (matrix.blocks + 1) // 2 * 2 * row
        for block in range(matrix.blocks):
            bits = read_mask(mask + 8 * block)
            write_scaled8(output, spread_bytes(matrix.levels, place, bits), read_bfloat(scale + 2 * (block // 2)))
            place += count_bits(bits)
            output += 256


@njit(cache=True, nogil=True, error_model="numpy")
def unpack_bitmask_int4(matrix: Value, output: Value, first: Value, last: Value) -> None:
    """Store rows as float32 at `output`, (last - first, filled columns)."""
    scratch = np.zeros(64 * matrix.blocks + 64, np.uint8)
    for row in range(first, last):
        place = scratch.ctypes.data
        _levels_of(matrix, row, place)
        mask, scale = matrix.mask + 8 * matrix.blocks * row, matrix.scales + (matrix.blocks + 1) // 2 * 2 * row
        for block in range(matrix.blocks):
            bits = read_mask(mask + 8 * block)
            write_scaled8(output, spread_bytes(matrix.levels, place, bits), read_bfloat(scale + 2 * (block // 2)))
            place += _even(count_bits(bits))
            output += 256
    scratch[0] = 0  # the array must live until here


@njit(cache=True, nogil=True, error_model="numpy")
def unpack_int8(matrix: Value, output: Value, first: Value, last: Value) -> None:
    """Store rows as float32 at `output`, (last - first, filled columns)."""
    for row in range(first, last):
        place, scale = matrix.values + 64 * matrix.blocks * row, matrix.scales + (matrix.blocks + 1) // 2 * 2 * row
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


UNPACK = {
    "int8": unpack_int8,
    "index-bf16": unpack_index_bf16,
    "bitmask-bf16": unpack_bitmask_bf16,
    "bitmask-int8": unpack_bitmask_int8,
    "bitmask-int4": unpack_bitmask_int4,
}
KERNELS = {
    "bf16": bf16,
    "int8": int8,
    "bitmask-bf16": bitmask_bf16,
    "bitmask-int8": bitmask_int8,
    "bitmask-int4": bitmask_int4,
    "index-bf16": index_bf16,
}
Table = NDArray[np.uint8]
_NONE = 128  # in a table: the lane becomes zero


def table_of_bfloats() -> Table:
    """The order that spreads bfloat16 values over the set bits of each byte, as float32: (256, 32)."""
    found = np.full((256, 32), _NONE, np.uint8)
    for bits in range(256):
        for count, lane in enumerate(_set(bits)):
            found[bits, 4 * lane + 2 : 4 * lane + 4] = 2 * count, 2 * count + 1
    return found


def table_of_bytes() -> Table:
    """The orders that spread bytes over the set bits of each byte, (9, 256, 8), after 0 to 8 bytes of others."""
    found = np.full((9, 256, 8), _NONE, np.uint8)
    for before in range(9):
        for bits in range(256):
            lanes = _set(bits)
            found[before, bits, lanes] = before + np.arange(len(lanes))
    return found


def _set(bits: int) -> list[int]:
    return [lane for lane in range(8) if bits >> lane & 1]
