"""Products of stored matrices with one or more vectors, for CPUs with AVX-512 (VBMI2 and VNNI).

A kernel computes rows `first` to `last` of the product for all `tokens`. The weights of a row are read and widened once
for all tokens. Row r of token t is stored at `output` + t * `stride` + 4 * r. `tokens` are the addresses of the
activations, as `activations.py` lays them out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, types

from iobs.inference.expansions import (
    expand_bytes,
    expand_codes,
    expand_halves,
    gather,
    write_scaled,
    write_widened,
)
from iobs.inference.vectors import (
    Value,
    add_bfloats,
    add_bytes,
    add_scaled,
    count_bits,
    from_bfloat,
    fused,
    integer_tile,
    plus,
    prefetch,
    read_bfloat,
    read_bytes64,
    read_halves16,
    read_halves32,
    read_long,
    read_mask,
    real_tile,
    scaled_tile,
    sum16,
    write_real,
    write_sums,
    zero_reals16,
)

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_short, _word = types.uint32, types.float32
CODES = {"bf16": 0, "bitmask-bf16": 1, "index-bf16": 2, "int8": 3, "bitmask-int8": 4, "bitmask-int4": 5}
_AHEAD = 1024  # bytes of values that are fetched ahead


class Addresses(NamedTuple):
    """Addresses of the tensors of a stored matrix (0 where the format has none), and its number of blocks."""

    mask: int
    values: int
    starts: int
    scales: int
    corrections: int
    levels: int
    indices: int
    blocks: int


@njit(cache=True, nogil=True, error_model="numpy")
def bitmask_bf16(matrix: Value, tokens: Value, output: Value, stride: Value, first: Value, last: Value) -> None:
    """Rows of a bitmask-bf16 matrix times each token."""
    for row in range(first, last):
        place = matrix.values + read_long(matrix.starts + 8 * row)
        mask = matrix.mask + 8 * matrix.blocks * row
        tile = real_tile(tokens)
        for block in range(matrix.blocks):
            bits = read_mask(mask + 8 * block)
            prefetch(place + _AHEAD)
            low = expand_halves(place, _short(bits))
            high = expand_halves(place + 2 * count_bits(bits & _LOW), _short(bits >> _HALF))
            tile = add_bfloats(tile, tokens, 256 * block, low, high)
            place += 2 * count_bits(bits)
        write_sums(tile, tokens, output + 4 * row, stride)


@njit(cache=True, nogil=True, error_model="numpy")
def bf16(matrix: Value, tokens: Value, output: Value, stride: Value, first: Value, last: Value) -> None:
    """Rows of a bf16 matrix times each token."""
    for row in range(first, last):
        place = matrix.values + 128 * matrix.blocks * row
        tile = real_tile(tokens)
        for block in range(matrix.blocks):
            prefetch(place + 2 * _AHEAD)
            prefetch(place + 2 * _AHEAD + 64)
            low, high = read_halves32(place), read_halves32(place + 64)
            tile = add_bfloats(tile, tokens, 256 * block, low, high)
            place += 128
        write_sums(tile, tokens, output + 4 * row, stride)


@njit(cache=True, nogil=True, error_model="numpy")
def bitmask_int8(matrix: Value, tokens: Value, output: Value, stride: Value, first: Value, last: Value) -> None:
    """Rows of a bitmask-int8 matrix times each token, without the correction and the scale of the token."""
    groups = (matrix.blocks + 1) // 2
    for row in range(first, last):
        place = matrix.values + read_long(matrix.starts + 8 * row)
        mask = matrix.mask + 8 * matrix.blocks * row
        scale = matrix.scales + 2 * groups * row
        tile = scaled_tile(tokens)
        for group in range(matrix.blocks // 2):
            bits, more = read_mask(mask + 16 * group), read_mask(mask + 16 * group + 8)
            prefetch(place + _AHEAD)
            second = place + count_bits(bits)
            sums = integer_tile(tokens)
            sums = add_bytes(sums, tokens, 128 * group, expand_bytes(place, bits))
            sums = add_bytes(sums, tokens, 128 * group + 64, expand_bytes(second, more))
            tile = add_scaled(tile, sums, read_bfloat(scale + 2 * group))
            place = second + count_bits(more)
        if matrix.blocks % 2:
            last_group = groups - 1
            expanded = expand_bytes(place, read_mask(mask + 16 * last_group))
            sums = add_bytes(integer_tile(tokens), tokens, 128 * last_group, expanded)
            tile = add_scaled(tile, sums, read_bfloat(scale + 2 * last_group))
        write_sums(tile, tokens, output + 4 * row, stride)


@njit(cache=True, nogil=True, error_model="numpy")
def int8(matrix: Value, tokens: Value, output: Value, stride: Value, first: Value, last: Value) -> None:
    """Rows of an int8 matrix times each token, without the correction and the scale of the token."""
    groups = (matrix.blocks + 1) // 2
    for row in range(first, last):
        place = matrix.values + 64 * matrix.blocks * row
        scale = matrix.scales + 2 * groups * row
        tile = scaled_tile(tokens)
        for group in range(matrix.blocks // 2):
            prefetch(place + 2 * _AHEAD)
            prefetch(place + 2 * _AHEAD + 64)
            sums = integer_tile(tokens)
            sums = add_bytes(sums, tokens, 128 * group, read_bytes64(place))
            sums = add_bytes(sums, tokens, 128 * group + 64, read_bytes64(place + 64))
            tile = add_scaled(tile, sums, read_bfloat(scale + 2 * group))
            place += 128
        if matrix.blocks % 2:
            last_group = groups - 1
            sums = add_bytes(integer_tile(tokens), tokens, 128 * last_group, read_bytes64(place))
            tile = add_scaled(tile, sums, read_bfloat(scale + 2 * last_group))
        write_sums(tile, tokens, output + 4 * row, stride)


@njit(cache=True, nogil=True, error_model="numpy")
def bitmask_int4(matrix: Value, tokens: Value, output: Value, stride: Value, first: Value, last: Value) -> None:
    """Rows of a bitmask-int4 matrix times each token, without the correction and the scale of the token."""
    groups = (matrix.blocks + 1) // 2
    levels = read_bytes64(matrix.levels)
    for row in range(first, last):
        place = matrix.values + read_long(matrix.starts + 8 * row)
        mask = matrix.mask + 8 * matrix.blocks * row
        scale = matrix.scales + 2 * groups * row
        tile = scaled_tile(tokens)
        for group in range(matrix.blocks // 2):
            bits, more = read_mask(mask + 16 * group), read_mask(mask + 16 * group + 8)
            prefetch(place + _AHEAD)
            second = place + ((count_bits(bits) + 1) >> 1)
            sums = integer_tile(tokens)
            sums = add_bytes(sums, tokens, 128 * group, expand_codes(levels, place, bits))
            sums = add_bytes(sums, tokens, 128 * group + 64, expand_codes(levels, second, more))
            tile = add_scaled(tile, sums, read_bfloat(scale + 2 * group))
            place = second + ((count_bits(more) + 1) >> 1)
        if matrix.blocks % 2:
            last_group = groups - 1
            expanded = expand_codes(levels, place, read_mask(mask + 16 * last_group))
            sums = add_bytes(integer_tile(tokens), tokens, 128 * last_group, expanded)
            tile = add_scaled(tile, sums, read_bfloat(scale + 2 * last_group))
        write_sums(tile, tokens, output + 4 * row, stride)


@njit(cache=True, nogil=True, error_model="numpy")
def index_bf16(matrix: Value, tokens: Value, output: Value, stride: Value, first: Value, last: Value) -> None:
    """Rows of an index-bf16 matrix times each token."""
    for token in range(len(tokens)):
        activations = tokens[token]
        for row in range(first, last):
            place, end = read_long(matrix.starts + 8 * row), read_long(matrix.starts + 8 * row + 8)
            even, odd = zero_reals16(), zero_reals16()
            while place + 32 < end:
                prefetch(matrix.values + place + _AHEAD)
                prefetch(matrix.indices + place + _AHEAD)
                some, rest = read_halves16(matrix.values + place), read_halves16(matrix.values + place + 32)
                even = fused(from_bfloat(some), gather(activations, read_halves16(matrix.indices + place)), even)
                odd = fused(from_bfloat(rest), gather(activations, read_halves16(matrix.indices + place + 32)), odd)
                place += 64
            if place < end:
                some = read_halves16(matrix.values + place)
                even = fused(from_bfloat(some), gather(activations, read_halves16(matrix.indices + place)), even)
            write_real(output + stride * token + 4 * row, sum16(plus(even, odd)))


@njit(cache=True, nogil=True, error_model="numpy")
def unpack_bitmask_bf16(matrix: Value, output: Value, first: Value, last: Value) -> None:
    """Store rows as float32 at `output`, (last - first, filled columns)."""
    for row in range(first, last):
        place = matrix.values + read_long(matrix.starts + 8 * row)
        mask = matrix.mask + 8 * matrix.blocks * row
        for block in range(matrix.blocks):
            bits = read_mask(mask + 8 * block)
            write_widened(output, expand_halves(place, _short(bits)))
            high = expand_halves(place + 2 * count_bits(bits & _LOW), _short(bits >> _HALF))
            write_widened(output + 128, high)
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
            write_scaled(output, expand_bytes(place, bits), read_bfloat(scale + 2 * (block // 2)))
            place += count_bits(bits)
            output += 256


@njit(cache=True, nogil=True, error_model="numpy")
def unpack_bitmask_int4(matrix: Value, output: Value, first: Value, last: Value) -> None:
    """Store rows as float32 at `output`, (last - first, filled columns)."""
    levels = read_bytes64(matrix.levels)
    for row in range(first, last):
        place = matrix.values + read_long(matrix.starts + 8 * row)
        mask, scale = matrix.mask + 8 * matrix.blocks * row, matrix.scales + (matrix.blocks + 1) // 2 * 2 * row
        for block in range(matrix.blocks):
            bits = read_mask(mask + 8 * block)
            write_scaled(output, expand_codes(levels, place, bits), read_bfloat(scale + 2 * (block // 2)))
            place += (count_bits(bits) + 1) >> 1
            output += 256


UNPACK = {
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
