"""The result of `iobs solve`: its fit, its report and its figure; `solution_tables` prints it."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from iobs.cli import console
from iobs.core.files import whole_file

if TYPE_CHECKING:
    from iobs.cli.solve_inputs import Regression
    from iobs.optimize.estimators.knockoffs import KnockoffFilter
    from iobs.optimize.estimators.paths import ChosenPath, Observations, PathSearch
    from iobs.optimize.estimators.risk_score import RiskScore
    from iobs.optimize.objectives.design import Array

JSONObject: TypeAlias = dict[str, Any]
_PAIRS = 1e9  # most pairs of rows that the concordance compares


@dataclass(frozen=True)
class SolveResult:
    """Result of `iobs solve`.

    Attributes:
        problem: the table and what the options say about it.
        estimator: fitted.
        data: the samples as the estimator takes them.
        path: the fits of every k.
        knockoffs: the filter that chose the columns; None if the best columns for a k were searched.
        card: the scorecard; None if coefficients are real numbers.
    """

    problem: Regression
    estimator: PathSearch
    data: Observations
    path: ChosenPath
    knockoffs: KnockoffFilter | None = None
    card: RiskScore | None = None

    @property
    def criterion(self) -> str:
        """The criterion that chose k; "" if k was given."""
        k = self.estimator.k
        return k if isinstance(k, str) and self.knockoffs is None else ""

    @property
    def coefficients(self) -> Array:
        """(1, d), or (C, d) for C > 2 classes."""
        return np.atleast_2d(self.estimator.coef_)

    @cached_property
    def spread(self) -> Array:
        """Weighted standard deviations of the columns (d,)."""
        from iobs.optimize.objectives.centring import variances

        return np.asarray(np.sqrt(variances(self.data.X, self.data.weights, True)))


def best_columns(problem: Regression, k: str, seed: int) -> SolveResult:
    """Choose k if it is a criterion, then fit every k up to it; the last fit by the best known method."""
    from iobs.optimize.estimators.paths import fit_from_zero
    from iobs.optimize.refit.separation import warn_of_separation

    estimator = problem.search(k, seed)
    data, path = fit_from_zero(estimator, problem.table.X, problem.answers, problem.weights, offset=problem.offset)
    warn_of_separation(path.objective, path.free_fit, problem.names)
    return SolveResult(problem, estimator, data, path)


def card_columns(problem: Regression, k: int, seconds: float, seed: int) -> SolveResult:
    """The best scorecard of at most k columns, as a logistic model whose coefficients are multiples of its scale.

    Raises:
        DataError: a target of other than two classes.
    """
    from iobs.errors import DataError
    from iobs.optimize.estimators import RiskScore
    from iobs.optimize.estimators.paths import ChosenPath
    from iobs.optimize.refit.newton import Fit

    table = problem.table
    if problem.loss != "logistic" or np.unique(table.y).size != 2 or len(table.classes) > 2:
        raise DataError("--select points needs a target of two classes.")
    card = RiskScore(k, ridge=max(problem.ridge, 1e-6), seconds=seconds, random_state=seed)
    card.fit(table.X, table.y, problem.weights)
    estimator = problem.estimator(str(card.support_.size), seed)
    data = estimator._observe(table.X, problem.answers, problem.weights, None)
    objective = estimator._objective(data)
    theta = np.append(card.scale_ * card.points_, 0.0)
    theta[-1] = card.intercept_ - objective.split(theta)[1]
    fit = Fit(np.flatnonzero(theta).astype(np.int64), theta, *objective.value_and_gradient(theta))
    path = ChosenPath(objective, [card.support_.size], [fit], [0.0], [math.nan], 0)
    estimator._store(data, path)
    return SolveResult(problem, estimator, data, path, card=card)


def knockoff_columns(problem: Regression, fdr: float, seed: int) -> SolveResult:
    """The fits of the first k columns in the order of the knockoff filter's statistic, up to all that it chooses.

    Raises:
        DataError: a target of more than two classes, or constant columns.
        ProblemError: columns that have no knockoffs.
    """
    from iobs.errors import DataError
    from iobs.optimize.estimators.knockoffs import knockoff_filter
    from iobs.optimize.estimators.paths import fit_supports
    from iobs.optimize.refit.separation import warn_of_separation

    table = problem.table
    if len(table.classes) > 2:
        raise DataError("--select knockoff needs a target of numbers, or of at most two classes.")
    constant = [name for name, values in zip(table.names, table.X.T, strict=True) if (values == values[0]).all()]
    if constant:
        options = " ".join(f"--drop {shlex.quote(name)}" for name in constant)
        raise DataError(f"Constant columns have no knockoffs; leave them out with {options}.")
    estimator = problem.estimator("ebic", seed)
    chosen = knockoff_filter(estimator, table.X, problem.answers, fdr=fdr, seed=seed)
    order = chosen.support[np.argsort(-chosen.statistics[chosen.support], kind="stable")]
    supports = [order[:k] for k in range(order.size + 1)]
    data, path = fit_supports(estimator, table.X, problem.answers, supports)
    warn_of_separation(path.objective, path.free_fit, problem.names)
    return SolveResult(problem, estimator, data, path, chosen)


def report(solution: SolveResult) -> JSONObject:
    """The result as plain values; `model` is what predicts, `path` has the best columns for every k.

    `value` is the loss; `explained` is the share of the baseline's loss, ridge terms excluded. `score` and
    `score_error` of the path are there if k was chosen.
    """
    from iobs.optimize.estimators.summary import AFTER_SELECTION
    from iobs.optimize.objectives.tabled import Multinomial
    from iobs.optimize.refit.newton import refit
    from iobs.optimize.search.path import unpenalised

    problem, estimator, objective = solution.problem, solution.estimator, solution.path.objective
    table, best = problem.table, solution.path.fit
    # The baseline has no column, not even the forced ones: only the intercept, where it is a coordinate.
    first = 0 if isinstance(objective, Multinomial) else len(problem.names)
    constant = refit(objective, objective.forced[objective.forced >= first])
    empty = unpenalised(objective, constant)
    constants = np.atleast_1d(estimator.intercept_)
    model = {
        "loss": problem.loss,
        "samples": len(table.y),
        "columns": len(problem.names),
        "k": estimator.k_,
        "value": best.value,
        "value_without_features": constant.value,
        "explained": 1 - unpenalised(objective, best) / empty if empty > 0 else None,
        "noise": _finite(estimator.noise_) if problem.loss == "squared" else None,
        "intercept": float(constants[0]) if constants.size == 1 else constants.tolist(),
        "classes": table.classes,
        "features": _features(solution),
        "standard_errors": AFTER_SELECTION,
        "path": _path(solution),
        "model": _fitted(solution),
        "rows_dropped": table.dropped,
    }
    if solution.knockoffs is not None:
        model["knockoffs"] = {
            "fdr": solution.knockoffs.fdr,
            "kind": solution.knockoffs.kind,
            "false_share": _finite(solution.knockoffs.false_share),
            "statistics": dict(zip(table.names, solution.knockoffs.statistics.tolist(), strict=True)),
        }
    if solution.card is not None:
        model["card"] = {
            "points": {problem.names[j]: int(solution.card.points_[j]) for j in solution.card.support_.tolist()},
            "scale": solution.card.scale_,
            "intercept": solution.card.intercept_,
            "gap": _finite(solution.card.gap_),
            "message": solution.card.message_,
        }
    concordance = _concordance(solution)
    if concordance is not None:
        model["concordance"] = concordance
    return model


def _finite(value: float) -> float | None:
    """The value, or None in the place of NaN and infinity, which JSON does not have."""
    return float(value) if math.isfinite(value) else None


def _features(solution: SolveResult) -> list[JSONObject]:
    """The chosen columns and their coefficients, the most important first; with more than two classes one for each."""
    problem, coefficients = solution.problem, solution.coefficients
    errors = np.atleast_2d(solution.estimator.standard_errors_)
    weight = np.abs(coefficients).max(axis=0) * solution.spread
    rows: list[JSONObject] = []
    for j in np.argsort(-weight, kind="stable").tolist():
        if not coefficients[:, j].any():
            continue
        for number, label in enumerate(problem.table.classes if len(coefficients) > 1 else [""]):
            value, error = float(coefficients[number, j]), float(errors[number, j])
            row = {
                "name": problem.names[j],
                "coefficient": value,
                "standard_error": _finite(error),
                "z": value / error if error > 0 else None,
                "per_standard_deviation": value * float(solution.spread[j]),
            }
            if label:
                row["label"] = label
            if problem.loss == "cox":
                row["hazard_ratio"] = float(np.exp(value))
            rows.append(row)
    return rows


def _concordance(solution: SolveResult) -> float | None:
    """Harrell's concordance of Cox's model on the table; None for other losses, and where pairs are too many."""
    events, data = solution.problem.events, solution.data
    if events is None or len(events) * float(events.sum()) > _PAIRS:
        return None
    from iobs.optimize.estimators.survival import concordance

    margin = data.margin(solution.coefficients[0], 0.0)
    return _finite(concordance(data.y[:, 0], events, margin, data.weights))


def _path(solution: SolveResult) -> list[JSONObject]:
    names, rows = solution.problem.names, []
    for entry in solution.estimator.path_:
        row = {"k": entry["k"], "value": entry["loss"], "features": [names[j] for j in entry["support"].tolist()]}
        if solution.criterion:
            row.update(score=entry["score"], score_error=_finite(entry["score_error"]))
        rows.append(row)
    return rows


def _fitted(solution: SolveResult) -> JSONObject:
    """The model on the columns of the file that it uses."""
    from iobs.data.fitted import Fitted
    from iobs.optimize.search.hierarchy import pairs_of

    problem, data, coefficients = solution.problem, solution.data, solution.coefficients
    constants = np.atleast_1d(solution.estimator.intercept_)
    kept, codings, start = [], [], 0
    used = np.flatnonzero(coefficients.any(axis=0))
    width = len(problem.table.names)
    products = used[used >= width]
    parents = pairs_of(width)[products - width]
    for coding in problem.table.codings:
        columns = range(start, start + len(coding.names))
        start = columns.stop
        if np.isin(columns, used).any() or np.isin(columns, parents).any():
            codings.append(coding)
            kept += list(columns)
    places = tuple((kept.index(first), kept.index(second)) for first, second in parents.tolist())
    kept += products.tolist()
    survival = None
    if problem.events is not None:  # relative to a row at the means of the columns
        from iobs.optimize.estimators.survival import baseline

        constants = -np.average(data.X, axis=0, weights=data.weights) @ coefficients.T
        margin = data.margin(coefficients[0], constants[0])
        survival = baseline(data.y[:, 0], problem.events, data.weights, margin)
    model = Fitted(
        problem.target,
        problem.loss,
        tuple(problem.table.classes),
        tuple(codings),
        coefficients[:, kept],
        constants,
        problem.offset_name,
        problem.exposure,
        survival,
        places,
        tuple(problem.table.X[:, [j for j in kept if j < width]].mean(axis=0).tolist()),
    )
    return model.to_plain()


def write(file: Path, model: JSONObject) -> None:
    """Write the report as JSON.

    Raises:
        OutputError: the file cannot be written.
    """
    from iobs.core.formats import to_json

    with whole_file(file) as written:
        written.write_text(to_json(model) + "\n", encoding="utf8")
    console.say(f"Wrote {file}")


def draw(file: Path, solution: SolveResult) -> None:
    """Draw the score and the coefficients of every k.

    Raises:
        OutputError: the file cannot be written.
    """
    import matplotlib as mpl

    from iobs.errors import OutputError
    from iobs.optimize.estimators.plots import path_figure

    problem, path = solution.problem, solution.estimator.path_
    scores, name = [entry["loss"] for entry in path], f"{problem.loss} loss"
    if solution.criterion:
        by_folds = solution.criterion.startswith("cv")
        scores = [entry["score"] for entry in path]
        name = "held-out loss per row" if by_folds else f"{solution.criterion.upper()} (lower is better)"
    columns = np.arange(len(problem.names))
    figure = path_figure(
        path, scores, name, chosen=solution.estimator.k_, columns=columns, spread=solution.spread, names=problem.names
    )
    figure.suptitle(problem.target, parse_math=False)
    try:
        with whole_file(file) as written, mpl.rc_context({"text.parse_math": False}):
            figure.savefig(written, dpi=130)
    except ValueError as error:
        raise OutputError(f"Cannot write {file}: {error}.") from error
    console.say(f"Wrote {file}")
