"""Refit: the exact minimiser on a given support (Algorithm 1, Option 2, for a fixed mask)."""

from __future__ import annotations

from dataclasses import dataclass

from iobs.core import linalg
from iobs.core.patterns import Pattern
from iobs.core.quadratic import Quadratic, Solution


@dataclass(frozen=True)
class Refit:
    """Keep the mask, solve every row on its support exactly, in float64."""

    def __call__(self, problem: Quadratic, pattern: Pattern, solution: Solution) -> Solution:
        """The best weights that live on the solution's mask."""
        weight = linalg.solve_on_support(problem.matrix, problem.linear, solution.mask)
        return Solution.of(problem, weight.to(problem.dtype), solution.mask, **solution.stats)
