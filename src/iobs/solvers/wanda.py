"""Wanda: magnitude in the metric of the Hessian's diagonal, weights kept as they are (Sun et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass

from iobs.core.patterns import Pattern, top_mask
from iobs.core.quadratic import Quadratic, Solution


@dataclass(frozen=True)
class Wanda:
    """Keep the entries with the largest c_ij^2 H_jj: |weight| times the norm of its input.

    This is also OBD on a quadratic. As published, rows compete on their own: use `Unstructured(s, per="row")`.
    """

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """The centre with the entries of least diagonal saliency set to zero."""
        centre = problem.centre()
        scores = centre.square() * problem.operator.diagonal()
        return Solution.of(problem, centre, top_mask(scores, pattern))
