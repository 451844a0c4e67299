"""`iobs bench`: speed and memory of a model, dense and with its zeros used."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iobs.cli import console
from iobs.core.files import whole_file
from iobs.errors import IOBSError

if TYPE_CHECKING:
    from iobs.cli.benching import Workload


@console.with_groups
def bench(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A directory that iobs prune or iobs pack wrote.")],
    tokens: Annotated[int, typer.Option(min=2, help="New tokens, or images, of one repetition.")] = 32,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 64,
    repetitions: Annotated[int, typer.Option(min=1, help="Repetitions of each form, which take turns.")] = 3,
    precision: Annotated[str | None, console.precision()] = None,
    shape: console.Shape = None,
    beside: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Another model, such as the one before units were removed; both compute the same sample in float32.",
            show_default=False,
        ),
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(metavar="torch|onnx", help="Of --beside; by default both that are installed.", show_default=False),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads; by default as in iobs run.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(callback=console.at_home, help="Write a figure of the table (.svg).")
    ] = None,
    trust_remote_code: console.TrustRemoteCode = False,
    talk: console.Talk = console.Talk(),  # noqa: B008 - frozen
) -> None:
    """Measure tokens or images a second, bytes and memory on the CPU: dense, and with the zeros used."""
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
    console.check_files((plot,), ())
    work = Workload(model, tokens, prompt, sizes, known, threads, trust_remote_code)
    if beside is not None or runtime is not None:
        if beside is None or plot is not None:
            raise typer.BadParameter("--runtime goes with --beside MODEL, and --plot does not", param_hint="--beside")
        _show_beside(work, beside, runtime, talk.as_json)
        return
    with Steps("loading the model") as steps:
        rows = [*measured(work, repetitions, lambda task: steps.update(0, 0, task))]
    if plot is not None:
        with whole_file(plot) as written:
            written.write_text(running_figure(rows), encoding="utf8")
    if talk.as_json:
        console.print_json({"forms": [{**asdict(row), "bytes": row.bytes} for row in rows]})
        return
    out = console.output_console()
    out.print(running_table(rows))
    for line in running_notes(rows):
        out.print(line, soft_wrap=True)
    out.print(running_line(rows))
    if removed_units(model):
        out.print(
            f"Its units were removed. Time beside the model before: iobs bench {shlex.quote(model)} --beside MODEL"
        )
    if plot is not None:
        out.print(f"Written: {plot}")


def _show_beside(work: Workload, beside: str, runtime: str | None, as_json: bool) -> None:
    from iobs.cli.beside import measured_beside, runtimes_of
    from iobs.cli.progress import Steps
    from iobs.report.running import beside_table

    runtimes = runtimes_of(runtime)
    with Steps("loading the models") as steps:
        rows = measured_beside(work, beside, runtimes, lambda task: steps.update(0, 0, task))
    if as_json:
        console.print_json({"beside": [{**asdict(row), "share": row.seconds / row.seconds_beside} for row in rows]})
        return
    out = console.output_console()
    out.print(beside_table(rows))
    for row in rows:
        out.print(row.sentence)


def removed_units(model: str) -> bool:
    """Check that a directory holds the report of a run that removed units."""
    from iobs.pruning.structured_report import StructuredReport
    from iobs.report import read_report

    try:
        return isinstance(read_report(Path(model) / "report.json"), StructuredReport)
    except (OSError, IOBSError, ValueError, KeyError, TypeError):  # no such file, or of another program
        return False
