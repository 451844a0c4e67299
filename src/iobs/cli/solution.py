"""The result of `iobs solve`: its report and figure; `solution_tables` prints it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import numpy as np

from iobs.cli import console
from iobs.core.files import whole_file

if TYPE_CHECKING:
    from iobs.cli.near_optimal import NearOptimal
    from iobs.cli.sides import Sides
    from iobs.data.tables import Table
    from iobs.optimize.estimators.base import SparseEstimator
    from iobs.optimize.estimators.knockoffs import KnockoffFilter
    from iobs.optimize.objectives.base import Objective
    from iobs.optimize.objectives.design import Array
    from iobs.optimize.refit.fit import Fit

_PAIRS = 1e9  # most pairs of rows that the concordance compares


class FeatureRow(TypedDict):
    """A chosen column and its coefficient; `label` is the class, where there are more than two."""

    name: str
    label: NotRequired[str]
    coefficient: float
    standard_error: float | None
    z: float | None
    per_standard_deviation: float
    hazard_ratio: NotRequired[float]


class PathRow(TypedDict):
    """The best columns for one k; `score` and its error are there if k was chosen."""

    k: int
    value: float
    features: list[str]
    score: NotRequired[float]
    score_error: NotRequired[float | None]


class KnockoffReport(TypedDict):
    """Result of the knockoff filter: its limit, the estimate of the false share, and W of every column."""

    fdr: float
    kind: str
    false_share: float | None
    statistics: dict[str, float]


class FitReport(TypedDict):
    """Numbers of the fit; `value` is the loss, `explained` the share of the baseline's loss, ridge terms excluded."""

    loss: str
    samples: int
    columns: int
    k: int
    value: float
    value_without_features: float
    explained: float | None
    noise: float | None


class ModelReport(FitReport):
    """The fitted model as written to JSON; `model` is what predicts."""

    intercept: float | list[float]
    classes: list[str]
    features: list[FeatureRow]
    standard_errors: str
    path: list[PathRow]
    model: dict[str, Any]
    rows_dropped: int
    concordance: NotRequired[float]
    knockoffs: NotRequired[KnockoffReport]
    certificate: NotRequired[str]
    near_optimal: NotRequired[NearOptimal]


@dataclass(frozen=True)
class Solution:
    """Result of `iobs solve`.

    Attributes:
        table: the data.
        target: name of the column that is explained.
        loss: one of `iobs.data.fitted.LOSSES`.
        objective: the loss on the table.
        fits: the best fits for k = 0, 1, ... up to the k that is used.
        chooser: the estimator that chose k; None if k was given.
        how: k as asked for.
        sides: sample weights, offset, events and bounds.
        knockoffs: the filter that chose the columns; None if the best columns for a k were searched.
    """

    table: Table
    target: str
    loss: str
    objective: Objective
    fits: list[Fit]
    chooser: SparseEstimator | None
    how: str
    sides: Sides
    knockoffs: KnockoffFilter | None = None

    @property
    def size(self) -> int:
        """The k that is used."""
        return len(self.fits) - 1

    @property
    def best(self) -> Fit:
        """The fit for that k."""
        return self.fits[-1]

    @cached_property
    def spread(self) -> Array:
        """Weighted standard deviations of the columns (d,)."""
        from iobs.optimize.objectives.centring import variances

        return np.asarray(np.sqrt(variances(self.table.X, self.sides.weights, True)))

    def coefficients(self, theta: Array) -> tuple[Array, Array]:
        """(1, d) and (1,), or (C, d) and (C,) for C > 2 classes."""
        from iobs.optimize.objectives.multinomial import Multinomial

        if isinstance(self.objective, Multinomial):
            return self.objective.table(theta)
        coefficients, constant = self.objective.split(theta)
        return coefficients[None, : len(self.table.names)], np.array([constant])

    @cached_property
    def errors(self) -> tuple[Array, float]:
        """Standard errors in the shape of the coefficients, NaN outside the support; and the noise."""
        from iobs.optimize.objectives.multinomial import Multinomial
        from iobs.optimize.search.path import standard_errors

        bounds = self.sides.bounds
        free = self.best if bounds is None else bounds.inside(self.best)
        found = standard_errors(self.objective, free, float(self.sides.weights.sum()), intercept=True)
        values = np.full(self.objective.dimension, np.nan)
        values[free.support] = found.errors
        if isinstance(self.objective, Multinomial):
            return self.objective.table(values)[0], found.noise
        return values[None, : len(self.table.names)], found.noise


