"""The k-th largest magnitude of a tensor, without sorting."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core.partition import Partition, is_spanning
from iobs.core.patterns import top_mask_of


@dataclass(frozen=True)
class Threshold:
    """The k-th largest magnitude, the number of entries above it and the number of entries equal to it."""

    value: float
    above: int
    equal: int


def largest(values: Tensor, groups: Partition) -> Tensor:
    """`top_mask_of` the magnitudes; on a CPU, for one group without ties, only the threshold is computed.

    Args:
        values: (rows, columns), not NaN.
        groups: groups of the pattern.
    """
    quick = values.device.type == "cpu" and values.dtype == torch.float32 and groups.count == 1
    if quick and 0 < groups.keep < groups.size and not is_spanning(groups, values.numel()):
        cut = threshold(values.contiguous(), groups.keep)
        if cut.above + cut.equal == groups.keep:
            return values.abs() >= cut.value
    return top_mask_of(values.abs(), groups)


def threshold(values: Tensor, keep: int) -> Threshold:
    """Exact `keep`-th largest of |values|: a radix select on bits, which order non-negative floats as integers.

    Args:
        values: contiguous float32 on the CPU, any shape, not NaN.
        keep: rank, from 1 to the number of entries.
    """
    from iobs.solvers.kernels import select_numba

    bits, above, equal = select_numba.kth_largest(values.detach().numpy().reshape(-1).view("uint32"), keep)
    return Threshold(float(torch.tensor(bits, dtype=torch.int32).view(torch.float32)), above, equal)
