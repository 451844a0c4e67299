"""A path of fits over k, and the choice of k, without scikit-learn."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from iobs.errors import ProblemError, first_line, is_a, shown
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.centring import variances
from iobs.optimize.objectives.design import (
    Array,
    Indices,
    MatrixLike,
    VectorLike,
    as_vector,
    few_threads,
    forced_columns,
)
from iobs.optimize.objectives.linear import LeastSquares
from iobs.optimize.objectives.tabled import Tabled
from iobs.optimize.refit.newton import Fit, refit
from iobs.optimize.refit.within import Bounds
from iobs.optimize.search.groups import CoordinateGroups, labels_to_groups
from iobs.optimize.search.hierarchy import Hierarchy
from iobs.optimize.search.path import fit_path, information, standard_errors, without_dependent

if TYPE_CHECKING:
    from sklearn.model_selection import BaseCrossValidator

    from iobs.optimize.bounds.certificate import Certificate

_PROOF_SECONDS = 60.0  # time limit of a proof for which none is given
_CRITERIA = ("aic", "bic", "ebic")
_BY_FOLDS = ("cv", "cv-1se")
Choice: TypeAlias = Literal["cv", "cv-1se", "aic", "bic", "ebic"]
Samples: TypeAlias = Array | sp.csr_array | sp.csc_array  # (n, d), after validation
Labels: TypeAlias = npt.NDArray[np.generic]


class PathEntry(TypedDict):
    """The fit for one k on the path.

    `score` is what chose k, lower is better: a criterion, or the mean held-out loss with its standard error over folds
    in `score_error` (NaN otherwise). `coef` has the coefficients of `support`, (k,) or (classes, k).
    """

    k: int
    loss: float
    score: float
    score_error: float
    support: Indices
    coef: Array


@dataclass(frozen=True)
class Observations:
    """Training or held-out samples.

    Attributes:
        X: (n, d) features.
        y: (n,) targets, or class numbers.
        weights: (n,) as counts.
        offset: (n,) known part of the margins; None for zero.
    """

    X: Samples
    y: Array
    weights: Array
    offset: Array | None = None

    def rows(self, chosen: Indices) -> Observations:
        """The samples `chosen`."""
        offset = None if self.offset is None else self.offset[chosen]
        return Observations(self.X[chosen], self.y[chosen], self.weights[chosen], offset)

    def margin(self, coefficients: Array, intercept: float) -> Array:
        """X coefficients + intercept + offset, (n,)."""
        margin = self.X @ coefficients + intercept
        return np.asarray(margin if self.offset is None else margin + self.offset)


@dataclass(frozen=True)
class ChosenPath:
    """The fits of a path over k, and the choice of one of them.

    Attributes:
        objective: the loss on the training set.
        sizes: the values of k.
        fits: one for each k.
        scores: what chooses k, lower is better; one for each k.
        errors: standard errors of the scores over folds; NaN where there are none.
        best: position of the chosen k.
        bounds: of the coefficients; None without any.
    """

    objective: Objective
    sizes: list[int]
    fits: list[Fit]
    scores: list[float]
    errors: list[float]
    best: int
    bounds: Bounds | None = None

    @property
    def fit(self) -> Fit:
        """The fit of the chosen k."""
        return self.fits[self.best]

    @property
    def free_fit(self) -> Fit:
        """The fit of the chosen k on the coordinates that are at no bound."""
        if self.bounds is None:
            return self.fit
        tabled = isinstance(self.objective, Tabled)
        return self.fit.strictly_within(self.bounds.repeated(self.objective.outputs) if tabled else self.bounds)


@dataclass(eq=False, repr=False, kw_only=True)
class PathSearch(ABC):
    """A path of fits over k, and the choice of k; a subclass gives the loss. The settings are fields.

    It needs no scikit-learn, which takes a second to load: `SparseEstimator` is its face there.
    """

    k: int | Choice = field(default="ebic", kw_only=False)
    ridge: float = 0.0
    fit_intercept: bool = True
    max_k: int | None = None
    groups: npt.ArrayLike | None = None
    forced: npt.ArrayLike | None = None
    lower: float | VectorLike | None = None
    upper: float | VectorLike | None = None
    cv: int | BaseCrossValidator = 5
    thorough: bool = True
    certify: bool | float = False
    gap: float = 1e-4
    random_state: int = 0

    @abstractmethod
    def _objective(self, data: Observations) -> Objective:
        """The loss on a training set."""

    @abstractmethod
    def _held_out(self, data: Observations, fit: Fit, objective: Objective) -> float:
        """The loss of a fit on held-out samples."""

    def _encode(self, target: Labels) -> Array:
        """The validated targets as numbers."""
        return np.asarray(target, dtype=np.float64)

    def _strata(self, data: Observations) -> Array | None:
        """Classes (n,) that all folds of the cross-validation have in equal shares; None for folds of neighbours."""
        return None

    def _sample_count(self, data: Observations) -> float:
        """The number of samples that information criteria count."""
        return float(data.weights.sum())

    def _proved(self, path: ChosenPath) -> ChosenPath:
        """The path with a certificate for the k that is used, and with the better fit if the proof finds one.

        Raises:
            ProblemError: groups of features, a gap or time that is negative, or what `iobs.certify` refuses.
        """
        if hasattr(self, "certificate_"):
            del self.certificate_  # of an earlier fit
        if isinstance(self.certify, bool | np.bool_) and not self.certify:
            return path
        if self.groups is not None:
            raise ProblemError("certify proves nothing about groups of features; leave one of them out.")
        from iobs.optimize.bounds.branch_and_bound import certify

        lower, upper = (None, None) if path.bounds is None else (path.bounds.lower, path.bounds.upper)
        self.certificate_: Certificate = certify(
            path.objective,
            path.sizes[path.best],
            fit=path.fit,
            gap=self.gap,
            seconds=_PROOF_SECONDS if isinstance(self.certify, bool | np.bool_) else self.certify,
            lower=lower,
            upper=upper,
            seed=self.random_state,
        )
        fits = [self.certificate_.fit if number == path.best else fit for number, fit in enumerate(path.fits)]
        return replace(path, fits=fits)

    def _observe(
        self, X: MatrixLike, y: npt.ArrayLike, sample_weight: VectorLike | None, offset: VectorLike | None
    ) -> Observations:
        """The samples, validated and converted; weights as counts."""
        features, target, weights = self._validated(X, y, sample_weight)
        self._forced_features = forced_columns(self.forced, self.n_features_in_)
        target = self._encode(target)
        shift = None if offset is None else as_vector(offset, "offset", features.shape[0])
        return Observations(features, target, counts_of(weights), shift)

    def _validated(
        self, X: MatrixLike, y: npt.ArrayLike, sample_weight: VectorLike | None
    ) -> tuple[Samples, Labels, Array]:
        """The samples as they are, which have to be `is_clean`, and their weights (n,), one by default."""
        assert is_clean(X, y)
        assert isinstance(X, np.ndarray)
        assert isinstance(y, np.ndarray)
        self.n_features_in_ = X.shape[1]
        weights = np.ones(X.shape[0]) if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)
        return X, y, weights

    def _search(
        self, data: Observations, sample_groups: npt.ArrayLike | None = None, *, from_zero: bool = False
    ) -> ChosenPath:
        """Fit for every k on the path and choose one.

        Args:
            data: the training set.
            sample_groups: labels of the samples; those of one label are in the same fold.
            from_zero: fit every k from 0 also where k is a number.
        """
        if not (is_a(Real, self.ridge) and np.isfinite(self.ridge) and self.ridge >= 0):
            raise ProblemError(f"ridge must be a finite number, not negative, got {self.ridge!r}.")
        features, samples = data.X.shape[1], self._sample_count(data)
        objective = self._objective(data)
        groups = self._groups(objective, features)
        bounds = Bounds.of(self.lower, self.upper, features)
        choices = groups.choices if groups else features - self._forced_features.size
        sizes = self._sizes(choices, samples)
        splits = self._splits(data, sample_groups) if self.k in _BY_FOLDS else iter(())
        if from_zero and not isinstance(self.k, str):
            sizes = list(range(sizes[0] + 1))
        # The best known method runs for a single given k, or at the end for the chosen k; the path is warm started.
        single = len(sizes) == 1 and not from_zero
        fits = fit_path(objective, groups, sizes, self.thorough and single, self.random_state, bounds=bounds)
        scores, errors = [0.0] * len(sizes), [math.nan] * len(sizes)
        best = len(sizes) - 1
        if self.k in _BY_FOLDS:
            scores, errors = self._cross_validate(data, sizes, splits, bounds)
        elif isinstance(self.k, str) and len(sizes) > 1:
            scores = [
                information(objective, fit, self.k, samples, choices, size)  # type: ignore[arg-type]
                for size, fit in zip(sizes, fits, strict=True)
            ]
        if isinstance(self.k, str):
            best = int(np.argmin(scores))
        if self.k == "cv-1se":
            best = next((i for i, score in enumerate(scores) if score <= scores[best] + errors[best]), best)
        if self.thorough and not single and not isinstance(groups, CoordinateGroups):
            thorough = fit_path(objective, groups, [sizes[best]], True, self.random_state, bounds=bounds)[0]
            fits[best] = min(fits[best], thorough, key=lambda fit: fit.value)
        if groups is None and bounds is None:
            fits[best] = without_dependent(objective, fits[best])
        return ChosenPath(objective, sizes, fits, scores, errors, best, bounds)

    def _store(self, data: Observations, path: ChosenPath) -> None:
        """Set the attributes of a fitted estimator."""
        objective = path.objective
        self.k_ = path.sizes[path.best]
        self.path_: list[PathEntry] = [
            self._entry(objective, fit, size, score, error)
            for size, fit, score, error in zip(path.sizes, path.fits, path.scores, path.errors, strict=True)
        ]
        self.support_ = self.path_[path.best]["support"]
        self.n_iter_ = len(path.sizes)
        self._keep(objective, path.fit)
        self._keep_errors(objective, path.free_fit, self._sample_count(data))
        if len(path.sizes) > 1:
            self._keep_spread(data, objective)

    def _entry(self, objective: Objective, fit: Fit, size: int, score: float, error: float) -> PathEntry:
        support = self._support(objective, fit)
        if isinstance(objective, Tabled):
            coef = objective.table(fit.theta)[0][:, support]
        else:
            coef = objective.split(fit.theta)[0][support]
        return {
            "k": size, "loss": fit.value, "score": score, "score_error": error, "support": support, "coef": coef
        }  # fmt: skip

    def _keep_errors(self, objective: Objective, fit: Fit, samples: float) -> None:
        """Standard errors of `coef_`, NaN outside the support of the fit; as if it had been known beforehand."""
        inference = standard_errors(objective, fit, samples, self.fit_intercept)
        errors = np.full(objective.dimension, np.nan)
        errors[fit.support] = inference.errors
        self.standard_errors_: Array = self._shaped(objective, errors)
        self.noise_ = inference.noise

    def _shaped(self, objective: Objective, values: Array) -> Array:
        """Values of the coordinates in the shape of `coef_`."""
        if isinstance(objective, Tabled):
            return values[: np.size(self.coef_)].reshape(-1, objective.outputs).T
        return values[: np.size(self.coef_)].reshape(np.shape(self.coef_))

    def _keep_spread(self, data: Observations, objective: Objective) -> None:
        """Standard deviations of the features on the path, for figures in units that can be compared."""
        self._path_features: Indices = np.unique(np.concatenate([entry["support"] for entry in self.path_]))
        if isinstance(objective, LeastSquares) and self.fit_intercept:  # the design of the objective is centred
            spread = objective.squares[self._path_features] / float(data.weights.sum())
        else:
            spread = (
                variances(data.X[:, self._path_features], data.weights, True)
                if self._path_features.size
                else np.zeros(0)
            )
        self._path_spread: Array = np.sqrt(spread)

    def _names(self) -> list[str]:
        names = getattr(self, "feature_names_in_", None)
        return [f"x{j}" for j in range(self.n_features_in_)] if names is None else [str(name) for name in names]

    def _support(self, objective: Objective, fit: Fit) -> Indices:
        if isinstance(objective, Tabled):
            return np.flatnonzero(objective.table(fit.theta)[0].any(axis=0)).astype(np.int64)
        return np.flatnonzero(objective.split(fit.theta)[0]).astype(np.int64)

    def _keep(self, objective: Objective, fit: Fit) -> None:
        self.coef_: Array
        self.intercept_: float | Array
        self.coef_, self.intercept_ = (
            objective.table(fit.theta) if isinstance(objective, Tabled) else objective.split(fit.theta)
        )

    def _groups(self, objective: Objective, features: int) -> CoordinateGroups | Hierarchy | None:
        if self.groups is None and not isinstance(objective, Tabled):
            return None
        members = labels_to_groups(np.arange(features) if self.groups is None else self.groups, features)
        forced = self._forced_groups(members)
        if isinstance(objective, Tabled):
            rows = objective.groups
            members = [np.concatenate([rows[j] for j in member]) for member in members]
        return CoordinateGroups(objective, members, forced)

    def _forced_groups(self, members: list[Indices]) -> frozenset[int]:
        forced_features = set(self._forced_features.tolist())
        return frozenset(i for i, member in enumerate(members) if forced_features & set(member.tolist()))

    def _penalty(self, X: Samples, weights: Array) -> Array:
        """The ridge of every feature (d,): the same per standard deviation, so that units do not matter."""
        if self.ridge == 0:
            return np.zeros(X.shape[1])
        return self.ridge * variances(X, weights, self.fit_intercept)

    def _loss_options(self, data: Observations) -> dict[str, Any]:
        """Arguments of a loss with one coefficient a feature."""
        return {
            "ridge": self._penalty(data.X, data.weights) if self.ridge else 0.0,
            "sample_weight": None if (data.weights == 1).all() else data.weights,
            "forced": () if self.groups is not None else self._forced_features,
            "offset": data.offset,
        }

    def _sizes(self, choices: int, samples: float) -> list[int]:
        if isinstance(self.k, str):
            if self.k not in (*_CRITERIA, *_BY_FOLDS):
                raise ProblemError(f'k must be an integer, "cv", "cv-1se", "aic", "bic" or "ebic", got {self.k!r}.')
            if self.max_k is not None and not (isinstance(self.max_k, (int, np.integer)) and self.max_k >= 0):
                raise ProblemError(f"max_k must be a whole number of at least 0, got {self.max_k!r}.")
            usual = max(1, min(50, int(samples / max(1.0, 2 * np.log(max(samples, 2.0))))))
            return list(range(min(choices, usual if self.max_k is None else self.max_k) + 1))
        if not is_a(Integral, self.k) or not 0 <= self.k <= choices:
            raise ProblemError(
                f"k must lie between 0 and the {choices} that can be chosen "
                f"(n_features = {self.n_features_in_}), got {shown(self.k)}."
            )
        return [int(self.k)]

    def _splits(self, data: Observations, sample_groups: npt.ArrayLike | None) -> Iterator[tuple[Indices, Indices]]:
        """The training and the held-out samples of every fold.

        Raises:
            ProblemError: the samples, their classes or their groups are too few for the folds.
        """
        from sklearn.model_selection import GroupKFold, StratifiedGroupKFold, check_cv

        strata = self._strata(data)
        folds = check_cv(self.cv, strata, classifier=strata is not None)
        if sample_groups is not None and (self.cv is None or isinstance(self.cv, (int, np.integer))):
            folds = (GroupKFold if strata is None else StratifiedGroupKFold)(folds.get_n_splits())
        if self.k == "cv-1se" and folds.get_n_splits(data.X, data.y, sample_groups) < 2:
            raise ProblemError('k="cv-1se" needs at least two folds for a standard error; raise cv, or give k="cv".')
        try:
            return iter([*folds.split(data.X, data.y if strata is None else strata, sample_groups)])
        except (TypeError, ValueError) as error:  # such as fewer groups than folds
            raise ProblemError(f"The samples cannot be divided into folds: {first_line(error)}") from error

    def _cross_validate(
        self, data: Observations, sizes: list[int], splits: Iterator[tuple[Indices, Indices]], bounds: Bounds | None
    ) -> tuple[list[float], list[float]]:
        """The mean held-out loss of every k over the samples, and its standard error over the folds."""
        totals, mass, means = np.zeros(len(sizes)), 0.0, []
        for number, (train, test) in enumerate(splits, 1):
            if not (data.weights[train].sum() > 0 and data.weights[test].sum() > 0):
                raise ProblemError(
                    f"All sample weights are zero in fold {number} of the cross-validation or in all others; shuffle "
                    "the rows, or leave those of weight zero out."
                )
            try:
                objective, held_out = self._objective(data.rows(train)), data.rows(test)
            except ProblemError as error:
                raise ProblemError(f"The samples outside fold {number} of the cross-validation: {error}") from error
            groups = self._groups(objective, data.X.shape[1])
            fits = fit_path(objective, groups, sizes, False, self.random_state, exact=False, bounds=bounds)
            losses = np.array([self._held_out(held_out, fit, objective) for fit in fits])
            totals += losses
            mass += float(held_out.weights.sum())
            means.append(losses / float(held_out.weights.sum()))
        spread = np.std(means, axis=0, ddof=1) if len(means) > 1 else np.full(len(sizes), np.nan)
        # Repeated cross-validation tests every sample several times; the repeats are no further samples.
        repeats = max(1.0, round(mass / float(data.weights.sum()), 6))
        return (totals / mass).tolist(), (spread / np.sqrt(len(means) / repeats)).tolist()


def fit_from_zero(
    estimator: PathSearch,
    X: MatrixLike,
    y: npt.ArrayLike,
    sample_weight: VectorLike | None = None,
    *,
    offset: VectorLike | None = None,
) -> tuple[Observations, ChosenPath]:
    """`fit` for every k from 0, also where k is a number; return the samples and the path too."""
    data = estimator._observe(X, y, sample_weight, offset)
    with few_threads(data.X.shape[0] * data.X.shape[1]):
        path = estimator._search(data, from_zero=True)
        estimator._store(data, path)
    return data, path


def fit_supports(
    estimator: PathSearch, X: MatrixLike, y: npt.ArrayLike, supports: Sequence[Indices]
) -> tuple[Observations, ChosenPath]:
    """`fit` on supports that were chosen elsewhere, of 0, 1, 2, ... features; the last is the one that is used."""
    data = estimator._observe(X, y, None, None)
    objective = estimator._objective(data)
    fits = [refit(objective, np.union1d(support, objective.forced)) for support in supports]
    count = len(fits)
    path = ChosenPath(objective, list(range(count)), fits, [0.0] * count, [math.nan] * count, count - 1)
    estimator._store(data, path)
    return data, path


def counts_of(weights: Array) -> Array:
    """Sample weights as counts (n,).

    Integer weights are counts of repeated rows and stay unchanged. Other weights are scaled so that their sum is
    (sum w)^2 / sum w^2 (Kish 1965). This is the number of equally weighted samples that hold as much information. Only
    the ratios of these weights matter.
    """
    if (weights == 1).all() or (weights == np.round(weights)).all():
        return weights
    return weights * float(weights.sum() / (weights @ weights))


def is_clean(X: object, y: object) -> bool:
    """True if samples need no conversion: NumPy arrays in float64, (n, d) and (n,), finite and not empty."""
    return (
        type(X) is np.ndarray
        and type(y) is np.ndarray
        and X.dtype == np.float64
        and y.dtype == np.float64
        and X.ndim == 2
        and X.size > 0
        and y.shape == X.shape[:1]
        and math.isfinite(X.sum())
        and math.isfinite(y.sum())
    )