def report(found: Solution) -> ModelReport:
    """The result as plain values."""
    from iobs.optimize.estimators.summary import AFTER_SELECTION
    from iobs.optimize.objectives.multinomial import Multinomial
    from iobs.optimize.refit.newton import refit
    from iobs.optimize.search.path import unpenalised

    objective, table, best = found.objective, found.table, found.best
    # The baseline has no column, not even the forced ones: only the intercept, where it is a coordinate.
    first = 0 if isinstance(objective, Multinomial) else len(table.names)
    constant = refit(objective, objective.forced[objective.forced >= first])
    empty = unpenalised(objective, constant)
    constants = found.coefficients(best.theta)[1]
    noise = found.errors[1]
    model: ModelReport = {
        "loss": found.loss,
        "samples": len(table.y),
        "columns": len(table.names),
        "k": found.size,
        "value": best.value,
        "value_without_features": constant.value,
        "explained": 1 - unpenalised(objective, best) / empty if empty > 0 else None,
        "noise": noise if found.loss == "squared" and math.isfinite(noise) else None,
        "intercept": float(constants[0]) if constants.size == 1 else constants.tolist(),
        "classes": table.classes,
        "features": _features(found),
        "standard_errors": AFTER_SELECTION,
        "path": _path(found),
        "model": _fitted(found),
        "rows_dropped": table.dropped,
    }
    if found.knockoffs is not None:
        share = found.knockoffs.false_share
        model["knockoffs"] = {
            "fdr": found.knockoffs.fdr,
            "kind": found.knockoffs.kind,
            "false_share": share if math.isfinite(share) else None,
            "statistics": dict(zip(table.names, found.knockoffs.statistics.tolist(), strict=True)),
        }
    pairs = _concordance(found)
    if pairs is not None:
        model["concordance"] = pairs
    return model


def _features(found: Solution) -> list[FeatureRow]:
    theta, errors = found.coefficients(found.best.theta)[0], found.errors[0]
    weight = np.abs(theta).max(axis=0) * found.spread
    used = [j for j in np.argsort(-weight, kind="stable").tolist() if theta[:, j].any()]
    rows: list[FeatureRow] = []
    for j in used:
        for number, label in enumerate(found.table.classes if len(theta) > 1 else [""]):
            value, error = float(theta[number, j]), float(errors[number, j])
            row: FeatureRow = {
                "name": found.table.names[j],
                "coefficient": value,
                "standard_error": error if math.isfinite(error) else None,
                "z": value / error if error > 0 else None,
                "per_standard_deviation": value * float(found.spread[j]),
            }
            if label:
                row["label"] = label
            if found.loss == "cox":
                row["hazard_ratio"] = float(np.exp(value))
            rows.append(row)
    return rows


def _concordance(found: Solution) -> float | None:
    """Harrell's concordance of Cox's model on the table; None for other losses, and where pairs are too many."""
    from iobs.optimize.estimators.survival import concordance

    events, times, weights = found.sides.events, found.table.y, found.sides.weights
    if events is None or len(times) * float(events.sum()) > _PAIRS:
        return None
    margin = found.table.X @ found.coefficients(found.best.theta)[0][0]
    margin = margin if found.sides.offset is None else margin + found.sides.offset
    value = concordance(times, events, margin, weights)
    return value if math.isfinite(value) else None


