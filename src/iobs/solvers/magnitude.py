"""Magnitude: keep the largest entries of the centre, as they are."""

from __future__ import annotations

from dataclasses import dataclass

from iobs.core.patterns import Pattern, top_mask
from iobs.core.quadratic import Quadratic, Solution


@dataclass(frozen=True)
class Magnitude:
    """T_k of the centre: k-IHT when H = I / step, Topk-I-OBS (Algorithm 1, Option 1) when H is the Hessian.

    Truncates, does not refit.
    """

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """The centre with all but its largest entries set to zero."""
        centre = problem.centre()
        return Solution.of(problem, centre, top_mask(centre.abs(), pattern))
