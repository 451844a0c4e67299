"""One ADMM iteration's entrywise half: the new target, its projection on the pattern, the next right-hand side.

With u the scaled multiplier and s the projected point, one array holds both: the target t is s where an entry is kept
and u where it is not. The over-relaxed dense solution x moves it to a x + (1 - a) s + u, the projection keeps its
largest entries, and the next dense step solves for B + penalty (s - u), which is B + penalty t or B - penalty t.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from iobs.core.patterns import Groups, top_mask_of
from iobs.solvers.kernels.threads import over_rows


def project(
    dense: Tensor, target: Tensor, mask: Tensor, linear: Tensor, groups: Groups, penalty: float, relaxation: float
) -> None:
    """Replace the dense solution by the next right-hand side, and bring target and mask up to date, all in place.

    The numba form finds a layer-wide threshold from a histogram of 15 bits, interpolated inside its bucket: the count
    kept on the way may be off by a few in a hundred thousand.

    Args:
        dense: float32 (rows, d) contiguous: the dense solution; on return B + penalty (s - u).
        target: as dense: t.
        mask: boolean (rows, d) contiguous: the entries where t is s.
        linear: as dense: B.
        groups: the pattern's groups.
        penalty: of the next dense step.
        relaxation: a, between 1 and 2.
    """
    if dense.device.type != "cpu":
        project_torch(dense, target, mask, linear, groups, penalty, relaxation)
    elif groups.size > dense.shape[1]:
        _layer_numba(dense, target, mask, linear, groups, penalty, relaxation)
    else:
        _local_numba(dense, target, mask, linear, groups, penalty, relaxation)


def restart(right: Tensor, target: Tensor, mask: Tensor, linear: Tensor, shrink: float, penalty: float) -> None:
    """Begin a stage: the scaled multiplier shrinks as the penalty grows; the right-hand side of its first dense step.

    Args:
        right: float32 (rows, d) contiguous, written: B + penalty (s - u).
        target: as `project`, changed.
        mask: as `project`.
        linear: as `project`.
        shrink: old penalty over new.
        penalty: the new one.
    """
    if right.device.type != "cpu":
        restart_torch(right, target, mask, linear, shrink, penalty)
        return
    from iobs.solvers.kernels import project_numba

    arrays: Any = tuple(tensor.numpy() for tensor in (right, target, mask, linear))
    kernel: Any = project_numba.restart
    over_rows(lambda start, stop: kernel(start, stop, *arrays, shrink, penalty), len(right))


def restart_torch(right: Tensor, target: Tensor, mask: Tensor, linear: Tensor, shrink: float, penalty: float) -> None:
    """The plain form."""
    target.mul_(torch.where(mask, 1.0, shrink))
    torch.addcmul(linear, target, torch.where(mask, penalty, -penalty), out=right)


def project_torch(
    dense: Tensor, target: Tensor, mask: Tensor, linear: Tensor, groups: Groups, penalty: float, relaxation: float
) -> None:
    """The plain form."""
    target.mul_(torch.where(mask, 1 - relaxation, 1.0)).add_(dense, alpha=relaxation)
    mask.copy_(top_mask_of(target.abs(), groups))
    torch.addcmul(linear, target, torch.where(mask, penalty, -penalty), out=dense)


def _layer_numba(
    dense: Tensor, target: Tensor, mask: Tensor, linear: Tensor, groups: Groups, penalty: float, relaxation: float
) -> None:
    from iobs.solvers.kernels import project_numba

    x, t, kept, b = dense.numpy(), target.numpy(), mask.numpy(), linear.numpy()
    move: Any = project_numba.move
    pull: Any = project_numba.pull
    histograms: list[Any] = []

    def first(start: int, stop: int) -> None:
        histograms.append(move(start, stop, x, t, kept, relaxation))

    over_rows(first, len(x))
    level = project_numba.level(sum(histograms), groups.keep)
    over_rows(lambda start, stop: pull(start, stop, x, t, kept, b, level, penalty), len(x))


def _local_numba(
    dense: Tensor, target: Tensor, mask: Tensor, linear: Tensor, groups: Groups, penalty: float, relaxation: float
) -> None:
    from iobs.solvers.kernels import project_numba

    arrays: Any = tuple(tensor.numpy() for tensor in (dense, target, mask, linear))
    kernel: Any = project_numba.local
    over_rows(
        lambda start, stop: kernel(start, stop, *arrays, groups.size, groups.keep, penalty, relaxation), len(dense)
    )
