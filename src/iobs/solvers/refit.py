"""Exact minimiser on a given support (Algorithm 1, Option 2, for a fixed mask)."""

from __future__ import annotations

from dataclasses import dataclass

from iobs.core import linalg
from iobs.core.patterns import Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.solvers.protocols import SolveCost


@dataclass(frozen=True)
class Refit:
    """Keep the mask and solve every row on its support in float64."""

    def cost(self, rows: int, columns: int) -> SolveCost:
        """For every row a factorisation in float64 of half of the columns, with some rows at a time."""
        return SolveCost(rows * float(columns) ** 3 / 12, 16 * columns**2 + 8 * rows * columns)

    def __call__(self, problem: Quadratic, pattern: Pattern, solution: Solution) -> Solution:
        """Return the optimal weights on the mask of the solution."""
        weight = linalg.solve_on_support(problem.matrix, problem.linear, solution.mask)
        return Solution.of(problem, weight.to(problem.dtype), solution.mask, **solution.stats)
