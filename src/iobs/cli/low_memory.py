"""`iobs prune --low-memory`: a plan first, then block by block from files to files."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from iobs.cli import console
from iobs.errors import ModelError, OutputError

if TYPE_CHECKING:
    import torch

    from iobs.cli.run_file import Asked
    from iobs.cli.running import Place
    from iobs.pruning.cost.memory import Plan


def prune_low_memory(
    directory: str | None,
    asked: Asked,
    device: str | None,
    place: Place,
    dry_run: bool,
    as_json: bool,
    streams: str = "auto",
) -> None:
    """Show what a run will need and, unless that is all, prune a directory with one block in memory at a time.

    Raises:
        ModelError: MODEL is no directory.
        OutputError: the disk has too little room.
        ProblemError: the recipe needs the whole model, or there is no such place for hidden states.
    """
    from iobs.cli.loading import batches_of_run, checked_device, checked_dtype
    from iobs.cli.offload import show_plan
    from iobs.cli.results import write_card
    from iobs.cli.running import prune_as_asked
    from iobs.core.files import weight_files
    from iobs.core.paths import expanded
    from iobs.models.streamed import StreamedModel
    from iobs.models.streamed_store import StreamedStore
    from iobs.models.without_weights import without_weights
    from iobs.pruning.allocation.bits import require_whole
    from iobs.pruning.blockwise.spill import place_named
    from iobs.pruning.blockwise.streamable import require_streamable
    from iobs.pruning.cost.work import warning_of_days
    from iobs.pruning.driver import requested
    from iobs.pruning.runtime.ranks import current
    from iobs.report import summary_lines, write_report

    options, recipe, output, checkpoint = asked.options, asked.recipe, place.output, place.checkpoint
    chosen, arithmetic = checked_device(device), checked_dtype(options.dtype)
    streams_place = place_named(streams)
    require_streamable(recipe)
    require_whole(options.pattern, False)
    directory = directory and str(expanded(directory))
    if directory is None or not Path(directory).is_dir():
        raise ModelError("--low-memory needs a local model directory with safetensors; download the model first.")
    if dry_run and not weight_files(Path(directory)):
        if current().first:
            _show_machines(Path(directory), asked, as_json, arithmetic)
        return
    streamed = StreamedModel.open(Path(directory), device=chosen, arithmetic=arithmetic)
    store = StreamedStore(streamed, output or Path(), streams_place)
    selection = store.select(options.include, options.ignore, recipe.depthwise)
    selection, _ = requested(recipe, options.pattern, selection, options.holdout, options.seed, checkpoint)
    if about := warning_of_days(selection.layers, recipe):
        console.warn(about)
    name, window, batches = batches_of_run(without_weights(Path(directory), streamed.module), options)
    plan = store.plan(selection, batches, recipe, options.holdout)
    if (dry_run or output is None) and not current().first:
        return
    if dry_run or output is None:
        if as_json:
            console.print_json(asdict(plan))
        else:
            show_plan(plan, console.output_console().print)
        _warn_of_memory(plan, store.device)
        if output is not None:
            try:
                store.require_room(plan, checkpoint, place.replaceable)
            except OutputError as error:  # the plan was asked for, and the run may be meant for another machine
                console.warn(f"Warning: {error}")
        return
    show_plan(plan, console.say)
    _warn_of_memory(plan, store.device)
    with store.writing(place.replaceable):
        facts = {"model": directory, "calibration": name, "seq_len": window}
        report = prune_as_asked(store, batches, asked, checkpoint, facts)
        if not current().first:
            return
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


def _show_machines(directory: Path, asked: Asked, as_json: bool, arithmetic: torch.dtype | None) -> None:
    """Show what a run takes on several GPUs; the directory holds a configuration and no weights.

    Args:
        directory: of the configuration.
        asked: recipe and options.
        as_json: print JSON.
        arithmetic: dtype of the computations in blocks; None: as the weights are stored.
    """
    from iobs.models.shapes import shapes_of
    from iobs.pruning.cost.machines import GPUS, need

    options, recipe = asked.options, asked.recipe
    halves = recipe.blocks is not None and recipe.blocks.halves
    network = shapes_of(directory, options.include, options.ignore, recipe.depthwise, halves)
    machines = [replace(gpu, count=count) for count in (1, 8) for gpu in GPUS]
    asked_for = network, recipe, options.samples, options.seq_len, options.batch_size
    itemsize = None if arithmetic is None else arithmetic.itemsize
    needs = [need(*asked_for, one, options.holdout, itemsize) for one in machines]
    if as_json:
        found = [{**asdict(one), "fits": one.fits, "streams": one.streams} for one in needs]
        console.print_json({"weights": network.weights, "machines": found})
        return
    out = console.output_console().print
    out(f"{directory} holds no weights: predicted from config.json for {network.weights / 1e9:.1f} billion weights,")
    length = min(options.seq_len, network.context or options.seq_len)
    out(f"{options.samples} samples of {length} tokens, at half of each vendor's figures.")
    for one in needs:
        machine = one.machine
        peak, hours = max(one.peak_bytes.values()), sum(one.phases.values()) / 3600
        fits = "fits" if one.fits else "does not fit"
        out(f"{machine.count} x {machine.name}: peak {peak / 1e9:.1f} GB ({fits}), {hours:.2f} h")
        out("  peak by phase: " + ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in one.peak_bytes.items()))
        out("  time by phase: " + ", ".join(f"{name} {value / 60:.1f} min" for name, value in one.phases.items()))
        place = "the device" if one.streams == "device" else "main memory"
        out(f"  hidden states and fitted parameters: {one.streams_bytes / 1e9:.1f} GB in {place} of every rank")


def _warn_of_memory(plan: Plan, device: torch.device) -> None:
    """Warn if a run is predicted to take more memory than is free, or if its files do not stay in main memory."""
    from iobs.pruning.runtime import memory
    from iobs.pruning.runtime.ranks import current

    left = memory.left(device) // (current().size if device.type == "cpu" else 1)
    if 0 < left < plan.peak_bytes:
        console.warn(
            f"Warning: the run is predicted to take {plan.peak_bytes / 1e9:.2f} GB of memory, and {device} has "
            f"{left / 1e9:.2f} GB for it; lower --batch-size, --seq-len or --samples, or take --recipe one-shot."
        )
    cached = memory.available() // current().size
    if plan.streams == "disk" and 0 < cached < plan.streams_bytes:
        console.warn(
            f"Warning: files of hidden states and fitted parameters take {plan.streams_bytes / 1e9:.2f} GB, and main "
            f"memory has {cached / 1e9:.2f} GB left; they are read from the disk again and again, and the predicted "
            "time does not count that."
        )
