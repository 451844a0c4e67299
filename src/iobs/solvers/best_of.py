"""Selection of the best of several solutions, separately for every row if rows are independent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from iobs.core.patterns import Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.solvers.exact import Exact
from iobs.solvers.magnitude import Magnitude
from iobs.solvers.obc import OBC
from iobs.solvers.protocols import Budget
from iobs.solvers.refit import Refit
from iobs.solvers.screened_swap import ScreenedSwap
from iobs.solvers.swap import Swap

_SMALL = 1 << 24  # rows x columns^3 up to which magnitude and exact swaps compete whatever the budget
_ELIMINATION = 80  # (kept entries of a row)^3 / columns^2 up to which swaps cost no more than the search before them
_PROVABLE = 16  # columns up to which the optimum of a row is proven in milliseconds


def candidates(problem: Quadratic, pattern: Pattern, solution: Solution, budget: Budget) -> Iterator[Solution]:
    """The given solution and its competitors, which depend on the budget and the size of the problem.

    On small problems the refitted magnitude support is a competitor. A solution that is never worse than it inherits
    the convergence rate that is proven for Top-k.
    """
    yield solution
    rows, columns = problem.shape
    operations = rows * columns**3
    if operations <= _SMALL:
        yield Refit()(problem, pattern, Magnitude()(problem, pattern))
        swap = Swap()
        yield swap(problem, pattern, solution)
        if budget == "best":
            yield swap(problem, pattern, OBC()(problem, pattern))
            if columns <= _PROVABLE and pattern.groups(problem.shape).size <= columns:
                yield Exact()(problem, pattern)
    elif budget == "best" and (int(solution.mask.sum()) / rows) ** 3 <= _ELIMINATION * columns**2:
        yield ScreenedSwap()(problem, pattern, solution)


def best_of(problem: Quadratic, pattern: Pattern, solutions: Iterable[Solution]) -> Solution:
    """The candidate of least loss: for each row, or for the whole layer if its rows share one count."""
    first, *others = solutions
    if not others:
        return first
    if pattern.groups(problem.shape).size > problem.shape[1]:
        return min([first, *others], key=lambda candidate: float(candidate.loss.sum()))
    weight, mask, loss = first.weight, first.mask, first.loss
    for other in others:
        better = other.loss < loss
        weight = torch.where(better[:, None], other.weight, weight)
        mask = torch.where(better[:, None], other.mask, mask)
        loss = torch.where(better, other.loss, loss)
    return Solution.of(problem, weight, mask, **first.stats)
