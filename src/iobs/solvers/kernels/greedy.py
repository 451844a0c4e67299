"""Greedy order of removals of Optimal Brain Surgeon (OBS), for every row of a quadratic.

Removing variable p from a row costs w_p^2 / (2 M_pp), with M the inverse Hessian of the remaining variables. The
removal projects w and M along column p of M. This is a Cholesky factorisation of the inverse Hessian with pivots
chosen by the greedy rule. Only the columns of the factor are stored: d^3 / 6 multiplications for each row, and no
(d, d) matrix for each row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from iobs.solvers.kernels.threads import over_rows

_BATCH_ELEMENTS = 1 << 26  # largest number of entries of factors in one batch of the torch form


def greedy_removals(inverse: Tensor, centre: Tensor, steps: Tensor, of: int, quota: int) -> tuple[Tensor, Tensor]:
    """Remove variables from every row, always the cheapest variable first, and return the order.

    Args:
        inverse: (d, d) inverse Hessian, contiguous, symmetric.
        centre: (rows, d) contiguous, the unconstrained minimisers.
        steps: int64 (rows,), number of removals in each row.
        of: columns in each group.
        quota: largest number of removals in each group of `of` neighbouring columns.

    Returns:
        Indices of the removed variables, int64 (rows, max steps), and the loss added by each removal, (rows, max steps)
        in the dtype of the centre. After the steps of a row the entries are -1 and infinity.
    """
    longest = int(steps.max()) if len(steps) else 0
    order = torch.full((len(centre), longest), -1, dtype=torch.int64, device=centre.device)
    cost = torch.full((len(centre), longest), torch.inf, dtype=centre.dtype, device=centre.device)
    form = _numba if centre.device.type == "cpu" else _torch
    form(inverse, centre, steps, of, quota, order, cost)
    return order, cost


def _numba(inverse: Tensor, centre: Tensor, steps: Tensor, of: int, quota: int, order: Tensor, cost: Tensor) -> None:
    from iobs.solvers.kernels import greedy_numba

    matrix, rows, counts = inverse.numpy(), centre.numpy(), steps.numpy()
    sequence, price, greedy = order.numpy(), cost.numpy(), greedy_numba.greedy
    over_rows(lambda start, stop: greedy(start, stop, matrix, rows, counts, sequence, price, of, quota), len(rows))


def _torch(inverse: Tensor, centre: Tensor, steps: Tensor, of: int, quota: int, order: Tensor, cost: Tensor) -> None:
    """Torch form: all rows of a batch take each step together."""
    size = max(1, _BATCH_ELEMENTS // max(1, order.shape[1] * centre.shape[1]))
    for start in range(0, len(centre), size):
        part = slice(start, start + size)
        _torch_batch(inverse, centre[part], steps[part], of, quota, order[part], cost[part])


def _torch_batch(
    inverse: Tensor, centre: Tensor, steps: Tensor, of: int, quota: int, order: Tensor, cost: Tensor
) -> None:
    rows, d = centre.shape
    row = torch.arange(rows, device=centre.device)
    weight = centre.clone()
    diagonal = inverse.diagonal().expand(rows, d).clone()
    factor = torch.zeros(rows, order.shape[1], d, dtype=centre.dtype, device=centre.device)
    removed = torch.zeros(rows, d, dtype=torch.bool, device=centre.device)
    counts = torch.zeros(rows, d // of, dtype=torch.int64, device=centre.device)
    for t in range(order.shape[1]):
        closed = removed | (counts >= quota).repeat_interleave(of, dim=1)
        saliency = (weight.square() / diagonal).masked_fill(closed, torch.inf)
        pivot = saliency.argmin(1)
        running = t < steps
        order[:, t] = torch.where(running, pivot, -1)
        cost[:, t] = torch.where(running, 0.5 * saliency[row, pivot], torch.inf)
        column = inverse[pivot] - torch.einsum("rt,rtd->rd", factor[row, :t, pivot], factor[:, :t])
        column = column / diagonal[row, pivot].sqrt()[:, None]
        column = column.masked_fill(removed, 0)
        factor[:, t] = column
        step = (weight[row, pivot] / column[row, pivot])[:, None]
        weight -= step * column
        diagonal = torch.maximum(diagonal - column.square(), torch.finfo(centre.dtype).eps * diagonal)
        removed[row, pivot] = True
        counts[row, pivot // of] += 1
