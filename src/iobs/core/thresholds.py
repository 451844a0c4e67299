"""The k-th largest score of each group."""

from __future__ import annotations

import torch
from torch import Tensor

_MANY = 64  # groups from which torch's selection keeps a GPU busy: it takes one block of threads for each group


def smallest_kept(table: Tensor, keep: int) -> Tensor:
    """The `keep`-th largest score of each row.

    Args:
        table: (groups, size), any floating dtype, not NaN.
        keep: rank, from 1 to `size`.

    Returns:
        (groups, 1), in the dtype of the table.
    """
    if table.device.type == "cpu" or len(table) >= _MANY:
        return table.kthvalue(table.shape[1] - keep + 1, dim=1, keepdim=True).values
    return smallest_kept_by_bits(table, keep)


def smallest_kept_by_bits(table: Tensor, keep: int) -> Tensor:
    """Form of `smallest_kept` for few large groups on a GPU: finds the bits of the score, the highest bit first.

    Each bit takes one count of the scores that are at least as large, which the whole GPU shares. The CPU waits for
    nothing.
    """
    exact = table.contiguous() if table.dtype is torch.float64 else table.float().contiguous()
    whole, bits = (torch.int64, 64) if exact.dtype is torch.float64 else (torch.int32, 32)
    limits, numbers = torch.iinfo(whole), exact.view(whole)
    codes = (numbers >> (bits - 1)).bitwise_and_(limits.max).bitwise_xor_(numbers)  # ordered as the scores are
    zero = torch.zeros(len(table), 1, dtype=whole, device=table.device)
    bound = torch.where((codes >= 0).sum(1, keepdim=True) >= keep, zero, zero + limits.min)
    for place in range(bits - 2, -1, -1):
        raised = bound + (1 << place)
        bound = torch.where((codes >= raised).sum(1, keepdim=True) >= keep, raised, bound)
    value = (bound >> (bits - 1)).bitwise_and_(limits.max).bitwise_xor_(bound)
    return value.view(exact.dtype).to(table.dtype)
