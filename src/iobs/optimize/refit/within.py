"""Bounds on the coefficients; `newton.refit` minimises f within them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from iobs.errors import ProblemError, shown
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.design import Array, Indices, VectorLike, as_vector


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
        low = _vector(lower, "lower bounds", features, -np.inf)
        high = _vector(upper, "upper bounds", features, np.inf)
        if (low > 0).any() or (high < 0).any():
            wrong = int(np.flatnonzero((low > 0) | (high < 0))[0])
            raise ProblemError(
                f"The bounds of coefficient {wrong} are {low[wrong]} and {high[wrong]}; a coefficient that is not "
                "chosen is 0, so lower must be at most 0 and upper at least 0."
            )
        return cls(low, high)

    @classmethod
    def on_objective(
        cls, lower: float | VectorLike | None, upper: float | VectorLike | None, objective: Objective
    ) -> Bounds | None:
        """The bounds of users as those of all coordinates of an objective; arguments and errors as `of`."""
        bounds = cls.of(lower, upper, objective.coefficient_count)
        return None if bounds is None else bounds.extended(objective.dimension)

    def extended(self, dimension: int) -> Bounds:
        """The bounds of all coordinates of an objective; those behind the features, such as an intercept, are free."""
        more = dimension - self.lower.size
        return Bounds(np.append(self.lower, np.full(more, -np.inf)), np.append(self.upper, np.full(more, np.inf)))

    def repeated(self, outputs: int) -> Bounds:
        """The bounds of a table of coefficients: those of a feature for each of its `outputs` coefficients."""
        return Bounds(np.repeat(self.lower, outputs), np.repeat(self.upper, outputs))

    def on(self, support: Indices) -> Bounds:
        """The bounds of the coordinates in a support."""
        return Bounds(self.lower[support], self.upper[support])

    def promised(self, theta: Array, gradient: Array, curvature: Array) -> Array:
        """The decrease that a step of each coordinate alone promises within its bounds, by slope and curvature (d,)."""
        curvature = np.maximum(curvature, 1e-300)
        step = self.clip(theta - gradient / curvature) - theta
        return np.asarray(np.maximum(-(gradient + 0.5 * curvature * step) * step, 0.0))

    def clip(self, theta: Array) -> Array:
        """Values, moved into their bounds."""
        return np.clip(theta, self.lower, self.upper)


def _vector(values: float | VectorLike | None, name: str, features: int, free: float) -> Array:
    if values is None:
        return np.full(features, free)
    try:
        array = np.full(features, values, dtype=np.float64) if np.ndim(values) == 0 else np.asarray(values, np.float64)
    except (TypeError, ValueError):
        raise ProblemError(f"The {name} must be numbers, got {shown(values)}.") from None
    if np.isnan(array).any():
        raise ProblemError(f"The {name} hold NaN; use infinity where there is no bound.")
    _ = as_vector(np.where(np.isfinite(array), array, 0.0), name, features)  # the length
    return array
