"""Products of stored matrices with many tokens, for CPUs with AMX and AVX-512 (VBMI2 and VNNI).

A kernel takes 128 rows at a time (4 strips of 32). It writes a piece of them dense to a small memory, and multiplies it
by all tokens before the next piece. So weights are read from main memory once, in their stored form.
"""

from __future__ import annotations

import math
import threading
from typing import NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numpy.typing import NDArray
from torch import Tensor

from iobs.inference import activations
from iobs.inference.expansions import expand_bytes, expand_codes, expand_halves
from iobs.inference.formats import StoredMatrix
from iobs.inference.vectors import (
    Address,
    Code,
    F32x16,
    I8x64,
    I16x32,
    I32x16,
    Value,
    Vector,
    call,
    count_bits,
    operation,
    prefetch,
    read,
    read_bfloat,
    read_bytes64,
    read_half,
    read_halves32,
    read_long,
    read_mask,
    read_real,
    splat,
    write_real,
)

# ---- Operations of AMX, the matrix registers of newer x86 CPUs, as functions of compiled code
# A register holds 16 rows of 64 bytes. Registers 4 and 5 hold 16 rows of weights each, registers 6 and 7 hold 16 tokens
# each. Registers 0 to 3 are the sums of their 2 x 2 pairs. A register in memory takes 1,024 bytes, row after row.

SIDE = 16  # rows of a register, and sums in a row
REGISTER = 1024  # bytes
STRIP = 2 * SIDE  # rows of weights, and tokens, of the four sums
_SUMS, _WEIGHTS, _TOKENS = (0, 1, 2, 3), (4, 5), (6, 7)
_BYTE, _LONG, _REAL = ir.IntType(8), ir.IntType(64), ir.FloatType()


def settings() -> NDArray[np.uint8]:
    """The 64 bytes that `configure` reads: 8 registers of 16 rows of 64 bytes."""
    table = np.zeros(64, np.uint8)
    table[0] = 1  # the only layout of this table
    table.view(np.uint16)[8:16] = 64
    table[48:56] = SIDE
    return table


def _run(builder: Code, name: str, values: list[Code]) -> None:
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    module = builder.module
    function = cgutils.get_or_insert_function(module, kind, f"llvm.x86.{name}")  # type: ignore[no-untyped-call]
    builder.call(function, values)


def _place(builder: Code, address: Code, offset: int = 0) -> Code:
    return builder.inttoptr(builder.add(address, _LONG(offset)), _BYTE.as_pointer())


def _write(builder: Code, address: Code, offset: int, value: Code, align: int = 4) -> None:
    place = builder.inttoptr(builder.add(address, _LONG(offset)), value.type.as_pointer())
    builder.store(value, place, align=align)


@operation(types.void, Address)
def configure(builder: Code, _: Code, address: Code) -> None:
    """Set the shapes of the registers of this thread."""
    _run(builder, "ldtilecfg", [_place(builder, address)])


@operation(types.void)
def release(builder: Code, _: Code) -> None:
    """Give the registers back."""
    _run(builder, "tilerelease", [])


@operation(types.void)
def clear_sums(builder: Code, _: Code) -> None:
    """Set the four sums to zero."""
    for number in _SUMS:
        _run(builder, "tilezero", [_BYTE(number)])


