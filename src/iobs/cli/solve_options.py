"""Options of `iobs solve`: the columns of the table, bounds on coefficients, the selection, proofs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from iobs.data.tables import Table
    from iobs.optimize.objectives.design import Array
    from iobs.optimize.refit.within import Bounds


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
