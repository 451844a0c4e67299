"""`iobs solve`: explain one column of a table by k others."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iobs.cli import console, options
from iobs.cli.solve_options import CoefficientLimits, ColumnSelection, Proofs, TableColumns

if TYPE_CHECKING:
    from iobs.cli.solution import JSONObject, SolveResult
    from iobs.optimize.objectives.design import Array

_PROOF_SECONDS = 60.0  # time limit of --near and --select points without --certify


@options.command
def solve(
    data: options.Table,
    columns: TableColumns = TableColumns(),  # noqa: B008 - frozen
    k: Annotated[str, typer.Option("-k")] = "ebic",
    loss: Annotated[str, typer.Option("--loss", "--family")] = "auto",
    ridge: Annotated[float, typer.Option(min=0.0)] = 0.0,
    selection: ColumnSelection = ColumnSelection(),  # noqa: B008 - frozen
    limits: CoefficientLimits = CoefficientLimits(),  # noqa: B008 - frozen
    proofs: Proofs = Proofs(),  # noqa: B008 - frozen
    output: options.Output = None,
    plot: Path | None = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    talk: options.Talk = options.Talk(),  # noqa: B008 - frozen
) -> None:
    """Choose the k columns of a table that explain another one best, and fit them.

    The coefficients are for the columns as they are; scaling a column never changes the choice.

    Args:
        data: A .csv or .tsv with a header, a .parquet (pyarrow), or an .npz (X and y, or an array per column).
        k: Number of columns that explain it; cv, cv-1se, bic, ebic or aic choose it.
        loss: squared, logistic (classes), poisson, gamma, tweedie (power 1.5), negative_binomial (alpha 1) or cox
            (times, with --status). auto: cox with --status, logistic for text or 0 and 1, else squared.
        ridge: Weight of half the squared coefficients, per standard deviation; the loss is summed over rows.
        output: Write the model (JSON).
        plot: Plot the score and coefficients for every k to this file.
        seed: Seed of every random choice.

    Examples:
        iobs solve data.csv --target price -k 5  # the best five columns
        iobs solve data.csv --target price -k cv --plot path.png  # the number chosen by cross-validation
        iobs solve patients.csv --family cox --target time --event status -k 5  # times that may be censored
        iobs solve patients.csv --target ill -k 5 --select points  # a scorecard
        iobs solve houses.csv --target price --interactions strong  # with products of two columns
    """
    selection.check(columns, limits, k, proofs)
    proofs.check(columns)
    if not ridge < math.inf:
        raise typer.BadParameter("give a finite number", param_hint="--ridge")
    missing = options.missing(columns.missing)
    if plot is not None and not plot.suffix:
        plot = plot.with_suffix(".png")
    _check_outputs(output, plot, data)

    from iobs.cli import solution, solution_tables
    from iobs.cli.console import ConsoleSteps
    from iobs.cli.solve_inputs import read_regression
    from iobs.data.tables import read_table

    table = read_table(
        data,
        columns.target,
        columns.drop or [],
        missing=missing,
        categories=columns.category or [],
        aside=columns.aside,
        target_classes=loss == "logistic",
    )
    problem = read_regression(table, columns, loss, limits, ridge)
    with ConsoleSteps("searching") as steps:
        if selection.select == "knockoff":
            result = solution.knockoff_columns(problem, 0.1 if selection.fdr is None else selection.fdr, seed)
        elif selection.select == "points":
            seconds = _PROOF_SECONDS if proofs.certify is None else proofs.certify
            result = solution.card_columns(problem, int(k), seconds, seed)
        else:
            result = solution.best_columns(problem, k, seed)
        model = solution.report(result)
        if proofs and result.card is None:
            steps.update(0, 0, "proving")
        if proofs.certify is not None and result.card is None:
            model["certificate"] = _certificate(result, proofs.certify, proofs.checkpoint, steps)
        if proofs.near is not None:
            seconds = _PROOF_SECONDS if proofs.certify is None else proofs.certify
            model["near_optimal"] = _near_optimal(result, proofs.near, seconds)
    try:  # the files come first: the reader of a pipe, such as head, may end the command while it prints
        if output is not None:
            solution.write(output, model)
        if plot is not None:
            solution.draw(plot, result)
    finally:  # a full disk does not cost the table
        if talk.as_json:
            console.print_json(model)
        else:
            solution_tables.show(result, model)


def _check_outputs(output: Path | None, plot: Path | None, data: Path) -> None:
    """Raise unless the output files can be written, before any work.

    Raises:
        UnusableOutputError: as `console.check_files`, or matplotlib cannot draw files with that suffix.
    """
    from iobs.errors import UnusableOutputError

    console.check_files((output, plot), (data,))
    if plot is not None:
        from matplotlib.backend_bases import FigureCanvasBase

        endings = FigureCanvasBase.get_supported_filetypes()
        if plot.suffix.lower().removeprefix(".") not in endings:
            raise UnusableOutputError(
                f"Cannot draw {plot}: figures end in {', '.join(f'.{name}' for name in endings)}."
            )


def _certificate(result: SolveResult, seconds: float, checkpoint: Path | None, steps: console.ConsoleSteps) -> str:
    """The result of `certify` in words; its progress is shown."""
    from iobs.errors import NotPositiveDefiniteError, ProblemError
    from iobs.optimize.bounds.branch_and_bound import certify

    path, k = result.path, result.estimator.k_
    lower, upper = _limits(result)
    try:
        return certify(
            path.objective,
            k,
            fit=path.fit,
            seconds=seconds,
            lower=lower,
            upper=upper,
            on_progress=lambda state: steps.update(0, 0, f"proving: {state}"),
            checkpoint=checkpoint,
        ).message
    except (NotPositiveDefiniteError, ProblemError) as error:
        return f"1-swap optimal; no bound: {error}"


def _limits(result: SolveResult) -> tuple[Array | None, Array | None]:
    """The lower and the upper bounds of the coefficients."""
    bounds = result.problem.bounds
    return (None, None) if bounds is None else (bounds.lower, bounds.upper)


def _near_optimal(result: SolveResult, gap: float, seconds: float) -> JSONObject:
    """Every model of k columns at most a relative `gap` above the best loss, and the importance of every column."""
    from iobs.optimize.bounds.rashomon import rashomon_set

    names = result.problem.names
    lower, upper = _limits(result)
    models = rashomon_set(
        result.path.objective, result.estimator.k_, gap=gap, seconds=seconds, lower=lower, upper=upper
    )
    scale = max(abs(models.best), 1e-300)
    return {
        "gap": gap,
        "complete": models.complete,
        "message": models.message,
        "models": [
            {
                "features": [names[j] for j in member.support],
                "coefficients": member.coefficients.tolist(),
                "above_best": max(0.0, (member.loss - models.best) / scale),
            }
            for member in models
        ],
        "columns": [
            {
                "name": names[row.feature],
                "share": row.share,
                "least_rise": row.least,
                "most_rise": row.most,
                "best_without": row.without if math.isfinite(row.without) else None,
            }
            for row in models.importance()
        ],
    }
