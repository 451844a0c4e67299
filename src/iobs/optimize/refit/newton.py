"""The exact minimiser of f on a given support: Option 2's second line of Algorithm 1, iterated to convergence.

For a quadratic this is one solve of H_QQ z = b_Q with one step of iterative refinement. Otherwise it is a damped Newton
method on the k variables of the support, which needs only k x k matrices.
"""

from __future__ import annotations

import numpy as np

from iobs.optimize.objectives.autodiff import TorchObjective
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.design import Array, Indices
from iobs.optimize.objectives.families import Logistic, Poisson
from iobs.optimize.objectives.gram import GramLeastSquares
from iobs.optimize.objectives.linear import LeastSquares, LinearModel
from iobs.optimize.refit import newton_numba
from iobs.optimize.refit.fit import Fit, newton_direction
from iobs.optimize.refit.quasi_newton import refit_exactly, refit_loosely

_COMPILED: dict[type, int] = {Logistic: newton_numba.LOGISTIC, Poisson: newton_numba.POISSON}
_SMALL = 200_000  # most entries of a restricted design for the compiled form
_REFINED = 1e-9  # relative change of a refinement after which no further one is needed
_CHORD = 1e-3  # a Hessian is reused while each step with it lowers the decrement by this factor


def refit(
    objective: Objective,
    support: Indices,
    start: Array | None = None,
    *,
    steps: int | None = None,
    block: Array | None = None,
) -> Fit:
    """Minimise f over vectors that are zero outside `support`.

    Args:
        objective: f.
        support: coordinates that may be non-zero (k,).
        start: first guess (d,); zero if not given.
        steps: largest number of Newton steps, for an inexact fit; None iterates to the minimiser.
        block: H_QQ near the start (k, k), if known; used where every column of the Hessian takes a differentiation.
    """
    if support.size and isinstance(objective, TorchObjective):
        first = np.zeros(objective.dimension) if start is None else start
        if steps is None:
            return refit_exactly(objective, support, first, block=block)
        return refit_loosely(objective, support, first, steps=steps)[0]
    theta = refitted(objective, support, start, steps=steps)
    value, gradient = objective.value_and_gradient(theta)
    return Fit(support, theta, value, gradient)


def refitted(objective: Objective, support: Indices, start: Array | None = None, *, steps: int | None = None) -> Array:
    """The minimiser (d,) of `refit` alone, without f and its gradient, which take a pass over the data each."""
    theta = np.zeros(objective.dimension)
    if support.size and isinstance(objective, TorchObjective):
        return refit(objective, support, start, steps=steps).theta
    if isinstance(objective, GramLeastSquares):
        theta[support] = _solve(objective.hessian_block(theta, support), objective.linear[support])
    elif support.size:
        part = objective.restricted(support)
        first = np.zeros(support.size) if start is None else start[support]
        most = 50 if steps is None else steps
        found = _compiled(part, first, most)
        theta[support] = minimise_on_all(part, first, steps=most) if found is None else found
    return theta


def _compiled(part: Objective, start: Array, steps: int) -> Array | None:
    """The minimiser of a small logistic or Poisson model over all its coordinates; None for others."""
    family = _COMPILED.get(type(part))
    if family is None or not isinstance(part, LinearModel) or part.design.shape[0] * start.size > _SMALL:
        return None
    rows = np.ascontiguousarray(part.design.columns(np.arange(start.size)).T)
    offset = np.zeros(part.target.size) if part.offset is None else part.offset
    fine, theta = newton_numba.minimise(
        family, rows, part.target, part.weights, part.ridge, offset, np.ascontiguousarray(start), steps
    )
    return theta if fine else None


def _solve(block: Array, linear: Array) -> Array:
    """The solution of H_QQ z = c_Q, with one step of iterative refinement."""
    solution = newton_direction(block, -linear)
    return solution + newton_direction(block, block @ solution - linear)


def on_data(objective: Objective, fit: Fit) -> Fit:
    """A fit by the Gram matrix of least squares, refined by residuals of the data; any other fit unchanged."""
    if not isinstance(objective, LeastSquares) or not isinstance(objective.by_gram, GramLeastSquares):
        return fit
    theta, support = fit.theta.copy(), fit.support
    residual = objective.target
    if support.size:
        columns, block = objective.design.columns(support), objective.by_gram.hessian_block(theta, support)
        values, ridge = theta[support], objective.ridge[support]
        residual = objective.target - columns @ values
        for _ in range(2):
            change = newton_direction(block, ridge * values - columns.T @ residual)
            values = values + change
            residual = objective.target - columns @ values
            if np.abs(change).max() <= _REFINED * np.abs(values).max():  # a second round would change rounding only
                break
        theta[support] = values
    value = 0.5 * float(residual @ residual) + 0.5 * float(objective.ridge @ theta**2)
    return Fit(support, theta, value, objective.ridge * theta - objective.design.rmatvec(residual))


def minimise_on_all(objective: Objective, start: Array, *, steps: int = 50) -> Array:
    """Minimise f without constraints from any start, by Newton steps that are regularised and halved until f falls."""
    theta = start
    value, gradient = objective.value_and_gradient(theta)
    if not np.isfinite(value):
        theta = np.zeros_like(start)
        value, gradient = objective.value_and_gradient(theta)
    everything = np.arange(objective.dimension)
    block, previous = objective.hessian_block(theta, everything), np.inf
    if objective.quadratic:
        for _ in range(2):  # the second step is iterative refinement
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
                break  # even a fresh Hessian gives no progress: the rest is rounding
        step = _halve_until_descent(objective, theta, value, direction, decrease)
        if step is None:
            if fresh:
                break
            previous = 0.0  # the reused Hessian gives no progress: compute a new one
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
    for _ in range(newton_numba.HALVINGS):
        trial = theta + length * direction
        trial_value, trial_gradient = objective.value_and_gradient(trial)
        if np.isfinite(trial_value) and trial_value <= value - 1e-4 * length * decrease + rounding:
            return trial, trial_value, trial_gradient
        if length * decrease <= rounding:
            return None
        length *= 0.5
    return None
