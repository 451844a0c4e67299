"""Optimal Brain Compression (Frantar and Alistarh, 2022): exact greedy removal, one entry of a row at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core import linalg
from iobs.core.patterns import Groups, Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.solvers.kernels.greedy import greedy_removals
from iobs.solvers.weights import solve_weights


@dataclass(frozen=True)
class OBC:
    """Always remove the entry that raises its row's loss least, with the exact update of the rest.

    Where rows compete for a common count, the layer's next removal is the cheapest next removal of any row. The
    weights are solved for anew on the mask that is left. The order of removals is found in the dtype of the linear
    term.
    """

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Greedy removals until the pattern's count is left."""
        centre = problem.centre().contiguous()
        inverse = problem.factors.get(
            ("inverse", centre.dtype), lambda: linalg.inverse(problem.matrix.to(centre.dtype)).contiguous()
        )
        mask = greedy_mask(inverse, centre, pattern.groups(problem.shape))
        return Solution.of(problem, solve_weights(problem, mask), mask)


def greedy_mask(inverse: Tensor, centre: Tensor, groups: Groups) -> Tensor:
    """What exact greedy removal leaves, boolean (rows, d), from the inverse Hessian and the centre."""
    rows, d = centre.shape
    if groups.size > d:
        return _across_rows(inverse, centre, rows * d - groups.keep)
    quota = groups.size - groups.keep
    steps = torch.full((rows,), quota * (d // groups.size), device=centre.device)
    order, _ = greedy_removals(inverse, centre, steps, groups.size, quota)
    return _without(order, steps, d)


def _across_rows(inverse: Tensor, centre: Tensor, removals: int) -> Tensor:
    """Rows go on only as far as the common price takes them: those stopped too early start again with more steps."""
    rows, d = centre.shape
    steps = torch.full((rows,), min(d, math.ceil(1.2 * removals / rows) + 4), device=centre.device)
    order = torch.full((rows, d), -1, device=centre.device)
    price = torch.full((rows, d), torch.inf, dtype=centre.dtype, device=centre.device)
    todo = torch.arange(rows, device=centre.device)
    while True:
        part, cost = greedy_removals(inverse, centre[todo].contiguous(), steps[todo], d, d)
        order[todo, : part.shape[1]] = part
        # A cheap removal that only a dear one makes possible comes right after it: its price is the dear one's.
        price[todo, : part.shape[1]] = cost.cummax(1).values
        taken = price.flatten().sort(stable=True).indices[:removals] // d
        counts = torch.bincount(taken, minlength=rows)
        todo = ((counts >= steps) & (steps < d)).nonzero().flatten()
        if len(todo) == 0:
            return _without(order, counts, d)
        steps[todo] = (2 * steps[todo]).clamp_max(d)


def _without(order: Tensor, counts: Tensor, d: int) -> Tensor:
    mask = torch.ones(len(order), d + 1, dtype=torch.bool, device=order.device)  # one spare column for no removal
    taken = torch.arange(order.shape[1], device=order.device) < counts[:, None]
    mask.scatter_(1, torch.where(taken, order, d), False)
    return mask[:, :d].contiguous()
