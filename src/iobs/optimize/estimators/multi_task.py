"""Linear regression of several responses on the same k features."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from sklearn.base import RegressorMixin
from sklearn.utils import Tags

from iobs.optimize.estimators.base import Observations, SparseEstimator
from iobs.optimize.objectives.design import Array, MatrixLike, VectorLike
from iobs.optimize.objectives.multi_response import MultiResponse
from iobs.optimize.objectives.tabled import Tabled
from iobs.optimize.refit.fit import Fit


class SparseMultiTaskRegressor(RegressorMixin, SparseEstimator):  # type: ignore[misc]
    """Least squares for several responses that share exactly k features.

    The losses of the responses are added as they are: divide each response by its standard deviation if their units
    differ. Arguments are those of `SparseRegressor` without the loss.

    Attributes:
        coef_: (C, d), zero outside `support_`.
        intercept_: (C,).
        support_: sorted indices of the features used.
        k_: the number of features, given or chosen.
        path_: a `PathEntry` for every k that was tried.
        standard_errors_: (C, d), NaN outside the support; after selection, so too small.
        noise_: estimated standard deviation of the noise, the same for all responses.
    """

    _outputs = "response"

    def fit(
        self,
        X: MatrixLike,
        y: npt.ArrayLike,
        sample_weight: VectorLike | None = None,
        *,
        sample_groups: npt.ArrayLike | None = None,
    ) -> SparseMultiTaskRegressor:
        """Fit to (n, d) features, dense or sparse, and (n, C) responses.

        Args:
            X: features.
            y: responses; (n,) is one response.
            sample_weight: (n,) non-negative.
            sample_groups: (n,) labels; cross-validation keeps the samples of one label in one fold.

        Raises:
            ProblemError: invalid settings.
        """
        features, target, weights = self._validated(X, y, sample_weight, y_numeric=True, multi_output=True)
        target = np.asarray(target, dtype=np.float64).reshape(len(weights), -1)
        self._fit_path(Observations(features, target, weights), sample_groups)
        return self

    def predict(self, X: MatrixLike) -> Array:
        """Predicted responses (n, C)."""
        return self._margin(X)

    def _objective(self, data: Observations) -> MultiResponse:
        ridge = self._penalty(data.X, data.weights)
        return MultiResponse(data.X, data.y, ridge=ridge, intercept=self.fit_intercept, sample_weight=data.weights)

    def _held_out(self, data: Observations, fit: Fit, objective: Tabled) -> float:  # type: ignore[override]
        table, constants = objective.table(fit.theta)
        return float(data.weights @ ((data.y - data.X @ table.T - constants) ** 2).sum(axis=1))

    def __sklearn_tags__(self) -> Tags:
        """scikit-learn's tags: several responses."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output, tags.target_tags.single_output = True, False
        return tags
