"""Logistic regression on exactly k features, for two or more classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from scipy.special import expit, logsumexp, softmax
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets

from iobs.errors import ProblemError
from iobs.optimize.estimators.base import SparseEstimator
from iobs.optimize.estimators.paths import Labels, Observations
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.centring import variances
from iobs.optimize.objectives.design import Array, MatrixLike, VectorLike, as_vector
from iobs.optimize.objectives.families import Logistic
from iobs.optimize.objectives.tabled import Multinomial
from iobs.optimize.refit.newton import Fit


@dataclass(eq=False, repr=False, kw_only=True)
class SparseClassifier(ClassifierMixin, SparseEstimator):  # type: ignore[misc]
    """Logistic regression on exactly k features; with more than two classes a feature has one coefficient per class.

    `fit` takes labels (n,) of any type. An offset is a known part of the log-odds of the second of two classes.

    Args:
        k: number of features; "aic", "bic" or "ebic" choose it by information criterion, "cv" by cross-validation.
        ridge: as `SparseRegressor`; keeps coefficients finite when the classes can be separated.
        fit_intercept: whether to estimate a constant, not counted in k; with more than two classes there always is one.
        max_k: as `SparseRegressor`.
        groups: as `SparseRegressor`.
        forced: as `SparseRegressor`.
        lower: see `SparseRegressor`; with two classes only.
        upper: see `SparseRegressor`; with two classes only.
        cv: as `SparseRegressor`, stratified.
        thorough: as `SparseRegressor`.
        certify: as `SparseRegressor`.
        gap: as `SparseRegressor`.
        random_state: as `SparseRegressor`.

    Attributes:
        classes_: the labels.
        coef_: (1, d) for two classes, (C, d) for more.
        intercept_: (1,) or (C,).
        support_: sorted indices of the features used.
        k_: the number of features, given or chosen.
        path_: a `PathEntry` for every k that was tried.
        certificate_: the `Certificate` of the k that is used, if asked for.
        standard_errors_: as `coef_`, NaN outside the support; after selection, so too small.
    """

    ridge: float = 1e-3

    _checks: ClassVar[dict[str, bool]] = {}

    def _observe(
        self, X: MatrixLike, y: npt.ArrayLike, sample_weight: VectorLike | None, offset: VectorLike | None
    ) -> Observations:
        data = super()._observe(X, y, sample_weight, offset)
        if self.classes_.size > 2:
            self._refuse_offset(offset)
        return data

    def _strata(self, data: Observations) -> Array:
        return data.y

    def _encode(self, target: Labels) -> Array:
        check_classification_targets(target)
        self.classes_: Labels
        self.classes_, numbers = np.unique(target, return_inverse=True)
        if self.classes_.size < 2:
            (label,) = self.classes_.tolist()
            raise ProblemError(f"A classifier needs at least two classes, got only one class: {label!r}.")
        return np.asarray(numbers, dtype=np.float64)

    def decision_function(self, X: MatrixLike, *, offset: VectorLike | None = None) -> Array:
        """Log-odds of the second class (n,), with the offset (n,) of the new samples; or margins (n, C).

        Raises:
            ProblemError: an offset with more than two classes.
        """
        margins = self._margin(X)
        if self.classes_.size > 2:
            self._refuse_offset(offset)
            return margins
        return margins[:, 0] if offset is None else margins[:, 0] + as_vector(offset, "offset", len(margins))

    def predict_proba(self, X: MatrixLike, *, offset: VectorLike | None = None) -> Array:
        """Class probabilities (n, C)."""
        margins = self.decision_function(X, offset=offset)
        if margins.ndim == 1:
            return np.stack([expit(-margins), expit(margins)], axis=1)
        return np.asarray(softmax(margins, axis=1))

    def predict(self, X: MatrixLike, *, offset: VectorLike | None = None) -> Labels:
        """Predicted labels (n,)."""
        margins = self.decision_function(X, offset=offset)
        numbers = (margins > 0).astype(int) if margins.ndim == 1 else margins.argmax(axis=1)
        labels: Labels = self.classes_[numbers]
        return labels

    def _refuse_offset(self, offset: VectorLike | None) -> None:
        if offset is not None:
            raise ProblemError(f"An offset needs two classes, got {self.classes_.size}; leave it out.")

    def _objective(self, data: Observations) -> Objective:
        X, y, weights = data.X, data.y, data.weights
        if self.classes_.size > 2:
            spread = variances(X, weights, True)
            # A constant column needs a positive ridge too.
            ridge = max(self.ridge, 1e-8) * np.where(spread > 0, spread, 1.0)
            return Multinomial(X, y, self.classes_.size, ridge=ridge, sample_weight=weights)
        return Logistic(X, y, intercept=self.fit_intercept, **self._loss_options(data))

    def _keep(self, objective: Objective, fit: Fit) -> None:
        super()._keep(objective, fit)
        if not isinstance(objective, Multinomial):
            self.coef_, self.intercept_ = self.coef_[None], np.array([float(self.intercept_)])

    def _held_out(self, data: Observations, fit: Fit, objective: Objective) -> float:
        X, y, weights = data.X, data.y, data.weights
        if isinstance(objective, Multinomial):
            table, constants = objective.table(fit.theta)
            margins = X @ table.T + constants
            return float(weights @ (logsumexp(margins, axis=1) - margins[np.arange(len(y)), y.astype(np.int64)]))
        margin = data.margin(*objective.split(fit.theta))
        return float(weights @ (np.logaddexp(0.0, margin) - y * margin))
