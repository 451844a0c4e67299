"""Confidence intervals after selection by sample splitting: one part of the samples chooses, the other estimates.

The samples that estimate had no part in the choice, so that classical errors are right for the chosen features (Cox
1975). The price is that each part has fewer samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats
from sklearn.base import clone, is_classifier
from sklearn.model_selection import train_test_split
from sklearn.utils import check_array, check_consistent_length

from iobs.errors import ProblemError
from iobs.optimize.estimators.base import SparseEstimator
from iobs.optimize.estimators.interactions import require_features
from iobs.optimize.estimators.paths import counts_of
from iobs.optimize.estimators.regressor import SparseMultiTaskRegressor
from iobs.optimize.objectives.design import MatrixLike, VectorLike


@dataclass(frozen=True)
class Interval:
    """A coefficient with its confidence interval.

    Attributes:
        feature: index of the feature.
        coefficient: estimated on the samples that did not choose.
        error: its standard error.
        low: lower end of the interval.
        high: upper end.
        p_value: of the hypothesis that the coefficient is zero in the model of the chosen features; two-sided.
    """

    feature: int
    coefficient: float
    error: float
    low: float
    high: float
    p_value: float


def split_inference(
    estimator: SparseEstimator,
    X: MatrixLike,
    y: npt.ArrayLike,
    *,
    level: float = 0.95,
    share: float = 0.5,
    sample_weight: VectorLike | None = None,
    seed: int = 0,
) -> list[Interval]:
    """Choose features on a random part of the samples, and give confidence intervals from the rest.

    The intervals are for the coefficients of the model of the chosen features, whether it is the true one or not. They
    come from Student's t for the squared loss, from the normal distribution otherwise.

    Args:
        estimator: a `SparseRegressor`, a `SparseCox`, or a `SparseClassifier` of two classes, without bounds; a ridge
            would bias the intervals.
        X: (n, d) features.
        y: (n,) targets, or what the estimator takes.
        level: probability that an interval covers its coefficient.
        share: share of the samples that choose.
        sample_weight: (n,) non-negative.
        seed: of the random parts.

    Raises:
        ProblemError: level or share outside (0, 1), an estimator of another kind, more than two classes, or too few
            samples to estimate the noise.
    """
    if not (0 < level < 1 and 0 < share < 1):
        raise ProblemError(f"level and share must lie between 0 and 1, got {level} and {share}.")
    require_features(estimator, "split_inference")
    if isinstance(estimator, SparseMultiTaskRegressor):
        raise ProblemError("split_inference takes one response; give a SparseRegressor and one column of y.")
    if estimator.lower is not None or estimator.upper is not None:
        raise ProblemError("A coefficient at its bound has no interval; leave the bounds out of split_inference.")
    X = check_array(X, accept_sparse=["csr", "csc"], dtype=[np.float64, np.float32])
    y = np.asarray(y)
    check_consistent_length(X, y, sample_weight)
    if is_classifier(estimator) and np.unique(y).size > 2:
        raise ProblemError("split_inference takes at most two classes.")
    weights = np.ones(len(y)) if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)
    classes = y if is_classifier(estimator) else None
    choosing, estimating = train_test_split(np.arange(len(y)), train_size=share, random_state=seed, stratify=classes)
    chosen = clone(estimator).fit(X[choosing], y[choosing], weights[choosing])
    forced = np.asarray(chosen.support_)
    fitted = clone(estimator).set_params(k=0, forced=forced, groups=None)
    fitted.fit(X[estimating], y[estimating], weights[estimating])
    coefficients, errors = np.atleast_2d(fitted.coef_)[0], np.atleast_2d(fitted.standard_errors_)[0]
    if not np.isfinite(errors[forced]).all():
        raise ProblemError(
            f"{estimating.size} samples are too few to estimate {forced.size} coefficients and the noise; lower share."
        )
    squared = getattr(estimator, "loss", None) == "squared"
    freedom = counts_of(weights[estimating]).sum() - forced.size - fitted.fit_intercept if squared else math.inf
    law = stats.t(freedom) if squared else stats.norm
    width = float(law.ppf(0.5 + 0.5 * level))
    return [
        Interval(
            int(j),
            float(coefficients[j]),
            float(errors[j]),
            float(coefficients[j] - width * errors[j]),
            float(coefficients[j] + width * errors[j]),
            float(2 * law.sf(abs(coefficients[j]) / errors[j])),
        )
        for j in forced
    ]
