"""Products of stored matrices with one or more vectors, for CPUs with AVX-512 (VBMI2 and VNNI).

A kernel computes rows `first` to `last` of the product for all `tokens`. The weights of a row are read and widened once
for all tokens. Row r of token t is stored at `output` + t * `stride` + 4 * r. `tokens` are the addresses of the
activations, as `activations.py` lays them out.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types

from iobs.inference.kernels_avx2 import groups_of
from iobs.inference.kernels_avx2 import unpack_index_bf16 as unpack_index_bf16  # has no vectors
from iobs.inference.kernels_avx2 import unpack_int8 as unpack_int8  # reads dense bytes, which AVX2 does as well
from iobs.inference.vectors import (
    Address,
    Code,
    F32x16,
    I8x32,
    I8x64,
    I16x16,
    I16x32,
    I32x16,
    Value,
    add_scaled,
    count_bits,
    from_bfloat,
    fused,
    operation,
    plus,
    prefetch,
    read_bfloat,
    read_bytes64,
    read_halves16,
    read_halves32,
    read_long,
    read_mask,
    sum16,
    write_real,
    write_sums,
    zero_reals16,
    zeros,
)
from iobs.inference.vectors import call as _call
from iobs.inference.vectors import constant as _constant
from iobs.inference.vectors import fused_code as _fused
from iobs.inference.vectors import read as _read
from iobs.inference.vectors import splat as _splat

# ---- Operations for CPUs with AVX-512

_BIT, _BYTE, _WORD, _LONG = (ir.IntType(bits) for bits in (1, 8, 32, 64))
_REAL = ir.FloatType()


@operation(I16x32, Address, types.uint32)
def expand_halves(builder: Code, _: Code, address: Code, mask: Code) -> Code:
    """The next 16-bit values at an address, spread over the lanes of the set bits; reads 64 bytes (vpexpandw)."""
    source = _read(builder, address, I16x32.llvm)
    lanes = builder.bitcast(mask, ir.VectorType(_BIT, 32))
    name = "llvm.x86.avx512.mask.expand.v32i16"
    return _call(builder, name, source.type, [source, ir.Constant(source.type, None), lanes])


def _expanded(builder: Code, source: Code, mask: Code) -> Code:
    lanes = builder.bitcast(mask, ir.VectorType(_BIT, 64))
    name = "llvm.x86.avx512.mask.expand.v64i8"
    return _call(builder, name, source.type, [source, ir.Constant(source.type, None), lanes])


@operation(I8x64, Address, types.uint64)
def expand_bytes(builder: Code, _: Code, address: Code, mask: Code) -> Code:
    """The next bytes at an address, spread over the lanes of the set bits; reads 64 bytes (vpexpandb)."""
    return _expanded(builder, _read(builder, address, I8x64.llvm), mask)


@operation(I8x64, I8x64, Address, types.uint64)
def expand_codes(builder: Code, _: Code, levels: Code, address: Code, mask: Code) -> Code:
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
def gather(builder: Code, _: Code, base: Code, columns: Code) -> Code:
    """The float32 values of 16 unsigned 16-bit columns (vgatherdps)."""
    index = builder.zext(columns, I32x16.llvm)
    place = builder.inttoptr(base, _BYTE.as_pointer())
    every = ir.Constant(ir.VectorType(_BIT, 16), [1] * 16)
    empty = ir.Constant(F32x16.llvm, None)
    return _call(builder, "llvm.x86.avx512.mask.gather.dps.512", F32x16.llvm, [empty, place, index, every, _WORD(4)])


@operation(types.void, Address, I16x32)
def write_widened(builder: Code, _: Code, address: Code, values: Code) -> None:
    """Store 32 bfloat16 values as float32."""
    words, reals = ir.VectorType(_WORD, 32), ir.VectorType(_REAL, 32)
    widened = builder.bitcast(builder.shl(builder.zext(values, words), _constant(words, 16)), reals)
    builder.store(widened, builder.inttoptr(address, reals.as_pointer()), align=4)


@operation(types.void, Address, I8x64, types.float32)
def write_scaled(builder: Code, _: Code, address: Code, values: Code, scale: Code) -> None:
    """Store 64 int8 values times a scale as float32."""
    reals = ir.VectorType(_REAL, 64)
    scaled = builder.fmul(builder.sitofp(values, reals), _splat(builder, scale, 64))
    builder.store(scaled, builder.inttoptr(address, reals.as_pointer()), align=4)


# ---- tiles: one or more accumulators for each token
# For bfloat16 weights, enough of them to hide the latency of a multiply-add; for scaled sums of integers; for the sums.
real_tile = zeros(F32x16, lambda tokens: max(1, min(4, 8 // tokens)))
scaled_tile = zeros(F32x16)
integer_tile = zeros(I32x16)


@operation(lambda tile, tokens, offset, low, high: tile)
def add_bfloats(builder: Code, signed: Code, tile: Code, tokens: Code, offset: Code, low: Code, high: Code) -> Code:
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
            activations = _read(builder, builder.add(start, _LONG(64 * part)), lanes, 4)
            tile = builder.insert_value(
                tile, _fused(builder, weights, activations, builder.extract_value(tile, place)), place
            )
    return tile


@operation(lambda tile, tokens, offset, weights: tile)
def add_bytes(builder: Code, signed: Code, tile: Code, tokens: Code, offset: Code, weights: Code) -> Code:
    """Add the products of 64 int8 weights with each token's uint8 activations at `offset` bytes (vpdpbusd)."""
    for token in range(signed.args[0].count):
        activations = _read(builder, builder.add(builder.extract_value(tokens, token), offset), I8x64.llvm)
        old = builder.extract_value(tile, token)
        new = _call(builder, "llvm.x86.avx512.vpdpbusd.512", old.type, [old, activations, weights])
        tile = builder.insert_value(tile, new, token)
    return tile


