"""Optimal weights on a fixed support (Algorithm 1, Option 2): exact if cheap, otherwise to the accuracy of float32."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from iobs.core import linalg
from iobs.core.patterns import Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.errors import NotPositiveDefiniteError
from iobs.solvers.protocols import SolveCost


@dataclass(frozen=True)
class Refit:
    """Keep the mask and solve every row on its support in float64."""

    def cost(self, rows: int, columns: int) -> SolveCost:
        """For every row a factorisation in float64 of half of the columns, with some rows at a time."""
        return SolveCost(rows * float(columns) ** 3 / 12, 16 * columns**2 + 8 * rows * columns)

    def __call__(self, problem: Quadratic, pattern: Pattern, solution: Solution) -> Solution:
        """Return the optimal weights on the mask of the solution."""
        weight = linalg.solve_on_support(problem.matrix, problem.linear, solution.mask)
        return Solution.of(problem, weight.to(problem.dtype), solution.mask, **solution.stats)


# ---- For other solvers: their weights on the mask they chose

_STEPS = 30  # of conjugate gradients; on layers of real networks they give five correct digits of the loss
_EXACT_WORK = 1 << 22  # multiplications up to which every row is solved by its own Cholesky factor in float64


def scaled(problem: Quadratic) -> tuple[Tensor, Tensor, Tensor]:
    """Scale the problem to the variables u = scale v, scale_i = (H_ii / [H^-1]_ii)^(1/4), in float32.

    The scale is the geometric mean of the metrics of diag(H), sqrt(H_ii), and of OBS, 1 / sqrt([H^-1]_ii). In this
    scale H_ii = [H^-1]_ii: a variable has curvature k if the others are fixed and 1/k if the others are free.

    Returns:
        Hessian (d, d), linear term (rows, d) contiguous, and scale (d,).
    """
    hessian, scale = problem.factors.get("geometric scale", lambda: _scale(problem.matrix))
    return hessian, problem.linear.float().div(scale).contiguous(), scale


def _scale(matrix: Tensor) -> tuple[Tensor, Tensor]:
    hessian = matrix.float()
    try:
        conditional = linalg.inverse(hessian).diagonal().clone()  # a view would keep the inverse in memory
    except NotPositiveDefiniteError:  # too ill-conditioned for float32, maybe not for float64
        conditional = linalg.inverse(matrix.double()).diagonal()
    # In float64: the ratio is the fourth power of the scale, which may differ by many orders of magnitude.
    scale = (hessian.diagonal().double() / conditional.double()).pow(0.25).float()
    hessian = hessian / scale
    hessian /= scale[:, None]
    return hessian, scale


def is_cheap(mask: Tensor) -> bool:
    """True if the exact weights on a mask take little time."""
    return len(mask) * int(mask.sum(1).max()) ** 3 <= _EXACT_WORK


def solve_weights(problem: Quadratic, mask: Tensor) -> Tensor:
    """Optimal weights on a mask (rows, d) in the dtype of the problem, by conjugate gradients if exact ones cost much.

    Args:
        problem: the quadratic.
        mask: boolean (rows, d).
    """
    if is_cheap(mask):
        return linalg.solve_on_support(problem.matrix, problem.linear, mask).to(problem.dtype)
    hessian, linear, scale = scaled(problem)
    start = problem.centre().float().mul(scale).mul_(mask)
    weight, _ = linalg.masked_conjugate_gradients(hessian, linear, mask, start, iterations=_STEPS)
    return weight.div_(scale).to(problem.dtype)
