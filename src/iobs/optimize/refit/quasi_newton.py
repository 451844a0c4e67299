"""Refits where every column of the Hessian takes a differentiation.

Early Newton steps are solved by a few conjugate gradients. The last refit of a support starts from one block of the
Hessian and updates it by the gradients on the way (BFGS). So a step takes one gradient, and the steps converge
superlinearly.
"""

from __future__ import annotations

import numpy as np

from iobs.optimize.curvature.conjugate import conjugate_gradients
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.design import Array, Indices
from iobs.optimize.refit.fit import Fit, newton_direction

_STEPS = 50  # most steps of an exact refit
_SLOW = 0.1  # compute a new block if a full step lowers the decrement by less than this factor
_LOOSE = 0.1  # relative residual of an inexact Newton step


def refit_loosely(objective: Objective, support: Indices, start: Array, *, steps: int = 1) -> tuple[Fit, Array]:
    """Take a few inexact Newton steps on a support; return the fit and the approximate H_QQ that they learned.

    Args:
        objective: f.
        support: coordinates that may be non-zero (k,).
        start: first guess (d,); entries outside the support are dropped.
        steps: largest number of steps, each of at most k Hessian products.
    """
    fit = _begin(objective, support, start)
    hessian = np.zeros((support.size, support.size))
    for _ in range(steps):
        direction, hessian = _inexact_step(objective, fit)
        decrease = -float(fit.gradient[support] @ direction)
        better = line_search(objective, fit, direction, decrease, max(abs(fit.value), 1e-4))
        if better is None:
            break
        hessian = _updated(hessian, (better.theta - fit.theta)[support], (better.gradient - fit.gradient)[support])
        fit = better
        if decrease <= 1e-6 * abs(fit.value):
            break
    return fit, hessian


def refit_exactly(
    objective: Objective,
    support: Indices,
    start: Array,
    *,
    block: Array | None = None,
    begun: Fit | None = None,
) -> Fit:
    """The minimiser on a support, to rounding.

    Args:
        objective: f.
        support: coordinates that may be non-zero (k,).
        start: first guess (d,); entries outside the support are dropped.
        block: an approximate H_QQ (k, k) to start with; computed if not given.
        begun: the fit at the start, if known.
    """
    fit = _begin(objective, support, start) if begun is None else begun
    fresh = block is None
    hessian = objective.hessian_block(fit.theta, support) if block is None else block
    previous, size = np.inf, max(abs(fit.value), 1e-4)
    for _ in range(_STEPS):
        gradient = fit.gradient[support]
        direction = newton_direction(hessian, gradient)
        decrease = -float(gradient @ direction)
        slow = not fresh and decrease > _SLOW * previous
        better = None if slow else line_search(objective, fit, direction, decrease, size)
        if better is None:
            if fresh:
                break
            hessian, fresh, previous = objective.hessian_block(fit.theta, support), True, np.inf
            continue
        moved = (better.theta - fit.theta)[support]
        hessian = _updated(hessian, moved, better.gradient[support] - gradient)
        fit, previous, fresh = better, decrease, False
        if decrease <= 1e-28 * size:
            break
    return fit


def _begin(objective: Objective, support: Indices, start: Array) -> Fit:
    theta = np.zeros(objective.dimension)
    theta[support] = start[support]
    value, gradient = objective.value_and_gradient(theta)
    if not np.isfinite(value):
        theta = np.zeros(objective.dimension)
        value, gradient = objective.value_and_gradient(theta)
    return Fit(support, theta, value, gradient)


def line_search(objective: Objective, fit: Fit, direction: Array, decrease: float, size: float) -> Fit | None:
    """The fit at the first of the step lengths 1, 1/2, 1/4, ... that lowers f enough; None if there is none.

    Near a minimum the change of f is below its rounding error, relative to `size`, an earlier value of f. There a step
    is accepted if it halves the slope along the direction (compare the approximate Wolfe condition of Hager and Zhang
    2005).
    """
    rounding = 1e-9 * size
    length = 1.0
    for _ in range(30):
        theta = fit.theta.copy()
        theta[fit.support] += length * direction
        value, gradient = objective.value_and_gradient(theta)
        if np.isfinite(value):
            lower = value <= fit.value - 1e-4 * length * decrease
            flat = decrease <= rounding and abs(float(gradient[fit.support] @ direction)) <= 0.5 * decrease
            if lower or (flat and value <= fit.value + rounding):
                return Fit(fit.support, theta, value, gradient)
        if length * decrease <= 1e-7 * rounding:
            return None
        length *= 0.5
    return None


def _inexact_step(objective: Objective, fit: Fit) -> tuple[Array, Array]:
    """H_QQ^-1 (-g_Q) to a relative residual of `_LOOSE`, and a matrix that agrees with H_QQ along every direction used.

    The first direction is steepest descent; if its curvature is not positive, it is the step itself.
    """
    support = fit.support
    descent = -fit.gradient[support]
    size = float(descent @ descent)
    hessian: Array | None = None

    def product(direction: Array) -> Array:
        full = np.zeros(objective.dimension)
        full[support] = direction
        return objective.hessian_product(fit.theta, full)[support]

    def learn(direction: Array, image: Array) -> None:
        nonlocal hessian
        if hessian is None:
            hessian = np.eye(support.size) * (float(direction @ image) / size)
        hessian = _updated(hessian, direction, image)

    goal = _LOOSE**2 * size
    solution = conjugate_gradients(product, descent, goal=goal, steps=support.size, seen=learn)
    return (solution if solution.any() else descent), np.eye(support.size) if hessian is None else hessian


def _updated(hessian: Array, step: Array, change: Array) -> Array:
    """The BFGS update: the nearest definite matrix that maps the step to the change of the gradient."""
    along, product = float(step @ change), hessian @ step
    size = float(step @ product)
    if not (along > 1e-8 * size > 0):
        return hessian
    return np.asarray(hessian + np.outer(change, change) / along - np.outer(product, product) / size)
