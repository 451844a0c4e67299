"""Optimal Brain Compression (Frantar and Alistarh, 2022): greedy removal of single entries."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from iobs.core import linalg
from iobs.core.partition import Partition
from iobs.core.patterns import Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.solvers.kernels.greedy import greedy_removals
from iobs.solvers.protocols import SolveCost, usual_cost
from iobs.solvers.refit_weights import solve_weights


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
