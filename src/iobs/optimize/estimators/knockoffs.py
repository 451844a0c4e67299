"""The knockoff filter: a choice of features whose expected share of false ones is limited.

A knockoff of a feature has the same correlations with all other features as the feature itself. It is made without the
targets (Barber and Candes 2015; Candes, Fan, Janson and Lv 2018). A sparse path over features and knockoffs together
cannot tell a feature without effect from its knockoff. So the number of knockoffs that look better than their feature
estimates how many of the chosen features are false.

Statistic: W_j, the mean over the path of the absolute coefficient of feature j less that of its knockoff. A fair coin
decides which of the two comes first, so that no rule for ties prefers the feature.

Correlation: a feature and its knockoff have the covariance Sigma_jj - s_j, 0 <= diag(s) <= 2 Sigma. The s here makes a
feature as hard as possible to predict from all others (minimum variance-based reconstructability, Spector and Janson
2022). It is found by coordinate descent in closed form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from sklearn.base import clone, is_classifier
from sklearn.covariance import ledoit_wolf
from sklearn.utils import check_array

from iobs.errors import ProblemError
from iobs.optimize.estimators.base import SparseEstimator
from iobs.optimize.estimators.interactions import require_features
from iobs.optimize.objectives.design import Array, Booleans, Indices, MatrixLike, add_to_diagonal, forced_columns
from iobs.optimize.problem import generator_of

Kind: TypeAlias = Literal["fixed", "gaussian"]
_SWEEPS = 20  # most rounds of coordinate descent on s
_SETTLED = 1e-3  # relative change of s in a round after which it ends
_STREAM = 2015  # makes the noise of the knockoffs independent of data that were drawn with the same seed
_DEFINITE = 1e-8  # least eigenvalue of a correlation matrix that counts as positive


@dataclass(frozen=True)
class KnockoffFilter:
    """The result of `knockoff_filter`.

    Attributes:
        support: sorted indices of the chosen features.
        statistics: W (d,); large where a feature explains more than its knockoff.
        threshold: least W of the chosen features; infinite if none is chosen.
        fdr: the limit on the expected share of false features among the chosen ones.
        false_share: the estimate of that share at the threshold; NaN if none is chosen.
        kind: "fixed" or "gaussian", the kind of knockoffs.
    """

    support: Indices
    statistics: Array
    threshold: float
    fdr: float
    false_share: float
    kind: Kind


def knockoff_filter(
    estimator: SparseEstimator,
    X: MatrixLike,
    y: npt.ArrayLike,
    *,
    fdr: float = 0.1,
    kind: Literal["auto", "fixed", "gaussian"] = "auto",
    covariance: npt.ArrayLike | None = None,
    seed: int = 0,
) -> KnockoffFilter:
    """Choose features so that the expected share of false ones among them is at most `fdr`.

    At least 1 / `fdr` features must stand out, or none is chosen: with 0.1 that is 10.

    Args:
        estimator: a `SparseRegressor`, `SparseClassifier` or `SparseCox`; its k is ignored, its `max_k` ends the path.
        X: (n, d) features, dense.
        y: (n,) targets, or what the estimator takes.
        fdr: limit on the false discovery rate, between 0 and 1.
        kind: "fixed" knockoffs need at least 2 d + 1 samples and a linear model with normal noise of one variance.
            Nothing is assumed about X. "gaussian" knockoffs serve every loss and any n, and need rows of X that are
            normal with the given covariance. An estimated covariance, or another law, makes the limit approximate.
            "auto" takes "fixed" where it can.
        covariance: (d, d) of the rows of X, for "gaussian"; the Ledoit-Wolf estimate if not given.
        seed: of the knockoffs and of the coins.

    Raises:
        ProblemError: fdr outside (0, 1), an unknown kind, settings of the estimator that do not go with knockoffs, too
            few samples or a wrong loss for "fixed", dependent or constant features, or a covariance that is not
            definite.
    """
    X = check_array(X, dtype=np.float64)
    chosen = _checked(estimator, X, fdr, kind, covariance)
    rng = generator_of(seed, _STREAM)
    centred = X - X.mean(axis=0)
    spread = np.sqrt((centred**2).mean(axis=0))
    constant = np.flatnonzero(~(spread > 1e-12 * np.abs(X).max(axis=0)))
    if constant.size:
        raise ProblemError(f"Feature {constant[0]} is constant and has no knockoff; leave it out.")
    features = centred / spread
    if chosen == "fixed":
        knockoffs = fixed_knockoffs(features, rng)
    else:
        law = ledoit_wolf(centred)[0] if covariance is None else np.asarray(covariance, dtype=np.float64)
        knockoffs = gaussian_knockoffs(features, law / np.outer(spread, spread), rng)
    first = rng.random(X.shape[1]) < 0.5
    statistics = difference(estimator, features, knockoffs, np.asarray(y), first)
    threshold, share = cut(statistics, fdr)
    support = np.flatnonzero(statistics >= threshold).astype(np.int64)
    return KnockoffFilter(support, statistics, threshold, fdr, share, chosen)


def fixed_knockoffs(features: Array, rng: np.random.Generator) -> Array:
    """Knockoffs (n, d) of centred features of equal norms (n, d), n >= 2 d + 1, with the exact inner products.

    Raises:
        ProblemError: the features are linearly dependent.
    """
    n, d = features.shape
    correlation = features.T @ features / n
    s, inverse = reconstructability(correlation)
    basis = np.linalg.qr(np.column_stack([features, np.ones(n), rng.standard_normal((n, d))]))[0][:, d + 1 :]
    spare = _root(2 * np.diag(s) - s[:, None] * inverse * s)
    return np.asarray(features - features @ (inverse * s) + np.sqrt(n) * basis @ spare)


def gaussian_knockoffs(features: Array, covariance: Array, rng: np.random.Generator) -> Array:
    """Knockoffs (n, d) of rows that are normal with mean 0 and this covariance (d, d), drawn from their law given X.

    Raises:
        ProblemError: the covariance is not positive definite.
    """
    scale = np.sqrt(covariance.diagonal())
    s, inverse = reconstructability(covariance / np.outer(scale, scale))
    s, inverse = s * scale**2, inverse / np.outer(scale, scale)
    spare = _root(2 * np.diag(s) - s[:, None] * inverse * s)
    return np.asarray(features - features @ (inverse * s) + rng.standard_normal(features.shape) @ spare)


def reconstructability(correlation: Array) -> tuple[Array, Array]:
    """The s (d,) of least trace(diag(s)^-1) + trace((2 Sigma - diag(s))^-1), and Sigma^-1 (d, d).

    Raises:
        ProblemError: the correlation matrix is not positive definite.
    """
    least = float(np.linalg.eigvalsh(correlation)[0])
    if not least > _DEFINITE:
        raise ProblemError(
            "The features are linearly dependent and have no knockoffs; leave out duplicates, or give the covariance."
        )
    s: Array = np.full(len(correlation), min(1.0, least))
    rest = 2 * correlation
    add_to_diagonal(rest, -s)
    inverse = np.linalg.inv(rest)
    for _ in range(_SWEEPS):
        before = s.copy()
        for j in range(s.size):
            column = inverse[:, j].copy()
            root = float(np.sqrt(column @ column))
            change = (1 - root * s[j]) / (column[j] + root)  # the minimiser over s_j alone
            inverse += np.outer(column, column) * (change / (1 - change * column[j]))
            s[j] += change
        if np.abs(s - before).max() <= _SETTLED * s.max():
            break
    return s, np.asarray(np.linalg.inv(correlation), dtype=np.float64)


def difference(estimator: SparseEstimator, features: Array, knockoffs: Array, y: Array, first: Booleans) -> Array:
    """W (d,) of a path over features and knockoffs; `first` (d,) is true where the feature comes first of the two."""
    columns = np.hstack([np.where(first, features, knockoffs), np.where(first, knockoffs, features)])
    model = clone(estimator).set_params(k="aic", thorough=False)
    model.fit(columns, y)
    size = np.zeros(2 * first.size)
    for entry in model.path_:
        size[entry["support"]] += np.abs(np.atleast_2d(entry["coef"])).max(axis=0)
    size /= len(model.path_)
    gain = size[: first.size] - size[first.size :]
    return np.where(first, gain, -gain)


def cut(statistics: Array, fdr: float) -> tuple[float, float]:
    """The least threshold t at which (1 + number of W <= -t) / (number of W >= t) is at most `fdr`, and this ratio."""
    for threshold in np.unique(np.abs(statistics[statistics != 0])):
        negative, positive = int((statistics <= -threshold).sum()), int((statistics >= threshold).sum())
        share = (1 + negative) / max(1, positive)
        if share <= fdr:
            return float(threshold), share
    return np.inf, np.nan


def _root(matrix: Array) -> Array:
    """The symmetric square root of a matrix (d, d) that is semi-definite up to rounding."""
    values, vectors = np.linalg.eigh(matrix)
    return np.asarray((vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T)


def _checked(estimator: SparseEstimator, X: Array, fdr: float, kind: str, covariance: npt.ArrayLike | None) -> Kind:
    """The kind of knockoffs, once all arguments are known to fit."""
    n, d = X.shape
    require_features(estimator, "knockoff_filter")
    if not 0 < fdr < 1:
        raise ProblemError(f"fdr must lie between 0 and 1, got {fdr}.")
    if kind not in ("auto", "fixed", "gaussian"):
        raise ProblemError(f'kind must be "auto", "fixed" or "gaussian", got {kind!r}.')
    if estimator.groups is not None or forced_columns(estimator.forced, d).size:
        raise ProblemError("The knockoff filter takes no groups and no forced features; leave them out.")
    if estimator.lower is not None or estimator.upper is not None:
        raise ProblemError("The knockoff filter takes no bounds on the coefficients; leave them out.")
    if covariance is not None and np.shape(covariance) != (d, d):
        raise ProblemError(f"The covariance must have shape ({d}, {d}), got {np.shape(covariance)}.")
    linear = not is_classifier(estimator) and getattr(estimator, "loss", None) == "squared"
    enough = n >= 2 * d + 1
    if kind == "fixed" and not (linear and enough):
        raise ProblemError(
            f"Fixed knockoffs of {d} features need the squared loss and at least {2 * d + 1} samples, got {n} samples; "
            'use kind="gaussian".'
        )
    if kind == "fixed" and covariance is not None:
        raise ProblemError('A covariance is for kind="gaussian"; fixed knockoffs need none.')
    fixed = kind == "fixed" or (kind == "auto" and linear and enough and covariance is None)
    return "fixed" if fixed else "gaussian"
