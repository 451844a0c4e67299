"""`iobs solve`: explain one column of a table by k others."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from iobs.cli import console

if TYPE_CHECKING:
    from collections.abc import Callable

    from iobs.optimize.objective import Objective
    from iobs.optimize.refit import Fit
    from iobs.optimize.tabular import Table


def solve(
    data: Annotated[
        Path,
        typer.Argument(
            help="A .csv or .tsv with a header, a .parquet (by pyarrow), or an .npz with X and y, or columns."
        ),
    ],
    target: Annotated[str, typer.Option(help="The column to be explained.")] = "y",
    k: Annotated[
        str, typer.Option("-k", help="How many columns explain it; or cv, bic, ebic, aic to have it chosen.")
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
            help="Weight of half the squared coefficients, per standard deviation, against the loss summed over rows.",
        ),
    ] = 0.0,
    drop: Annotated[list[str] | None, typer.Option(help="A column to leave out; repeat.", show_default=False)] = None,
    force: Annotated[
        list[str] | None, typer.Option(help="A column that is always in, not counted; repeat.", show_default=False)
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
        Path | None, typer.Option(help="Draw loss and coefficients for every k to a .png.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of every random choice.")] = 0,
    as_json: console.AsJson = False,
) -> None:
    """Choose the k columns of a table that explain another one best, and fit them.

    The coefficients are for the columns as they are; scaling a column never changes the choice.
    """
    from iobs.optimize.path import path, standard_errors
    from iobs.optimize.tabular import read_table

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
    if as_json:
        console.print_json(model)
    else:
        _show(model, table, inference.noise)
    if output is not None:
        _write(output, model)
    if plot is not None:
        _draw(plot, table, objective, fits)


def _check_outputs(output: Path | None, plot: Path | None) -> None:
    """Files that cannot be written are found before any work.

    Raises:
        OutputError: the folder is missing or may not be written to, or no picture has that ending.
    """
    from iobs.errors import OutputError

    for file in (output, plot):
        place = None if file is None else file if file.exists() else file.parent
        if file is not None and place is not None and (file.is_dir() or not os.access(place, os.W_OK)):
            raise OutputError(f"Cannot write {file}: give a file in a folder that exists and can be written to.")
    if plot is not None:
        from matplotlib.backend_bases import FigureCanvasBase

        endings = FigureCanvasBase.get_supported_filetypes()
        if plot.suffix.lower().removeprefix(".") not in endings:
            raise OutputError(f"Cannot draw {plot}: pictures end in {', '.join(f'.{name}' for name in endings)}.")


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
    from iobs.optimize.designs import variances
    from iobs.optimize.objectives import LeastSquares, Logistic, Poisson

    unknown = [name for name in force if name not in table.names]
    if unknown:
        raise DataError(f"There is no column {unknown[0]!r} to force in.")
    forced = [table.names.index(name) for name in force]
    choices: dict[str, Callable[..., Objective]] = {"squared": LeastSquares, "logistic": Logistic, "poisson": Poisson}
    spread = variances(table.X, np.ones(len(table.y)), True)  # units do not matter
    return choices[loss](table.X, table.y, ridge=_ridge(loss, ridge) * spread, intercept=True, forced=forced)


def _ridge(loss: str, ridge: float) -> float:
    """Classes that can be separated have no finite coefficients without at least a trace of it."""
    return max(ridge, 1e-6) if loss == "logistic" else ridge


def _size(table: Table, loss: str, ridge: float, k: str, seed: int, force: list[str]) -> int:
    from iobs.errors import DataError
    from iobs.optimize.estimators import SparseClassifier, SparseRegressor

    free = len(table.names) - len(set(force))
    if k in ("cv", "aic", "bic", "ebic"):
        _refuse_choice(table, loss, k)
        choice: Any = k
        forced = [table.names.index(name) for name in force]
        settings: dict[str, Any] = {"thorough": False, "random_state": seed, "forced": forced}
        settings["ridge"] = _ridge(loss, ridge)
        if loss == "logistic":
            return int(SparseClassifier(choice, **settings).fit(table.X, table.y).k_)
        kind: Any = "poisson" if loss == "poisson" else "squared"
        return int(SparseRegressor(choice, loss=kind, **settings).fit(table.X, table.y).k_)
    if not k.isdecimal() or int(k) > free:
        raise DataError(f"-k must be a number from 0 to {free}, or cv, aic, bic, ebic; got {k!r}.")
    return int(k)


def _refuse_choice(table: Table, loss: str, k: str) -> None:
    """What choosing k needs of the target beyond what a fit does."""
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
) -> dict[str, Any]:
    from iobs.optimize.refit import refit

    best = fits[-1]
    # Forced columns explain, too: the model without any column holds the intercept alone, where it is a coordinate.
    constant = refit(objective, objective.forced[objective.forced >= len(table.names)])
    theta, intercept = objective.split(best.theta)
    spread = table.X.std(axis=0)
    features = [
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
    """The share of the loss without any column that the columns take away, whatever the ridge costs."""
    from iobs.optimize.path import unpenalised

    empty = unpenalised(objective, constant)
    return 1 - unpenalised(objective, best) / empty if empty > 0 else None


def _names(table: Table, objective: Objective, fit: Fit) -> list[str]:
    return [table.names[j] for j in objective.split(fit.theta)[0].nonzero()[0]]


def _certificate(objective: Objective, size: int, best: Fit, seconds: float) -> str:
    from iobs.errors import NotPositiveDefiniteError, ProblemError
    from iobs.optimize.certificate import certify

    try:
        return certify(objective, size, fit=best, seconds=seconds).message
    except (NotPositiveDefiniteError, ProblemError) as error:
        return f"1-swap optimal; no bound: {error}"


def _write(file: Path, model: dict[str, Any]) -> None:
    from iobs.errors import OutputError
    from iobs.report.numbers import to_json

    try:
        file.write_text(to_json(model) + "\n")
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
    with mpl.rc_context({"text.parse_math": False}):  # names of columns may hold dollars
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
        left.plot(sizes, [fit.value for fit in fits], marker="o", markersize=3)
        left.set(xlabel="k", ylabel="loss", title="loss of the best k columns")
        lines = [right.plot(sizes, [each[j] for each in coefficients], marker="o", markersize=3)[0] for j in chosen]
        right.set(xlabel="k", ylabel="coefficient per standard deviation", title="coefficients of the last columns")
        if 0 < len(lines) <= 12:
            legend = right.legend(lines, ["name"] * len(lines), fontsize="small")
            for text, j in zip(legend.get_texts(), chosen, strict=True):
                text.set_text(table.names[j])  # a label given to legend must not begin with an underscore
        try:
            figure.savefig(file, dpi=130)
        except (OSError, ValueError) as error:
            raise OutputError(f"Cannot write {file}: {error}.") from error
        finally:
            pyplot.close(figure)
    console.say(f"Wrote {file}")


def _show(model: dict[str, Any], table: Table, noise: float) -> None:
    from rich.table import Table as RichTable

    out = console.output_console()
    used = len(model["features"])  # k and the forced ones
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