# ---- kernels
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_short = types.uint32
_AHEAD = 1024  # bytes of values that are fetched ahead


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
    groups = groups_of(matrix)
    for row in range(first, last):
        place = matrix.values + read_long(matrix.starts + 8 * row)
        mask, scale = matrix.mask + 8 * matrix.blocks * row, matrix.scales + 2 * groups * row
        tile = scaled_tile(tokens)
        for group in range(groups):
            bits = read_mask(mask + 16 * group)
            prefetch(place + _AHEAD)
            sums = add_bytes(integer_tile(tokens), tokens, 128 * group, expand_bytes(place, bits))
            place += count_bits(bits)
            if 2 * group + 1 < matrix.blocks:
                bits = read_mask(mask + 16 * group + 8)
                sums = add_bytes(sums, tokens, 128 * group + 64, expand_bytes(place, bits))
                place += count_bits(bits)
            tile = add_scaled(tile, sums, read_bfloat(scale + 2 * group))
        write_sums(tile, tokens, output + 4 * row, stride)


@njit(cache=True, nogil=True, error_model="numpy")
def int8(matrix: Value, tokens: Value, output: Value, stride: Value, first: Value, last: Value) -> None:
    """Rows of an int8 matrix times each token, without the correction and the scale of the token."""
    groups = groups_of(matrix)
    for row in range(first, last):
        place, scale = matrix.values + 64 * matrix.blocks * row, matrix.scales + 2 * groups * row
        tile = scaled_tile(tokens)
        for group in range(groups):
            prefetch(place + 2 * _AHEAD)
            prefetch(place + 2 * _AHEAD + 64)
            sums = add_bytes(integer_tile(tokens), tokens, 128 * group, read_bytes64(place))
            if 2 * group + 1 < matrix.blocks:
                sums = add_bytes(sums, tokens, 128 * group + 64, read_bytes64(place + 64))
            tile = add_scaled(tile, sums, read_bfloat(scale + 2 * group))
            place += 128
        write_sums(tile, tokens, output + 4 * row, stride)


@njit(cache=True, nogil=True, error_model="numpy")
def bitmask_int4(matrix: Value, tokens: Value, output: Value, stride: Value, first: Value, last: Value) -> None:
    """Rows of a bitmask-int4 matrix times each token, without the correction and the scale of the token."""
    groups, levels = groups_of(matrix), read_bytes64(matrix.levels)
    for row in range(first, last):
        place = matrix.values + read_long(matrix.starts + 8 * row)
        mask, scale = matrix.mask + 8 * matrix.blocks * row, matrix.scales + 2 * groups * row
        tile = scaled_tile(tokens)
        for group in range(groups):
            bits = read_mask(mask + 16 * group)
            prefetch(place + _AHEAD)
            sums = add_bytes(integer_tile(tokens), tokens, 128 * group, expand_codes(levels, place, bits))
            place += (count_bits(bits) + 1) >> 1
            if 2 * group + 1 < matrix.blocks:
                bits = read_mask(mask + 16 * group + 8)
                sums = add_bytes(sums, tokens, 128 * group + 64, expand_codes(levels, place, bits))
                place += (count_bits(bits) + 1) >> 1
            tile = add_scaled(tile, sums, read_bfloat(scale + 2 * group))
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
        mask, scale = matrix.mask + 8 * matrix.blocks * row, matrix.scales + 2 * groups_of(matrix) * row
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
        mask, scale = matrix.mask + 8 * matrix.blocks * row, matrix.scales + 2 * groups_of(matrix) * row
        for block in range(matrix.blocks):
            bits = read_mask(mask + 8 * block)
            write_scaled(output, expand_codes(levels, place, bits), read_bfloat(scale + 2 * (block // 2)))
            place += (count_bits(bits) + 1) >> 1
            output += 256
