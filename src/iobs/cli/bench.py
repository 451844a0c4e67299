"""`iobs bench`: speed and memory of a model, dense and with its zeros used."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iobs.cli import console, options
from iobs.core.files import whole_file
from iobs.errors import IOBSError

if TYPE_CHECKING:
    from iobs.cli.benching import Workload


@options.command
def bench(
    model: options.GivenModel,
    *,
    tokens: Annotated[int, typer.Option(min=2)] = 32,
    prompt: options.Positive = 64,
    repetitions: options.Positive = 3,
    precision: options.Precision = None,
    shape: options.Shape = None,
    beside: Annotated[str | None, typer.Option(callback=options.existing_model)] = None,
    runtime: str | None = None,
    threads: options.OptionalPositive = None,
    plot: Path | None = None,
    trust_remote_code: options.TrustRemoteCode = False,
    talk: options.Talk,
) -> None:
    """Measure tokens, images or texts a second, bytes and memory on the CPU: dense, and with the zeros used.

    The last dense form is stored as the model is, in 8 bits by default, but without zeros: what zeros give is what the
    model gains over it.

    Args:
        model (MODEL): A directory that iobs prune or iobs pack wrote.
        tokens: New tokens of one repetition; images, or texts for an encoder.
        prompt: Tokens of the prompt, or of each text.
        repetitions: Repetitions of each form, which take turns.
        precision (bf16|int8|int4): Fewest bits of a weight. A packed file keeps its own.
        beside (MODEL): Another model, such as the one before units were removed; both compute the same sample in
            float32.
        runtime (torch|onnx): Of --beside; by default both that are installed.
        threads: Threads; by default as in iobs run.
        plot: Write a figure of the table (.svg).

    Examples:
        iobs bench OUT  # tokens, images or texts a second, bytes and memory: dense, and with the zeros used
        iobs bench OUT --beside MODEL  # a model with fewer units beside the one before, in torch and ONNX Runtime
        iobs bench OUT.packed --tokens 64 --plot speed.svg --json  # a packed model, with a figure
    """
    sizes = options.parse_shape(shape)
    if plot is not None and plot.suffix != ".svg":
        raise typer.BadParameter(f"{plot} must end in .svg", param_hint="--plot")
    console.check_files((plot,), ())
    if (runtime is not None and beside is None) or (beside is not None and plot is not None):
        raise typer.BadParameter("--runtime goes with --beside MODEL, and --plot does not", param_hint="--beside")

    from iobs.cli.benching import Workload, measure_forms
    from iobs.cli.console import ConsoleSteps
    from iobs.cli.loading import checked_precision
    from iobs.report.comparisons import running_figure, running_line, running_notes, running_table

    checked = checked_precision(precision, model)
    fewest_bits = next(name for name in options.PRECISIONS if name == checked)
    workload = Workload(model, tokens, prompt, sizes, fewest_bits, threads, trust_remote_code)
    if beside is not None:
        _show_beside(workload, beside, runtime, talk.as_json)
        return
    with ConsoleSteps("loading the model") as steps:
        rows = [*measure_forms(workload, repetitions, lambda task: steps.update(0, 0, task))]
    if plot is not None:
        with whole_file(plot) as file:
            file.write_text(running_figure(rows), encoding="utf8")
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


def _show_beside(workload: Workload, beside: str, runtime: str | None, as_json: bool) -> None:
    from iobs.cli.benching import measure_beside, runtimes_of
    from iobs.cli.console import ConsoleSteps
    from iobs.report.comparisons import beside_table

    runtimes = runtimes_of(runtime)
    with ConsoleSteps("loading the models") as steps:
        rows = measure_beside(workload, beside, runtimes, lambda task: steps.update(0, 0, task))
    if as_json:
        console.print_json({"beside": [{**asdict(row), "share": row.seconds / row.seconds_beside} for row in rows]})
        return
    out = console.output_console()
    out.print(beside_table(rows))
    for row in rows:
        out.print(row.sentence)


def removed_units(model: str) -> bool:
    """True if a directory holds the report of a run that removed units."""
    from iobs.pruning.structured_report import StructuredReport
    from iobs.report import read_report

    try:
        return isinstance(read_report(Path(model) / "report.json"), StructuredReport)
    except (OSError, IOBSError, ValueError, KeyError, TypeError):  # no such file, or of another program
        return False