def _path(found: Solution) -> list[PathRow]:
    """The fits of every k; those beyond the chosen k are the chooser's."""
    names = found.table.names
    rows: list[PathRow] = [
        {
            "k": k,
            "value": fit.value,
            "features": [names[j] for j in np.flatnonzero(found.coefficients(fit.theta)[0].any(axis=0))],
        }
        for k, fit in enumerate(found.fits)
    ]
    if found.chooser is None:
        return rows
    for entry in found.chooser.path_:
        if entry["k"] >= len(rows):
            rows.append(
                {"k": entry["k"], "value": entry["loss"], "features": [names[j] for j in entry["support"].tolist()]}
            )
        rows[entry["k"]]["score"] = entry["score"]
        error = entry["score_error"]
        rows[entry["k"]]["score_error"] = error if math.isfinite(error) else None
    return rows


def _fitted(found: Solution) -> dict[str, Any]:
    """The model on the columns of the file that it uses."""
    from iobs.cli.sides import columns_of_file
    from iobs.data.fitted import Fitted
    from iobs.optimize.estimators.survival import baseline
    from iobs.optimize.search.hierarchy import pairs_of

    theta, constants = found.coefficients(found.best.theta)
    kept, codings, start = [], [], 0
    used = np.flatnonzero(theta.any(axis=0))
    width = columns_of_file(found.table)
    products = used[used >= width]
    parents = pairs_of(width)[products - width]
    for coding in found.table.codings:
        columns = range(start, start + len(coding.names))
        start = columns.stop
        if np.isin(columns, used).any() or np.isin(columns, parents).any():
            codings.append(coding)
            kept += list(columns)
    places = tuple((kept.index(left), kept.index(right)) for left, right in parents.tolist())
    kept += products.tolist()
    sides, classes = found.sides, tuple(found.table.classes)
    survival = None
    if sides.events is not None:  # relative to a row at the means of the columns
        constants = -np.average(found.table.X, axis=0, weights=sides.weights) @ theta.T
        margin = found.table.X @ theta[0] + constants[0]
        margin = margin if sides.offset is None else margin + sides.offset
        survival = baseline(found.table.y, sides.events, sides.weights, margin)
    model = Fitted(
        found.target,
        found.loss,
        classes,
        tuple(codings),
        theta[:, kept],
        constants,
        sides.name,
        sides.exposure,
        survival,
        places,
    )
    return model.to_plain()


def write(file: Path, model: ModelReport) -> None:
    """Write the report as JSON.

    Raises:
        OutputError: the file cannot be written.
    """
    from iobs.report.numbers import to_json

    with whole_file(file) as written:
        written.write_text(to_json(model) + "\n", encoding="utf8")
    console.say(f"Wrote {file}")


def draw(file: Path, found: Solution) -> None:
    """Draw the score and the coefficients of every k.

    Raises:
        OutputError: the file cannot be written.
    """
    import matplotlib as mpl

    from iobs.errors import OutputError
    from iobs.optimize.estimators.plots import draw_coefficients, draw_scores, largest_coefficients, new_figure

    columns = np.arange(len(found.table.names))
    tables = [found.coefficients(fit.theta)[0] for fit in found.fits]
    scores, errors, what = [fit.value for fit in found.fits], np.full(len(tables), np.nan), f"{found.loss} loss"
    if found.chooser is not None:
        path = found.chooser.path_
        scores, errors = [entry["score"] for entry in path], np.array([entry["score_error"] for entry in path])
        what = "held-out loss per row" if found.how.startswith("cv") else f"{found.how.upper()} (lower is better)"
        for entry in path[len(tables) :]:
            wide = np.zeros_like(tables[0])
            wide[:, entry["support"]] = entry["coef"]
            tables.append(wide)
    table = largest_coefficients([columns] * len(tables), tables, columns) * found.spread
    figure = new_figure()
    left, right = figure.subplots(1, 2)
    draw_scores(left, range(len(scores)), scores, errors, found.size, what)
    draw_coefficients(right, range(len(tables)), table, found.table.names, found.size)
    if len(tables[0]) > 1:
        right.set_ylabel("per standard deviation, largest of a class")
    figure.suptitle(found.target, parse_math=False)
    try:
        with whole_file(file) as written, mpl.rc_context({"text.parse_math": False}):
            figure.savefig(written, dpi=130)
    except ValueError as error:
        raise OutputError(f"Cannot write {file}: {error}.") from error
    console.say(f"Wrote {file}")
