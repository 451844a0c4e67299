"""Products of stored matrices with one vector, for CPUs with AVX2 and FMA: a table of 256 rows spreads the values.

Arguments as in `kernels_avx512.py`; activations are float32 in their own order, or uint8.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from iobs.inference.expansions import (
    add_pairs,
    splat8,
    spread_bytes,
    spread_halves,
    to_reals8,
    widen_bytes,
)
from iobs.inference.vectors import (
    Value,
    count_bits,
    from_bfloat,
    fused,
    plus,
    prefetch,
    read_bfloat,
    read_byte,
    read_halves8,
    read_long,
    read_mask,
    read_reals8,
    sum8,
    write_real,
    zero_reals8,
    zero_words8,
)

_BYTE, _SHORT, _LOW = np.uint64(0xFF), np.uint64(0xFFFF), np.uint64(0xFFFFFFFF)
_AHEAD = 1024


@njit(cache=True, nogil=True, error_model="numpy")
def bitmask_bf16(matrix: Value, tokens: Value, output: Value, stride: Value, first: Value, last: Value) -> None:
    """Rows of a bitmask-bf16 matrix times each token."""
    for token in range(len(tokens)):
        for row in range(first, last):
            place = matrix.values + read_long(matrix.starts + 8 * row)
            mask, given = matrix.mask + 8 * matrix.blocks * row, tokens[token]
            even, odd = zero_reals8(), zero_reals8()
            for block in range(4 * matrix.blocks):  # of 16 columns
                low, high = read_byte(mask + 2 * block), read_byte(mask + 2 * block + 1)
                prefetch(place + _AHEAD)
                some = from_bfloat(spread_halves(place, matrix.levels + 16 * low))
                place += 2 * count_bits(np.uint64(low))
                rest = from_bfloat(spread_halves(place, matrix.levels + 16 * high))
                place += 2 * count_bits(np.uint64(high))
                even = fused(some, read_reals8(given + 64 * block), even)
                odd = fused(rest, read_reals8(given + 64 * block + 32), odd)
            write_real(output + stride * token + 4 * row, sum8(plus(even, odd)))


@njit(cache=True, nogil=True, error_model="numpy")
def bf16(matrix: Value, tokens: Value, output: Value, stride: Value, first: Value, last: Value) -> None:
    """Rows of a bf16 matrix times each token."""
    for token in range(len(tokens)):
        for row in range(first, last):
            place, given = matrix.values + 128 * matrix.blocks * row, tokens[token]
            even, odd = zero_reals8(), zero_reals8()
            for block in range(4 * matrix.blocks):
                prefetch(place + _AHEAD)
                even = fused(from_bfloat(read_halves8(place)), read_reals8(given + 64 * block), even)
                odd = fused(from_bfloat(read_halves8(place + 16)), read_reals8(given + 64 * block + 32), odd)
                place += 32
            write_real(output + stride * token + 4 * row, sum8(plus(even, odd)))


@njit(cache=True, nogil=True, error_model="numpy")
def bitmask_int8(matrix: Value, tokens: Value, output: Value, stride: Value, first: Value, last: Value) -> None:
    """Rows of a bitmask-int8 matrix times each token, without the correction and the scale of the token."""
    groups = (matrix.blocks + 1) // 2
    for token in range(len(tokens)):
        for row in range(first, last):
            place = matrix.values + read_long(matrix.starts + 8 * row)
            mask, scale = matrix.mask + 8 * matrix.blocks * row, matrix.scales + 2 * groups * row
            given, total = tokens[token], zero_reals8()
            for group in range(groups):
                prefetch(place + _AHEAD)
                even, odd = zero_words8(), zero_words8()
                for word in range(min(2, matrix.blocks - 2 * group)):
                    bits = read_mask(mask + 16 * group + 8 * word)
                    for part in range(2):
                        one, two = bits & _BYTE, (bits >> np.uint64(8)) & _BYTE
                        three, four = (bits >> np.uint64(16)) & _BYTE, (bits >> np.uint64(24)) & _BYTE
                        second = place + count_bits(one)
                        third = place + count_bits(bits & _SHORT)
                        fourth = third + count_bits(three)
                        here = given + 128 * group + 64 * word + 32 * part
                        table = matrix.levels
                        low = spread_bytes(place, table + 8 * np.int64(one), second, table + 8 * np.int64(two))
                        high = spread_bytes(third, table + 8 * np.int64(three), fourth, table + 8 * np.int64(four))
                        even, odd = add_pairs(even, low, here), add_pairs(odd, high, here + 16)
                        place += count_bits(bits & _LOW)
                        bits = bits >> np.uint64(32)
                total = fused(to_reals8(plus(even, odd)), splat8(read_bfloat(scale + 2 * group)), total)
            write_real(output + stride * token + 4 * row, sum8(total))


@njit(cache=True, nogil=True, error_model="numpy")
def int8(matrix: Value, tokens: Value, output: Value, stride: Value, first: Value, last: Value) -> None:
    """Rows of an int8 matrix times each token, without the correction and the scale of the token."""
    groups = (matrix.blocks + 1) // 2
    for token in range(len(tokens)):
        for row in range(first, last):
            place, scale = matrix.values + 64 * matrix.blocks * row, matrix.scales + 2 * groups * row
            given, total = tokens[token], zero_reals8()
            for group in range(groups):
                prefetch(place + _AHEAD)
                even, odd = zero_words8(), zero_words8()
                for part in range(2 * min(2, matrix.blocks - 2 * group)):
                    here = given + 128 * group + 32 * part
                    even = add_pairs(even, widen_bytes(place), here)
                    odd = add_pairs(odd, widen_bytes(place + 16), here + 16)
                    place += 32
                total = fused(to_reals8(plus(even, odd)), splat8(read_bfloat(scale + 2 * group)), total)
            write_real(output + stride * token + 4 * row, sum8(total))


KERNELS = {"bf16": bf16, "int8": int8, "bitmask-bf16": bitmask_bf16, "bitmask-int8": bitmask_int8}


def table_of_halves() -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """The byte order that spreads 16-bit values over the set bits of each byte, (256, 16); 128 stands for zero."""
    found = np.full((256, 16), 128, np.uint8)
    for bits in range(256):
        lanes = [lane for lane in range(8) if bits >> lane & 1]
        for count, lane in enumerate(lanes):
            found[bits, 2 * lane : 2 * lane + 2] = 2 * count, 2 * count + 1
    return found


def table_of_bytes() -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """The byte order that spreads bytes over the set bits of each byte, (256, 8); 128 stands for zero."""
    found = np.full((256, 8), 128, np.uint8)
    for bits in range(256):
        lanes = [lane for lane in range(8) if bits >> lane & 1]
        found[bits, lanes] = np.arange(len(lanes))
    return found
