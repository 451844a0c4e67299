"""`iobs reproduce`: run a table or figure of the paper, and compare it with the published numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from iobs.cli import console
from iobs.cli.completion import words
from iobs.paper import Experiment, Request, Results, experiments, find


def _completed(incomplete: str) -> list[str]:
    return words([experiment.name for experiment in experiments()])(incomplete)


def _own(metavar: str, text: str, callback: Callable[[Path | None], Path | None] | None = None) -> object:
    panel = "Your own network and data"
    return typer.Option(metavar=metavar, help=text, show_default=False, rich_help_panel=panel, callback=callback)


@console.with_groups
def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Name of the experiment; leave it out to list all.",
            show_default=False,
            autocompletion=_completed,
        ),
    ] = None,
    stand_in: Annotated[
        bool, typer.Option("--stand-in", help="Use a small network or data set instead of the paper's.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", callback=console.at_home, help="Folder for figures and logs.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str | None, _own("MODEL", "Run this network instead of the paper's, with the paper's settings.")
    ] = None,
    data: Annotated[
        list[str] | None, _own("SOURCE", "Calibration data instead of the paper's; as in iobs prune.")
    ] = None,
    eval_data: Annotated[
        list[str] | None,
        _own("SOURCE", "Evaluation data instead of the paper's; for language models one per corpus, in order."),
    ] = None,
    questions: Annotated[
        Path | None,
        _own("FILE", "MMLU questions, .jsonl(.gz); by default lm-eval fetches them.", console.at_home),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Number of rounds instead of the paper's.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of images, windows, or questions per subject.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random choices.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep a checkpoint in the folder of -o, and continue from an existing one.")
    ] = False,
    talk: console.Talk = console.Talk(),  # noqa: B008 - frozen
) -> None:
    """Run one table or figure of the paper and show published and measured numbers side by side."""
    from iobs.models import make_folder
    from iobs.pruning.driver import require_seed

    out = console.output_console()
    if name is None:
        entries = experiments()
        if talk.as_json:
            found = [{"name": entry.name, "place": entry.place, "title": entry.title} for entry in entries]
            console.print_json({"experiments": found})
        else:
            out.print(_list(entries))
        return
    experiment = find(name)
    require_seed(seed)
    request = Request(stand_in, seed, output, console.say, model, tuple(data or ()), tuple(eval_data or ()))
    request = replace(request, questions=questions, rounds=rounds, limit=limit, resume=resume)
    experiment.check(request)
    if output is not None:
        make_folder(output)
    results = experiment.run(request)
    if talk.as_json:
        console.print_json(
            {
                "name": experiment.name,
                "measure": results.measure,
                "stand_in": stand_in and experiment.stand_in != "",
                "rows": [vars(row) for row in results.rows],
                "notes": results.notes,
            }
        )
        return
    out.print(_comparison(experiment, results))
    for note in results.notes:
        out.print(note)


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
