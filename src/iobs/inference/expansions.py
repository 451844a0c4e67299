"""Operations that move stored values to the lanes of their columns, for AVX-512 (VBMI2)."""

from __future__ import annotations

from llvmlite import ir
from numba import types

from iobs.inference.vectors import (
    Address,
    Code,
    F32x16,
    I8x32,
    I8x64,
    I16x16,
    I16x32,
    I32x16,
    operation,
)
from iobs.inference.vectors import call as _call
from iobs.inference.vectors import constant as _constant
from iobs.inference.vectors import read as _read
from iobs.inference.vectors import splat as _splat

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
