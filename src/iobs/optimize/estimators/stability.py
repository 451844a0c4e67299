"""Stability selection: the features that a sparse path chooses on most random halves of the samples.

Meinshausen and Buehlmann (2010), with the complementary pairs of Shah and Samworth (2013). On every half the path of
supports for k = 1 ... q is fitted. A feature is chosen on that half if any support of the path has it. Let m features
be chosen on average out of p, and let t > 1/2 be the threshold on the share of halves. Then the expected number of
falsely chosen features is at most m^2 / ((2 t - 1) p). This holds if the features that have no effect are exchangeable
and the path does better than guessing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from sklearn.base import clone, is_classifier
from sklearn.utils import check_array, check_consistent_length

from iobs.errors import ProblemError
from iobs.optimize.estimators.base import SparseEstimator
from iobs.optimize.estimators.interactions import require_features
from iobs.optimize.objectives.design import Array, Booleans, Indices, MatrixLike, VectorLike, forced_columns
from iobs.optimize.problem import generator_of


@dataclass(frozen=True)
class StabilitySelection:
    """The result of `stability_selection`.

    Attributes:
        support: sorted indices of the features that were chosen on at least a share `threshold` of the halves, the
            forced features included.
        frequencies: share of halves on which each feature was chosen (d,); 1 for forced features.
        path: share of halves on which the support of size k has each feature (q, d), row 0 for k = 1.
        threshold: share of halves that a stable feature needs.
        chosen: mean number m of features, or of groups, that were chosen on a half.
        false_bound: bound on the expected number of falsely chosen features, or groups; infinite at a threshold of 1/2.
        halves: number of halves.
    """

    support: Indices
    frequencies: Array
    path: Array = field(repr=False)
    threshold: float
    chosen: float
    false_bound: float
    halves: int


def stability_selection(
    estimator: SparseEstimator,
    X: MatrixLike,
    y: npt.ArrayLike,
    *,
    max_k: int,
    threshold: float | None = None,
    max_false: float | None = None,
    pairs: int = 50,
    sample_weight: VectorLike | None = None,
    seed: int = 0,
) -> StabilitySelection:
    """Choose the features that are stable over random halves of the samples.

    Args:
        estimator: a `SparseRegressor` or `SparseClassifier`; its k is ignored.
        X: (n, d) features.
        y: (n,) targets; the halves keep the shares of classes.
        max_k: q, the largest support of the path on every half.
        threshold: share of halves that a stable feature needs, above 1/2 and at most 1; 0.75 if not given.
        max_false: in place of `threshold`, bound on the expected number of falsely chosen features; the smallest
            threshold that keeps it is used.
        pairs: number of pairs of halves.
        sample_weight: (n,) non-negative.
        seed: of the random halves.

    Raises:
        ProblemError: a threshold outside (1/2, 1], both limits, no pair, no threshold that keeps `max_false`, or a
            `SparseInteractions`.
    """
    _check(threshold, max_false, pairs, max_k)
    require_features(estimator, "stability_selection")
    X = check_array(X, accept_sparse=["csr", "csc"], dtype=[np.float64, np.float32])
    y = np.asarray(y)
    check_consistent_length(X, y, sample_weight)
    labels, forced = _features(estimator, X.shape[1])
    free = np.setdiff1d(labels, labels[forced]).size
    if max_k > free:
        raise ProblemError(f"max_k must be at most the {free} features or groups that can be chosen, got {max_k}.")
    rng = generator_of(seed)
    path = np.zeros((max_k, X.shape[1]))
    union, chosen = np.zeros(X.shape[1]), 0.0
    for _ in range(pairs):
        for half in _halves(y, rng, is_classifier(estimator)):
            weights = None if sample_weight is None else np.asarray(sample_weight)[half]
            supports = _supports(estimator, max_k, X[half], y[half], weights)
            path += supports
            union += supports.any(axis=0)
            chosen += np.setdiff1d(labels[supports.any(axis=0)], labels[forced]).size
    halves = 2 * pairs
    mean, frequencies = chosen / halves, union / halves
    frequencies[forced] = 1.0
    if max_false is not None:
        threshold = 0.5 * (1 + mean**2 / (max_false * free))
        if threshold > 1:
            raise ProblemError(
                f"No threshold keeps {max_false:g} falsely chosen features: {mean:.1f} of {free} are chosen on a half. "
                f"Lower max_k, or allow at least {mean**2 / free:.2g}."
            )
    threshold = 0.75 if threshold is None else threshold
    bound = mean**2 / ((2 * threshold - 1) * free) if threshold > 0.5 and free else np.inf
    support = np.flatnonzero(frequencies >= threshold - 1e-12).astype(np.int64)
    return StabilitySelection(support, frequencies, path / halves, threshold, mean, float(bound), halves)


def _check(threshold: float | None, max_false: float | None, pairs: int, max_k: int) -> None:
    if threshold is not None and max_false is not None:
        raise ProblemError("Give threshold or max_false, not both: each gives the other.")
    if threshold is not None and not 0.5 < threshold <= 1:
        raise ProblemError(f"The threshold must be above 1/2 and at most 1, got {threshold}.")
    if max_false is not None and not max_false > 0:
        raise ProblemError(f"max_false must be positive, got {max_false}.")
    if pairs < 1 or max_k < 1:
        raise ProblemError(f"pairs and max_k must be at least 1, got {pairs} and {max_k}.")


def _features(estimator: SparseEstimator, count: int) -> tuple[npt.NDArray[np.int64], Indices]:
    """The group number of every feature (d,), and the forced features."""
    forced = forced_columns(estimator.forced, count)
    if estimator.groups is None:
        return np.arange(count), forced
    labels = np.unique(np.asarray(estimator.groups), return_inverse=True)[1]
    return labels, np.flatnonzero(np.isin(labels, labels[forced])).astype(np.int64)


def _halves(y: npt.NDArray[np.generic], rng: np.random.Generator, classes: bool) -> tuple[Indices, Indices]:
    """Two complementary halves of the samples; of classes each holds half of every class."""
    order = rng.permutation(len(y))
    if classes:
        order = order[np.argsort(y[order], kind="stable")]
    return np.sort(order[::2]), np.sort(order[1::2])


def _supports(
    estimator: SparseEstimator, max_k: int, X: MatrixLike, y: npt.NDArray[np.generic], weights: Array | None
) -> Booleans:
    """The supports for k = 1 ... max_k on some samples, (max_k, d)."""
    model = clone(estimator).set_params(k="aic", max_k=max_k, thorough=False)
    model.fit(X, y, weights)
    supports = np.zeros((max_k, model.n_features_in_), dtype=np.bool_)
    for entry in model.path_[1:]:
        supports[entry["k"] - 1, entry["support"]] = True
    return supports
