"""ADMM on the exact sparsity constraint, ended by a solve on the support that it settles on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from iobs.core import linalg
from iobs.core.factors import Factors
from iobs.core.patterns import Groups, Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.solvers.base import Budget
from iobs.solvers.candidates import best_of, polished
from iobs.solvers.kernels.conjugate import polish_weights
from iobs.solvers.kernels.inverse import shifted_inverse
from iobs.solvers.kernels.project import project, restart
from iobs.solvers.kernels.select import largest
from iobs.solvers.weights import is_cheap, scaled


@dataclass(frozen=True)
class Schedule:
    """How the penalty grows, and what the rest costs.

    Attributes:
        penalties: of the first and of the last stage; the stages between them grow geometrically.
        stages: one factorisation each, where rows are at least as many as half the columns.
        iterations: at most, in all; the stages share them evenly.
        relaxation: over-relaxation of the dense step.
        refit: conjugate gradient steps on the last support.
    """

    penalties: tuple[float, float]
    stages: int
    iterations: int
    relaxation: float
    refit: int


SCHEDULES = {
    "fast": Schedule((0.5, 1.0), stages=3, iterations=6, relaxation=1.4, refit=5),
    "default": Schedule((0.25, 2.0), stages=10, iterations=40, relaxation=1.0, refit=6),
    "best": Schedule((0.2, 2.0), stages=16, iterations=200, relaxation=1.0, refit=6),
}
_BALANCED = 0.7  # penalty from which a support that rests has settled; a little below the one that balances the scale
_REST = 1e-3  # share of the kept entries that still change sides when a support rests


@dataclass(frozen=True)
class ADMM:
    """Alternating direction method of multipliers: a dense least-squares step, a projection, a multiplier.

    Variables are scaled by (H_ii / [H^-1]_ii)^(1/4), the geometric mean of the diagonal's metric and that of OBS. In
    that scale the curvature of a variable, alone or with all others free to follow, is k or 1/k: the penalty that sits
    between them is about 1 whatever the layer, which is how it adapts. It grows in stages, one factorisation each, so
    that the support first moves freely and then settles. The search runs in float32.

    With budget "best", and on problems so small that it costs nothing, the answer is polished with exact 1-swaps and
    has to win against the supports of plain magnitude and of exact greedy removal; on large ones "best" takes swaps
    that a screening proposes, and no competitors.
    """

    budget: Budget = "default"

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """The best support found, with its exact weights (small problems) or those of conjugate gradients."""
        groups = pattern.groups(problem.shape)
        if groups.keep in (0, groups.size):
            mask = torch.full(problem.shape, groups.keep > 0, device=problem.device)
            return Solution.of(problem, problem.centre(), mask)
        found = self._search(problem, groups)
        return best_of(problem, pattern, polished(problem, pattern, found, self.budget))

    def _search(self, problem: Quadratic, groups: Groups) -> Solution:
        schedule = SCHEDULES[self.budget]
        hessian, linear, scale = scaled(problem)
        start = (problem.centre().float() * scale).contiguous()
        mask, target = alternate(hessian, linear, start, groups, schedule, problem.factors)
        if is_cheap(mask):
            weight = linalg.solve_on_support(problem.matrix, problem.linear, mask)
        else:
            weight = polish_weights(hessian, linear, mask, target.mul_(mask), schedule.refit).div_(scale)
        return Solution.of(problem, weight.to(problem.dtype), mask)


def alternate(
    hessian: Tensor, linear: Tensor, start: Tensor, groups: Groups, schedule: Schedule, factors: Factors
) -> tuple[Tensor, Tensor]:
    """The iteration itself, in float32, until the support has settled or the schedule ends.

    It starts as if the centre had just been projected: the multiplier is what the projection took away.

    Args:
        hessian: (d, d), scaled.
        linear: (rows, d) contiguous, scaled.
        start: (rows, d) contiguous, the scaled centre; overwritten.
        groups: of the pattern; not trivial.
        schedule: of the penalty.
        factors: where the factorisations of the stages are shared.

    Returns:
        The last projection's mask, exact in its counts, and its target.
    """
    stages = schedule.stages if 2 * len(linear) >= len(hessian) else max(2, schedule.stages * 5 // 8)
    low, high = schedule.penalties
    target, mask = start, largest(start, groups)
    dense, right = torch.empty_like(linear), torch.empty_like(linear)
    penalty, resting = low, 0
    for stage in range(stages):
        previous, penalty = penalty, low * (high / low) ** (stage / (stages - 1))
        solver = factors.get(("penalty", penalty), partial(shifted_inverse, hessian, penalty))
        restart(right, target, mask, linear, previous / penalty, penalty)
        steps = schedule.iterations * (stage + 1) // stages - schedule.iterations * stage // stages
        for _ in range(steps):
            before = mask.clone() if penalty > _BALANCED else None
            torch.mm(right, solver, out=dense)
            project(dense, target, mask, linear, groups, penalty, schedule.relaxation)
            dense, right = right, dense
            if before is not None:
                changed = int((mask != before).sum())
                # Twice in a row: the first iteration of a stage may change little only because it is the first.
                resting = resting + 1 if changed <= _REST * groups.count * groups.keep else 0
                if resting == 2:
                    return largest(target, groups), target
        del solver  # before the next is made: at 5,632 columns one takes 127 MB
    return largest(target, groups), target
