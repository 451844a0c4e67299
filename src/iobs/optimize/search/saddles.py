"""Stationary points that are no minima: f falls along a direction without curvature upwards, of at most k non-zeros.

Every search moves along gradients. At a saddle or a maximum, such as zero often is, they vanish and it would stay.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

from iobs.optimize.objectives.design import Array, Indices
from iobs.optimize.problem import Problem
from iobs.optimize.refit.newton import Fit, refit

_DENSE = 256  # most coordinates for which the Hessian is formed
_TRIES = 16  # directions without curvature upwards: up to half of them eigenvectors, the others random
_FLAT = 1e-7  # curvature relative to the largest one that counts as zero
_STATIONARY = 1e-9  # gradient relative to the largest curvature that counts as zero
_ROUNDING = 1e-15  # of a value, relative, that counts as no change
_DOUBLINGS = 60  # most doublings of a step

NO_MINIMUM = "stationary, not a minimum: f falls along a direction of negative curvature; give another start theta0"


def is_convex(problem: Problem) -> bool:
    """True if f is known to be convex; classes of other authors may not say so."""
    return bool(getattr(problem.objective, "convex", False))


def lower_point(problem: Problem, theta: Array) -> Array | None:
    """The best feasible point found below a stationary point by directions of negative or no curvature.

    Args:
        problem: f and k.
        theta: a feasible point (d,).

    Returns:
        The point (d,); None if f is convex, theta is not stationary, or no direction of at most k non-zeros falls.
    """
    objective = problem.objective
    if is_convex(problem) or problem.size == 0:
        return None
    value, gradient = objective.value_and_gradient(theta)
    fixed = np.union1d(np.flatnonzero(theta), problem.forced).astype(np.int64)  # the support that stays
    room = problem.size - np.setdiff1d(fixed, problem.forced).size
    usable = np.union1d(fixed, np.flatnonzero(problem.candidates)).astype(np.int64) if room > 0 else fixed
    slope = np.zeros(problem.dimension)
    slope[usable] = gradient[usable]
    size = float(np.linalg.norm(slope))
    if size > 0 and size**2 > _STATIONARY * float(np.linalg.norm(objective.hessian_product(theta, slope))):
        return None
    values, vectors = _falling(problem, theta, usable)
    best: Fit | None = None
    for number in range(_TRIES if values.size else 0):
        mix = (
            np.eye(values.size)[number]
            if number < min(values.size, _TRIES // 2)
            else problem.rng.standard_normal(values.size)
        )
        direction = np.zeros(problem.dimension)
        direction[usable] = vectors @ mix
        entering = np.setdiff1d(usable, fixed)
        entering = entering[np.argsort(-np.abs(direction[entering]), kind="stable")]
        direction[entering[room:]] = 0.0
        point = _along(problem, theta, value, direction)
        if point is None:
            continue
        fit = refit(objective, np.union1d(np.flatnonzero(point), problem.forced).astype(np.int64), point)
        if fit.value < value and (best is None or fit.value < best.value):
            best = fit
    return None if best is None else best.theta


def _falling(problem: Problem, theta: Array, usable: Indices) -> tuple[Array, Array]:
    """Curvatures that are negative or zero on some coordinates, and their directions (m, count), the least first.

    Zero counts too: of v^3 or v1 v2 v3 the Hessian vanishes at zero, which is no minimum.
    """
    objective = problem.objective
    if usable.size <= _DENSE:
        values, vectors = np.linalg.eigh(objective.hessian_block(theta, usable))
    else:

        def product(vector: Array) -> Array:
            full = np.zeros(problem.dimension)
            full[usable] = vector.ravel()
            return objective.hessian_product(theta, full)[usable]

        operator = LinearOperator((usable.size, usable.size), matvec=product, dtype=np.float64)
        start = np.random.default_rng(0).standard_normal(usable.size)
        try:
            values, vectors = eigsh(operator, k=_TRIES // 2, which="SA", tol=1e-3, maxiter=20, v0=start)
        except ArpackNoConvergence as error:
            values, vectors = error.eigenvalues, error.eigenvectors
    falling = values <= _FLAT * np.abs(values).max(initial=0.0)
    return values[falling], vectors[:, falling]


def _along(problem: Problem, theta: Array, value: float, direction: Array) -> Array | None:
    """The lowest of the points at doubled steps along a direction, or against it; None if f does not fall."""
    best, least = None, value
    for sign in (1.0, -1.0):
        length, last = 1e-3, value
        for _ in range(_DOUBLINGS):
            trial = theta + sign * length * direction
            new = problem.objective.value(trial)
            if not new < last - _ROUNDING * abs(last):
                break
            best, least, last = (trial, new, new) if new < least else (best, least, new)
            length *= 2
    return best
