"""The base class of the estimators: a path of fits over k, and the choice of k."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.model_selection import BaseCrossValidator, check_cv
from sklearn.utils import Tags
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from iobs.errors import ProblemError
from iobs.optimize.objectives.arguments import forced_columns
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.centring import variances
from iobs.optimize.objectives.design import Array, Indices, MatrixLike, VectorLike
from iobs.optimize.refit.fit import Fit
from iobs.optimize.search.groups import CoordinateGroups, labels_to_groups
from iobs.optimize.search.path import Criterion, fit_path, information

_CRITERIA = ("aic", "bic", "ebic")
Samples: TypeAlias = Array | sp.csr_array | sp.csc_array  # (n, d), after validation
Labels: TypeAlias = npt.NDArray[np.generic]


class PathEntry(TypedDict):
    """The fit for one k on the path."""

    k: int
    loss: float
    score: float
    support: Indices


class SparseEstimator(BaseEstimator, ABC):  # type: ignore[misc]
    """A path of fits over k, and the choice of k; a subclass gives the loss."""

    def __init__(
        self,
        k: int | Literal["cv", "aic", "bic", "ebic"] = "ebic",
        *,
        ridge: float = 0.0,
        fit_intercept: bool = True,
        max_k: int | None = None,
        groups: npt.ArrayLike | None = None,
        forced: npt.ArrayLike | None = None,
        cv: int | BaseCrossValidator = 5,
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
    def _objective(self, X: Samples, y: Array, weights: Array) -> Objective:
        """The loss on a training set."""

    @abstractmethod
    def _held_out(self, X: Samples, y: Array, weights: Array, fit: Fit, objective: Objective) -> float:
        """The loss of a fit on held-out samples."""

    def _fit_path(self, X: Samples, y: Array, weights: Array) -> None:
        """Fit for every k on the path and choose one."""
        if not (np.isfinite(self.ridge) and self.ridge >= 0):
            raise ProblemError(f"ridge must be finite and not negative, got {self.ridge}.")
        weights, features = _counts(weights), X.shape[1]
        samples = float(weights.sum())
        self._forced_features = forced_columns(self.forced, features)
        objective = self._objective(X, y, weights)
        groups = self._groups(objective, features)
        choices = len(groups.members) - len(groups.forced) if groups else features - self._forced_features.size
        sizes = self._sizes(choices, samples)
        # The best known method runs for a single given k, or at the end for the chosen k; the path is warm started.
        fixed = len(sizes) == 1
        fits = fit_path(objective, groups, sizes, self.thorough and fixed, self.random_state)
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
                fits[best],
                *fit_path(objective, None, [sizes[best]], True, self.random_state),
                key=lambda fit: fit.value,
            )
        self.k_ = sizes[best]
        self.path_: list[PathEntry] = [
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

    def _groups(self, objective: Objective, features: int) -> CoordinateGroups | None:
        if self.groups is None:
            return None
        members = labels_to_groups(self.groups, features)
        return CoordinateGroups(objective, members, self._forced_groups(members))

    def _forced_groups(self, members: list[Indices]) -> frozenset[int]:
        wanted = set(self._forced_features.tolist())
        return frozenset(i for i, member in enumerate(members) if wanted & set(member.tolist()))

    def _penalty(self, X: Samples, weights: Array) -> Array:
        """The ridge of every feature (d,): the same per standard deviation, so that units do not matter."""
        if self.ridge == 0:
            return np.zeros(X.shape[1])
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

    def _cross_validate(self, X: Samples, y: Array, weights: Array, sizes: list[int]) -> list[float]:
        """The mean held-out loss of every k over the folds."""
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
            fits = fit_path(objective, groups, sizes, False, self.random_state, exact=False)
            held_out = X[test], y[test], weights[test]
            totals += [self._held_out(*held_out, fit, objective) for fit in fits]
            mass += float(weights[test].sum())
        return [float(total) / mass for total in totals]

    def _validated(
        self, X: MatrixLike, y: npt.ArrayLike, sample_weight: VectorLike | None, *, y_numeric: bool = False
    ) -> tuple[Samples, Labels, Array]:
        features, target = validate_data(
            self, X, y, accept_sparse=["csr", "csc"], dtype=[np.float64, np.float32], y_numeric=y_numeric
        )
        return features, target, np.asarray(_check_sample_weight(sample_weight, features, dtype=np.float64))

    def _margin(self, X: MatrixLike) -> Array:
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse=["csr", "csc"], dtype=[np.float64, np.float32], reset=False)
        return np.asarray(X @ np.atleast_2d(self.coef_).T + self.intercept_)

    def __sklearn_tags__(self) -> Tags:
        """scikit-learn's tags: sparse matrices are accepted."""
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


def _counts(weights: Array) -> Array:
    """Sample weights as counts (n,).

    Integer weights are counts of repeated rows and stay unchanged. Other weights are scaled so that they sum to the
    number of equally weighted samples that hold as much information, (sum w)^2 / sum w^2 (Kish 1965); only their ratios
    matter.
    """
    if (weights == np.round(weights)).all():
        return weights
    return weights * float(weights.sum() / (weights @ weights))
