"""Optimal Brain Compression (Frantar and Alistarh, 2022): greedy removal of single entries.

Removing variable p from a row costs w_p^2 / (2 M_pp), with M the inverse Hessian of the remaining variables. The
removal projects w and M along column p of M. This is a Cholesky factorisation of the inverse Hessian with pivots chosen
by the greedy rule. Only the columns of the factor are stored: d^3 / 6 multiplications for each row, and no (d, d)
matrix for each row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from iobs.core import linalg
from iobs.core.partition import Partition
from iobs.core.patterns import Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.solvers.kernels import over_rows
from iobs.solvers.protocols import SolveCost, usual_cost
from iobs.solvers.refit import solve_weights


@dataclass(frozen=True)
class OBC:
    """Remove the entry that raises the loss of its row least, update the other entries exactly, and repeat.

    If rows share one count, the next removal is the cheapest next removal of all rows. The order of removals is
    computed in the dtype of the linear term. Finally the weights are solved for on the mask.
    """

    def cost(self, rows: int, columns: int) -> SolveCost:
        """For every row a removal of each column, d^3 / 12 operations up to a half of the columns."""
        usual = usual_cost(rows, columns)
        return replace(usual, loops=rows * float(columns) ** 3 / 12)

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Remove entries greedily until the count of the pattern is left."""
        centre = problem.centre().contiguous()
        inverse = problem.factors.get(
            ("inverse", centre.dtype), lambda: linalg.inverse(problem.matrix.to(centre.dtype)).contiguous()
        )
        mask = greedy_mask(inverse, centre, pattern.groups(problem.shape))
        return Solution.of(problem, solve_weights(problem, mask), mask)


def greedy_mask(inverse: Tensor, centre: Tensor, groups: Partition) -> Tensor:
    """Mask of the entries that greedy removal leaves.

    Args:
        inverse: (d, d) inverse Hessian.
        centre: (rows, d) unconstrained minimisers.
        groups: groups of the pattern.

    Returns:
        Boolean (rows, d), contiguous.
    """
    rows, d = centre.shape
    if groups.size > d:
        return _across_rows(inverse, centre, rows * d - groups.keep)
    quota = groups.size - groups.keep
    steps = torch.full((rows,), quota * (d // groups.size), device=centre.device)
    order, _ = greedy_removals(inverse, centre, steps, groups.size, quota)
    return _mask_without(order, steps, d)


def _across_rows(inverse: Tensor, centre: Tensor, removals: int) -> Tensor:
    """Greedy removal across all rows: `removals` of the cheapest removals of the layer.

    Each row computes a guessed number of removals. Rows that need more are repeated with twice as many.
    """
    rows, d = centre.shape
    steps = torch.full((rows,), min(d, math.ceil(1.2 * removals / rows) + 4), device=centre.device)
    order = torch.full((rows, d), -1, device=centre.device)
    price = torch.full((rows, d), torch.inf, dtype=centre.dtype, device=centre.device)
    todo = torch.arange(rows, device=centre.device)
    while True:
        part, cost = greedy_removals(inverse, centre[todo].contiguous(), steps[todo], d, d)
        order[todo, : part.shape[1]] = part
        # A removal is only possible after those before it in its row: its price is the running maximum of the costs.
        price[todo, : part.shape[1]] = cost.cummax(1).values
        taken = price.flatten().sort(stable=True).indices[:removals] // d
        counts = torch.bincount(taken, minlength=rows)
        todo = ((counts >= steps) & (steps < d)).nonzero().flatten()
        if len(todo) == 0:
            return _mask_without(order, counts, d)
        steps[todo] = (2 * steps[todo]).clamp_max(d)


def _mask_without(order: Tensor, counts: Tensor, d: int) -> Tensor:
    """Mask (rows, d) without the first `counts` removals of each row."""
    # The spare column takes the index of "no removal".
    mask = torch.ones(len(order), d + 1, dtype=torch.bool, device=order.device)
    taken = torch.arange(order.shape[1], device=order.device) < counts[:, None]
    mask.scatter_(1, torch.where(taken, order, d), False)
    return mask[:, :d].contiguous()


# ---- The order of removals of every row, in the two forms of a kernel

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
