"""The exact minimiser of f on a given support: Option 2's second line of Algorithm 1, iterated to convergence.

For a quadratic this is one solve of H_QQ z = b_Q (and one step of iterative refinement); otherwise a damped Newton
method on the k variables of the support, which needs no more than k x k matrices.
"""

from __future__ import annotations

import numpy as np

from iobs.optimize.autodiff import TorchObjective
from iobs.optimize.designs import Array, Indices
from iobs.optimize.fits import Fit as Fit
from iobs.optimize.fits import inverse_block as inverse_block
from iobs.optimize.fits import newton_direction as newton_direction
from iobs.optimize.objective import Objective
from iobs.optimize.products import refit_exactly, refit_loosely

_CHORD = 1e-3  # a Hessian is kept while each step on it lowers the decrement by this factor


def refit(
    objective: Objective,
    support: Indices,
    start: Array | None = None,
    *,
    steps: int | None = None,
    block: Array | None = None,
) -> Fit:
    """Minimise f over vectors that live on `support`.

    Args:
        objective: f.
        support: coordinates that may be non-zero (k,).
        start: (d,) first guess, zero if not given.
        steps: at most so many Newton steps, for a fit that need not be exact; None goes on to the minimiser.
        block: H_QQ near the start (k, k), where it is known already and dear to find again.
    """
    theta = np.zeros(objective.dimension)
    if support.size and isinstance(objective, TorchObjective):
        first = theta if start is None else start
        if steps is None:
            return refit_exactly(objective, support, first, block=block)
        return refit_loosely(objective, support, first, steps=steps)[0]
    if support.size:
        part = objective.restricted(support)
        first = np.zeros(support.size) if start is None else start[support]
        theta[support] = minimise_on_all(part, first, steps=50 if steps is None else steps)
    value, gradient = objective.value_and_gradient(theta)
    return Fit(support, theta, value, gradient)


def minimise_on_all(objective: Objective, start: Array, *, steps: int = 50) -> Array:
    """Unconstrained minimiser of f by Newton steps; regularised and halved until f falls, so any start will do."""
    theta = start
    value, gradient = objective.value_and_gradient(theta)
    if not np.isfinite(value):
        theta = np.zeros_like(start)
        value, gradient = objective.value_and_gradient(theta)
    everything = np.arange(objective.dimension)
    block, previous = objective.hessian_block(theta, everything), np.inf
    if objective.quadratic:
        for _ in range(2):  # the second is one step of iterative refinement
            theta = theta + newton_direction(block, gradient)
            gradient = objective.value_and_gradient(theta)[1]
        return theta
    fresh = True
    for _ in range(steps):
        direction = newton_direction(block, gradient)
        decrease = -float(gradient @ direction)
        if not fresh and decrease > _CHORD * previous:
            block, fresh = objective.hessian_block(theta, everything), True
            direction = newton_direction(block, gradient)
            decrease = -float(gradient @ direction)
            if decrease > _CHORD * previous and decrease <= 1e-13 * abs(value):
                break  # a fresh Hessian no longer helps: what is left is rounding
        step = _halve_until_descent(objective, theta, value, direction, decrease)
        if step is None:
            if fresh:
                break
            previous = 0.0  # the old Hessian no longer helps: look again with a new one
            continue
        theta, value, gradient = step
        if decrease <= 1e-30 * max(1.0, abs(value)) or decrease <= 1e-26 * abs(value):
            break
        previous, fresh = decrease, False
    return theta


def _halve_until_descent(
    objective: Objective, theta: Array, value: float, direction: Array, decrease: float
) -> tuple[Array, float, Array] | None:
    rounding = 1e-15 * max(abs(value), 1e-300)
    length = 1.0
    for _ in range(30):
        trial = theta + length * direction
        trial_value, trial_gradient = objective.value_and_gradient(trial)
        if np.isfinite(trial_value) and trial_value <= value - 1e-4 * length * decrease + rounding:
            return trial, trial_value, trial_gradient
        if length * decrease <= rounding:
            return None
        length *= 0.5
    return None
