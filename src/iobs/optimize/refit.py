"""The exact minimiser of f on a given support: Option 2's second line of Algorithm 1, iterated to convergence.

For a quadratic this is one solve of H_QQ z = b_Q (and one step of iterative refinement); otherwise a damped Newton
method on the k variables of the support, which needs no more than k x k matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg.lapack import dposv, dpotrf, dpotri

from iobs.optimize.designs import Array, Indices
from iobs.optimize.objective import Objective

_CHORD = 1e-3  # a Hessian is kept while each step on it lowers the decrement by this factor
_JITTER = 1e-12  # relative to the diagonal: what makes duplicate columns harmless


@dataclass(frozen=True)
class Fit:
    """f minimised on a support.

    Attributes:
        support: sorted coordinates Q (k,), forced ones included.
        theta: (d,), zero outside Q.
        value: f(theta).
        gradient: (d,), about zero on Q.
    """

    support: Indices
    theta: Array
    value: float
    gradient: Array


def refit(objective: Objective, support: Indices, start: Array | None = None, *, steps: int = 50) -> Fit:
    """Minimise f over vectors that live on `support`.

    Args:
        objective: f.
        support: coordinates that may be non-zero (k,).
        start: (d,) first guess, zero if not given.
        steps: at most so many Newton steps.
    """
    theta = np.zeros(objective.dimension)
    if support.size:
        part = objective.restricted(support)
        first = np.zeros(support.size) if start is None else start[support]
        theta[support] = minimise_on_all(part, first, steps=steps)
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


def newton_direction(hessian: Array, gradient: Array) -> Array:
    """-(H + mu D)^-1 g with D = diag(H), mu the least of 0, 1e-12, 1e-10, ... that makes the matrix definite."""
    diagonal = np.abs(hessian.diagonal())
    floor = diagonal.max(initial=0.0) * 1e-14
    ridge = np.maximum(diagonal, floor if floor > 0 else 1.0)
    amount = 0.0
    while amount < 1e8:
        matrix = hessian.copy()
        matrix[np.diag_indices_from(matrix)] += amount * ridge
        _, direction, info = dposv(matrix, -gradient, lower=1, overwrite_a=1)
        if info == 0 and np.isfinite(direction).all():
            return np.asarray(direction)
        amount = _JITTER if amount == 0 else 100 * amount
    return np.asarray(-gradient / ridge)


def inverse_block(hessian: Array) -> Array:
    """H_QQ^-1, with the diagonal raised by as little as makes it exist (duplicate columns)."""
    amount = 0.0
    diagonal = hessian.diagonal()
    while amount < 1.0:
        matrix = hessian.copy()
        matrix[np.diag_indices_from(matrix)] += amount * diagonal + (1e-300 if amount else 0.0)
        factor, info = dpotrf(matrix, lower=1, overwrite_a=1)
        if info == 0:
            # A factor that nearly broke down would give an inverse that is mostly rounding.
            pivots = factor.diagonal() ** 2
            if amount or (pivots > 1e-13 * diagonal).all():
                lower, _ = dpotri(factor, lower=1, overwrite_c=1)
                return np.asarray(np.tril(lower) + np.tril(lower, -1).T)
        amount = _JITTER if amount == 0 else 100 * amount
    return np.asarray(np.diag(1.0 / np.maximum(diagonal, 1e-300)))
