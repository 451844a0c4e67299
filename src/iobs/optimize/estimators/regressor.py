"""Linear and Poisson regression on exactly k features."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
from sklearn.base import RegressorMixin
from sklearn.model_selection import BaseCrossValidator

from iobs.errors import ProblemError
from iobs.optimize.estimators.base import Samples, SparseEstimator
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.design import Array, MatrixLike, VectorLike
from iobs.optimize.objectives.families import Poisson
from iobs.optimize.objectives.linear import LeastSquares
from iobs.optimize.refit.fit import Fit


class SparseRegressor(RegressorMixin, SparseEstimator):  # type: ignore[misc]
    """Linear or Poisson regression on exactly k features.

    Args:
        k: number of features; "aic", "bic" or "ebic" choose it by information criterion, "cv" by cross-validation.
        loss: "squared", or "poisson" with a log link.
        ridge: weight of 1/2 norm(coef)^2, with coefficients per standard deviation of their features.
        fit_intercept: whether to estimate a constant, which is not counted in k.
        max_k: largest k that is tried when k is chosen; n / (2 log n), at most 50, if not given.
        groups: (d,) labels; features with the same label enter together, and k counts labels.
        forced: features (with their groups) that are always used and not counted in k; indices or a boolean mask.
        cv: number of folds, or a splitter of scikit-learn.
        thorough: run the best known method, not only a warm start, at the k that is used.
        random_state: seed of every random choice.

    Attributes:
        coef_: (d,), zero outside `support_`.
        intercept_: the constant.
        support_: sorted indices of the features used.
        k_: the number of features, given or chosen.
        path_: a `PathEntry` for every k that was tried.
        standard_errors_: (d,), NaN outside the support; after selection, so too small.
        noise_: estimated standard deviation of the noise; 1 for loss="poisson".
    """

    def __init__(
        self,
        k: int | Literal["cv", "aic", "bic", "ebic"] = "ebic",
        *,
        loss: Literal["squared", "poisson"] = "squared",
        ridge: float = 0.0,
        fit_intercept: bool = True,
        max_k: int | None = None,
        groups: npt.ArrayLike | None = None,
        forced: npt.ArrayLike | None = None,
        cv: int | BaseCrossValidator = 5,
        thorough: bool = True,
        random_state: int = 0,
    ) -> None:
        super().__init__(
            k,
            ridge=ridge,
            fit_intercept=fit_intercept,
            max_k=max_k,
            groups=groups,
            forced=forced,
            cv=cv,
            thorough=thorough,
            random_state=random_state,
        )
        self.loss = loss

    def fit(self, X: MatrixLike, y: npt.ArrayLike, sample_weight: VectorLike | None = None) -> SparseRegressor:
        """Fit to (n, d) features, dense or sparse, and (n,) targets.

        Raises:
            ProblemError: invalid settings; negative targets with loss="poisson".
        """
        features, target, weights = self._validated(X, y, sample_weight, y_numeric=True)
        self._fit_path(features, np.asarray(target, dtype=np.float64), weights)
        return self

    def predict(self, X: MatrixLike) -> Array:
        """Predicted targets (n,)."""
        margin = self._margin(X)[:, 0]
        return np.asarray(np.exp(margin)) if self.loss == "poisson" else margin

    def _objective(self, X: Samples, y: Array, weights: Array) -> Objective:
        forced = () if self.groups is not None else self._forced_features
        models = {"squared": LeastSquares, "poisson": Poisson}
        if self.loss not in models:
            raise ProblemError(f'loss must be "squared" or "poisson", got {self.loss!r}.')
        model = models[self.loss]
        ridge = self._penalty(X, weights)
        return model(X, y, ridge=ridge, intercept=self.fit_intercept, sample_weight=weights, forced=forced)

    def _held_out(self, X: Samples, y: Array, weights: Array, fit: Fit, objective: Objective) -> float:
        coefficients, intercept = objective.split(fit.theta)
        margin = X @ coefficients + intercept
        if self.loss == "poisson":
            return float(weights @ (np.exp(np.minimum(margin, 700.0)) - y * margin))
        return float(weights @ (y - margin) ** 2)
