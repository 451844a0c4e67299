"""Exact solution of small problems: branch and bound over removals, in float64.

A node knows which variables remain and which of those must stay. Removing a set of variables costs at least as much
as removing its dearest member alone, so of the next r removals one costs at least the r-th cheapest single removal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from iobs.core import linalg
from iobs.core.patterns import Groups, Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.errors import ProblemError

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Exact:
    """The optimum, proven: for problems of a few dozen columns at most.

    Args:
        limit: nodes of the search tree that a row may open, before the problem counts as too large.

    Raises:
        ProblemError: the limit was reached.
    """

    limit: int = 200_000

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """The best support of all; where rows compete for a common count, also the best way to share it."""
        groups = pattern.groups(problem.shape)
        d = problem.shape[1]
        inverse = linalg.inverse(problem.matrix.double()).cpu().numpy()
        centres = problem.linear.double().cpu().numpy() @ inverse
        if groups.size > d:
            masks = _share(inverse, centres, groups.keep, self.limit)
        else:
            masks = np.stack([best_support(inverse, centre, groups, self.limit)[1] for centre in centres])
        mask = torch.from_numpy(masks).to(problem.device)
        weight = linalg.solve_on_support(problem.matrix, problem.linear, mask)
        return Solution.of(problem, weight.to(problem.dtype), mask)


def _share(inverse: Array, centres: Array, keep: int, limit: int) -> Bools:
    """Rows share `keep` entries: the best support of every row for every count, and dynamic programming over rows."""
    d = centres.shape[1]
    counts = range(max(0, keep - (len(centres) - 1) * d), min(d, keep) + 1)  # what the other rows can leave
    tables = [{k: best_support(inverse, row, Groups(1, d, k), limit) for k in counts} for row in centres]
    best = np.full(keep + 1, np.inf)
    best[0] = 0.0
    choices = np.zeros((len(centres), keep + 1), np.int64)
    for row, table in enumerate(tables):
        options = np.full((d + 1, keep + 1), np.inf)
        for count in counts:
            options[count, count:] = best[: keep + 1 - count] + table[count][0]
        choices[row], best = options.argmin(0), options.min(0)
    masks = np.zeros(centres.shape, np.bool_)
    left = keep
    for row in reversed(range(len(centres))):
        count = choices[row, left]
        masks[row] = tables[row][count][1]
        left -= count
    return masks


def best_support(inverse: Array, centre: Array, groups: Groups, limit: int) -> tuple[float, Bools]:
    """Least loss above the unconstrained minimum that a support of one row can have, and that support.

    Args:
        inverse: (d, d) inverse Hessian.
        centre: (d,) unconstrained minimiser.
        groups: every `groups.size` neighbours keep `groups.keep`.
        limit: nodes that may be opened.
    """
    search = _Search(groups.size, limit)
    quota = np.full(centre.size // groups.size, groups.size - groups.keep)
    search.visit(inverse.copy(), centre.copy(), 0.0, np.zeros(centre.size, np.bool_), quota)
    assert search.support is not None
    return search.loss, search.support


class _Search:
    def __init__(self, of: int, limit: int) -> None:
        self.of = of
        self.limit = limit
        self.nodes = 0
        self.loss = np.inf
        self.support: Bools | None = None

    def visit(self, inverse: Array, centre: Array, loss: float, fixed: Bools, quota: NDArray[np.int64]) -> None:
        """Search below a node: `fixed` variables stay or are gone, each group still loses `quota` of the others."""
        self.nodes += 1
        if self.nodes > self.limit:
            raise ProblemError(
                f"Proving the optimum of {centre.size} columns needs more than {self.limit} nodes; "
                'use solver="admm" with budget="best", or raise limit=.'
            )
        if not quota.any():
            if loss < self.loss:
                self.loss, self.support = loss, np.diag(inverse) > 0
            return
        fixed = fixed | np.repeat(quota == 0, self.of)
        diagonal = np.where(fixed, 1.0, np.diag(inverse))
        cost = np.where(fixed, np.inf, 0.5 * centre**2 / diagonal)
        # The quota-th cheapest removal of each group is a lower bound on what its removals add.
        bounds = np.sort(cost.reshape(-1, self.of), axis=1)[quota > 0, quota[quota > 0] - 1]
        if loss + bounds.max() >= self.loss:
            return
        cheapest = int(cost.argmin())
        column = inverse[:, cheapest]
        smaller = inverse - np.outer(column, column) / column[cheapest]
        smaller[cheapest] = smaller[:, cheapest] = 0.0
        moved = centre - column * (centre[cheapest] / column[cheapest])
        moved[cheapest] = 0.0
        gone = fixed.copy()
        gone[cheapest] = True
        fewer = quota.copy()
        fewer[cheapest // self.of] -= 1
        self.visit(smaller, moved, loss + cost[cheapest], gone, fewer)
        self.visit(inverse, centre, loss, gone, quota)
