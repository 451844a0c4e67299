"""Logistic regression on exactly k features, for two or more classes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.special import expit, logsumexp, softmax
from sklearn.base import ClassifierMixin
from sklearn.model_selection import BaseCrossValidator
from sklearn.utils.multiclass import check_classification_targets

from iobs.errors import ProblemError
from iobs.optimize.estimators.base import Choice, Labels, Observations, SparseEstimator
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.centring import variances
from iobs.optimize.objectives.design import Array, MatrixLike, VectorLike, as_vector
from iobs.optimize.objectives.families import Logistic
from iobs.optimize.objectives.multinomial import Multinomial
from iobs.optimize.refit.fit import Fit


class SparseClassifier(ClassifierMixin, SparseEstimator):  # type: ignore[misc]
    """Logistic regression on exactly k features; with more than two classes a feature has one coefficient per class.

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
        random_state: as `SparseRegressor`.

    Attributes:
        classes_: the labels.
        coef_: (1, d) for two classes, (C, d) for more.
        intercept_: (1,) or (C,).
        support_: sorted indices of the features used.
        k_: the number of features, given or chosen.
        path_: a `PathEntry` for every k that was tried.
        standard_errors_: as `coef_`, NaN outside the support; after selection, so too small.
    """

    def __init__(
        self,
        k: int | Choice = "ebic",
        *,
        ridge: float = 1e-3,
        fit_intercept: bool = True,
        max_k: int | None = None,
        groups: npt.ArrayLike | None = None,
        forced: npt.ArrayLike | None = None,
        lower: float | VectorLike | None = None,
        upper: float | VectorLike | None = None,
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
            lower=lower,
            upper=upper,
            cv=cv,
            thorough=thorough,
            random_state=random_state,
        )

    def fit(
        self,
        X: MatrixLike,
        y: npt.ArrayLike,
        sample_weight: VectorLike | None = None,
        *,
        offset: VectorLike | None = None,
        sample_groups: npt.ArrayLike | None = None,
    ) -> SparseClassifier:
        """Fit to (n, d) features, dense or sparse, and (n,) labels of any type.

        Args:
            X: features.
            y: labels.
            sample_weight: (n,) non-negative.
            offset: (n,) known part of the log-odds of the second of two classes.
            sample_groups: (n,) labels; cross-validation keeps the samples of one label in one fold.

        Raises:
            ProblemError: invalid settings, labels of a single class, or an offset with more than two classes.
        """
        features, labels, weights = self._validated(X, y, sample_weight)
        check_classification_targets(labels)
        self.classes_: Labels
        self.classes_, numbers = np.unique(labels, return_inverse=True)
        if self.classes_.size < 2:
            raise ProblemError(f"A classifier needs at least two classes, got only one class: {self.classes_[0]!r}.")
        if self.classes_.size > 2:
            self._refuse_offset(offset)
        known = None if offset is None else as_vector(offset, "offset", features.shape[0])
        self._fit_path(Observations(features, numbers.astype(np.float64), weights, known), sample_groups)
        return self

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
        forced = () if self.groups is not None else self._forced_features
        ridge = self._penalty(X, weights)
        return Logistic(
            X,
            y,
            ridge=ridge,
            intercept=self.fit_intercept,
            sample_weight=weights,
            forced=forced,
            offset=data.offset,
        )

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
