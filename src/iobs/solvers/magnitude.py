"""Pruning without an update of the weights: magnitude, and Wanda, magnitude in the metric of diag(H)."""

from __future__ import annotations

from dataclasses import dataclass

from iobs.core.masks import top_mask
from iobs.core.patterns import Pattern
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


@dataclass(frozen=True)
class Wanda:
    """Keep the entries of largest c_ij^2 H_jj: |weight| times the norm of the input (Sun et al., 2023).

    This is OBD on a quadratic. The published method prunes each row separately: use `Unstructured(s, per="row")`.
    """

    def cost(self, rows: int, columns: int) -> SolveCost:
        """Entrywise work; scores, a copy of the weights in float64, and the mask."""
        return SolveCost(10.0 * rows * columns, 21.0 * rows * columns)

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Set the entries of the centre with the least saliency to zero."""
        centre = problem.centre()
        scores = centre.square() * problem.matrix.diagonal()
        return Solution.of(problem, centre, top_mask(scores, pattern))
