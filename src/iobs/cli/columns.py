"""Options of `iobs solve` that say what the columns of a table are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass(frozen=True)
class Columns:
    """Options that say what the columns of the table are."""

    target: Annotated[str, typer.Option(help="The column to be explained.")] = "y"
    drop: Annotated[list[str] | None, typer.Option(help="A column to leave out; repeatable.", show_default=False)] = (
        None
    )
    force: Annotated[
        list[str] | None,
        typer.Option(help="A column that is always used and not counted; repeatable.", show_default=False),
    ] = None
    category: Annotated[
        list[str] | None,
        typer.Option(help="A column of numbers that are names of categories; repeatable.", show_default=False),
    ] = None
    missing: Annotated[
        str,
        typer.Option(
            help="Missing values: error, drop (their rows) or mean (of the column, with a column that marks them)."
        ),
    ] = "error"
    weight: Annotated[
        str | None, typer.Option(help="A column of sample weights; whole numbers count rows.", show_default=False)
    ] = None
    offset: Annotated[
        str | None,
        typer.Option(help="A column that is added to the linear predictor with coefficient 1.", show_default=False),
    ] = None
    exposure: Annotated[
        str | None,
        typer.Option(help="A column of exposures, such as years; its logarithm is the offset.", show_default=False),
    ] = None
    status: Annotated[
        str | None,
        typer.Option(
            "--status",
            "--event",
            help="For cox: the column with 1 where the event happened at the target's time, 0 where it was censored.",
            show_default=False,
        ),
    ] = None
    whole_categories: Annotated[
        bool,
        typer.Option("--whole-categories", help="k counts columns of the file: a category enters with all levels."),
    ] = False
    interactions: Annotated[
        str | None,
        typer.Option(
            help="Products of two columns may enter too: strong (only with both columns) or weak (with one of them).",
            show_default=False,
        ),
    ] = None

    @property
    def aside(self) -> list[str]:
        """The columns that are not in the design."""
        return [name for name in (self.weight, self.offset, self.exposure, self.status) if name is not None]
