"""Magnitude pruning: keep the largest entries of the centre without an update."""

from __future__ import annotations

from dataclasses import dataclass

from iobs.core.patterns import Pattern, top_mask
from iobs.core.quadratic import Quadratic, Solution
from iobs.solvers.protocols import SolveCost


@dataclass(frozen=True)
class Magnitude:
    """Top-k of the centre, without refit.

    This is k-IHT if H = I / step, and Topk-I-OBS (Algorithm 1, Option 1) if H is the Hessian.
    """

    def cost(self, rows: int, columns: int) -> SolveCost:
        """Entrywise work; a copy of the weights in float64, their magnitudes and the mask."""
        return SolveCost(10.0 * rows * columns, 21.0 * rows * columns)

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Keep the largest entries of the centre and set the others to zero."""
        centre = problem.centre()
        return Solution.of(problem, centre, top_mask(centre.abs(), pattern))
