"""Regression on exactly k terms: features and products of two features, with hierarchy."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted, validate_data

from iobs.errors import ProblemError
from iobs.optimize.estimators.base import SparseEstimator
from iobs.optimize.estimators.paths import Observations
from iobs.optimize.estimators.regressor import SparseRegressor
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.design import Array, Booleans, MatrixLike, VectorLike
from iobs.optimize.search.hierarchy import Hierarchy, Kind, pairs_of


def require_features(estimator: object, function: str) -> None:
    """Refuse an estimator whose coefficients are not those of single features.

    Raises:
        ProblemError: it is a `SparseInteractions`.
    """
    if isinstance(estimator, SparseInteractions):
        raise ProblemError(
            f"{function} takes no SparseInteractions, whose terms are not features; give a SparseRegressor and the "
            "products as columns of X."
        )


def with_products(X: Array) -> Array:
    """[X, products of all pairs of columns] (n, d + d (d - 1) / 2), in the order of `itertools.combinations`."""
    pairs = pairs_of(X.shape[1])
    return np.hstack([X, X[:, pairs[:, 0]] * X[:, pairs[:, 1]]])


@dataclass(eq=False, repr=False, kw_only=True)
class WithProducts(SparseEstimator):
    """Adds the products of all pairs of features to an estimator, under hierarchy; put it before the estimator's class.

    Args:
        hierarchy: "strong": an interaction only with both of its features; "weak": with at least one.
    """

    hierarchy: Kind = "strong"
    groups: None = field(default=None, init=False)
    lower: None = field(default=None, init=False)
    upper: None = field(default=None, init=False)
    certify: Literal[False] = field(default=False, init=False)
    gap: float = field(default=0.0, init=False)

    _terms: ClassVar[str] = "terms"

    def _observe(
        self, X: MatrixLike, y: npt.ArrayLike, sample_weight: VectorLike | None, offset: VectorLike | None
    ) -> Observations:
        if self.hierarchy not in ("strong", "weak"):
            raise ProblemError(f'hierarchy must be "strong" or "weak", got {self.hierarchy!r}.')
        data = super()._observe(X, y, sample_weight, offset)
        if sp.issparse(data.X):
            raise ProblemError("SparseInteractions needs dense features; convert X with X.toarray().")
        self.pairs_ = pairs_of(data.X.shape[1])
        return replace(data, X=with_products(np.asarray(data.X, dtype=np.float64)))

    def get_term_names(self) -> list[str]:
        """The names of all terms, of an interaction "a:b"."""
        check_is_fitted(self)
        return self._names()

    def _names(self) -> list[str]:
        names = super()._names()
        return [*names, *(f"{names[first]}:{names[second]}" for first, second in self.pairs_.tolist())]

    def _groups(self, objective: Objective, features: int) -> Hierarchy:
        return Hierarchy(objective, self.n_features_in_, self.hierarchy, frozenset(self._forced_features.tolist()))

    def _get_support_mask(self) -> Booleans:
        check_is_fitted(self)
        mask = np.zeros(self.n_features_in_, dtype=np.bool_)
        for term in self.support_.tolist():
            mask[[term] if term < self.n_features_in_ else self.pairs_[term - self.n_features_in_]] = True
        return mask

    def _margin(self, X: MatrixLike) -> Array:
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        return np.asarray(with_products(X) @ np.atleast_2d(self.coef_).T + self.intercept_)

    def __sklearn_tags__(self) -> Tags:
        """scikit-learn's tags: no sparse matrices, whose products would be formed densely."""
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = False
        return tags


@dataclass(eq=False, repr=False, kw_only=True)
class SparseInteractions(WithProducts, SparseRegressor):
    """Regression on exactly k terms, which are features and products of two features. `fit` takes dense features.

    Args:
        k: number of terms; chosen as `SparseRegressor` does if not a number.
        hierarchy: "strong": an interaction only with both of its features; "weak": with at least one.
        loss: see `SparseRegressor`.
        ridge: see `SparseRegressor`.
        fit_intercept: whether to estimate a constant, which is not counted in k.
        max_k: see `SparseRegressor`.
        forced: features whose main effects are always used and not counted in k.
        cv: see `SparseRegressor`.
        thorough: start the search from many models, at the k that is used.
        random_state: seed of every random choice.

    Attributes:
        coef_: (d + d (d - 1) / 2,) of the features, then of the pairs of `pairs_`; zero outside `support_`.
        pairs_: (d (d - 1) / 2, 2) the features of every interaction.
        support_: sorted indices of the terms used.
        intercept_: the constant.
        k_: the number of terms, given or chosen.
        path_: a `PathEntry` for every k that was tried.
        standard_errors_: as `coef_`, NaN outside the support; after selection, so too small.
    """
