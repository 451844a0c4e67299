"""Net-Trim (Aghasi et al., 2017): the weights of least l1 norm whose outputs stay within a tolerance, by ADMM.

    min norm(V)_1   subject to   norm((V - C) X)_F <= tolerance

This is the program of a layer without activation. Its multiplier form 1/2 tr((V - C) H (V - C)^T) + penalty norm(V)_1
needs only the Gram matrix H = X X^T. `net_trim` in `relu_trim` solves the program of a layer with a ReLU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core import linalg
from iobs.core.patterns import Pattern, top_mask
from iobs.core.quadratic import Quadratic, Solution
from iobs.errors import ProblemError
from iobs.solvers.kernels.inverse import shifted_inverse
from iobs.solvers.options import require_whole
from iobs.solvers.refit_weights import scaled, solve_weights

_RELAXED = 1.6  # over-relaxation of ADMM, between 1 and 2


@dataclass(frozen=True)
class NetTrim:
    """Net-Trim with a given count: the l1 penalty is bisected until as many entries are nonzero as the pattern keeps.

    The solution of the convex program chooses the mask. The penalty also shrinks the kept weights, so they are solved
    for again on the mask unless `refit` is False. `within_tolerance` solves the form with a tolerance.

    Args:
        refit: exact weights on the mask; False keeps the weights of the convex program.
        steps: penalties tried by bisection.
        iterations: of ADMM for each penalty.

    Raises:
        ProblemError: `steps` or `iterations` is not a positive whole number.
    """

    refit: bool = True
    steps: int = 20
    iterations: int = 20

    def __post_init__(self) -> None:
        require_whole("steps", self.steps, 1, "20 are usual")
        require_whole("iterations", self.iterations, 1, "20 are usual")

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Bisect the penalty to the count of the pattern; the largest thresholded entries are kept."""
        groups = pattern.groups(problem.shape)
        count = groups.count * groups.keep
        if groups.keep in (0, groups.size):
            mask = torch.full(problem.shape, groups.keep > 0, device=problem.device)
            return Solution.of(problem, problem.centre(), mask)
        hessian, linear, scale = scaled(problem)
        search = _Lasso(hessian, linear, scale, (problem.centre().float() * scale).contiguous())
        low, high = 0.0, search.largest_penalty()
        chosen, scores = high, search.scores()
        for _ in range(self.steps):
            penalty = 0.5 * high if low == 0 else math.sqrt(low * high)
            search.run(penalty, self.iterations)
            scores, chosen = search.scores(), penalty
            kept = int((scores > penalty).sum())
            if kept == count:
                break
            low, high = (penalty, high) if kept > count else (low, penalty)
        mask = top_mask(scores, pattern)
        if self.refit:
            return Solution.of(problem, solve_weights(problem, mask), mask)
        shrunk = (problem.linear - chosen * search.signs()).double()
        return Solution.of(
            problem, linalg.solve_on_support(problem.matrix, shrunk, mask).to(problem.dtype), mask, penalty=chosen
        )


def within_tolerance(
    problem: Quadratic, tolerance: float, *, accuracy: float = 1e-7, iterations: int = 20_000
) -> Solution:
    """The weights of least l1 norm with an error of at most the tolerance, for a layer without activation.

    Args:
        problem: the layer, (rows, d), with a positive definite Hessian H = X X^T.
        tolerance: largest norm((V - C) X)_F, where C is the centre.
        accuracy: relative, of the error and of the fixed point of ADMM.
        iterations: largest number of ADMM iterations for each penalty.

    Returns:
        The weights; `stats` holds their "l1" norm, "error" and "penalty".

    Raises:
        ProblemError: the tolerance is negative.
        NotPositiveDefiniteError: the Hessian is singular.
    """
    if not tolerance >= 0:
        raise ProblemError(f"The tolerance must not be negative, got {tolerance}.")
    double = problem.to(torch.float64)
    centre = double.centre()
    linalg.cholesky(double.matrix)
    scale = double.matrix.diagonal().sqrt()
    search = _Lasso(double.matrix / scale / scale[:, None], double.linear / scale, scale, centre * scale)

    def error(weight: Tensor) -> float:
        change = weight - centre
        return math.sqrt(max(0.0, float((change @ double.matrix * change).sum())))

    low, high = 0.0, search.largest_penalty()
    weight, penalty = centre, 0.0
    if error(torch.zeros_like(centre)) <= tolerance:
        low, weight, penalty = high, torch.zeros_like(centre), high
    while high - low > 1e-3 * accuracy * high and abs(error(weight) - tolerance) > accuracy * tolerance:
        middle = 0.5 * (low + high)
        search.run(middle, iterations, 1e-2 * accuracy)
        candidate = search.polished(double, middle)
        if error(candidate) > tolerance:
            high = middle
        else:
            low, weight, penalty = middle, candidate, middle
    mask = weight != 0
    stats = {"l1": float(weight.abs().sum()), "error": error(weight), "penalty": penalty}
    return Solution.of(problem, weight.to(problem.dtype), mask, **stats)


class _Lasso:
    """ADMM for 1/2 u H u^T - b u^T + penalty sum_j |u_j| / scale_j in scaled variables u = scale v, from a warm start.

    The parameter of ADMM is 1: the variables are scaled to curvatures near 1.
    """

    def __init__(self, hessian: Tensor, linear: Tensor, scale: Tensor, start: Tensor) -> None:
        self.linear = linear
        self.scale = scale
        self.inverse = shifted_inverse(hessian, 1.0)
        self.target = start.clone()
        self.multiplier = torch.zeros_like(start)
        self.argument = start.clone()  # what the last projection thresholded

    def largest_penalty(self) -> float:
        """The least penalty whose solution is zero."""
        return float((self.linear * self.scale).abs().max())

    def run(self, penalty: float, iterations: int, tolerance: float = 0.0) -> None:
        """Iterate until the primal and dual residuals are at most `tolerance`, relative to the target."""
        threshold = penalty / self.scale
        for count in range(iterations):
            dense = (self.linear + self.target - self.multiplier) @ self.inverse
            relaxed = _RELAXED * dense + (1 - _RELAXED) * self.target
            self.argument = relaxed + self.multiplier
            target = self.argument.sign() * (self.argument.abs() - threshold).clamp_min(0)
            self.multiplier = self.argument - target
            if tolerance and count % 10 == 9:
                size = max(float(target.norm()), 1e-300)
                if float((dense - target).norm()) + float((target - self.target).norm()) <= tolerance * size:
                    self.target = target
                    return
            self.target = target

    def scores(self) -> Tensor:
        """Sizes (rows, d) of what was thresholded, in units of the penalty: an entry above the penalty is not zero."""
        return self.argument.abs() * self.scale

    def signs(self) -> Tensor:
        """Signs (rows, d) of what was thresholded."""
        return self.argument.sign()

    def polished(self, problem: Quadratic, penalty: float) -> Tensor:
        """Exact solution on the support and signs of the target; the target where that changes a sign."""
        mask = self.target != 0
        weight = linalg.solve_on_support(problem.matrix, problem.linear - penalty * self.target.sign(), mask)
        if bool((weight.sign() != self.target.sign()).any()):
            return self.target / self.scale
        return weight
