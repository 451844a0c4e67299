"""Operations of AMX, the matrix registers of newer x86 CPUs, as functions of compiled code.

A register holds 16 rows of 64 bytes. Registers 4 and 5 hold 16 rows of weights each, registers 6 and 7 hold 16 tokens
each. Registers 0 to 3 are the sums of their 2 x 2 pairs. A register in memory takes 1,024 bytes, row after row.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from iobs.inference.vectors import (
    Address,
    Code,
    F32x16,
    I8x64,
    I16x32,
    I32x16,
    Vector,
    call,
    operation,
    read,
    splat,
)

SIDE = 16  # rows of a register, and sums in a row
REGISTER = 1024  # bytes
STRIP = 2 * SIDE  # rows of weights, and tokens, of the four sums
_SUMS, _WEIGHTS, _TOKENS = (0, 1, 2, 3), (4, 5), (6, 7)
_BYTE, _LONG, _REAL = ir.IntType(8), ir.IntType(64), ir.FloatType()


def settings() -> NDArray[np.uint8]:
    """The 64 bytes that `configure` reads: 8 registers of 16 rows of 64 bytes."""
    found = np.zeros(64, np.uint8)
    found[0] = 1  # the only layout of this table
    found.view(np.uint16)[8:16] = 64
    found[48:56] = SIDE
    return found


def _run(builder: Code, name: str, values: list[Code]) -> None:
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    found = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")  # type: ignore[no-untyped-call]
    builder.call(found, values)


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
            given = builder.sitofp(read(builder, builder.add(integers, _LONG(offset)), I32x16.llvm, 64), F32x16.llvm)
            old = read(builder, place, F32x16.llvm, 64)
            _write(builder, place, 0, call(builder, "llvm.fma.v16f32", old.type, [given, scale, old]), 64)


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
        given = read(builder, builder.add(reals, _LONG(4 * STRIP * row)), F32x16.llvm, 64)
        less = splat(builder, read(builder, builder.add(corrections, _LONG(4 * row)), _REAL, 4), SIDE)
        rows.append(builder.fmul(builder.fsub(given, less), factors))
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
