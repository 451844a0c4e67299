"""Run a table or figure of the paper, and compare it with the published numbers.

    python benchmarks/reproduce.py [NAME] [--stand-in] [-o FOLDER]

Without NAME it lists the experiments; --help shows all options. The experiments are in the folder paper_tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer
from paper_tables import Experiment, Request, Results, experiments, find
from rich.table import Table
from typer.core import TyperCommand

from iobs.cli import console, options


@dataclass(frozen=True)
class InputOptions:
    """Options for a network and data in place of the paper's.

    Attributes:
        model (MODEL): Run this network instead of the paper's, with the paper's settings.
        data (SOURCE): Calibration data instead of the paper's; as in iobs prune.
        eval_data (SOURCE): Evaluation data instead of the paper's; for language models one per corpus, in order.
        questions (FILE): MMLU questions, .jsonl(.gz); by default lm-eval fetches them.
    """

    panel: ClassVar = "Your own network and data"
    model: str | None = None
    data: list[str] | None = None
    eval_data: list[str] | None = None
    questions: Path | None = None


@options.command
def reproduce(
    name: Annotated[str | None, typer.Argument()] = None,
    *,
    stand_in: bool = False,
    output: options.Output = None,
    inputs: InputOptions,
    rounds: options.OptionalPositive = None,
    limit: options.OptionalPositive = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    resume: bool = False,
    talk: options.Talk,
) -> None:
    """Run one table or figure of the paper and show published and measured numbers side by side.

    Args:
        name: Name of the experiment; leave it out to list all.
        stand_in: Use a small network or data set instead of the paper's.
        output: Folder for figures and logs.
        rounds: Number of rounds instead of the paper's.
        limit: Maximum number of images, windows, or questions per subject.
        seed: Seed of all random choices.
        resume: Keep a checkpoint in the folder of -o, and continue from an existing one.
    """
    from iobs.core.outputs import make_folder
    from iobs.pruning.driver import require_seed

    out = console.output_console()
    if name is None:
        entries = experiments()
        if talk.as_json:
            listed = [{"name": entry.name, "place": entry.place, "title": entry.title} for entry in entries]
            console.print_json({"experiments": listed})
        else:
            out.print(_list(entries))
        return
    experiment = find(name)
    require_seed(seed)
    request = Request(
        stand_in,
        seed,
        output,
        console.say,
        model=inputs.model,
        data=tuple(inputs.data or ()),
        eval_data=tuple(inputs.eval_data or ()),
        questions=inputs.questions,
        rounds=rounds,
        limit=limit,
        resume=resume,
    )
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


class ErrorsAsLines(TyperCommand):
    """Command that runs under `console.errors_as_lines`."""

    def invoke(self, ctx):
        """Run the command."""
        with console.errors_as_lines():
            return super().invoke(ctx)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(cls=ErrorsAsLines)(reproduce)


if __name__ == "__main__":
    app()
