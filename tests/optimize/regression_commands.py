"""The commands of sparse regression as a user calls them, and tables for them."""

from __future__ import annotations

import csv
import io

import numpy as np
import typer
from typer.testing import CliRunner, Result

from iobs.cli.predict import predict
from iobs.cli.solve import solve

app = typer.Typer()
app.command("solve")(solve)
app.command("predict")(predict)


def invoked(*arguments: object) -> Result:
    """The result of a command."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run(*arguments: object) -> str:
    """What a command prints; its exception is raised."""
    result = invoked(*arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: object) -> str:
    """What a command says of arguments that it does not take, without line breaks and frames."""
    result = invoked(*arguments)
    assert result.exit_code == 2
    return " ".join(result.output.replace("│", " ").split())


def column(text: str, name: str) -> list[str]:
    """A column of a table of comma-separated values."""
    return [row[name] for row in csv.DictReader(io.StringIO(text))]


def write_table(file, names, *columns):
    """Write columns (n,) or (n, m) as comma-separated values, floats in full."""
    rows = zip(*(part for each in columns for part in np.atleast_2d(np.asarray(each).T)), strict=True)
    with file.open("w", newline="", encoding="utf8") as out:
        writer = csv.writer(out)
        writer.writerow(names)
        writer.writerows([entry.item() for entry in row] for row in rows)
    return file
