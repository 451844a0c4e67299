"""`iobs predict`: predictions of a regression that `iobs solve` wrote."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Annotated, TextIO

import typer

from iobs.cli import console
from iobs.core.files import whole_file


@console.with_groups
def predict(
    model: Annotated[Path, typer.Argument(help="The model that iobs solve ... -o wrote.", show_default=False)],
    data: Annotated[Path, typer.Argument(help="A table with the columns that the model uses.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            callback=console.at_home,
            help="Write the predictions as .csv; without it they are printed.",
            show_default=False,
        ),
    ] = None,
    talk: console.Talk = console.Talk(),  # noqa: B008 - frozen
) -> None:
    """Predict the rows of a new table with a model that `iobs solve` wrote.

    A table that lacks a column, or has levels that the model does not know, is refused with all problems at once.
    """
    from iobs.data.fitted import Fitted
    from iobs.errors import OutputError

    console.check_files((output,), (model, model / "model.json", data))
    found = Fitted.load(model).predict(data)
    if output is not None:
        with whole_file(output) as written, written.open("w", newline="", encoding="utf8") as file:
            _write(found, file)
        console.say(f"Wrote {output}")
    if talk.as_json:  # the columns have a place of their own, since their names are the user's
        console.print_json({"predictions": found})
    elif output is None:
        try:
            _write(found, sys.stdout)
        except UnicodeEncodeError as error:
            raise OutputError(f"{error.encoding} has no {error.object[error.start]!r}; write a file with -o.") from None


def _write(found: dict[str, list[str] | list[float]], file: TextIO) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(found)
    for row in zip(*found.values(), strict=True):
        writer.writerow([repr(value) if isinstance(value, float) else value for value in row])
