"""Prune further: entries that are zero already stay zero."""

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
    """A refinement that takes back what a solver revived: the mask moves into a support, then every row is refitted.

    Args:
        weight: (rows, columns) weights that hold the old zeros.
        first: another refinement that comes before, or None.
    """

    weight: Tensor
    first: Refinement | None = None

    def __call__(self, problem: Quadratic, pattern: Pattern, solution: Solution) -> Solution:
        """The solution itself where it lies in the support, else the best refit of its entries that do."""
        if self.first is not None:
            solution = self.first(problem, pattern, solution)
        support = self.weight != 0
        if not bool((solution.mask & ~support).any()):
            return solution
        # What the solver kept comes first, by its size; other entries of the support fill up, by their old size.
        old, new = self.weight.double().abs(), solution.weight.double().abs()
        scores = torch.where(solution.mask, 1 + new, old / (1 + old)).masked_fill(~support, -1.0)
        mask = top_mask(scores, pattern) & support
        weight = linalg.solve_on_support(problem.matrix, problem.linear, mask)
        return Solution.of(problem, weight.to(problem.dtype), mask, **solution.stats)


def keeping(weight: Tensor, refine: str | Refinement | None) -> WithinSupport:
    """The refinement that keeps the zeros of a weight, after another one."""
    return WithinSupport(weight, REFINEMENTS[refine]() if isinstance(refine, str) else refine)
