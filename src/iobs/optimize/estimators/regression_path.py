"""Paths of least squares and of generalised linear models with a log link, without scikit-learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from iobs.errors import ProblemError
from iobs.optimize.estimators.paths import Observations, PathSearch
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.families import FAMILIES, Family, Logistic
from iobs.optimize.objectives.linear import LeastSquares, LinearModel
from iobs.optimize.refit.newton import Fit

_LARGEST = 700.0  # the largest margin whose exponential is finite


@dataclass(eq=False, repr=False, kw_only=True)
class RegressionPath(PathSearch):
    """A path of fits by `loss`: see `SparseRegressor`."""

    loss: str | Callable[..., Family] = "squared"

    def _family(self) -> Callable[..., LinearModel]:
        if callable(self.loss):
            return self.loss
        if self.loss not in ("squared", *FAMILIES):
            names = ", ".join(f'"{name}"' for name in ("squared", *FAMILIES))
            raise ProblemError(f"loss must be one of {names}, or a family of iobs.objectives, got {self.loss!r}.")
        return FAMILIES.get(self.loss, LeastSquares)

    def _objective(self, data: Observations) -> Objective:
        objective = self._family()(data.X, data.y, intercept=self.fit_intercept, **self._loss_options(data))
        if callable(self.loss) and isinstance(objective, (LeastSquares, Logistic)):  # `predict` takes exp of the margin
            name = type(objective).__name__
            other = 'give loss="squared"' if isinstance(objective, LeastSquares) else "use SparseClassifier"
            raise ProblemError(f"A family given as loss needs a log link, {name} has none; {other}.")
        return objective

    def _held_out(self, data: Observations, fit: Fit, objective: Objective) -> float:
        margin = data.margin(*objective.split(fit.theta))
        if self.loss == "squared":
            return float(data.weights @ (data.y - margin) ** 2)
        margin = np.clip(margin, -_LARGEST, _LARGEST)
        if self.loss == "poisson":
            return float(data.weights @ (np.exp(margin) - data.y * margin))
        held_out = self._family()(np.zeros((margin.size, 1)), data.y)
        return float(data.weights @ held_out.losses(margin))
