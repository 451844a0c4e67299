"""`iobs prune --low-memory`: a plan first, then block by block from files to files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from iobs.cli import console
from iobs.errors import ModelError, OutputError

if TYPE_CHECKING:
    from iobs.core.patterns import Pattern
    from iobs.prune.plan import Plan
    from iobs.prune.record import Report

_OPENING = ("include", "skip", "device", "arithmetic")
# What a setting is called on the command line, where it is called otherwise.
_OPTIONS = {"step": "steps", "data": "fresh-data", "remote_code": "trust-remote-code"}


def prune_low_memory(
    directory: str | None,
    output: Path | None,
    pattern: Pattern,
    calibration: Any,
    options: dict[str, Any],
    dry_run: bool,
) -> None:
    """Show what a run will need, and unless that is all, prune a directory with one block in memory at a time.

    Raises:
        DistributedError: torchrun started several processes.
        ModelError: MODEL is no directory.
        OutputError: the disk has too little room.
        typer.BadParameter: an option that needs the whole network.
    """
    from iobs.cli.progress import Steps
    from iobs.cli.results import write_card
    from iobs.cli.watch import Watch
    from iobs.models.output import expanded
    from iobs.models.streamed import StreamedModel
    from iobs.models.streaming import SETTINGS, check_room, one_round, plan_of, prune_directory, without_weights
    from iobs.prune.distributed import require_alone
    from iobs.report import write_report

    require_alone()
    given = {name: value for name, value in options.items() if value is not None}
    if given.get("rounds") == 1:  # which it is
        del given["rounds"]
    whole = sorted(
        _OPTIONS.get(name, name).replace("_", "-") for name in given.keys() - {*SETTINGS, *_OPENING, "checkpoint"}
    )
    if whole:
        raise typer.BadParameter(
            f"--{', --'.join(whole)}: not with one block in memory at a time", param_hint="--low-memory"
        )
    directory = directory and str(expanded(directory))
    if directory is None or not Path(directory).is_dir():
        raise ModelError("--low-memory needs a local model directory with safetensors; download the model first.")
    loaded = without_weights(Path(directory))
    name, batches = calibration.batches(loaded)
    if dry_run or output is None:
        streamed = StreamedModel.open(Path(directory), **{name: given[name] for name in _OPENING if name in given})
        needed = plan_of(streamed, batches, one_round({name: given[name] for name in SETTINGS if name in given}))
        _show(needed, console.output_console().print)
        if output is not None:
            try:
                check_room(output, needed)
            except OutputError as error:  # the plan was asked for, and the run may be meant for another machine
                console.say(f"Warning: {error}")
        return

    def announce(plan: Plan) -> None:
        _show(plan, console.say)

    def complete(report: Report, folder: Path) -> None:
        report.settings = {"calibration": name, "seq_len": calibration.window, **report.settings}
        write_card(report, "transformers", folder, Path(directory) / "README.md")
        write_report(report, folder)

    with Steps("pruning") as steps:
        watch = Watch(steps)
        report = prune_directory(
            directory, output, batches, pattern, progress=watch, announce=announce, complete=complete, **given
        )
    if given.get("checkpoint") is not None:
        shutil.rmtree(given["checkpoint"])
    console.output_console().print(f"Written: {output} ({report.sparsity:.2%} zeros)")


def _show(plan: Plan, tell: Callable[[str], None]) -> None:
    tell(f"{plan.layers} matrices; the whole model takes {plan.model_bytes / 1e9:.2f} GB")
    tell(f"Predicted peak memory: {plan.peak_bytes / 1e9:.2f} GB")
    tell(f"Predicted time: {plan.seconds / 60:.0f} min")
    tell(f"Activations kept in files: {plan.spilled_bytes / 1e9:.2f} GB")
