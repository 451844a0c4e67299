"""`iobs bench`: speed and memory of a model, dense and with its zeros used."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from iobs.cli import console


@console.with_groups
def bench(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A directory that iobs prune or iobs pack wrote.")],
    tokens: Annotated[int, typer.Option(min=2, help="New tokens, or pictures, of one repetition.")] = 32,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 64,
    repetitions: Annotated[int, typer.Option(min=1, help="Repetitions of each form, which take turns.")] = 3,
    precision: Annotated[str | None, console.precision()] = None,
    shape: console.Shape = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads; by default as in iobs run.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(callback=console.at_home, help="Write a picture of the table (.svg).")
    ] = None,
    trust_remote_code: console.TrustRemoteCode = False,
    talk: console.Talk = console.Talk(),  # noqa: B008 - frozen
) -> None:
    """Measure tokens or pictures a second, bytes and memory on the CPU: dense, and with the zeros used."""
    from iobs.cli.benching import Workload, measured
    from iobs.cli.loading import checked_precision
    from iobs.cli.progress import Steps
    from iobs.inference.choices import PRECISIONS
    from iobs.report.running import running_figure, running_line, running_notes, running_table

    asked = checked_precision(precision, model, PRECISIONS)
    known = next(name for name in PRECISIONS if name == asked)
    sizes = console.shape_of(shape)
    if plot is not None and plot.suffix != ".svg":
        raise typer.BadParameter(f"{plot} must end in .svg", param_hint="--plot")
    work = Workload(model, tokens, prompt, sizes, known, threads, trust_remote_code)
    with Steps("loading the model") as steps:
        rows = [*measured(work, repetitions, lambda task: steps.update(0, 0, task))]
    if plot is not None:
        plot.write_text(running_figure(rows), encoding="utf8")
    if talk.as_json:
        console.print_json({"forms": [{**asdict(row), "bytes": row.bytes} for row in rows]})
        return
    out = console.output_console()
    out.print(running_table(rows))
    for line in running_notes(rows):
        out.print(line, soft_wrap=True)
    out.print(running_line(rows))
    if plot is not None:
        out.print(f"Written: {plot}")
