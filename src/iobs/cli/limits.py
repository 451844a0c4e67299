"""Options of `iobs solve` that bound its coefficients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from iobs.data.tables import Table
    from iobs.optimize.objectives.design import Array
    from iobs.optimize.refit.within import Bounds


@dataclass(frozen=True)
class Limits:
    """Options that bound the coefficients."""

    lower: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[COLUMN=]NUMBER",
            help="Least coefficient of a column, or of all columns; at most 0; repeatable.",
            show_default=False,
        ),
    ] = None
    upper: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[COLUMN=]NUMBER",
            help="Largest coefficient of a column, or of all columns; at least 0; repeatable.",
            show_default=False,
        ),
    ] = None
    non_negative: Annotated[
        bool, typer.Option("--non-negative", help="No coefficient below 0; the same as --lower 0.")
    ] = False

    @property
    def given(self) -> bool:
        """True if some coefficient has a bound."""
        return bool(self.lower or self.upper or self.non_negative)

    def bounds(self, table: Table) -> Bounds | None:
        """The bounds of the columns of the design; None without any.

        Raises:
            DataError: unknown columns, values that are no numbers, bounds that exclude zero; all are named at once.
        """
        from iobs.errors import DataError
        from iobs.optimize.refit.within import Bounds

        if not self.given:
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
        texts: what was given to the option.
        option: its name.
        free: the bound of a column without one.
        problems: texts that cannot be used are added here.
    """
    import numpy as np

    owners = [coding.name for coding in table.codings for _ in coding.names]
    values = np.full(len(table.names), free)
    for text in sorted(texts, key=lambda text: "=" in text):
        column, _, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            problems.append(f"{option} needs a number, or COLUMN=NUMBER, got {text!r}.")
            continue
        chosen = [
            not column or column in pair for pair in zip(owners, table.names, strict=True)
        ]  # a category bounds all its levels
        if not any(chosen):
            problems.append(f"{option} {text}: there is no column {column!r}.")
        wrong = value > 0 if option == "--lower" else value < 0
        if wrong or np.isnan(value):
            sign = "at most 0" if option == "--lower" else "at least 0"
            problems.append(f"{option} {text}: give a number of {sign}; a column that is not chosen has 0.")
        values[chosen] = value
    return values
