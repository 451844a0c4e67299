"""scikit-learn estimators with exactly k features: regression (squared or Poisson loss) and classification."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import numpy as np
from scipy.special import expit, logsumexp, softmax
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.model_selection import check_cv
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from iobs.errors import ProblemError
from iobs.optimize.arguments import forced_columns
from iobs.optimize.designs import Array, Indices, variances
from iobs.optimize.grouped import Groups, labels_to_groups
from iobs.optimize.multinomial import Multinomial
from iobs.optimize.objective import Objective
from iobs.optimize.objectives import LeastSquares, Logistic, Poisson
from iobs.optimize.path import Criterion, information, paths
from iobs.optimize.refit import Fit

_CRITERIA = ("aic", "bic", "ebic")


class _SparseEstimator(BaseEstimator, ABC):  # type: ignore[misc]
    """What both estimators share: a path over k, and the choice of one."""

    def __init__(
        self,
        k: int | Literal["cv", "aic", "bic", "ebic"] = "ebic",
        *,
        ridge: float = 0.0,
        fit_intercept: bool = True,
        max_k: int | None = None,
        groups: Any = None,
        forced: Any = None,
        cv: Any = 5,
        thorough: bool = True,
        random_state: int = 0,
    ) -> None:
        self.k = k
        self.ridge = ridge
        self.fit_intercept = fit_intercept
        self.max_k = max_k
        self.groups = groups
        self.forced = forced
        self.cv = cv
        self.thorough = thorough
        self.random_state = random_state

    @abstractmethod
    def _objective(self, X: Any, y: Array, weights: Array) -> Objective:
        """The loss of a training set."""

    @abstractmethod
    def _held_out(self, X: Any, y: Array, weights: Array, fit: Fit, objective: Objective) -> float:
        """The loss of a fit on samples that it has not seen."""

    def _fit_path(self, X: Any, y: Array, weights: Array) -> None:
        """Fits for k_min ... k_max, and the choice among them."""
        if not (np.isfinite(self.ridge) and self.ridge >= 0):
            raise ProblemError(f"ridge must be finite and not negative, got {self.ridge}.")
        weights, features = _counts(weights), X.shape[1]
        samples = float(weights.sum())
        self._forced_features = forced_columns(self.forced, features)
        objective = self._objective(X, y, weights)
        groups = self._groups(objective, features)
        choices = len(groups.members) - len(groups.forced) if groups else features - self._forced_features.size
        sizes = self._sizes(choices, samples)
        # A fixed k takes the best known method at that k; a path is warm started and polished at the end.
        fixed = len(sizes) == 1
        fits = paths(objective, groups, sizes, self.thorough and fixed, self.random_state)
        if self.k == "cv":
            scores = self._cross_validate(X, y, weights, sizes)
        elif fixed:
            scores = [0.0]
        else:
            criterion: Criterion = self.k  # type: ignore[assignment]
            scores = [
                information(objective, fit, criterion, samples, choices, size)
                for size, fit in zip(sizes, fits, strict=True)
            ]
        best = int(np.argmin(scores))
        if self.thorough and not fixed and groups is None:
            fits[best] = min(
                fits[best], *paths(objective, None, [sizes[best]], True, self.random_state), key=lambda fit: fit.value
            )
        self.k_ = sizes[best]
        self.path_ = [
            {"k": size, "loss": fit.value, "score": score, "support": self._support(objective, fit)}
            for size, fit, score in zip(sizes, fits, scores, strict=True)
        ]
        self.support_ = self._support(objective, fits[best])
        self.n_iter_ = len(sizes)
        self._keep(objective, fits[best])

    def _support(self, objective: Objective, fit: Fit) -> Indices:
        return np.flatnonzero(objective.split(fit.theta)[0]).astype(np.int64)

    def _keep(self, objective: Objective, fit: Fit) -> None:
        self.coef_: Array
        self.intercept_: float | Array
        self.coef_, self.intercept_ = objective.split(fit.theta)

    def _groups(self, objective: Objective, features: int) -> Groups | None:
        if self.groups is None:
            return None
        members = labels_to_groups(self.groups, features)
        return Groups(objective, members, self._forced_groups(members))

    def _forced_groups(self, members: list[Indices]) -> frozenset[int]:
        wanted = set(self._forced_features.tolist())
        return frozenset(i for i, member in enumerate(members) if wanted & set(member.tolist()))

    def _penalty(self, X: Any, weights: Array) -> Array:
        """The ridge of every feature: one number for all per standard deviation, so that units do not matter."""
        return self.ridge * variances(X, weights, self.fit_intercept)

    def _sizes(self, choices: int, samples: float) -> list[int]:
        if isinstance(self.k, str):
            if self.k not in (*_CRITERIA, "cv"):
                raise ProblemError(f'k must be an integer, "cv", "aic", "bic" or "ebic", got {self.k!r}.')
            if self.max_k is not None and not (isinstance(self.max_k, (int, np.integer)) and self.max_k >= 0):
                raise ProblemError(f"max_k must be a whole number of at least 0, got {self.max_k!r}.")
            usual = max(1, min(50, int(samples / max(1.0, 2 * np.log(max(samples, 2.0))))))
            return list(range(min(choices, usual if self.max_k is None else self.max_k) + 1))
        if not isinstance(self.k, (int, np.integer)) or not 0 <= self.k <= choices:
            raise ProblemError(
                f"k must lie between 0 and the {choices} that can be chosen "
                f"(n_features = {self.n_features_in_}), got {self.k!r}."
            )
        return [int(self.k)]

    def _cross_validate(self, X: Any, y: Array, weights: Array, sizes: list[int]) -> list[float]:
        """Mean held-out loss of every k over the folds."""
        folds = check_cv(self.cv, y, classifier=isinstance(self, ClassifierMixin))
        totals, mass = np.zeros(len(sizes)), 0.0
        for number, (train, test) in enumerate(folds.split(X, y), 1):
            if not (weights[train].sum() > 0 and weights[test].sum() > 0):
                raise ProblemError(
                    f"All sample weights are zero in fold {number} of the cross-validation or in all others; shuffle "
                    "the rows, or leave those of weight zero out."
                )
            objective = self._objective(X[train], y[train], weights[train])
            groups = self._groups(objective, X.shape[1])
            fits = paths(objective, groups, sizes, False, self.random_state)
            totals += [self._held_out(X[test], y[test], weights[test], fit, objective) for fit in fits]
            mass += float(weights[test].sum())
        return [float(total) / mass for total in totals]

    def _validated(self, X: Any, y: Any, sample_weight: Any, **checks: Any) -> tuple[Any, Any, Array]:
        X, y = validate_data(self, X, y, accept_sparse=["csr", "csc"], dtype=[np.float64, np.float32], **checks)
        weights = np.asarray(_check_sample_weight(sample_weight, X, dtype=np.float64))
        return X, y, weights

    def _margin(self, X: Any) -> Array:
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse=["csr", "csc"], dtype=[np.float64, np.float32], reset=False)
        return np.asarray(X @ np.atleast_2d(self.coef_).T + self.intercept_)

    def __sklearn_tags__(self) -> Any:
        """Sparse matrices are welcome."""
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


def _counts(weights: Array) -> Array:
    """Whole sample weights are how often a row was seen; of others only the ratios count.

    Their sum is then the number of equally weighted samples that say as much, (sum w)^2 / sum w^2 (Kish 1965).
    """
    if (weights == np.round(weights)).all():
        return weights
    return weights * float(weights.sum() / (weights @ weights))


class SparseRegressor(RegressorMixin, _SparseEstimator):  # type: ignore[misc]
    """Linear or Poisson regression on exactly k features.

    Args:
        k: how many features; "aic", "bic" or "ebic" choose by information criterion, "cv" by cross-validation.
        loss: "squared", or "poisson" with a log link.
        ridge: weight of 1/2 norm(coef)^2, coefficients taken per standard deviation of their features.
        fit_intercept: whether to estimate a constant, which is not counted in k.
        max_k: largest k that is tried when k is chosen; n / (2 log n) and at most 50 if not given.
        groups: (d,) labels: features with the same label enter together, and k counts labels.
        forced: features (their groups) that are always in, not counted in k: numbers, or a boolean mask.
        cv: folds, or a splitter of scikit-learn.
        thorough: search harder than a warm start at the k that is used.
        random_state: of everything random.

    Attributes:
        coef_: (d,), zero outside `support_`.
        intercept_: the constant.
        support_: sorted indices of the features used.
        k_: how many were asked for or chosen.
        path_: for every k that was tried its loss, score and support.
    """

    def __init__(
        self,
        k: int | Literal["cv", "aic", "bic", "ebic"] = "ebic",
        *,
        loss: Literal["squared", "poisson"] = "squared",
        ridge: float = 0.0,
        fit_intercept: bool = True,
        max_k: int | None = None,
        groups: Any = None,
        forced: Any = None,
        cv: Any = 5,
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

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> SparseRegressor:
        """Fit to (n, d) features, dense or sparse, and (n,) targets.

        Raises:
            ProblemError: impossible settings; negative targets with loss="poisson".
        """
        X, y, weights = self._validated(X, y, sample_weight, y_numeric=True)
        self._fit_path(X, np.asarray(y, dtype=np.float64), weights)
        return self

    def predict(self, X: Any) -> Array:
        """(n,) predictions."""
        margin = self._margin(X)[:, 0]
        return np.asarray(np.exp(margin)) if self.loss == "poisson" else margin

    def _objective(self, X: Any, y: Array, weights: Array) -> Objective:
        forced = () if self.groups is not None else self._forced_features
        models = {"squared": LeastSquares, "poisson": Poisson}
        if self.loss not in models:
            raise ProblemError(f'loss must be "squared" or "poisson", got {self.loss!r}.')
        model = models[self.loss]
        ridge = self._penalty(X, weights)
        return model(X, y, ridge=ridge, intercept=self.fit_intercept, sample_weight=weights, forced=forced)

    def _held_out(self, X: Any, y: Array, weights: Array, fit: Fit, objective: Objective) -> float:
        coefficients, intercept = objective.split(fit.theta)
        margin = X @ coefficients + intercept
        if self.loss == "poisson":
            return float(weights @ (np.exp(np.minimum(margin, 700.0)) - y * margin))
        return float(weights @ (y - margin) ** 2)


class SparseClassifier(ClassifierMixin, _SparseEstimator):  # type: ignore[misc]
    """Logistic regression on exactly k features; with more than two classes a feature has a coefficient for each.

    Args:
        k: how many features; "aic", "bic" or "ebic" choose by information criterion, "cv" by cross-validation.
        ridge: as `SparseRegressor`; what keeps coefficients finite when the classes can be separated.
        fit_intercept: whether to estimate a constant, which is not counted in k (always, for more than two classes).
        max_k: as `SparseRegressor`.
        groups: as `SparseRegressor`.
        forced: as `SparseRegressor`.
        cv: as `SparseRegressor`, stratified.
        thorough: as `SparseRegressor`.
        random_state: of everything random.

    Attributes:
        classes_: the labels.
        coef_: (1, d) for two classes, (C, d) for more.
        intercept_: (1,) or (C,).
        support_: sorted indices of the features used.
        k_: how many were asked for or chosen.
        path_: for every k that was tried its loss, score and support.
    """

    def __init__(
        self,
        k: int | Literal["cv", "aic", "bic", "ebic"] = "ebic",
        *,
        ridge: float = 1e-3,
        fit_intercept: bool = True,
        max_k: int | None = None,
        groups: Any = None,
        forced: Any = None,
        cv: Any = 5,
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

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> SparseClassifier:
        """Fit to (n, d) features, dense or sparse, and (n,) labels of any kind.

        Raises:
            ProblemError: impossible settings, or labels of a single class.
        """
        X, y, weights = self._validated(X, y, sample_weight)
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if self.classes_.size < 2:
            raise ProblemError(f"A classifier needs at least two classes, got only one class: {self.classes_[0]!r}.")
        self._fit_path(X, numbers.astype(np.float64), weights)
        return self

    def decision_function(self, X: Any) -> Array:
        """(n,) log-odds of the second class, or (n, C) margins."""
        margins = self._margin(X)
        return margins[:, 0] if self.classes_.size == 2 else margins

    def predict_proba(self, X: Any) -> Array:
        """(n, C) probabilities."""
        margins = self.decision_function(X)
        if margins.ndim == 1:
            return np.stack([expit(-margins), expit(margins)], axis=1)
        return np.asarray(softmax(margins, axis=1))

    def predict(self, X: Any) -> Any:
        """(n,) labels."""
        margins = self.decision_function(X)
        return self.classes_[(margins > 0).astype(int) if margins.ndim == 1 else margins.argmax(axis=1)]

    def _objective(self, X: Any, y: Array, weights: Array) -> Objective:
        if self.classes_.size > 2:
            spread = variances(X, weights, True)
            ridge = max(self.ridge, 1e-8) * np.where(spread > 0, spread, 1.0)  # a constant column needs one too
            return Multinomial(X, y, self.classes_.size, ridge=ridge, sample_weight=weights)
        forced = () if self.groups is not None else self._forced_features
        ridge = self._penalty(X, weights)
        return Logistic(X, y, ridge=ridge, intercept=self.fit_intercept, sample_weight=weights, forced=forced)

    def _groups(self, objective: Objective, features: int) -> Groups | None:
        if not isinstance(objective, Multinomial):
            return super()._groups(objective, features)
        labels = np.arange(features) if self.groups is None else self.groups
        rows = objective.groups
        members = labels_to_groups(labels, features)
        coordinates = [np.concatenate([rows[j] for j in member]) for member in members]
        return Groups(objective, coordinates, self._forced_groups(members))

    def _support(self, objective: Objective, fit: Fit) -> Indices:
        if not isinstance(objective, Multinomial):
            return super()._support(objective, fit)
        return np.flatnonzero(objective.table(fit.theta)[0].any(axis=0)).astype(np.int64)

    def _keep(self, objective: Objective, fit: Fit) -> None:
        if not isinstance(objective, Multinomial):
            super()._keep(objective, fit)
            self.coef_, self.intercept_ = self.coef_[None], np.array([float(self.intercept_)])
            return
        self.coef_, self.intercept_ = objective.table(fit.theta)

    def _held_out(self, X: Any, y: Array, weights: Array, fit: Fit, objective: Objective) -> float:
        if isinstance(objective, Multinomial):
            table, constants = objective.table(fit.theta)
            margins = X @ table.T + constants
            return float(weights @ (logsumexp(margins, axis=1) - margins[np.arange(len(y)), y.astype(np.int64)]))
        coefficients, intercept = objective.split(fit.theta)
        margin = X @ coefficients + intercept
        return float(weights @ (np.logaddexp(0.0, margin) - y * margin))
