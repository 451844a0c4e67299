"""Entrywise half of an ADMM iteration: new target, its projection on the pattern, next right-hand side.

Let u be the scaled multiplier and s the projected point. One array, the target t, holds both: t = s where an entry is
kept and t = u where it is not. With the dense solution x and over-relaxation a, the new target is
a x + (1 - a) s + u. The projection keeps its largest entries. The next right-hand side is B + penalty (s - u). It
equals B + penalty t where an entry is kept, and B - penalty t elsewhere.

Below it, the selection that the projection of whole layers and other solvers use.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from iobs.core.masks import is_spanning, top_mask_of
from iobs.core.partition import Partition
from iobs.solvers.kernels import over_rows


def project(
    dense: Tensor, target: Tensor, mask: Tensor, linear: Tensor, groups: Partition, penalty: float, relaxation: float
) -> None:
    """Update target and mask, and replace the dense solution by the next right-hand side, all in place.

    The numba form interpolates a layer-wide threshold in a histogram of 15 bits. Its count of kept entries may be off
    by a few in a hundred thousand.

    Args:
        dense: float32 (rows, d) contiguous, the dense solution; on return B + penalty (s - u).
        target: float32 (rows, d) contiguous, t.
        mask: boolean (rows, d) contiguous, True where t = s.
        linear: float32 (rows, d) contiguous, B.
        groups: groups of the pattern.
        penalty: penalty of the next dense step.
        relaxation: over-relaxation a, between 1 and 2.
    """
    if dense.device.type != "cpu":
        project_torch(dense, target, mask, linear, groups, penalty, relaxation)
    elif groups.size > dense.shape[1]:
        _layer_numba(dense, target, mask, linear, groups, penalty, relaxation)
    else:
        _local_numba(dense, target, mask, linear, groups, penalty, relaxation)


def restart(right: Tensor, target: Tensor, mask: Tensor, linear: Tensor, shrink: float, penalty: float) -> None:
    """Begin a stage: rescale the multiplier to the new penalty and write the first right-hand side.

    Args:
        right: float32 (rows, d) contiguous, overwritten with B + penalty (s - u).
        target: see `project`; changed in place.
        mask: see `project`.
        linear: see `project`.
        shrink: old penalty divided by new penalty.
        penalty: new penalty.
    """
    if right.device.type != "cpu":
        restart_torch(right, target, mask, linear, shrink, penalty)
        return
    from iobs.solvers.kernels import project_numba

    x, t, kept, b = right.numpy(), target.numpy(), mask.numpy(), linear.numpy()
    over_rows(lambda start, stop: project_numba.restart(start, stop, x, t, kept, b, shrink, penalty), len(x))


def restart_torch(right: Tensor, target: Tensor, mask: Tensor, linear: Tensor, shrink: float, penalty: float) -> None:
    """Torch form of `restart`."""
    target.mul_(torch.where(mask, 1.0, shrink))
    torch.addcmul(linear, target, torch.where(mask, penalty, -penalty), out=right)


def project_torch(
    dense: Tensor, target: Tensor, mask: Tensor, linear: Tensor, groups: Partition, penalty: float, relaxation: float
) -> None:
    """Torch form of `project`."""
    target.mul_(torch.where(mask, 1 - relaxation, 1.0)).add_(dense, alpha=relaxation)
    mask.copy_(top_mask_of(target.abs(), groups))
    torch.addcmul(linear, target, torch.where(mask, penalty, -penalty), out=dense)


def _layer_numba(
    dense: Tensor, target: Tensor, mask: Tensor, linear: Tensor, groups: Partition, penalty: float, relaxation: float
) -> None:
    from iobs.solvers.kernels import project_numba

    x, t, kept, b = dense.numpy(), target.numpy(), mask.numpy(), linear.numpy()
    move, pull = project_numba.move, project_numba.pull
    histograms: list[NDArray[np.int32]] = []

    def first(start: int, stop: int) -> None:
        histograms.append(move(start, stop, x, t, kept, relaxation))

    over_rows(first, len(x))
    histogram = groups.total(torch.from_numpy(sum(histograms[1:], start=histograms[0])))
    level = project_numba.level(histogram.numpy(), groups.keep)
    over_rows(lambda start, stop: pull(start, stop, x, t, kept, b, level, penalty), len(x))


def _local_numba(
    dense: Tensor, target: Tensor, mask: Tensor, linear: Tensor, groups: Partition, penalty: float, relaxation: float
) -> None:
    from iobs.solvers.kernels import project_numba

    x, t, kept, b = dense.numpy(), target.numpy(), mask.numpy(), linear.numpy()
    size, keep, local = groups.size, groups.keep, project_numba.local
    over_rows(lambda start, stop: local(start, stop, x, t, kept, b, size, keep, penalty, relaxation), len(x))


# ---- The k-th largest magnitude of a tensor, without sorting


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
    from iobs.solvers.kernels import project_numba

    bits, above, equal = project_numba.kth_largest(values.detach().numpy().reshape(-1).view("uint32"), keep)
    return Threshold(float(torch.tensor(bits, dtype=torch.int32).view(torch.float32)), above, equal)
