"""`iobs predict`: predictions of a regression that `iobs solve` wrote."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from iobs.cli import console, options
from iobs.core.files import whole_file

if TYPE_CHECKING:
    from iobs.data.fitted import Predictions


@options.command
def predict(
    model: Path,
    data: options.Table,
    missing: str = "error",
    output: options.Output = None,
    talk: options.Talk = options.Talk(),  # noqa: B008 - frozen
) -> None:
    """Predict the rows of a new table with a model that `iobs solve` wrote.

    A table that lacks a column, or has levels that the model does not know, is refused with all problems at once.

    Args:
        model: The model that iobs solve ... -o wrote.
        data: A table with the columns that the model uses.
        missing: Missing values, where the model was fitted to none: error, drop (no prediction for their rows) or mean
            (of the data that the model was fitted to).
        output: Write the predictions as .csv; without it they are printed.

    Examples:
        iobs predict model.json new.csv  # predict the rows of a new table
        iobs predict model.json new.csv -o predictions.csv  # write the predictions to a file
        iobs predict model.json new.csv --missing mean  # where values are missing
        iobs predict model.json new.csv --json  # the columns of predictions, for a program
    """
    from iobs.errors import ModelError, OutputError

    if not model.exists():
        raise ModelError(f"Cannot read {model}: there is no such file; give the one that iobs solve ... -o wrote.")
    choice = options.missing(missing)
    console.check_files((output,), (model, model / "model.json", data))
    from iobs.data.fitted import Fitted

    predictions = Fitted.load(model).predict(data, choice)
    if output is not None:
        with whole_file(output) as written, written.open("w", newline="", encoding="utf8") as file:
            _write(predictions, file)
        console.say(f"Wrote {output}")
    if talk.as_json:  # the columns have a place of their own, since their names are the user's
        console.print_json({"predictions": predictions})
    elif output is None:
        try:
            _write(predictions, sys.stdout)
        except UnicodeEncodeError as error:
            raise OutputError(f"{error.encoding} has no {error.object[error.start]!r}; write a file with -o.") from None


def _write(predictions: dict[str, Predictions], file: TextIO) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(predictions)
    for row in zip(*predictions.values(), strict=True):
        writer.writerow([repr(value) if isinstance(value, float) else value for value in row])
