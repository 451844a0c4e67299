"""The k-th largest magnitude of many numbers, without sorting them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core.patterns import Groups, top_mask_of


@dataclass(frozen=True)
class Threshold:
    """The k-th largest magnitude, how many entries lie above it, and how many are equal to it."""

    value: float
    above: int
    equal: int


def largest(values: Tensor, groups: Groups) -> Tensor:
    """`top_mask_of` the magnitudes, through the threshold alone where one group spans everything and ties are decided.

    Args:
        values: (rows, columns), no NaN.
        groups: of the pattern.
    """
    if groups.count == 1 and 0 < groups.keep < groups.size:
        found = threshold(values.contiguous(), groups.keep)
        if found.above + found.equal == groups.keep:
            return values.abs() >= found.value
    return top_mask_of(values.abs(), groups)


def threshold(values: Tensor, keep: int) -> Threshold:
    """The `keep`-th largest of |values|, exactly.

    Args:
        values: contiguous, float32 or float64, any shape, no NaN.
        keep: 1 <= keep <= number of entries.
    """
    assert 1 <= keep <= values.numel()
    if values.device.type == "cpu" and values.dtype == torch.float32:
        return threshold_numba(values, keep)
    return threshold_torch(values, keep)


def threshold_torch(values: Tensor, keep: int) -> Threshold:
    """The plain form, on any device and in any dtype."""
    magnitudes = values.abs().flatten()
    value = magnitudes.kthvalue(magnitudes.numel() - keep + 1).values
    return Threshold(float(value), int((magnitudes > value).sum()), int((magnitudes == value).sum()))


def threshold_numba(values: Tensor, keep: int) -> Threshold:
    """Radix select on the bits of float32: positive floats sort as the integers that their bits spell."""
    from iobs.solvers.kernels import select_numba

    bits, above, equal = select_numba.kth_largest(values.detach().numpy().reshape(-1).view("uint32"), keep)
    return Threshold(float(torch.tensor(bits, dtype=torch.int32).view(torch.float32)), above, equal)
