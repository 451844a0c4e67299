"""Products with a matrix of column offsets on a GPU, in Triton.

The parts of the matrix are those of `gpu.packed`; zeros that fill up a group are skipped. With
TRITON_INTERPRET=1 in the environment before the import, the same code runs on the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from iobs.inference.gpu import GROUP

_WARPS = 2  # of a program; with its block the fastest on an H100
_BLOCK = tl.constexpr(512)  # entries that a program reads at a time
_GROUP = tl.constexpr(GROUP)


# Triton's compiler reads annotations, and knows none of Python's. Its interpreter needs constant ends of loops.
@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _rows(  # type: ignore[no-untyped-def]
    values,
    offsets,
    bases,
    starts,
    bias,
    activations,
    output,
    columns,
    count,
    tokens: tl.constexpr,
    steps: tl.constexpr,
):
    """One row of the matrix times all tokens; `tokens` is the power of two from `count` on."""
    row, rows = tl.program_id(0), tl.num_programs(0)
    first = tl.load(starts + row).to(tl.int64)
    entries = (tl.load(starts + row + 1) - first) * _GROUP
    values += first * _GROUP
    offsets += first * _GROUP
    bases += first
    lane, token = tl.arange(0, _BLOCK), tl.arange(0, tokens)
    total = tl.zeros([tokens, _BLOCK], dtype=tl.float32)
    for step in range(steps):
        place = step * _BLOCK + lane
        value = tl.load(values + place, mask=place < entries, other=0.0)
        column = tl.load(bases + place // _GROUP, mask=place < entries, other=0).to(tl.int32)
        column += tl.load(offsets + place, mask=place < entries, other=0).to(tl.int32)
        read = (value != 0)[None, :] & (token < count)[:, None]
        activation = tl.load(activations + token[:, None] * columns + column[None, :], mask=read, other=0.0)
        total += value.to(tl.float32)[None, :] * activation.to(tl.float32)
    sums = tl.sum(total, 1)
    if bias is not None:
        sums += tl.load(bias + row).to(tl.float32)
    tl.store(output + token * rows + row, sums, mask=token < count)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _unpack(  # type: ignore[no-untyped-def]
    values, offsets, bases, starts, matrix, columns, steps: tl.constexpr
):
    """Write the entries of one row into a matrix of zeros."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(starts + row).to(tl.int64)
    entries = (tl.load(starts + row + 1) - first) * _GROUP
    values += first * _GROUP
    offsets += first * _GROUP
    bases += first
    lane = tl.arange(0, _BLOCK)
    for step in range(steps):
        place = step * _BLOCK + lane
        value = tl.load(values + place, mask=place < entries, other=0.0)
        column = tl.load(bases + place // _GROUP, mask=place < entries, other=0).to(tl.int32)
        column += tl.load(offsets + place, mask=place < entries, other=0).to(tl.int32)
        tl.store(matrix + row * columns + column, value, mask=value != 0)


def multiply(
    values: Tensor,
    offsets: Tensor,
    bases: Tensor,
    starts: Tensor,
    longest: int,
    activations: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """Multiply a matrix of column offsets by activations, and add a bias.

    Zero entries are skipped: a NaN or infinite activation that meets only zeros of a row does not change it.

    Args:
        values: the entries of the groups, (32 n,), in float32, bfloat16 or float16.
        offsets: column of each entry minus that of the first of its group, (32 n,), any integer dtype.
        bases: column of the first entry of each group, (n,), any integer dtype.
        starts: number of groups before each row, and of all, (rows + 1,).
        longest: most groups of a row.
        activations: (tokens, columns), any floating dtype, contiguous.
        bias: (rows,), or None.

    Returns:
        (tokens, rows), in the dtype of `activations`; sums are in float32.
    """
    rows, (tokens, columns) = len(starts) - 1, activations.shape
    output = torch.empty(tokens, rows, dtype=activations.dtype, device=activations.device)
    arguments = values, offsets, bases, starts, bias, activations, output, columns, tokens
    sizes = triton.next_power_of_2(tokens), triton.cdiv(longest * GROUP, _BLOCK.value)
    # Triton launches on the current device.
    with torch.cuda.device_of(activations):  # type: ignore[no-untyped-call, unused-ignore]
        _rows[(rows,)](*arguments, *sizes, num_warps=_WARPS)
    return output


def unpack(values: Tensor, offsets: Tensor, bases: Tensor, starts: Tensor, longest: int, columns: int) -> Tensor:
    """The matrix (rows, columns) with all its zeros; arguments as of `multiply`."""
    rows = len(starts) - 1
    matrix = torch.zeros(rows, columns, dtype=values.dtype, device=values.device)
    steps = triton.cdiv(longest * GROUP, _BLOCK.value)
    with torch.cuda.device_of(values):  # type: ignore[no-untyped-call, unused-ignore]
        _unpack[(rows,)](values, offsets, bases, starts, matrix, columns, steps, num_warps=_WARPS)
    return matrix
