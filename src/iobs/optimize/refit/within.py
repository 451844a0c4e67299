"""The minimiser of f on a given support within bounds on its coefficients.

Newton's method on the coordinates that are free to move, projected onto the bounds (Bertsekas 1982). For a quadratic it
ends at the exact minimiser once the coordinates at their bounds no longer change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from iobs.errors import ProblemError
from iobs.optimize.curvature.models import QuadraticObjective
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.design import Array, Indices, VectorLike, as_vector
from iobs.optimize.objectives.gram import GramLeastSquares
from iobs.optimize.refit.newton import Fit, newton_direction

_STEPS = 200
_HALVINGS = 40


@dataclass(frozen=True)
class Bounds:
    """Bounds lower <= theta <= upper; zero is always within them.

    Attributes:
        lower: (d,) at most 0, or -inf.
        upper: (d,) at least 0, or inf.
    """

    lower: Array
    upper: Array

    @classmethod
    def of(cls, lower: float | VectorLike | None, upper: float | VectorLike | None, features: int) -> Bounds | None:
        """The bounds of users: a number, one for each feature (d,), or None for no bound; None without any.

        Raises:
            ProblemError: a bound excludes zero or is NaN, or the length is wrong.
        """
        if lower is None and upper is None:
            return None
        low = _vector(lower, "lower", features, -np.inf)
        high = _vector(upper, "upper", features, np.inf)
        if (low > 0).any() or (high < 0).any():
            wrong = int(np.flatnonzero((low > 0) | (high < 0))[0])
            raise ProblemError(
                f"The bounds of coefficient {wrong} are {low[wrong]} and {high[wrong]}; a coefficient that is not "
                "chosen is 0, so lower must be at most 0 and upper at least 0."
            )
        return cls(low, high)

    def extended(self, dimension: int) -> Bounds:
        """The bounds of all coordinates of an objective; those behind the features, such as an intercept, are free."""
        more = dimension - self.lower.size
        return Bounds(np.append(self.lower, np.full(more, -np.inf)), np.append(self.upper, np.full(more, np.inf)))

    def repeated(self, outputs: int) -> Bounds:
        """The bounds of a table of coefficients: those of a feature for each of its `outputs` coefficients."""
        return Bounds(np.repeat(self.lower, outputs), np.repeat(self.upper, outputs))

    def clip(self, theta: Array, support: Indices) -> Array:
        """Values on a support (k,), moved into their bounds."""
        return np.clip(theta, self.lower[support], self.upper[support])

    def inside(self, fit: Fit) -> Fit:
        """The fit with only those coordinates in its support that are not at a bound: the others are not estimated."""
        theta, bounds = fit.theta[fit.support], self.extended(fit.theta.size)
        free = (theta > bounds.lower[fit.support]) & (theta < bounds.upper[fit.support])
        return replace(fit, support=fit.support[free])


def _vector(values: float | VectorLike | None, name: str, features: int, free: float) -> Array:
    if values is None:
        return np.full(features, free)
    array = np.full(features, values, dtype=np.float64) if np.ndim(values) == 0 else np.asarray(values, np.float64)
    if np.isnan(array).any():
        raise ProblemError(f"{name} holds NaN; use infinity where there is no bound.")
    _ = as_vector(np.where(np.isfinite(array), array, 0.0), name, features)  # the length
    return array


def refit_within(objective: Objective, support: Indices, bounds: Bounds, start: Array | None = None) -> Fit:
    """Minimise f over vectors within the bounds that are zero outside `support`.

    Args:
        objective: f, convex for the result to be the minimiser.
        support: coordinates that may be non-zero (k,).
        bounds: of all coordinates.
        start: first guess (d,); zero if not given.
    """
    theta = np.zeros(objective.dimension)
    if support.size:
        first = bounds.clip(np.zeros(support.size) if start is None else start[support], support)
        theta[support] = _minimise(_restricted(objective, support), first, bounds, support)
    value, gradient = objective.value_and_gradient(theta)
    return Fit(support, theta, value, gradient)


def _restricted(objective: Objective, support: Indices) -> Objective:
    if isinstance(objective, GramLeastSquares):
        block = objective.hessian_block(np.zeros(objective.dimension), support)
        return QuadraticObjective(block, objective.linear[support], constant=objective.constant)
    return objective.restricted(support)


def _minimise(part: Objective, theta: Array, bounds: Bounds, support: Indices) -> Array:
    value, gradient = part.value_and_gradient(theta)
    if not np.isfinite(value):
        theta = bounds.clip(np.zeros_like(theta), support)
        value, gradient = part.value_and_gradient(theta)
    everything = np.arange(theta.size)
    block = part.hessian_block(theta, everything)
    for _ in range(_STEPS):
        low, high = bounds.lower[support], bounds.upper[support]
        free = ~(((theta <= low) & (gradient >= 0)) | ((theta >= high) & (gradient <= 0)))
        if not free.any():
            break
        if not part.quadratic:
            block = part.hessian_block(theta, everything)
        direction = np.zeros_like(theta)
        direction[free] = newton_direction(block[np.ix_(free, free)], gradient[free])
        steepest = np.where(free, -gradient / np.maximum(np.abs(block.diagonal()), 1e-300), 0.0)
        better_step = _step(part, theta, value, gradient, direction, bounds, support)
        if better_step is None or better_step[1] >= value:
            better_step = _step(part, theta, value, gradient, steepest, bounds, support) or better_step
        if better_step is None:
            break
        moved, better, slope = better_step
        change = np.abs(moved - theta).max()
        ended = value - better <= 1e-15 * abs(value) and change <= 1e-12 * np.abs(moved).max(initial=0.0)
        theta, value, gradient = moved, min(value, better), slope
        if ended:
            break
    return theta


def _step(
    part: Objective, theta: Array, value: float, gradient: Array, direction: Array, bounds: Bounds, support: Indices
) -> tuple[Array, float, Array] | None:
    """The first of the projected steps of length 1, 1/2, 1/4, ... that lowers f enough; None if there is none."""
    rounding = 1e-15 * max(abs(value), 1e-300)
    length = 1.0
    for _ in range(_HALVINGS):
        moved = bounds.clip(theta + length * direction, support)
        expected = float(gradient @ (theta - moved))
        trial, slope = part.value_and_gradient(moved)
        if np.isfinite(trial) and expected >= 0 and trial <= value - 1e-4 * expected + rounding:
            return moved, trial, slope
        length *= 0.5
    return None
