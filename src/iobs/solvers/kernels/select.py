"""The k-th largest magnitude of a tensor, without sorting."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core.partition import Partition
from iobs.core.patterns import top_mask_of
from iobs.core.shared_rows import is_spanning


@dataclass(frozen=True)
class Threshold:
    """The k-th largest magnitude, the number of entries above it and the number of entries equal to it."""

    value: float
    above: int
    equal: int


def largest(values: Tensor, groups: Partition) -> Tensor:
    """`top_mask_of` the magnitudes; for one group without ties only the threshold is computed.

    Args:
        values: (rows, columns), not NaN.
        groups: groups of the pattern.
    """
    if groups.count == 1 and 0 < groups.keep < groups.size and not is_spanning(groups, values.numel()):
        found = threshold(values.contiguous(), groups.keep)
        if found.above + found.equal == groups.keep:
            return values.abs() >= found.value
    return top_mask_of(values.abs(), groups)


def threshold(values: Tensor, keep: int) -> Threshold:
    """Exact `keep`-th largest of |values|.

    Args:
        values: contiguous, float32 or float64, any shape, not NaN.
        keep: rank, from 1 to the number of entries.
    """
    assert 1 <= keep <= values.numel()
    if values.device.type == "cpu" and values.dtype == torch.float32:
        return threshold_numba(values, keep)
    return threshold_torch(values, keep)


def threshold_torch(values: Tensor, keep: int) -> Threshold:
    """Torch form of `threshold`, for any device and dtype."""
    magnitudes = values.abs().flatten()
    value = magnitudes.kthvalue(magnitudes.numel() - keep + 1).values
    return Threshold(float(value), int((magnitudes > value).sum()), int((magnitudes == value).sum()))


def threshold_numba(values: Tensor, keep: int) -> Threshold:
    """Numba form of `threshold`: radix select on bits, which order non-negative floats as integers."""
    from iobs.solvers.kernels import select_numba

    bits, above, equal = select_numba.kth_largest(values.detach().numpy().reshape(-1).view("uint32"), keep)
    return Threshold(float(torch.tensor(bits, dtype=torch.int32).view(torch.float32)), above, equal)
