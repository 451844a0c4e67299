"""ADMM on the exact sparsity constraint, ended by a solve on the support that it settles on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core import linalg
from iobs.core.patterns import Pattern, top_mask
from iobs.core.quadratic import Quadratic, Solution
from iobs.solvers.base import Budget

_SCHEDULES = {"fast": (3, 4), "default": (8, 5), "best": (16, 15)}  # stages, iterations a stage


@dataclass(frozen=True)
class ADMM:
    """Alternating direction method of multipliers: a dense least-squares step, a projection, a multiplier.

    Variables are scaled by (H_ii / [H^-1]_ii)^(1/4), the geometric mean of the diagonal's metric and that of OBS.
    The penalty grows from 0.1 to 1 (relative to the scaled diagonal) in stages, one factorisation each, so that
    the support first moves freely and then settles; on the last support the weights are solved for exactly.
    """

    budget: Budget = "default"

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """The best support that the iteration settles on, with its exact weights."""
        hessian, linear = problem.matrix.float(), problem.linear.float()
        scale = (hessian.diagonal() / linalg.inverse(hessian).diagonal()).clamp_min(0).pow(0.25)
        mask = self._support(
            hessian / scale / scale[:, None], linear / scale, problem.centre().float() * scale, pattern
        )
        weight = linalg.solve_on_support(problem.matrix, problem.linear, mask)
        return Solution.of(problem, weight.to(problem.linear.dtype), mask)

    def _support(self, hessian: Tensor, linear: Tensor, start: Tensor, pattern: Pattern) -> Tensor:
        stages, iterations = _SCHEDULES[self.budget]
        mean = float(hessian.diagonal().mean())
        multiplier = torch.zeros_like(start)  # scaled by the penalty
        mask = top_mask(start.square(), pattern)
        sparse = start * mask
        last = 0.0
        for stage in range(stages):
            penalty = mean * 0.1 * 10 ** (stage / max(1, stages - 1))
            multiplier *= last / penalty
            last = penalty
            damped = hessian.clone()
            damped.diagonal().add_(penalty)
            solver = linalg.inverse(damped)
            for _ in range(iterations):
                dense = (linear + penalty * (sparse - multiplier)) @ solver
                target = dense + multiplier
                mask = top_mask(target.square(), pattern)
                sparse = target * mask
                multiplier = target - sparse
        return mask
