"""From the table and the options of `iobs solve` to a regression problem and the estimator that solves it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from iobs.errors import DataError

if TYPE_CHECKING:
    from iobs.cli.solve import CoefficientLimits, TableColumns
    from iobs.data.tables import Table
    from iobs.optimize.estimators.base import SparseEstimator
    from iobs.optimize.estimators.paths import Labels, PathSearch
    from iobs.optimize.objectives.design import Array
    from iobs.optimize.refit.within import Bounds

CRITERIA = ("cv", "cv-1se", "aic", "bic", "ebic")


@dataclass(frozen=True)
class Regression:
    """A regression problem: the table and what the options say about it.

    Attributes:
        table: the data.
        target: name of the column that is explained.
        loss: one of `iobs.data.fitted.LOSSES`.
        ridge: per standard deviation of the columns.
        weights: sample weights (n,); None without any.
        offset: known part of the linear predictor (n,), or None.
        offset_name: the column of the offset or of the exposure; "" without one.
        exposure: whether the offset is the logarithm of that column.
        labels: for each column of the design the number of its column of the file, if categories enter whole.
        forced: columns of the design that are always used.
        events: 1 where the event happened, 0 where it was censored (n,); None unless the loss is "cox".
        bounds: of the coefficients; None without any.
        interactions: "strong" or "weak" hierarchy of the products of two columns; None without products.
        names: of the columns of the design, then of the products "a:b".
    """

    table: Table
    target: str
    loss: str
    ridge: float
    weights: Array | None
    offset: Array | None
    offset_name: str
    exposure: bool
    labels: list[int] | None
    forced: list[int]
    events: Array | None
    bounds: Bounds | None
    interactions: str | None
    names: list[str] = field(repr=False)

    @property
    def answers(self) -> Array:
        """The targets as the estimator takes them: (n,), or times and events (n, 2)."""
        return self.table.y if self.events is None else np.column_stack([self.table.y, self.events])

    def search(self, k: str, seed: int) -> PathSearch:
        """The search along a path of the loss: without scikit-learn, which takes a second to load, where it can be.

        Raises:
            DataError: as `estimator`.
        """
        from iobs.optimize.estimators.paths import is_clean
        from iobs.optimize.estimators.regression_path import RegressionPath

        plain = self.interactions is None and self.weights is None and self.loss not in ("cox", "logistic")
        if not (plain and is_clean(self.table.X, self.answers)):
            return self.estimator(k, seed)
        return RegressionPath(self._checked(k), **self._settings(seed), loss=self.loss, groups=self.labels)

    def _settings(self, seed: int) -> dict[str, Any]:
        """The settings that all losses have."""
        bounds = {} if self.bounds is None else {"lower": self.bounds.lower, "upper": self.bounds.upper}
        return {"random_state": seed, "forced": self.forced, "ridge": self.ridge, **bounds}

    def estimator(self, k: str, seed: int) -> SparseEstimator:
        """The estimator of the loss.

        Raises:
            DataError: a k that is neither a number of columns nor a criterion, or that the target does not allow.
        """
        from iobs.optimize.estimators import SparseClassifier, SparseCox, SparseInteractions, SparseRegressor
        from iobs.optimize.estimators.interactions import WithProducts

        settings = self._settings(seed)
        kind: type[SparseEstimator] = SparseRegressor
        if self.loss == "cox":
            kind = SparseCox
        elif self.loss == "logistic":
            # At least a tiny ridge, without which separable classes have no finite fit.
            kind, settings["ridge"] = SparseClassifier, max(self.ridge, 1e-6)
            if not self.table.classes and not np.isin(self.table.y, (0, 1)).all():
                kind = _soft_classifier()
        else:
            settings["loss"] = self.loss
        if self.interactions is not None:
            # Only the combination with SparseRegressor is public.
            mixed = type(f"{kind.__name__}WithProducts", (WithProducts, kind), {})
            kind = SparseInteractions if kind is SparseRegressor else mixed
            settings["hierarchy"] = self.interactions
        else:
            settings["groups"] = self.labels
        estimator: SparseEstimator = kind(self._checked(k), **settings)
        return estimator

    def _checked(self, k: str) -> Any:
        """k as a number or a criterion."""
        if k not in CRITERIA:
            labels = list(range(len(self.names))) if self.labels is None else self.labels
            free = len(set(labels) - {labels[j] for j in self.forced})
            if not (k.isascii() and k.isdecimal()) or int(k) > free:
                raise DataError(f"-k must be a number from 0 to {free}, or {', '.join(CRITERIA)}; got {k!r}.")
            return int(k)
        counts = Counter(self.table.y.tolist())
        logistic = self.loss == "logistic"
        if logistic and len(counts) > 2 and not self.table.classes:
            raise DataError(
                f"-k {k} with --loss logistic needs a target of two values, got {len(counts)}; give a number."
            )
        most = max(counts.values()) if logistic else len(self.table.y)
        if k in ("cv", "cv-1se") and most < 5:
            needed = "5 rows of one class" if logistic else "5 rows"
            raise DataError(f"-k {k} cuts the table into 5 parts and needs {needed}, there are {most}; give a number.")
        return k


def _soft_classifier() -> type[SparseEstimator]:
    """A classifier whose targets are probabilities of the second class."""
    from iobs.optimize.estimators import SparseClassifier

    class SoftClassifier(SparseClassifier):
        def _encode(self, target: Labels) -> Array:
            self.classes_ = np.array([0.0, 1.0])
            return np.asarray(target, dtype=np.float64)

    return SoftClassifier


def read_regression(
    table: Table, columns: TableColumns, loss: str, limits: CoefficientLimits, ridge: float
) -> Regression:
    """The regression problem that the options ask for.

    Raises:
        ProblemError: weights that are negative, not finite or all zero.
        DataError: a target that the loss does not take; an offset twice, or for more than two classes; an exposure that
            is not positive, or without a log link; interactions with options that do not go with them; a status that is
            not 0 and 1; bounds with more than two classes; a forced column that does not exist.
    """
    from iobs.optimize.objectives.design import weights_of

    table, loss = _with_loss(table, loss, columns.status)
    many, aside = len(table.classes) > 2, table.aside
    weights = None
    if columns.weight is not None:
        weights = weights_of(aside[columns.weight], len(table.y), f"weights {columns.weight!r}")
    offset = None if columns.offset is None else aside[columns.offset]
    if columns.exposure is not None:
        exposure = aside[columns.exposure]
        if loss in ("squared", "logistic", "cox") or offset is not None:
            raise DataError("--exposure needs a loss of counts or amounts, such as poisson, and no --offset.")
        wrong = exposure[~((exposure > 0) & np.isfinite(exposure))]
        if wrong.size:
            raise DataError(f"The exposure {columns.exposure!r} must be positive and finite, got {wrong[0]:g}.")
        offset = np.log(exposure)
    if offset is not None and many:
        raise DataError("An offset needs at most two classes.")
    events = None if columns.status is None else aside[columns.status]
    if events is not None and not (np.isin(events, (0, 1)).all() and events.any()):
        raise DataError(f"The status {columns.status!r} must be 0 or 1, with 1 at least once: the event happened.")
    bounds = limits.bounds(table)
    if bounds is not None and many:
        raise DataError(
            "Bounds on coefficients need at most two classes: a number added to those of all classes changes nothing."
        )
    if columns.interactions is not None:
        if columns.whole_categories or limits or many:
            raise DataError("--interactions needs at most two classes, no bounds and no --whole-categories.")
        if columns.interactions not in ("strong", "weak"):
            raise DataError(f"--interactions must be strong or weak, got {columns.interactions!r}.")
    labels = [number for number, coding in enumerate(table.codings) for _ in coding.names]
    return Regression(
        table,
        columns.target,
        loss,
        ridge,
        weights,
        offset,
        columns.exposure or columns.offset or "",
        columns.exposure is not None,
        labels if columns.whole_categories else None,
        _forced(table, columns.force or []),
        events,
        bounds,
        columns.interactions,
        table.names if columns.interactions is None else _with_products(table.names),
    )


def _with_products(names: list[str]) -> list[str]:
    from iobs.optimize.search.hierarchy import pairs_of

    return [*names, *(f"{names[first]}:{names[second]}" for first, second in pairs_of(len(names)).tolist())]


def _forced(table: Table, names: list[str]) -> list[int]:
    """The columns of the design that belong to forced columns of the file, all dummy columns of a category."""
    files = [coding.name for coding in table.codings for _ in coding.names]
    unknown = [name for name in names if name not in files and name not in table.names]
    if unknown:
        raise DataError(f"There is no column {', '.join(map(repr, unknown))} to force in.")
    return [j for j, pair in enumerate(zip(files, table.names, strict=True)) if not set(pair).isdisjoint(names)]


def _with_loss(table: Table, loss: str, status: str | None) -> tuple[Table, str]:
    """The table with its target as classes where it has some, and the loss."""
    from iobs.data.fitted import LOSSES

    values = np.unique(table.y)
    if loss == "auto" and status is not None:
        loss = "cox"
    if (loss == "cox") != (status is not None):
        raise DataError("--loss cox and --status COLUMN (1 for an event, 0 for a censored time) need each other.")
    if loss == "auto":
        loss = "logistic" if table.classes or np.isin(values, (0, 1)).all() else "squared"
    if loss.replace("-", "_") not in LOSSES:
        raise DataError(f"--loss (or --family) must be auto, {', '.join(LOSSES)}, got {loss!r}.")
    if loss == "cox" and (table.classes or (table.y < 0).any()):
        raise DataError("The target of --loss cox must be times: numbers of at least 0.")
    if table.classes and loss != "logistic":
        raise DataError(f"The target holds text ({', '.join(table.classes[:3])}); use --loss logistic.")
    if len(table.y) < 2:
        raise DataError("The table has 1 row; a regression needs at least 2.")
    if loss == "logistic" and values.size < 2:
        raise DataError("The target has one value everywhere; there is nothing to tell apart.")
    whole = (values == np.round(values)).all()
    if loss == "logistic" and not table.classes and whole and not np.isin(values, (0, 1)).all():
        numbers = np.searchsorted(values, table.y).astype(np.float64)
        table = replace(table, y=numbers, classes=[str(int(value)) for value in values])
    return table, loss.replace("-", "_")
