"""The chosen columns of a table, as the selectors of scikit-learn give them.

This is its `SelectorMixin`, which cannot be imported without all of its feature selection, metrics and neighbours: a
second for a regression of a small table.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
from sklearn.base import TransformerMixin
from sklearn.utils import check_array
from sklearn.utils._set_output import _get_output_config
from sklearn.utils.validation import _check_feature_names_in, check_is_fitted, validate_data

from iobs.errors import ProblemError
from iobs.optimize.objectives.design import Booleans, Indices


class ColumnSelector(TransformerMixin):  # type: ignore[misc]
    """A transformer that keeps some columns."""

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
