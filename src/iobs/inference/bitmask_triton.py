"""The product of a bitmask matrix and a few vectors on a GPU, in Triton.

With TRITON_INTERPRET=1 in the environment before the import, the same code runs on the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS = 32  # words of the mask that a program reads at a time
_BITS = 32  # columns of a word


# Triton's compiler reads annotations, and knows none of Python's.
@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _rows(  # type: ignore[no-untyped-def]
    mask, values, starts, given, found, rows, columns, words, step: tl.constexpr, bits: tl.constexpr
):
    """One row times one token. The number of set bits before a lane is the place of its value."""
    row, token = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, step * bits)
    place = tl.load(starts + row)
    total = tl.zeros([step * bits], dtype=tl.float32)
    for first in range(0, words, step):
        word = first + lane // bits
        content = tl.load(mask + row * words + word, mask=word < words, other=0)
        bit = (content >> (lane % bits)) & 1
        before = tl.cumsum(bit, 0) - bit
        weight = tl.load(values + place + before, mask=bit != 0, other=0.0).to(tl.float32)
        column = first * bits + lane
        activation = tl.load(given + token * columns + column, mask=bit != 0, other=0.0).to(tl.float32)
        total += weight * activation
        place += tl.sum(bit, 0)
    tl.store(found + token * rows + row, tl.sum(total, 0))


def multiply(mask: Tensor, values: Tensor, starts: Tensor, given: Tensor) -> Tensor:
    """Multiply a bitmask matrix by activations.

    Entries without a bit are skipped: a NaN or infinite activation that meets only zeros of a row does not change it.

    Args:
        mask: int32 (rows, words); bit b of word w belongs to column 32 * w + b, and columns past the last have none.
        values: the non-zero entries row after row, in float32, bfloat16 or float16.
        starts: int64 (rows + 1), the number of entries before each row.
        given: (tokens, columns), any floating dtype, contiguous.

    Returns:
        (tokens, rows), in the dtype of `given`; sums are in float32.
    """
    rows, words = mask.shape
    tokens, columns = given.shape
    found = torch.empty(tokens, rows, dtype=torch.float32, device=given.device)
    if tokens:
        # Triton launches on the current device.
        with torch.cuda.device_of(given):  # type: ignore[no-untyped-call, unused-ignore]
            _rows[(rows, tokens)](mask, values, starts, given, found, rows, columns, words, _WORDS, _BITS)
    return found.to(given.dtype)
