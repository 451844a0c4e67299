"""The base class of the estimators: a search along a path as scikit-learn knows it."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils import Tags, check_array
from sklearn.utils._set_output import _get_output_config
from sklearn.utils.validation import _check_feature_names_in, _check_sample_weight, check_is_fitted, validate_data

from iobs.errors import ProblemError
from iobs.optimize.estimators.paths import _BY_FOLDS, Labels, PathSearch, Samples, is_clean
from iobs.optimize.estimators.plots import path_figure
from iobs.optimize.estimators.summary import Row, Summary
from iobs.optimize.objectives.design import (
    Array,
    Booleans,
    Indices,
    MatrixLike,
    VectorLike,
    few_threads,
)
from iobs.optimize.refit.separation import warn_of_separation

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ColumnSelector(TransformerMixin):  # type: ignore[misc]
    """A transformer that keeps some columns.

    It is scikit-learn's `SelectorMixin`, which cannot be imported without all of its feature selection, metrics and
    neighbours: a second for a regression of a small table.
    """

    @abstractmethod
    def _get_support_mask(self) -> Booleans:
        """True for the columns that are kept, (n_features_in_,)."""

    def get_support(self, indices: bool = False) -> Booleans | Indices:
        """A mask of the chosen columns (d,), or their indices."""
        mask = self._get_support_mask()
        return np.flatnonzero(mask) if indices else mask

    def transform(self, X: Any) -> Any:
        """The chosen columns of X (n, d): as an array, as a sparse matrix, or as `set_output` asks for."""
        mask = self._get_support_mask()
        framed = hasattr(X, "iloc") and _get_output_config("transform", estimator=self)["dense"] != "default"
        X = validate_data(self, X, dtype=None, accept_sparse="csr", skip_check_array=framed, reset=False)
        return X.loc[:, mask] if framed else X[:, mask]

    def inverse_transform(self, X: Any) -> Any:
        """A matrix (n, d) with the columns of X (n, chosen) in their places and zeros elsewhere.

        Raises:
            ProblemError: X has another number of columns.
        """
        kept = self.get_support(indices=True)
        X = check_array(X, dtype=None, accept_sparse=True)
        if X.shape[1] != kept.size:
            raise ProblemError(f"X has {X.shape[1]} columns, and {kept.size} were chosen.")
        count = self._get_support_mask().size
        if sp.issparse(X):
            return X @ sp.csr_array((np.ones(kept.size), (np.arange(kept.size), kept)), shape=(kept.size, count))
        whole = np.zeros((X.shape[0], count), dtype=X.dtype)
        whole[:, kept] = X
        return whole

    def get_feature_names_out(self, input_features: npt.ArrayLike | None = None) -> npt.NDArray[np.object_]:
        """Names of the chosen columns."""
        check_is_fitted(self)
        return np.asarray(_check_feature_names_in(self, input_features))[self._get_support_mask()]


_STORAGE: dict[str, Any] = {"accept_sparse": ["csr", "csc"], "dtype": [np.float64, np.float32]}


@dataclass(eq=False, repr=False, kw_only=True)
class SparseEstimator(ColumnSelector, PathSearch, BaseEstimator):  # type: ignore[misc]
    """A path of fits over k, and the choice of k; a subclass gives the loss.

    As a selector of scikit-learn it also has `get_support`, `transform` (the chosen columns) and
    `get_feature_names_out`. The settings are fields, from which the constructor is made.
    """

    _outputs: ClassVar[str] = "class"  # name of what a feature has several coefficients for
    _terms: ClassVar[str] = "features"  # name of what k counts
    _checks: ClassVar[dict[str, bool]] = {"y_numeric": True}  # arguments of scikit-learn's `validate_data`

    def fit(
        self,
        X: MatrixLike,
        y: npt.ArrayLike,
        sample_weight: VectorLike | None = None,
        *,
        offset: VectorLike | None = None,
        sample_groups: npt.ArrayLike | None = None,
    ) -> Self:
        """Fit for every k on the path and choose one.

        Args:
            X: features (n, d), dense or sparse.
            y: targets (n,); see the class for other forms.
            sample_weight: (n,) non-negative; whole numbers count rows.
            offset: (n,) known part of the linear predictor, such as the log of the exposure.
            sample_groups: (n,) labels; cross-validation keeps the samples of one label in one fold, and gives the folds
                about equal shares of classes or events.

        Raises:
            ProblemError: invalid settings; targets or an offset that the loss does not take.
        """
        data = self._observe(X, y, sample_weight, offset)
        with few_threads(data.X.shape[0] * data.X.shape[1]):
            path = self._proved(self._search(data, sample_groups))
            self._store(data, path)
        warn_of_separation(path.objective, path.free_fit, self._names())
        return self

    def _validated(
        self, X: MatrixLike, y: npt.ArrayLike, sample_weight: VectorLike | None
    ) -> tuple[Samples, Labels, Array]:
        if sample_weight is None and self._checks == {"y_numeric": True} and is_clean(X, y):
            # What scikit-learn would do takes longer than a small fit.
            if hasattr(self, "feature_names_in_"):
                del self.feature_names_in_
            return super()._validated(X, y, None)
        features, target = validate_data(self, X, y, **_STORAGE, **self._checks)
        return features, target, np.asarray(_check_sample_weight(sample_weight, features, dtype=np.float64))

    def _get_support_mask(self) -> Booleans:
        check_is_fitted(self)
        mask = np.zeros(self.n_features_in_, dtype=np.bool_)
        mask[self.support_] = True
        return mask

    def summary(self) -> Summary:
        """The table of coefficients of the chosen features; prints as text, and as HTML in notebooks."""
        check_is_fitted(self)
        names = self._names()
        coef, errors = np.atleast_2d(self.coef_), np.atleast_2d(self.standard_errors_)
        constants = np.atleast_1d(self.intercept_)
        outputs = getattr(self, "classes_", range(len(coef)))
        labels = [str(label) for label in outputs] if len(coef) > 1 else [""]
        rows: list[Row] = []
        for number, label in enumerate(labels):
            rows += [
                Row(names[j], float(coef[number, j]), float(errors[number, j]), label) for j in self.support_.tolist()
            ]
            rows.append(Row("(intercept)", float(constants[number]), float("nan"), label))
        how = f"chosen by {self.k}" if isinstance(self.k, str) else "given"
        title = f"{type(self).__name__}: {self.support_.size} of {len(names)} {self._terms} (k = {self.k_}, {how})"
        return Summary(title, tuple(rows), outputs=self._outputs)

    def plot_path(self) -> Figure:
        """A figure of the score and the coefficients for every k, the chosen k marked.

        With several classes or responses the coefficient drawn is the largest of them in absolute value.

        Raises:
            ProblemError: k was given, so there is no path.
        """
        check_is_fitted(self)
        if len(self.path_) < 2:
            raise ProblemError(
                'There is no path for a given k; fit with k="cv", "cv-1se", "aic", "bic" or "ebic" to draw one.'
            )
        score = "held-out loss per sample" if self.k in _BY_FOLDS else f"{str(self.k).upper()} (lower is better)"
        names = self._names()
        return path_figure(
            self.path_,
            [entry["score"] for entry in self.path_],
            score,
            chosen=self.k_,
            columns=self._path_features,
            spread=self._path_spread,
            names=[names[j] for j in self._path_features],
            outputs=self._outputs,
        )

    def _margin(self, X: MatrixLike) -> Array:
        check_is_fitted(self)
        X = validate_data(self, X, **_STORAGE, reset=False)
        return np.asarray(X @ np.atleast_2d(self.coef_).T + self.intercept_)

    def __sklearn_tags__(self) -> Tags:
        """scikit-learn's tags: sparse matrices are accepted, and y has several columns where a class takes them."""
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        if self._checks.get("multi_output"):
            tags.target_tags.multi_output, tags.target_tags.single_output = True, False
        return tags
