"""`iobs solve`: explain one column of a table by k others."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NotRequired, TypedDict, cast

import typer

from iobs.cli import console

if TYPE_CHECKING:
    from collections.abc import Callable

    from iobs.data.tables import Table
    from iobs.optimize.objectives.base import Objective
    from iobs.optimize.refit.fit import Fit


class FeatureRow(TypedDict):
    """A chosen column and its coefficient."""

    name: str
    coefficient: float
    standard_error: float | None
    per_standard_deviation: float


class PathRow(TypedDict):
    """The best columns for one k."""

    k: int
    value: float
    features: list[str]


class ModelReport(TypedDict):
    """The fitted model as written to JSON; `value` is the loss."""

    loss: str
    samples: int
    columns: int
    k: int
    value: float
    value_without_features: float
    explained: float | None
    intercept: float
    classes: list[str]
    features: list[FeatureRow]
    path: list[PathRow]
    certificate: NotRequired[str]


@console.with_groups
def solve(
    data: Annotated[
        Path,
        typer.Argument(
            help="A .csv or .tsv with a header, a .parquet (pyarrow), or an .npz (X and y, or an array per column)."
        ),
    ],
    target: Annotated[str, typer.Option(help="The column to be explained.")] = "y",
    k: Annotated[
        str, typer.Option("-k", help="Number of columns that explain it; cv, bic, ebic or aic choose the number.")
    ] = "ebic",
    loss: Annotated[
        str,
        typer.Option(
            help="squared, logistic (two classes) or poisson; auto: logistic for text or 0 and 1, else squared."
        ),
    ] = "auto",
    ridge: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Weight of half the squared coefficients, per standard deviation; the loss is summed over rows.",
        ),
    ] = 0.0,
    drop: Annotated[
        list[str] | None, typer.Option(help="A column to leave out; repeatable.", show_default=False)
    ] = None,
    force: Annotated[
        list[str] | None,
        typer.Option(help="A column that is always used and not counted; repeatable.", show_default=False),
    ] = None,
    certify: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, help="Bound the distance from the best support; squared loss only."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", callback=console.at_home, help="Write the model as JSON.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot loss and coefficients for every k to this file.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of every random choice.")] = 0,
    talk: console.Talk = console.Talk(),  # noqa: B008 - frozen
) -> None:
    """Choose the k columns of a table that explain another one best, and fit them.

    The coefficients are for the columns as they are; scaling a column never changes the choice.
    """
    from iobs.data.tables import read_table
    from iobs.optimize.search.path import path, standard_errors

    if certify is not None and not certify < math.inf:
        raise typer.BadParameter("give a number of seconds", param_hint="--certify")
    if plot is not None and not plot.suffix:
        plot = plot.with_suffix(".png")
    _check_outputs(output, plot)
    table = read_table(data, target, drop or [])
    loss = _loss(loss, table)
    objective = _objective(table, loss, ridge, force or [])
    size = _size(table, loss, ridge, k, seed, force or [])
    fits = path(objective, range(size + 1), seed=seed)
    best = min(fits[-1], path(objective, [size], seed=seed, thorough=True)[0], key=lambda fit: fit.value)
    fits[-1] = best
    inference = standard_errors(objective, best, len(table.y), intercept=True)
    errors = {
        column: None if math.isnan(error) else error
        for column, error in zip(best.support.tolist(), inference.errors.tolist(), strict=True)
    }
    model = _model(table, objective, fits, loss, errors)
    if certify is not None:
        model["certificate"] = _certificate(objective, size, best, certify)
    if talk.as_json:
        console.print_json(model)
    else:
        _show(model, table, inference.noise)
    if output is not None:
        _write(output, model)
    if plot is not None:
        _draw(plot, table, objective, fits)


def _check_outputs(output: Path | None, plot: Path | None) -> None:
    """Check that output files can be written, before any work.

    Raises:
        UnusableOutputError: the folder is missing or not writable, or matplotlib cannot draw files with that suffix.
    """
    from iobs.errors import UnusableOutputError

    for file in (output, plot):
        place = None if file is None else file if file.exists() else file.parent
        if file is not None and place is not None and (file.is_dir() or not os.access(place, os.W_OK)):
            raise UnusableOutputError(
                f"Cannot write {file}: give a file in a folder that exists and can be written to."
            )
    if plot is not None:
        from matplotlib.backend_bases import FigureCanvasBase

        endings = FigureCanvasBase.get_supported_filetypes()
        if plot.suffix.lower().removeprefix(".") not in endings:
            raise UnusableOutputError(
                f"Cannot draw {plot}: pictures end in {', '.join(f'.{name}' for name in endings)}."
            )


def _loss(loss: str, table: Table) -> str:
    from iobs.errors import DataError

    if loss == "auto":
        loss = "logistic" if table.classes or ((table.y == 0) | (table.y == 1)).all() else "squared"
    if loss not in ("squared", "logistic", "poisson"):
        raise DataError(f"--loss must be squared, logistic, poisson or auto, got {loss!r}.")
    if len(table.classes) > 2:
        raise DataError(
            f"The target has {len(table.classes)} classes; iobs solve takes two, iobs.SparseClassifier takes more."
        )
    if table.classes and loss != "logistic":
        raise DataError(f"The target holds text ({', '.join(table.classes[:3])}); use --loss logistic.")
    if loss == "logistic" and len(set(table.y.tolist())) < 2:
        raise DataError("The target has one value everywhere; there is nothing to tell apart.")
    return loss


def _objective(table: Table, loss: str, ridge: float, force: list[str]) -> Objective:
    import numpy as np

    from iobs.errors import DataError
    from iobs.optimize.objectives.centring import variances
    from iobs.optimize.objectives.linear import LeastSquares, Logistic, Poisson

    unknown = [name for name in force if name not in table.names]
    if unknown:
        raise DataError(f"There is no column {unknown[0]!r} to force in.")
    forced = [table.names.index(name) for name in force]
    choices: dict[str, Callable[..., Objective]] = {"squared": LeastSquares, "logistic": Logistic, "poisson": Poisson}
    spread = variances(table.X, np.ones(len(table.y)), True)  # so that units do not matter
    return choices[loss](table.X, table.y, ridge=_ridge(loss, ridge) * spread, intercept=True, forced=forced)


def _ridge(loss: str, ridge: float) -> float:
    """The ridge; for the logistic loss at least a tiny one, without which separable classes have no finite fit."""
    return max(ridge, 1e-6) if loss == "logistic" else ridge


def _size(table: Table, loss: str, ridge: float, k: str, seed: int, force: list[str]) -> int:
    from iobs.errors import DataError
    from iobs.optimize.estimators import SparseClassifier, SparseRegressor

    free = len(table.names) - len(set(force))
    if k in ("cv", "aic", "bic", "ebic"):
        choice = cast('Literal["cv", "aic", "bic", "ebic"]', k)
        _refuse_choice(table, loss, k)
        forced, ridge = [table.names.index(name) for name in force], _ridge(loss, ridge)
        if loss == "logistic":
            chooser = SparseClassifier(choice, thorough=False, random_state=seed, forced=forced, ridge=ridge)
            return int(chooser.fit(table.X, table.y).k_)
        kind: Literal["poisson", "squared"] = "poisson" if loss == "poisson" else "squared"
        regressor = SparseRegressor(choice, loss=kind, thorough=False, random_state=seed, forced=forced, ridge=ridge)
        return int(regressor.fit(table.X, table.y).k_)
    if not k.isdecimal() or int(k) > free:
        raise DataError(f"-k must be a number from 0 to {free}, or cv, aic, bic, ebic; got {k!r}.")
    return int(k)


def _refuse_choice(table: Table, loss: str, k: str) -> None:
    """Refuse a target that choosing k cannot handle.

    Raises:
        DataError: more than two values with the logistic loss, or too few rows for cross-validation.
    """
    from collections import Counter

    from iobs.errors import DataError

    counts = Counter(table.y.tolist())
    if loss == "logistic" and len(counts) > 2:
        raise DataError(f"-k {k} with --loss logistic needs a target of two values, got {len(counts)}; give a number.")
    most = max(counts.values()) if loss == "logistic" else len(table.y)
    if k == "cv" and most < 5:
        needed = "5 rows of one class" if loss == "logistic" else "5 rows"
        raise DataError(f"-k cv cuts the table into 5 parts and needs {needed}, there are {most}; give a number.")


def _model(
    table: Table, objective: Objective, fits: list[Fit], loss: str, errors: dict[int, float | None]
) -> ModelReport:
    from iobs.optimize.refit.newton import refit

    best = fits[-1]
    # The baseline has no column, not even the forced ones: only the intercept, where it is a coordinate.
    constant = refit(objective, objective.forced[objective.forced >= len(table.names)])
    theta, intercept = objective.split(best.theta)
    spread = table.X.std(axis=0)
    features: list[FeatureRow] = [
        {
            "name": table.names[j],
            "coefficient": float(theta[j]),
            "standard_error": errors[j],
            "per_standard_deviation": float(theta[j] * spread[j]),
        }
        for j in sorted(theta.nonzero()[0].tolist(), key=lambda j: -abs(theta[j]) * spread[j])
    ]
    return {
        "loss": loss,
        "samples": len(table.y),
        "columns": len(table.names),
        "k": len(fits) - 1,
        "value": best.value,
        "value_without_features": constant.value,
        "explained": _explained(objective, best, constant),
        "intercept": intercept,
        "classes": table.classes,
        "features": features,
        "path": [{"k": k, "value": fit.value, "features": _names(table, objective, fit)} for k, fit in enumerate(fits)],
    }


def _explained(objective: Objective, best: Fit, constant: Fit) -> float | None:
    """The share of the baseline's loss that the columns explain, ridge terms excluded; None if the baseline's is 0."""
    from iobs.optimize.search.path import unpenalised

    empty = unpenalised(objective, constant)
    return 1 - unpenalised(objective, best) / empty if empty > 0 else None


def _names(table: Table, objective: Objective, fit: Fit) -> list[str]:
    return [table.names[j] for j in objective.split(fit.theta)[0].nonzero()[0]]


def _certificate(objective: Objective, size: int, best: Fit, seconds: float) -> str:
    from iobs.errors import NotPositiveDefiniteError, ProblemError
    from iobs.optimize.bounds.branch_and_bound import certify

    try:
        return certify(objective, size, fit=best, seconds=seconds).message
    except (NotPositiveDefiniteError, ProblemError) as error:
        return f"1-swap optimal; no bound: {error}"


def _write(file: Path, model: ModelReport) -> None:
    from iobs.errors import OutputError
    from iobs.report.numbers import to_json

    try:
        file.write_text(to_json(model) + "\n", encoding="utf8")
    except OSError as error:
        raise OutputError(f"Cannot write {file}: {error.strerror}.") from error
    console.say(f"Wrote {file}")


def _draw(file: Path, table: Table, objective: Objective, fits: list[Fit]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    from iobs.errors import OutputError

    sizes = range(len(fits))
    coefficients = [objective.split(fit.theta)[0] * table.X.std(axis=0) for fit in fits]
    chosen = coefficients[-1].nonzero()[0]
    with mpl.rc_context({"text.parse_math": False}):  # column names may hold dollar signs
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
        left.plot(sizes, [fit.value for fit in fits], marker="o", markersize=3)
        left.set(xlabel="k", ylabel="loss", title="loss of the best k columns")
        lines = [right.plot(sizes, [each[j] for each in coefficients], marker="o", markersize=3)[0] for j in chosen]
        right.set(xlabel="k", ylabel="coefficient per standard deviation", title="coefficients of the last columns")
        if 0 < len(lines) <= 12:
            legend = right.legend(lines, ["name"] * len(lines), fontsize="small")
            for text, j in zip(legend.get_texts(), chosen, strict=True):
                text.set_text(table.names[j])  # a label passed to legend must not begin with an underscore
        try:
            figure.savefig(file, dpi=130)
        except (OSError, ValueError) as error:
            raise OutputError(f"Cannot write {file}: {error}.") from error
        finally:
            pyplot.close(figure)
    console.say(f"Wrote {file}")


def _show(model: ModelReport, table: Table, noise: float) -> None:
    from rich.table import Table as RichTable

    out = console.output_console()
    used = len(model["features"])  # k and the forced columns
    title = f"{used} of {model['columns']} columns, {model['samples']:,} rows, {model['loss']} loss"
    shown = RichTable(title=title, title_justify="left", header_style="bold")
    shown.add_column("column")
    for heading in ("coefficient", "standard error", "z", "per standard deviation"):
        shown.add_column(heading, justify="right")
    for row in model["features"]:
        error = row["standard_error"]
        shown.add_row(
            row["name"],
            f"{row['coefficient']:.5g}",
            f"{error:.2g}" if error is not None else "–",
            f"{row['coefficient'] / error:.1f}" if error else "–",
            f"{row['per_standard_deviation']:.3g}",
        )
    shown.add_row("(intercept)", f"{model['intercept']:.5g}", "", "", "")
    out.print(shown)
    empty, value = model["value_without_features"], model["value"]
    share = "nothing to explain" if model["explained"] is None else f"{model['explained']:.1%} of it explained"
    out.print(f"loss {value:.6g}, {empty:.6g} without any column: {share}")
    if model["loss"] == "squared":
        out.print(
            "no rows are left to estimate the noise from"
            if math.isnan(noise)
            else f"noise {noise:.4g} (standard deviation)"
        )
    elif table.classes:
        out.print(f"coefficients are for {table.classes[1]!r} against {table.classes[0]!r}")
    out.print("Standard errors ignore that the columns were chosen by the same data.")
    if "certificate" in model:
        out.print(f"certificate: {model['certificate']}")
