"""Regression on exactly k features: least squares and generalised linear models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from sklearn.base import RegressorMixin

from iobs.errors import ProblemError
from iobs.optimize.estimators.base import SparseEstimator
from iobs.optimize.estimators.paths import Labels, Observations
from iobs.optimize.estimators.regression_path import RegressionPath
from iobs.optimize.objectives.design import Array, MatrixLike, VectorLike, as_vector
from iobs.optimize.objectives.tabled import MultiResponse, Tabled
from iobs.optimize.refit.newton import Fit


@dataclass(eq=False, repr=False, kw_only=True)
class SparseRegressor(RegressorMixin, RegressionPath, SparseEstimator):  # type: ignore[misc]
    """Regression on exactly k features: least squares, or a generalised linear model with a log link.

    Args:
        k: number of features. "aic", "bic" or "ebic" choose it by information criterion, and "cv" by cross-validation.
            "cv-1se" chooses the smallest k whose held-out loss is within one standard error of the least.
        loss: "squared", "poisson", "gamma", "tweedie" (power 1.5) or "negative_binomial" (alpha 1); or a family with
            its parameter and a log link, such as `functools.partial(iobs.objectives.Tweedie, power=1.7)`.
        ridge: weight of 1/2 norm(coef)^2, with coefficients per standard deviation of their features.
        fit_intercept: whether to estimate a constant, which is not counted in k.
        max_k: largest k that is tried when k is chosen; n / (2 log n), at most 50, if not given.
        groups: (d,) labels; features with the same label enter together, and k counts labels.
        forced: features (with their groups) that are always used and not counted in k; indices or a boolean mask.
        lower: least value of the coefficients, a number or one for each feature (d,); at most 0, which makes them
            non-negative.
        upper: largest value of the coefficients, at least 0. The intercept is free, and coefficients at a bound have no
            standard error.
        cv: number of folds, or a splitter of scikit-learn, such as `RepeatedKFold`.
        thorough: run the best known method, not only a warm start, at the k that is used.
        certify: prove how far the choice of features is from the best one of k features, for at most 60 seconds, or for
            this many. A better choice that the proof finds is used. Not with groups.
        gap: relative gap of the loss at which the proof ends.
        random_state: seed of every random choice.

    Attributes:
        coef_: (d,), zero outside `support_`.
        intercept_: the constant.
        support_: sorted indices of the features used.
        k_: the number of features, given or chosen.
        path_: a `PathEntry` for every k that was tried.
        certificate_: the `Certificate` of the k that is used, if asked for.
        standard_errors_: (d,), NaN outside the support; after selection, so too small.
        noise_: estimated standard deviation of the noise; square root of the dispersion of other families.
    """

    def predict(self, X: MatrixLike, *, offset: VectorLike | None = None) -> Array:
        """Predicted targets (n,), with the offset (n,) of the new samples; zero if not given."""
        margin = self._margin(X)[:, 0]
        if offset is not None:
            margin = margin + as_vector(offset, "offset", margin.size)
        return margin if self.loss == "squared" else np.asarray(np.exp(margin))


class SparseMultiTaskRegressor(RegressorMixin, SparseEstimator):  # type: ignore[misc]
    """Least squares for several responses that share exactly k features.

    The losses of the responses are added as they are: divide each response by its standard deviation if their units
    differ. Arguments are those of `SparseRegressor` without the loss. `fit` takes responses (n, C), or one response
    (n,), and no offset.

    Attributes:
        coef_: (C, d), zero outside `support_`.
        intercept_: (C,).
        support_: sorted indices of the features used.
        k_: the number of features, given or chosen.
        path_: a `PathEntry` for every k that was tried.
        certificate_: the `Certificate` of the k that is used, if asked for.
        standard_errors_: (C, d), NaN outside the support; after selection, so too small.
        noise_: estimated standard deviation of the noise, the same for all responses.
    """

    _outputs: ClassVar[str] = "response"
    _checks: ClassVar[dict[str, bool]] = {"y_numeric": True, "multi_output": True}

    def _observe(
        self, X: MatrixLike, y: npt.ArrayLike, sample_weight: VectorLike | None, offset: VectorLike | None
    ) -> Observations:
        if offset is not None:
            raise ProblemError("SparseMultiTaskRegressor takes no offset; subtract it from the responses.")
        return super()._observe(X, y, sample_weight, None)

    def _encode(self, target: Labels) -> Array:
        return np.asarray(target, dtype=np.float64).reshape(len(target), -1)

    def predict(self, X: MatrixLike) -> Array:
        """Predicted responses (n, C)."""
        return self._margin(X)

    def _objective(self, data: Observations) -> MultiResponse:
        ridge = self._penalty(data.X, data.weights)
        return MultiResponse(data.X, data.y, ridge=ridge, intercept=self.fit_intercept, sample_weight=data.weights)

    def _held_out(self, data: Observations, fit: Fit, objective: Tabled) -> float:  # type: ignore[override]
        table, constants = objective.table(fit.theta)
        return float(data.weights @ ((data.y - data.X @ table.T - constants) ** 2).sum(axis=1))
