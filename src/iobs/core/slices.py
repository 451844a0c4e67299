"""Slices of large tensors: a copy of all entries in another form would take much memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from iobs.core.late import torch

if TYPE_CHECKING:
    from torch import Tensor

_MOST = 2**18  # entries of a slice: whole bytes of a mask


def slices(shape: Sequence[int], most: int = _MOST) -> list[slice]:
    """Slices of the first dimension of a tensor, of at most some entries, or single rows.

    Args:
        shape: of the tensor.
        most: entries of a slice.
    """
    step = max(1, most // max(1, math.prod(shape[1:])))
    return [slice(start, start + step) for start in range(0, shape[0], step)]


def is_exact(tensor: Tensor, dtype: torch.dtype) -> bool:
    """True if a dtype holds all numbers of a floating tensor."""
    flat = tensor.flatten()
    return all(torch.equal(flat[part].to(dtype).to(flat.dtype), flat[part]) for part in slices(flat.shape))
