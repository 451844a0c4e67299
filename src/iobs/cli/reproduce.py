"""`iobs reproduce`: a table or figure of the paper, published and measured side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from iobs.cli import console
from iobs.paper import Experiment, Request, Results, experiments, find


def reproduce(
    name: Annotated[str | None, typer.Argument(help="Which one; nothing lists them.", show_default=False)] = None,
    stand_in: Annotated[
        bool, typer.Option("--stand-in", help="Use a small network or data set in place of one to be fetched.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for pictures and logs.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of every random choice.")] = 0,
    as_json: console.AsJson = False,
) -> None:
    """Run one table or figure of the paper and show published and measured numbers side by side."""
    out = console.output_console()
    if name is None:
        out.print(_list(experiments()))
        return
    experiment = find(name)
    results = experiment.run(Request(stand_in=stand_in, seed=seed, output=output, say=console.say))
    if as_json:
        console.print_json(
            {"name": experiment.name, "measure": results.measure, "rows": [vars(r) for r in results.rows]}
        )
        return
    out.print(_comparison(experiment, results))
    for note in results.notes:
        out.print(note, markup=False)


def _list(entries: list[Experiment]) -> Table:
    table = Table(title="Experiments of the paper", title_justify="left", header_style="bold")
    for column in ("name", "in the paper", "what it shows", "with --stand-in"):
        table.add_column(column)
    for entry in entries:
        table.add_row(entry.name, entry.place, entry.title, entry.stand_in or "–")
    return table


def _comparison(experiment: Experiment, results: Results) -> Table:
    title = f"{experiment.place}: {experiment.title}. {results.measure}"
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("setting")
    table.add_column("method")
    table.add_column("published", justify="right")
    table.add_column("measured", justify="right")
    for row in results.rows:
        table.add_row(row.setting, row.method, _number(row.published), _number(row.measured))
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.4g}"
