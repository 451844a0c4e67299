"""Keep existing zeros: a refinement that restricts a solution to the support of the given weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core import linalg
from iobs.core.patterns import Pattern, top_mask
from iobs.core.quadratic import Quadratic, Solution
from iobs.solvers import REFINEMENTS, Refinement


@dataclass(frozen=True)
class WithinSupport:
    """A refinement that moves the mask into the support of a weight, then refits every row.

    Args:
        weight: (rows, columns) weights with the existing zeros.
        first: a refinement to run before, or None.
    """

    weight: Tensor
    first: Refinement | None = None

    def __call__(self, problem: Quadratic, pattern: Pattern, solution: Solution) -> Solution:
        """The solution itself if its mask lies in the support, otherwise the best refit on a mask that does."""
        if self.first is not None:
            solution = self.first(problem, pattern, solution)
        support = self.weight != 0
        if not bool((solution.mask & ~support).any()):
            return solution
        # Entries that the solver kept come first, by magnitude; then other entries of the support, by old magnitude.
        old, new = self.weight.double().abs(), solution.weight.double().abs()
        scores = torch.where(solution.mask, 1 + new, old / (1 + old)).masked_fill(~support, -1.0)
        mask = top_mask(scores, pattern) & support
        weight = linalg.solve_on_support(problem.matrix, problem.linear, mask)
        return Solution.of(problem, weight.to(problem.dtype), mask, **solution.stats)


def keeping(weight: Tensor, refine: str | Refinement | None) -> WithinSupport:
    """The refinement that keeps the zeros of a weight, after another refinement or None."""
    return WithinSupport(weight, REFINEMENTS[refine]() if isinstance(refine, str) else refine)
