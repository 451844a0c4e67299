"""`iobs solve`: explain one column of a table by k others."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from iobs.cli import console, options
from iobs.cli.columns import Columns
from iobs.cli.limits import Limits
from iobs.cli.selection import Selection

if TYPE_CHECKING:
    from iobs.cli.sides import Sides
    from iobs.cli.solution import Solution
    from iobs.data.tables import Table
    from iobs.optimize.objectives.base import Objective
    from iobs.optimize.refit.fit import Fit


def _gap(given: str | float) -> float:
    """A relative gap from text: "0.02" or "2%".

    Raises:
        typer.BadParameter: the text is neither, or the gap is negative or not finite.
    """
    from iobs.core.patterns import share
    from iobs.errors import PatternError

    try:
        found = share(str(given))
    except PatternError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise typer.BadParameter(f"give a share such as 0.02 or 2%, got {given}")
    return found


@dataclass(frozen=True)
class Proofs:
    """Options that ask for proofs about the best columns."""

    certify: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, help="Bound the distance from the best support; squared loss only."),
    ] = None
    near: Annotated[
        float | None,
        typer.Option(
            metavar="GAP",
            parser=_gap,
            help="List every choice of k columns whose loss is at most this share above the best, 0.02 or 2%, with "
            "a proof that none is missing; squared loss only. The time limit is that of --certify, else 60 s.",
            show_default=False,
        ),
    ] = None

    def check(self, columns: Columns, limits: Limits) -> None:
        """Refuse numbers that are not finite, and proofs about whole categories or bounded coefficients."""
        if columns.interactions is not None and (self.certify is not None or self.near is not None):
            raise typer.BadParameter("it proves nothing about --interactions", param_hint="--certify or --near")
        if limits.given and (self.certify is not None or self.near is not None):
            raise typer.BadParameter("it proves nothing within bounds", param_hint="--certify or --near")
        if columns.whole_categories and (self.certify is not None or self.near is not None):
            raise typer.BadParameter("it proves nothing about --whole-categories", param_hint="--certify or --near")
        if self.certify is not None and not self.certify < math.inf:
            raise typer.BadParameter("give a finite number", param_hint="--certify")


@options.command
def solve(
    data: Annotated[
        Path,
        typer.Argument(
            help="A .csv or .tsv with a header, a .parquet (pyarrow), or an .npz (X and y, or an array per column)."
        ),
    ],
    columns: Columns = Columns(),  # noqa: B008 - frozen
    k: Annotated[
        str,
        typer.Option("-k", help="Number of columns that explain it; cv, cv-1se, bic, ebic or aic choose it."),
    ] = "ebic",
    loss: Annotated[
        str,
        typer.Option(
            "--loss",
            "--family",
            help="squared, logistic (classes), poisson, gamma, tweedie (power 1.5), negative_binomial (alpha 1) or cox "
            "(times, with --status). auto: cox with --status, logistic for text or 0 and 1, else squared.",
        ),
    ] = "auto",
    ridge: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Weight of half the squared coefficients, per standard deviation; the loss is summed over rows.",
        ),
    ] = 0.0,
    selection: Selection = Selection(),  # noqa: B008 - frozen
    limits: Limits = Limits(),  # noqa: B008 - frozen
    proofs: Proofs = Proofs(),
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            callback=options.expand_home,
            help="Write the model (JSON).",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            callback=options.expand_home,
            help="Plot the score and coefficients for every k to this file.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of every random choice.")] = 0,
    talk: options.Talk = options.Talk(),  # noqa: B008 - frozen
) -> None:
    """Choose the k columns of a table that explain another one best, and fit them.

    The coefficients are for the columns as they are; scaling a column never changes the choice.

    Examples:
        iobs solve data.csv --target price -k 5  # the best five columns
        iobs solve data.csv --target price -k cv --plot path.png  # the number chosen by cross-validation
        iobs solve patients.csv --family cox --target time --event status -k 5  # times that may be censored
        iobs solve houses.csv --target price --interactions strong  # with products of two columns
    """
    from iobs.cli import near_optimal, solution, solution_tables
    from iobs.cli.progress import ConsoleSteps
    from iobs.cli.sides import sides_of, with_interactions
    from iobs.data.tables import read_table

    selection.check(columns, limits, k, proofs.certify is not None or proofs.near is not None)
    proofs.check(columns, limits)
    if not ridge < math.inf:
        raise typer.BadParameter("give a finite number", param_hint="--ridge")
    if columns.missing not in ("error", "drop", "mean"):
        raise typer.BadParameter("give error, drop or mean", param_hint="--missing")
    if plot is not None and not plot.suffix:
        plot = plot.with_suffix(".png")
    _check_outputs(output, plot, data)
    missing = cast('Literal["error", "drop", "mean"]', columns.missing)
    table = read_table(
        data,
        columns.target,
        columns.drop or [],
        missing=missing,
        categories=columns.category or [],
        aside=columns.aside,
        target_classes=loss == "logistic",
    )
    table, loss = _with_loss(table, loss, columns.status)
    if proofs.near is not None:
        near_optimal.require_squared(loss)
    sides = sides_of(table, columns, loss, limits)
    if sides.interactions is not None:
        table = with_interactions(table)
    with ConsoleSteps("searching (the first run also compiles)") as steps:
        if selection.knockoff:
            found = selection.solution(table, sides, columns.target, loss, ridge, seed)
        else:
            found = _solution(table, sides, columns, loss, ridge, k, seed)
        model = solution.report(found)
        if proofs.certify is not None:
            steps.update(0, 0, "proving")
            model["certificate"] = _certificate(found.objective, found.size, found.best, proofs.certify)
        if proofs.near is not None:
            steps.update(0, 0, "proving")
            seconds = near_optimal.SECONDS if proofs.certify is None else proofs.certify
            model["near_optimal"] = near_optimal.near_optimal(
                found.objective, found.table.names, found.size, proofs.near, seconds
            )
    try:  # the files come first: the reader of a pipe, such as head, may end the command while it prints
        if output is not None:
            solution.write(output, model)
        if plot is not None:
            solution.draw(plot, found)
    finally:  # a full disk does not cost the table
        if talk.as_json:
            console.print_json(model)
        else:
            solution_tables.show(found, model)


def _solution(table: Table, sides: Sides, columns: Columns, loss: str, ridge: float, k: str, seed: int) -> Solution:
    """Choose k if asked, then fit every k up to it; the last fit by the best known method."""
    from iobs.cli.choice import forced_of, objective_of, size_of
    from iobs.cli.solution import Solution
    from iobs.optimize.search.groups import CoordinateGroups
    from iobs.optimize.search.path import fit_path

    forced = forced_of(table, columns.force or [])
    objective, groups = objective_of(table, loss, ridge, forced, sides)
    size, chooser = size_of(table, loss, ridge, k, seed, forced, sides)
    fits = fit_path(objective, groups, range(size + 1), False, seed, bounds=sides.bounds)
    if not isinstance(groups, CoordinateGroups):
        thorough = fit_path(objective, groups, [size], True, seed, bounds=sides.bounds)[0]
        fits[-1] = min(fits[-1], thorough, key=lambda fit: fit.value)
    return Solution(table, columns.target, loss, objective, fits, chooser, k, sides)


def _check_outputs(output: Path | None, plot: Path | None, data: Path) -> None:
    """Check that output files can be written, before any work.

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


def _with_loss(table: Table, loss: str, status: str | None) -> tuple[Table, str]:
    """The table with its target as classes where it has some, and the loss."""
    import numpy as np

    from iobs.data.fitted import LOSSES
    from iobs.errors import DataError

    values = np.unique(table.y)
    if loss == "auto" and status is not None:
        loss = "cox"
    if (loss == "cox") != (status is not None):
        raise DataError("--loss cox and --status COLUMN (1 for an event, 0 for a censored time) need each other.")
    if loss == "auto":
        loss = "logistic" if table.classes or np.isin(values, (0, 1)).all() else "squared"
    if loss not in LOSSES:
        raise DataError(f"--loss must be auto, {', '.join(LOSSES)}, got {loss!r}.")
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
    return table, loss


def _certificate(objective: Objective, size: int, best: Fit, seconds: float) -> str:
    from iobs.errors import NotPositiveDefiniteError, ProblemError
    from iobs.optimize.bounds.branch_and_bound import certify

    try:
        return certify(objective, size, fit=best, seconds=seconds).message
    except (NotPositiveDefiniteError, ProblemError) as error:
        return f"1-swap optimal; no bound: {error}"
