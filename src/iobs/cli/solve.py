"""`iobs solve`: explain one column of a table by k others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iobs.cli import console, options

if TYPE_CHECKING:
    from iobs.cli.solution import JSONObject, SolveResult
    from iobs.data.tables import Table
    from iobs.optimize.objectives.design import Array
    from iobs.optimize.refit.within import Bounds

_PROOF_SECONDS = 60.0  # time limit of --near and --select points without --certify


@dataclass(frozen=True)
class TableColumns:
    """Options that say what the columns of the table are.

    Attributes:
        target: The column to be explained.
        drop: A column to leave out; repeatable.
        force: A column that is always used and not counted; repeatable.
        category: A column of numbers that are names of categories; repeatable.
        missing: Missing values: error, drop (their rows) or mean (of the column, with a column that marks them).
        weight: A column of sample weights; whole numbers count rows.
        offset: A column that is added to the linear predictor with coefficient 1.
        exposure: A column of exposures, such as years; its logarithm is the offset.
        status: For cox: the column with 1 where the event happened at the target's time, 0 where it was censored.
        whole_categories: k counts columns of the file: a category enters with all levels.
        interactions: Products of two columns may enter too: strong (only with both columns) or weak (with one of
            them).
    """

    target: str = "y"
    drop: list[str] | None = None
    force: list[str] | None = None
    category: list[str] | None = None
    missing: str = "error"
    weight: str | None = None
    offset: str | None = None
    exposure: str | None = None
    status: Annotated[str | None, typer.Option("--status", "--event")] = None
    whole_categories: bool = False
    interactions: str | None = None

    @property
    def aside(self) -> list[str]:
        """The columns that are not in the design."""
        return [name for name in (self.weight, self.offset, self.exposure, self.status) if name is not None]


@dataclass(frozen=True)
class CoefficientLimits:
    """Options that bound the coefficients.

    Attributes:
        lower ([COLUMN=]NUMBER): Least coefficient of a column, or of all columns; at most 0; repeatable.
        upper ([COLUMN=]NUMBER): Largest coefficient of a column, or of all columns; at least 0; repeatable.
        non_negative: No coefficient below 0; the same as --lower 0.
    """

    lower: list[str] | None = None
    upper: list[str] | None = None
    non_negative: bool = False

    def __bool__(self) -> bool:
        return bool(self.lower or self.upper or self.non_negative)

    def bounds(self, table: Table) -> Bounds | None:
        """The bounds of the columns of the design; None without any.

        Raises:
            DataError: unknown columns, values that are no numbers, bounds that exclude zero; all are named at once.
        """
        from iobs.errors import DataError
        from iobs.optimize.refit.within import Bounds

        if not self:
            return None
        problems: list[str] = []
        low = _values(table, ["0"] * self.non_negative + (self.lower or []), "--lower", float("-inf"), problems)
        high = _values(table, self.upper or [], "--upper", float("inf"), problems)
        if len(problems) == 1:
            raise DataError(problems[0])
        if problems:
            lines = "".join(f"\n  - {problem}" for problem in problems)
            raise DataError(f"The bounds have {len(problems)} problems:{lines}")
        return Bounds.of(low, high, len(table.names))


def _values(table: Table, texts: list[str], option: str, free: float, problems: list[str]) -> Array:
    """The bound of every column of the design (d,); a bound of a column overrules the one of all columns.

    Args:
        table: the data.
        texts: the values of the option.
        option: its name.
        free: the bound of a column without one.
        problems: texts that cannot be used are added here.
    """
    import numpy as np

    files = [coding.name for coding in table.codings for _ in coding.names]
    values = np.full(len(table.names), free)
    for text in sorted(texts, key=lambda text: "=" in text):
        column, _, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            problems.append(f"{option} needs a number, or COLUMN=NUMBER, got {text!r}.")
            continue
        # A category bounds all its levels.
        chosen = [not column or column in pair for pair in zip(files, table.names, strict=True)]
        if not any(chosen):
            problems.append(f"{option} {text}: there is no column {column!r}.")
        wrong = value > 0 if option == "--lower" else value < 0
        if wrong or np.isnan(value):
            sign = "at most 0" if option == "--lower" else "at least 0"
            problems.append(f"{option} {text}: give a number of {sign}; a column that is not chosen has 0.")
        values[chosen] = value
    return values


def _gap(text: str | float) -> float:
    """A relative gap from text: "0.02" or "2%".

    Raises:
        typer.BadParameter: the text is neither, or the gap is negative or not finite.
    """
    from iobs.core.patterns import share
    from iobs.errors import PatternError

    try:
        gap = share(str(text))
    except PatternError:
        gap = math.nan
    if not 0 <= gap < math.inf:
        raise typer.BadParameter(f"give a share such as 0.02 or 2%, got {text}")
    return gap


@dataclass(frozen=True)
class Proofs:
    """Options that ask for proofs about the best columns.

    Attributes:
        certify (SECONDS): Bound the distance from the best support.
        checkpoint: Of --certify: file (.npz) that keeps the unfinished proof; a later run with the same options goes on
            from there.
        near (GAP): List every choice of k columns whose loss is at most this share above the best, 0.02 or 2%, with a
            proof that none is missing. The time limit is that of --certify, else 60 s.
    """

    certify: Annotated[float | None, typer.Option(min=0)] = None
    checkpoint: Path | None = None
    near: Annotated[float | None, typer.Option(parser=_gap)] = None

    def __bool__(self) -> bool:
        return self.certify is not None or self.near is not None

    def check(self, columns: TableColumns) -> None:
        """Refuse numbers that are not finite, and proofs about whole categories or products."""
        others = {
            "about --interactions": columns.interactions is not None,
            "about --whole-categories": columns.whole_categories,
        }
        for name, value in others.items():
            if self and value:
                raise typer.BadParameter(f"it proves nothing {name}", param_hint="--certify or --near")
        if self.certify is not None and not self.certify < math.inf:
            raise typer.BadParameter("give a finite number", param_hint="--certify")
        if self.checkpoint is not None and self.certify is None:
            raise typer.BadParameter("it belongs to --certify", param_hint="--checkpoint")


@dataclass(frozen=True)
class ColumnSelection:
    """Options that say how columns are chosen.

    Attributes:
        select (best|points|knockoff): best: the best k columns. points: a scorecard of at most k columns, each with a
            whole number of points from -5 to 5; two classes. knockoff: columns whose expected share of false ones is at
            most --fdr.
        fdr (SHARE): Of --select knockoff: limit on that share (default 0.1).
    """

    select: str = "best"
    fdr: Annotated[float | None, typer.Option(min=0, max=1)] = None

    def check(self, columns: TableColumns, limits: CoefficientLimits, k: str, proofs: Proofs) -> None:
        """Refuse an unknown choice, and all options that do not go with points or the knockoff filter, at once."""
        if self.select not in ("best", "points", "knockoff"):
            raise typer.BadParameter("give best, points or knockoff", param_hint="--select")
        if self.select != "knockoff" and self.fdr is not None:
            raise typer.BadParameter("it belongs to --select knockoff", param_hint="--fdr")
        if self.select == "best":
            return
        knockoff = self.select == "knockoff"
        if not knockoff and not k.isdecimal():
            raise typer.BadParameter("points needs a number of columns, -k", param_hint="--select")
        others = {
            "-k": knockoff and k != "ebic",
            "--force": columns.force,
            "--weight": knockoff and columns.weight,
            "--offset": columns.offset,
            "--exposure": columns.exposure,
            "--whole-categories": columns.whole_categories,
            "--interactions": columns.interactions,
            "bounds on coefficients": limits,
            "--certify or --near": knockoff and proofs,
            "--checkpoint": proofs.checkpoint is not None,
            "--near": proofs.near is not None and not knockoff,
        }
        refused = [name for name, value in others.items() if value]
        if refused:
            raise typer.BadParameter(f"{self.select} does not go with {', '.join(refused)}", param_hint="--select")


@options.command
def solve(
    data: options.Table,
    columns: TableColumns = TableColumns(),
    k: Annotated[str, typer.Option("-k")] = "ebic",
    loss: Annotated[str, typer.Option("--loss", "--family")] = "auto",
    ridge: Annotated[float, typer.Option(min=0.0)] = 0.0,
    selection: ColumnSelection = ColumnSelection(),
    limits: CoefficientLimits = CoefficientLimits(),
    proofs: Proofs = Proofs(),
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
