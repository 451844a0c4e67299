"""SparseGPT inside one block of columns: remove entries left to right, each error spread over the columns after it."""

from __future__ import annotations

import torch
from torch import Tensor

from iobs.solvers.kernels.threads import over_rows


def eliminate(current: Tensor, factor: Tensor, mask: Tensor) -> None:
    """Remove every entry outside the mask, column after column, in place.

    Removing entry i of a row adds -(current_i / R_ii) R_i to the row, with R the upper Cholesky factor of the inverse
    Hessian of the block's columns given those after it.

    Args:
        current: (rows, n) contiguous, changed.
        factor: (n, n) upper triangular R, contiguous.
        mask: boolean (rows, n), contiguous, True where an entry stays.
    """
    (eliminate_numba if current.device.type == "cpu" else eliminate_torch)(current, factor, mask)


def eliminate_groups(current: Tensor, factor: Tensor, mask: Tensor, keep: int, of: int) -> None:
    """The same, and the mask is chosen on the way: at the first of every `of` columns, the `keep` most salient.

    Args:
        current: (rows, n) contiguous, changed; n is a multiple of `of`.
        factor: (n, n) upper triangular R, contiguous.
        mask: boolean (rows, n), contiguous, written.
        keep: entries kept in each group.
        of: size of a group.
    """
    chosen = eliminate_groups_numba if current.device.type == "cpu" else eliminate_groups_torch
    chosen(current, factor, mask, keep, of)


def eliminate_torch(current: Tensor, factor: Tensor, mask: Tensor) -> None:
    """The plain form of `eliminate`."""
    for i in range(current.shape[1]):
        _remove_column(current, factor, mask[:, i], i)


def eliminate_groups_torch(current: Tensor, factor: Tensor, mask: Tensor, keep: int, of: int) -> None:
    """The plain form of `eliminate_groups`."""
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
    """The CPU form of `eliminate`: a row stays in the cache, kept columns cost nothing."""
    from iobs.solvers.kernels import eliminate_numba as kernel

    arrays = current.numpy(), factor.numpy(), mask.numpy()
    over_rows(lambda start, stop: kernel.eliminate(start, stop, *arrays), len(current))


def eliminate_groups_numba(current: Tensor, factor: Tensor, mask: Tensor, keep: int, of: int) -> None:
    """The CPU form of `eliminate_groups`."""
    from iobs.solvers.kernels import eliminate_numba as kernel

    arrays = current.numpy(), factor.numpy(), mask.numpy()
    over_rows(lambda start, stop: kernel.eliminate_groups(start, stop, *arrays, keep, of), len(current))
