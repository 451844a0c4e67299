"""`iobs prune --low-memory`: a plan first, then block by block from files to files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from iobs.cli import console
from iobs.errors import ModelError, OutputError

if TYPE_CHECKING:
    from iobs.cli.run_file import Asked
    from iobs.cli.running import Place
    from iobs.pruning.cost.memory_plan import Plan


def prune_low_memory(
    directory: str | None, asked: Asked, device: str | None, place: Place, dry_run: bool, as_json: bool
) -> None:
    """Show what a run will need and, unless that is all, prune a directory with one block in memory at a time.

    Raises:
        DistributedError: torchrun started several processes.
        ModelError: MODEL is no directory.
        OutputError: the disk has too little room.
        ProblemError: the recipe needs the whole model.
    """
    from iobs.cli.loading import batches_of_run, checked_device, checked_dtype
    from iobs.cli.results import write_card
    from iobs.cli.running import prune_as_asked
    from iobs.models.output import expanded
    from iobs.models.streamed import StreamedModel
    from iobs.models.streamed_store import StreamedStore, without_weights
    from iobs.pruning.driver import requested
    from iobs.pruning.runtime.ranks import require_alone
    from iobs.report import summary_lines, write_report

    require_alone()
    options, recipe, output, checkpoint = asked.options, asked.recipe, place.output, place.checkpoint
    chosen, arithmetic = checked_device(device), checked_dtype(options.dtype)
    StreamedStore.require_streamable(recipe)
    directory = directory and str(expanded(directory))
    if directory is None or not Path(directory).is_dir():
        raise ModelError("--low-memory needs a local model directory with safetensors; download the model first.")
    streamed = StreamedModel.open(Path(directory), device=chosen, arithmetic=arithmetic)
    store = StreamedStore(streamed, output or Path())
    selection = store.select(options.include, options.ignore, recipe.depthwise)
    selection, _ = requested(recipe, options.pattern, selection, options.holdout, options.seed, checkpoint)
    name, window, batches = batches_of_run(without_weights(Path(directory)), options)
    plan = store.plan(selection, batches, recipe, options.holdout)
    if dry_run or output is None:
        if as_json:
            console.print_json(asdict(plan))
        else:
            _show(plan, console.output_console().print)
        if output is not None:
            try:
                store.require_room(plan)
            except OutputError as error:  # the plan was asked for, and the run may be meant for another machine
                console.warn(f"Warning: {error}")
        return
    _show(plan, console.say)
    store.require_room(plan)
    with store.writing(place.replaceable):
        facts = {"model": directory, "calibration": name, "seq_len": window}
        report = prune_as_asked(store, batches, asked, checkpoint, facts)
        write_card(report, "transformers", store.folder, Path(directory) / "README.md")
        write_report(report, store.folder)
        asked.write(store.folder)
    place.finish()
    if as_json:
        console.print_json({"output": str(output), **report.as_dict()})
        return
    out = console.output_console()
    for line in summary_lines(report):
        out.print(line)
    out.print(f"Written: {output} ({report.sparsity:.2%} zeros)")


def _show(plan: Plan, show: Callable[[str], None]) -> None:
    show(f"{plan.layers} matrices; the whole model takes {plan.model_bytes / 1e9:.2f} GB")
    show(f"Predicted peak memory: {plan.peak_bytes / 1e9:.2f} GB")
    show(f"Predicted time: {plan.seconds / 60:.0f} min")
    for name, seconds in plan.phases.items():
        show(f"  {name}: {seconds / 60:.1f} min")
    place = {"device": "memory of the device", "memory": "main memory", "disk": "files"}[plan.streams]
    show(f"Hidden states between blocks: {plan.streams_bytes / 1e9:.2f} GB, in {place}")
