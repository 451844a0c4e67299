"""Weights on a support that has been chosen: exact where that is cheap, otherwise to the accuracy of float32."""

from __future__ import annotations

from torch import Tensor

from iobs.core import linalg
from iobs.core.quadratic import Quadratic
from iobs.errors import NotPositiveDefiniteError
from iobs.solvers.kernels.conjugate import polish_weights

_EXACT_WORK = 1 << 22  # multiplications up to which rows are factorised for, one by one, in float64


def scaled(problem: Quadratic) -> tuple[Tensor, Tensor, Tensor]:
    """Hessian, linear term and scale of the variables u = scale v, in float32, the rows contiguous.

    The scale (H_ii / [H^-1]_ii)^(1/4) is the geometric mean of the metric of the diagonal, sqrt(H_ii), and that of
    Optimal Brain Surgeon, 1 / sqrt([H^-1]_ii). In it a variable's curvature, alone or with all others free to follow,
    is k or 1/k.
    """
    hessian, scale = problem.factors.get("geometric scale", lambda: _scale(problem.matrix))
    return hessian, problem.linear.float().div(scale).contiguous(), scale


def _scale(matrix: Tensor) -> tuple[Tensor, Tensor]:
    hessian = matrix.float()
    try:
        conditional = linalg.inverse(hessian).diagonal()
    except NotPositiveDefiniteError:  # beyond float32, perhaps not beyond float64
        conditional = linalg.inverse(matrix.double()).diagonal()
    # In float64: where inputs differ by many orders of magnitude the ratio is their fourth power.
    scale = (hessian.diagonal().double() / conditional.double()).pow(0.25).float()
    hessian = hessian / scale
    hessian /= scale[:, None]
    return hessian, scale


def is_cheap(mask: Tensor) -> bool:
    """Whether the exact weights on a mask cost next to nothing."""
    return len(mask) * int(mask.sum(1).max()) ** 3 <= _EXACT_WORK


def solve_weights(problem: Quadratic, mask: Tensor, iterations: int = 30) -> Tensor:
    """The best weights on a mask, (rows, d) in the problem's dtype.

    Args:
        problem: the quadratic.
        mask: boolean (rows, d).
        iterations: of conjugate gradients where the exact solution would be dear; 30 agree with it to five digits of
            the loss on the layers of real networks.
    """
    if is_cheap(mask):
        return linalg.solve_on_support(problem.matrix, problem.linear, mask).to(problem.dtype)
    hessian, linear, scale = scaled(problem)
    start = problem.centre().float().mul(scale).mul_(mask).contiguous()
    return polish_weights(hessian, linear, mask, start, iterations).div_(scale).to(problem.dtype)