def _multiplier(name: str) -> Code:
    @operation(types.void, Address, Address, Address)
    def multiply(builder: Code, _: Code, weights: Code, first: Code, second: Code) -> None:
        stride = _LONG(REGISTER // SIDE)
        for number, place in zip(_TOKENS, (first, second), strict=True):
            _run(builder, "tileloadd64", [_BYTE(number), _place(builder, place), stride])
        for half, number in enumerate(_WEIGHTS):
            _run(builder, "tileloadd64", [_BYTE(number), _place(builder, weights, half * REGISTER), stride])
            for token, other in enumerate(_TOKENS):
                _run(builder, name, [_BYTE(_SUMS[2 * half + token]), _BYTE(number), _BYTE(other)])

    return multiply


# Add to the sums: two registers of weights at an address times the registers of tokens at two addresses.
multiply_bytes = _multiplier("tdpbsud")  # int8 weights, uint8 activations, int32 sums
multiply_halves = _multiplier("tdpbf16ps")  # bfloat16 weights and activations, float32 sums


def _mover(name: str) -> Code:
    @operation(types.void, Address)
    def move(builder: Code, _: Code, address: Code) -> None:
        for number in _SUMS:
            row, column = divmod(number, 2)
            place = _place(builder, address, 4 * SIDE * (STRIP * row + column))
            _run(builder, name, [_BYTE(number), place, _LONG(4 * STRIP)])

    return move


# Move the four sums: a matrix of 32 rows of weights and 32 tokens, 4 bytes an entry.
read_registers, write_registers = _mover("tileloadd64"), _mover("tilestored64")


@operation(types.void, Address)
def clear_square(builder: Code, _: Code, address: Code) -> None:
    """Set a matrix of 32 x 32 float32 to zero; its address is a multiple of 64."""
    for place in range(4 * STRIP * STRIP // 64):
        _write(builder, address, 64 * place, ir.Constant(F32x16.llvm, None), 64)


@operation(types.void, Address, Address, Address)
def add_square(builder: Code, _: Code, integers: Code, reals: Code, scales: Code) -> None:
    """Add a matrix of 32 x 32 int32, each row times its float32 scale, to a matrix of float32 (multiples of 64)."""
    for row in range(STRIP):
        scale = splat(builder, read(builder, builder.add(scales, _LONG(4 * row)), _REAL, 4), SIDE)
        for offset in (4 * STRIP * row, 4 * STRIP * row + 64):
            place = builder.add(reals, _LONG(offset))
            addends = builder.sitofp(read(builder, builder.add(integers, _LONG(offset)), I32x16.llvm, 64), F32x16.llvm)
            old = read(builder, place, F32x16.llvm, 64)
            _write(builder, place, 0, call(builder, "llvm.fma.v16f32", old.type, [addends, scale, old]), 64)


@operation(types.void, Address, Address, Address, Address, Address)
def write_turned(
    builder: Code, _: Code, reals: Code, scales: Code, corrections: Code, output: Code, stride: Code
) -> None:
    """Store 16 rows of 16 tokens as 16 tokens of 16 rows: scale of the token * (sum - correction of the row).

    Args:
        reals: address of the sums, a row every 128 bytes.
        scales: address of 16 float32.
        corrections: address of 16 float32.
        output: address of the first row of the first token.
        stride: bytes between tokens.
    """
    factors = read(builder, scales, F32x16.llvm)
    rows = []
    for row in range(SIDE):
        sums = read(builder, builder.add(reals, _LONG(4 * STRIP * row)), F32x16.llvm, 64)
        less = splat(builder, read(builder, builder.add(corrections, _LONG(4 * row)), _REAL, 4), SIDE)
        rows.append(builder.fmul(builder.fsub(sums, less), factors))
    half = SIDE // 2
    orders = [[start + number // 2 + SIDE * (number % 2) for number in range(SIDE)] for start in (0, half)]
    kind = ir.VectorType(ir.IntType(32), SIDE)
    for _stage in range(4):  # interleaving the first half with the second, four times, is a transposition
        rows = [
            builder.shuffle_vector(rows[number // 2], rows[number // 2 + half], ir.Constant(kind, orders[number % 2]))
            for number in range(SIDE)
        ]
    for number, row in enumerate(rows):
        _write(builder, builder.add(output, builder.mul(stride, _LONG(number))), 0, row)


def _writer(vector: Vector) -> Code:
    @operation(types.void, Address, vector)
    def write_vector(builder: Code, _: Code, address: Code, value: Code) -> None:
        _write(builder, address, 0, value, 64)

    return write_vector


write_bytes64, write_halves32 = _writer(I8x64), _writer(I16x32)  # at an address that is a multiple of 64


@operation(types.void, Address, types.uint16)
def write_half(builder: Code, _: Code, address: Code, value: Code) -> None:
    """Store 16 bits."""
    _write(builder, address, 0, value, 2)


ROWS = 4 * STRIP  # rows at a time: activations, which may be far away, are read once for all of them
_PIECE = 4  # groups of 128 columns that are dense at a time: they stay in a near cache
_AHEAD = 512  # bytes of values that are fetched ahead
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_short = types.uint32
_THREAD = threading.local()
_SETTINGS = settings()
_BYTES_A_GROUP = {False: 8 * REGISTER, True: 4 * REGISTER}  # of 32 dense rows, by quantised


class TileBuffers(NamedTuple):
    """Memory of one thread.

    Args:
        dense: the dense piece.
        integers: (32, 32) int32, sums of one group of columns.
        sums: (4, pairs of 16 tokens, 32, 32) float32.
        scales: (4, groups, 32) float32, of the 128 rows.
        places: (128), address of the next value of each row.
        settings: see `settings`.
    """

    dense: NDArray[np.uint8]
    integers: NDArray[np.int32]
    sums: NDArray[np.float32]
    scales: NDArray[np.float32]
    places: NDArray[np.int64]
    settings: NDArray[np.uint8]


class Layout(NamedTuple):
    """Activations as the kernels read them, in memory of a thread that its next call of `lay_out` writes again.

    Args:
        place: address of the activations in the order of `in_registers`.
        tokens: number of tokens.
        pairs: number of pairs of 16 tokens.
        scales: (32 * pairs) float32, a factor of each token.
    """

    place: int
    tokens: int
    pairs: int
    scales: NDArray[np.float32]


class Operands(NamedTuple):
    """Activations and output of a kernel.

    Args:
        place: see `Layout`.
        pairs: see `Layout`.
        scales: see `Layout`.
        corrections: (rows) float32, subtracted from the sums of each row.
        output: (tokens, rows) float32, written.
    """

    place: int
    pairs: int
    scales: NDArray[np.float32]
    corrections: NDArray[np.float32]
    output: NDArray[np.float32]


def lay_out(inputs: Tensor, blocks: int, quantised: bool) -> Layout:
    """Lay out activations for matrices with `blocks` words of mask in a row.

    Args:
        inputs: float32 (tokens, columns), contiguous.
        blocks: words of 64 columns.
        quantised: round to 8 bits, else to bfloat16.
    """
    (count, columns), pairs, wide = inputs.shape, -(-len(inputs) // STRIP), 64 * blocks
    scales = np.ones(STRIP * pairs, np.float32)
    kind = torch.uint8 if quantised else torch.bfloat16
    layout = torch.from_numpy(_memory("layout", (STRIP * pairs, wide * kind.itemsize), np.uint8)).view(kind)
    if quantised:
        activations.rounded(inputs.numpy(), layout[:count].numpy(), scales)
    else:
        layout[:count, :columns] = inputs
        layout[:count, columns:] = 0
    layout[count:] = 0
    words = layout.view(torch.int32)
    placed = torch.from_numpy(_memory("placed", (len(words) // SIDE, words.shape[1] // SIDE, SIDE, SIDE), np.int32))
    placed.copy_(in_registers(words))
    return Layout(placed.data_ptr(), count, pairs, scales)


def operands_of(layout: Layout, matrix: StoredMatrix) -> Operands:
    """Activations and a new output for one matrix."""
    less = matrix.tensors["corrections"].numpy() if matrix.quantised else np.zeros(matrix.rows, np.float32)
    output = np.empty((layout.tokens, matrix.rows), np.float32)
    return Operands(layout.place, layout.pairs, layout.scales, less, output)


def in_registers(words: Tensor) -> Tensor:
    """Activations as AMX registers: (groups of 16 tokens, steps of 16 words, 16 words, 16 tokens).

    Args:
        words: (tokens, words) of 4 bytes: 4 uint8 or 2 bfloat16; 16 divides both sizes.
    """
    return words.view(len(words) // SIDE, SIDE, -1, SIDE).permute(0, 2, 3, 1)


def scratch_for(matrix: StoredMatrix, pairs: int) -> TileBuffers:
    """Memory for one thread."""
    return TileBuffers(
        _memory("dense", (ROWS // STRIP * _PIECE * _BYTES_A_GROUP[matrix.quantised],), np.uint8),
        _memory("integers", (STRIP, STRIP), np.int32),
        _memory("sums", (ROWS // STRIP, pairs, STRIP, STRIP), np.float32),
        _memory("scales", (ROWS // STRIP, (matrix.blocks + 1) // 2, STRIP), np.float32),
        _memory("places", (ROWS,), np.int64),
        _SETTINGS,
    )


def _memory(name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Value]:
    """Memory of this thread, used again by the next call; its address is a multiple of 64."""
    held: dict[str, NDArray[Value]] = _THREAD.__dict__
    if name in held and held[name].shape == shape and held[name].dtype == dtype:
        return held[name]
    size = math.prod(shape) * np.dtype(dtype).itemsize
    whole = f"{name} bytes"
    if whole not in held or len(held[whole]) < size + 64:
        held[whole] = np.zeros(size + 64, np.uint8)
    start = -held[whole].ctypes.data % 64
    held[name] = held[whole][start : start + size].view(dtype).reshape(shape)
    return held[name]


@njit(cache=True, nogil=True, error_model="numpy")
def _write_bytes(
    matrix: Value, code: Value, row: Value, count: Value, first: Value, last: Value, scratch: Value
) -> None:
    """Write blocks `first` to `last` of some rows as int8 to the dense piece."""
    base, size = scratch.dense.ctypes.data, 2 * REGISTER * (last - first)  # of a strip
    levels = read_bytes64(matrix.levels) if code == 5 else read_bytes64(scratch.settings.ctypes.data)
    for number in range(count):
        place, goal = scratch.places[number], base + size * (number // STRIP) + 64 * (number % STRIP)
        mask = matrix.mask + 8 * matrix.blocks * (row + number)
        for block in range(first, last):
            prefetch(place + _AHEAD)
            if code == 3:
                write_bytes64(goal, read_bytes64(place))
                place += 64
            else:
                bits = read_mask(mask + 8 * block)
                if code == 4:
                    write_bytes64(goal, expand_bytes(place, bits))
                    place += count_bits(bits)
                else:
                    write_bytes64(goal, expand_codes(levels, place, bits))
                    place += (count_bits(bits) + 1) >> 1
            goal += 2 * REGISTER
        scratch.places[number] = place


@njit(cache=True, nogil=True, error_model="numpy")
def _write_halves(
    matrix: Value, code: Value, row: Value, count: Value, first: Value, last: Value, scratch: Value
) -> None:
    """Write blocks `first` to `last` of some rows as bfloat16 to the dense piece."""
    base, size = scratch.dense.ctypes.data, 4 * REGISTER * (last - first)  # of a strip
    if code == 2:
        scratch.dense[:] = 0
    for number in range(count):
        place, goal = scratch.places[number], base + size * (number // STRIP) + 64 * (number % STRIP)
        mask = matrix.mask + 8 * matrix.blocks * (row + number)
        if code == 2:
            scratch.places[number] = _scatter(matrix, row + number, place, 64 * first, 64 * last, goal)
            continue
        for block in range(first, last):
            prefetch(place + 2 * _AHEAD)
            if code == 0:
                write_halves32(goal, read_halves32(place))
                write_halves32(goal + 2 * REGISTER, read_halves32(place + 64))
                place += 128
            else:
                bits = read_mask(mask + 8 * block)
                write_halves32(goal, expand_halves(place, _short(bits)))
                place += 2 * count_bits(bits & _LOW)
                write_halves32(goal + 2 * REGISTER, expand_halves(place, _short(bits >> _HALF)))
                place += 2 * count_bits(bits >> _HALF)
            goal += 4 * REGISTER
        scratch.places[number] = place


@njit(cache=True, nogil=True, error_model="numpy")
def _scatter(matrix: Value, row: Value, place: Value, first: Value, last: Value, goal: Value) -> Value:
    """Write the entries of columns `first` to `last` of a row with indices; returns the place of the next entry."""
    end = read_long(matrix.starts + 8 * row + 8)
    while place < end:
        column = read_half(matrix.indices + place)
        value = types.uint16(read_half(matrix.values + place))
        if value != 0:  # fillers are zeros of column 0
            if column >= last:
                break
            column -= first
            write_half(goal + 2 * REGISTER * (column // 32) + 2 * (column % 32), value)
        place += 2
    return place


@njit(cache=True, nogil=True, error_model="numpy")
def _begin(matrix: Value, code: Value, row: Value, count: Value, scratch: Value, pairs: Value) -> None:
    """Find the values of some rows, read their scales, and clear the sums."""
    groups = (matrix.blocks + 1) // 2
    for number in range(count):
        if code == 2:
            scratch.places[number] = read_long(matrix.starts + 8 * (row + number))
        elif code == 0 or code == 3:
            scratch.places[number] = matrix.values + (128 if code == 0 else 64) * matrix.blocks * (row + number)
        else:
            scratch.places[number] = matrix.values + read_long(matrix.starts + 8 * (row + number))
        if code >= 3:
            for group in range(groups):
                scratch.scales[number // STRIP, group, number % STRIP] = read_bfloat(
                    matrix.scales + 2 * (groups * (row + number) + group)
                )
    for square in range(ROWS // STRIP * pairs):
        clear_square(scratch.sums.ctypes.data + 4 * STRIP * STRIP * square)


@njit(cache=True, nogil=True, error_model="numpy")
def _finish(operands: Value, row: Value, count: Value, scratch: Value) -> None:
    """Write the sums of some rows to the output, token by token."""
    tokens, rows = operands.output.shape
    for token in range(0, tokens, SIDE):
        pair, side = token // STRIP, token % STRIP
        for number in range(0, count, SIDE):
            square = operands.pairs * (number // STRIP) + pair
            sums = scratch.sums.ctypes.data + 4 * (STRIP * STRIP * square + STRIP * (number % STRIP) + side)
            scales = operands.scales.ctypes.data + 4 * token
            less = operands.corrections.ctypes.data + 4 * (row + number)
            output = operands.output.ctypes.data + 4 * (rows * token + row + number)
            if token + SIDE <= tokens and number + SIDE <= count:
                write_turned(sums, scales, less, output, 4 * rows)
            else:
                for right in range(min(SIDE, tokens - token)):
                    for below in range(min(SIDE, count - number)):
                        total = read_real(sums + 4 * (STRIP * below + right)) - read_real(less + 4 * below)
                        write_real(output + 4 * (rows * right + below), read_real(scales + 4 * right) * total)


@njit(cache=True, nogil=True, error_model="numpy")
def quantised(matrix: Value, code: Value, operands: Value, scratch: Value, first: Value, last: Value) -> None:
    """Rows `first` to `last` of a matrix of 8 or 4 bits times all tokens, into `operands.output`."""
    configure(scratch.settings.ctypes.data)
    groups, integers = (matrix.blocks + 1) // 2, scratch.integers.ctypes.data
    half = REGISTER * matrix.blocks  # bytes of 16 tokens
    for row in range(first, last, ROWS):
        count = min(ROWS, last - row)
        strips = (count + STRIP - 1) // STRIP
        _begin(matrix, code, row, count, scratch, operands.pairs)
        for start in range(0, groups, _PIECE):
            end = min(start + _PIECE, groups)
            blocks = min(2 * end, matrix.blocks) - 2 * start
            _write_bytes(matrix, code, row, count, 2 * start, 2 * start + blocks, scratch)
            for square in range(operands.pairs * strips):
                pair, strip = square // strips, square % strips
                sums = scratch.sums.ctypes.data + 4 * STRIP * STRIP * (operands.pairs * strip + pair)
                for group in range(start, end):
                    weights = scratch.dense.ctypes.data + 2 * REGISTER * (blocks * strip + 2 * (group - start))
                    tokens = operands.place + 2 * half * pair + 2 * REGISTER * group
                    clear_sums()
                    multiply_bytes(weights, tokens, tokens + half)
                    if 2 * group + 1 < matrix.blocks:
                        multiply_bytes(weights + 2 * REGISTER, tokens + REGISTER, tokens + half + REGISTER)
                    write_registers(integers)
                    add_square(integers, sums, scratch.scales.ctypes.data + 4 * STRIP * (groups * strip + group))
        _finish(operands, row, count, scratch)
    release()


@njit(cache=True, nogil=True, error_model="numpy")
def bfloats(matrix: Value, code: Value, operands: Value, scratch: Value, first: Value, last: Value) -> None:
    """Rows `first` to `last` of a bfloat16 matrix times all tokens, into `operands.output`."""
    configure(scratch.settings.ctypes.data)
    half = 2 * REGISTER * matrix.blocks  # bytes of 16 tokens
    for row in range(first, last, ROWS):
        count = min(ROWS, last - row)
        strips = (count + STRIP - 1) // STRIP
        _begin(matrix, code, row, count, scratch, operands.pairs)
        for start in range(0, matrix.blocks, 2 * _PIECE):
            steps = 2 * (min(start + 2 * _PIECE, matrix.blocks) - start)
            _write_halves(matrix, code, row, count, start, start + steps // 2, scratch)
            for square in range(operands.pairs * strips):
                pair, strip = square // strips, square % strips
                sums = scratch.sums.ctypes.data + 4 * STRIP * STRIP * (operands.pairs * strip + pair)
                read_registers(sums)
                for step in range(steps):
                    weights = scratch.dense.ctypes.data + 2 * REGISTER * (steps * strip + step)
                    tokens = operands.place + 2 * half * pair + REGISTER * (2 * start + step)
                    multiply_halves(weights, tokens, tokens + half)
                write_registers(sums)
        _finish(operands, row, count, scratch)
    release()
