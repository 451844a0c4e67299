"""Exact solution of small problems: branch and bound over removals, in float64.

A node holds the remaining variables and the variables that must stay. Removing a set of variables costs at least as
much as removing any one of them alone. So r further removals cost at least the r-th cheapest single removal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from iobs.core import linalg
from iobs.core.partition import Partition
from iobs.core.patterns import Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.errors import ProblemError
from iobs.solvers.protocols import require_whole

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]

_MOST_COLUMNS = 1024  # a path through the tree holds up to this many matrices of (columns, columns)


@dataclass(frozen=True)
class Exact:
    """Proven optimum, for problems of at most a few dozen columns.

    Args:
        limit: largest number of nodes of one row's search tree.

    Raises:
        ProblemError: `limit` is not a positive whole number, or, when called, a row needs more nodes, or the problem
            has more than 1,024 columns.
    """

    limit: int = 200_000

    def __post_init__(self) -> None:
        require_whole("limit", self.limit, 1, "200,000 nodes prove most rows of two dozen columns")

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """The optimal support of every row; if rows share one count, also the optimal number of entries in each row."""
        groups = pattern.groups(problem.shape)
        d = problem.shape[1]
        if d > _MOST_COLUMNS:
            raise ProblemError(
                f'The matrix has {d:,} columns; solver="exact" proves rows of a few dozen, and takes at most '
                f'{_MOST_COLUMNS:,}. Use solver="admm" with budget="best".'
            )
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
    """Masks of rows that share `keep` entries: optimum of each row for each count, then dynamic programming."""
    d = centres.shape[1]
    # A row keeps at least what does not fit into the other rows.
    counts = range(max(0, keep - (len(centres) - 1) * d), min(d, keep) + 1)
    tables = [{k: best_support(inverse, row, Partition(1, d, k), limit) for k in counts} for row in centres]
    best = np.full(keep + 1, np.inf)
    best[0] = 0.0
    choices = np.zeros((len(centres), keep + 1), np.int64)
    for row, table in enumerate(tables):
        options = np.full((d + 1, keep + 1), np.inf)
        for count in counts:
            options[count, count:] = best[: keep + 1 - count] + table[count][0]
        choices[row], best = options.argmin(0), options.min(0)
    masks = np.zeros(centres.shape, np.bool_)
    remaining = keep
    for row in reversed(range(len(centres))):
        count = choices[row, remaining]
        masks[row] = tables[row][count][1]
        remaining -= count
    return masks


def best_support(inverse: Array, centre: Array, groups: Partition, limit: int) -> tuple[float, Bools]:
    """Optimal support of one row, and its loss above the unconstrained minimum.

    Args:
        inverse: (d, d) inverse Hessian.
        centre: (d,) unconstrained minimiser.
        groups: each `groups.size` neighbouring columns keep `groups.keep`.
        limit: largest number of nodes.

    Raises:
        ProblemError: the search needs more nodes.
    """
    search = _SupportSearch(groups.size, limit)
    quota = np.full(centre.size // groups.size, groups.size - groups.keep)
    search.run(_SupportNode(inverse.copy(), centre.copy(), 0.0, np.zeros(centre.size, np.bool_), quota))
    assert search.support is not None
    return search.loss, search.support


@dataclass(frozen=True)
class _SupportNode:
    """A node: the variables of a row that remain, and the removals left.

    Attributes:
        inverse: (d, d) inverse Hessian of the remaining variables, zero elsewhere.
        centre: (d,) minimiser on the remaining variables, zero elsewhere.
        loss: added by the removals so far.
        fixed: boolean (d,), variables that are removed or must stay.
        quota: (groups,), removals left in each group.
    """

    inverse: Array
    centre: Array
    loss: float
    fixed: Bools
    quota: NDArray[np.int64]


class _SupportSearch:
    """Depth-first branch and bound for one row.

    Args:
        of: neighbouring columns of a group.
        limit: largest number of nodes.
    """

    def __init__(self, of: int, limit: int) -> None:
        self.of = of
        self.limit = limit
        self.nodes = 0
        self.loss = np.inf
        self.support: Bools | None = None

    def run(self, root: _SupportNode) -> None:
        """Search below a node. Open nodes are on a stack: a path has up to one node for each column."""
        opened = [root]
        while opened:
            self.nodes += 1
            if self.nodes > self.limit:
                raise ProblemError(
                    f"Proving the optimum of {root.centre.size} columns needs more than {self.limit} nodes; "
                    'use solver="admm" with budget="best", or raise limit=.'
                )
            opened += self._below(opened.pop())

    def _below(self, node: _SupportNode) -> tuple[_SupportNode, ...]:
        """The two nodes below one, that of the removal last; none below a leaf, or where none can be better."""
        if not node.quota.any():
            if node.loss < self.loss:
                self.loss, self.support = node.loss, np.diag(node.inverse) > 0
            return ()
        fixed = node.fixed | np.repeat(node.quota == 0, self.of)
        diagonal = np.where(fixed, 1.0, np.diag(node.inverse))
        cost = np.where(fixed, np.inf, 0.5 * node.centre**2 / diagonal)
        # The quota-th cheapest removal of a group is a lower bound on the loss that its removals add.
        open_groups = node.quota > 0
        bounds = np.sort(cost.reshape(-1, self.of), axis=1)[open_groups, node.quota[open_groups] - 1]
        if node.loss + bounds.max() >= self.loss:
            return ()
        cheapest = int(cost.argmin())
        column = node.inverse[:, cheapest]
        smaller = node.inverse - np.outer(column, column) / column[cheapest]
        smaller[cheapest] = smaller[:, cheapest] = 0.0
        moved = node.centre - column * (node.centre[cheapest] / column[cheapest])
        moved[cheapest] = 0.0
        gone = fixed.copy()
        gone[cheapest] = True
        fewer = node.quota.copy()
        fewer[cheapest // self.of] -= 1
        kept = replace(node, fixed=gone)
        return kept, _SupportNode(smaller, moved, node.loss + float(cost[cheapest]), gone, fewer)
