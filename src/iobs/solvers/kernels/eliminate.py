"""SparseGPT inside one block: remove entries from left to right and spread each error over the later columns."""

from __future__ import annotations

import torch
from torch import Tensor

from iobs.solvers.kernels.threads import over_rows


def eliminate(current: Tensor, factor: Tensor, mask: Tensor) -> None:
    """Remove every entry outside the mask, one column at a time, in place.

    Removing entry i of a row adds -(current_i / R_ii) R_i to the row. R is the upper Cholesky factor of the inverse
    Hessian of the columns of the block, for fixed earlier columns and free later columns.

    Args:
        current: (rows, n) contiguous weights, changed in place.
        factor: (n, n) upper triangular R, contiguous.
        mask: boolean (rows, n), contiguous, True where an entry is kept.
    """
    (eliminate_numba if current.device.type == "cpu" else eliminate_torch)(current, factor, mask)


def eliminate_groups(current: Tensor, factor: Tensor, mask: Tensor, keep: int, of: int) -> None:
    """`eliminate` with an N:M mask chosen on the way: the `keep` entries of largest saliency in each group.

    The mask of a group is chosen when its first column is reached.

    Args:
        current: (rows, n) contiguous weights, changed in place; n is a multiple of `of`.
        factor: (n, n) upper triangular R, contiguous.
        mask: boolean (rows, n), contiguous, overwritten.
        keep: entries kept in each group.
        of: columns in each group.
    """
    chosen = eliminate_groups_numba if current.device.type == "cpu" else eliminate_groups_torch
    chosen(current, factor, mask, keep, of)


def eliminate_torch(current: Tensor, factor: Tensor, mask: Tensor) -> None:
    """Torch form of `eliminate`."""
    for i in range(current.shape[1]):
        _remove_column(current, factor, mask[:, i], i)


def eliminate_groups_torch(current: Tensor, factor: Tensor, mask: Tensor, keep: int, of: int) -> None:
    """Torch form of `eliminate_groups`."""
    for first in range(0, current.shape[1], of):
        group = slice(first, first + of)
        saliency = (current[:, group] / factor.diagonal()[group]).abs()
        order = saliency.sort(dim=1, descending=True, stable=True).indices[:, :keep]
        mask[:, group] = torch.zeros_like(mask[:, group]).scatter_(1, order, True)
        for i in range(first, first + of):
            _remove_column(current, factor, mask[:, i], i)


def _remove_column(current: Tensor, factor: Tensor, kept: Tensor, i: int) -> None:
    error = torch.where(kept, torch.zeros_like(current[:, i]), current[:, i] / factor[i, i])
    current[:, i + 1 :].addr_(error, factor[i, i + 1 :], alpha=-1)
    current[:, i] *= kept


def eliminate_numba(current: Tensor, factor: Tensor, mask: Tensor) -> None:
    """Numba form of `eliminate`."""
    from iobs.solvers.kernels import eliminate_numba as kernel

    arrays = current.numpy(), factor.numpy(), mask.numpy()
    over_rows(lambda start, stop: kernel.eliminate(start, stop, *arrays), len(current))


def eliminate_groups_numba(current: Tensor, factor: Tensor, mask: Tensor, keep: int, of: int) -> None:
    """Numba form of `eliminate_groups`."""
    from iobs.solvers.kernels import eliminate_numba as kernel

    arrays = current.numpy(), factor.numpy(), mask.numpy()
    over_rows(lambda start, stop: kernel.eliminate_groups(start, stop, *arrays, keep, of), len(current))
