"""Runs of `iobs prune` by blocks: of a model that does not fit on the GPU, and from files to files (`--low-memory`)."""

from __future__ import annotations

import gc
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self, TypeVar

import torch
import typer
from torch import nn

from iobs.cli import console
from iobs.cli.loading import batches_of_run, checked_device, checked_dtype, local_directory
from iobs.cli.output_place import OutputPlace
from iobs.cli.run_file import RunSettings
from iobs.cli.running import prune_with_progress, write_card
from iobs.core.files import weight_files
from iobs.core.memory import available
from iobs.core.patterns import Budget
from iobs.core.steps import in_words
from iobs.data import Batch
from iobs.errors import OutputError, ProblemError, is_out_of_memory
from iobs.models import LoadedModel
from iobs.models.factory import is_built_by_code
from iobs.models.skeleton import shapes_of, without_weights
from iobs.models.streamed import StreamedModel, StreamedStore
from iobs.pruning.blockwise import fits, require_streamable, resident_bytes
from iobs.pruning.blockwise.offloaded import OffloadedStore
from iobs.pruning.blockwise.storage import parse_place
from iobs.pruning.cost.machines import GPUS, need
from iobs.pruning.cost.memory import Plan
from iobs.pruning.cost.work import warning_of_days
from iobs.pruning.driver import requested, selected_for
from iobs.pruning.runtime import memory
from iobs.pruning.runtime.ranks import current
from iobs.pruning.store import Store
from iobs.pruning.workspace import Request
from iobs.report import summary_lines, write_report

Result = TypeVar("Result")


@dataclass(frozen=True)
class StreamPlace:
    """Place of the hidden states if the blocks of a model visit a device.

    Args:
        place: as `--streams`; None: as "auto".
        folder: of files; None: the default folder for temporary files.
    """

    place: str | None
    folder: Path | None

    @classmethod
    def of(cls, place: str | None, output: Path | None) -> Self:
        """The place that was asked for; files lie beside the output."""
        return cls(place, None if output is None else Path(os.path.realpath(output)).parent)

    def store(self, module: nn.Module, device: torch.device) -> OffloadedStore:
        """A store of a model whose blocks visit a device.

        Raises:
            ProblemError: there is no such place.
        """
        return OffloadedStore(module, device, parse_place(self.place or "auto"), self.folder)


def refuse_streams(streams: str, device: str | None) -> None:
    """Refuse `--streams` where no block will visit a device: the option does nothing there.

    Raises:
        typer.BadParameter: the device is the CPU.
        ProblemError: there is no such place.
    """

    parse_place(streams)
    if torch.device(checked_device(device)).type == "cpu":
        raise typer.BadParameter(
            "only with --low-memory, or on a GPU that is too small for the model: otherwise no hidden states are kept. "
            "Add --low-memory, or leave it out",
            param_hint="--streams",
        )


def store_of(loaded: LoadedModel, request: Request | None, device: str, streams: StreamPlace) -> Store:
    """The store of a model in main memory, for a run on a device.

    Args:
        loaded: the model; it moves to the device if a run fits there.
        request: what is asked; None: whole units are removed, which needs the whole model on the device.
        device: of the computations.
        streams: place of the hidden states, if the model does not fit.

    Raises:
        ProblemError: the model does not fit, and the recipe needs the whole model.
    """

    place = torch.empty(0, device=device).device
    if request is not None and (about := warning_of_days(request.patterns, request.recipe)):
        console.warn(about)
    if request is None or fits(loaded.module, [*request.patterns], request.recipe, place):
        if streams.place is not None:
            console.say(f"--streams does nothing now: the whole model is on {place}, and no hidden states are kept.")
        loaded.module.to(place)
        return Store(loaded.module, is_built_by_code(loaded.source))
    needed = resident_bytes(loaded.module, [*request.patterns], request.recipe) / 1e9
    store, reason = streams.store(loaded.module, place), f"The model and its copies take {needed:.1f} GB on {place}"
    try:
        store.require_possible(request.recipe)
    except ProblemError as error:
        raise ProblemError(f"{reason}, which has less. Its blocks would visit {place}, but: {error}") from error
    console.say(f"{reason}, which has less: the model stays in main memory, and its blocks visit {place}.")
    return store


def run_where_it_fits(
    run: Callable[[Store], Result], loaded: LoadedModel, store: Store, request: Request | None, streams: StreamPlace
) -> Result:
    """Run with the whole model on the GPU, and begin again by blocks if the GPU becomes full.

    The memory of hidden states, Grams and solves is known only during a run. A failed run has restored the weights.

    Args:
        run: prunes the model of a store.
        loaded: the model.
        store: the first store.
        request: what is asked; None: whole units are removed, which needs the whole model on the device.
        streams: place of the hidden states of a run by blocks.

    Raises:
        IOBSError: as the runs.
        RuntimeError: memory ran out, and the recipe needs the whole model, or there are several ranks.
    """
    place = store.device
    try:
        return run(store)
    except RuntimeError as error:
        if request is None or not _may_run_by_blocks(store, request, error):
            raise
    # The error is gone here, and so are the tensors that its traceback has held.
    store.forget()
    loaded.module.to("cpu")
    gc.collect()
    torch.cuda.empty_cache()
    console.say(f"The run takes more memory than {place} has: it begins again, and the blocks visit {place}.")
    return run(streams.store(loaded.module, place))


def _may_run_by_blocks(store: Store, request: Request, error: BaseException) -> bool:
    """True if a run failed because its GPU was full, and that its recipe does not need the whole model there."""
    if not (store.whole and store.device.type == "cuda" and current().size == 1 and is_out_of_memory(error)):
        return False
    try:
        require_streamable(request.recipe)
    except ProblemError:
        return False
    return True


def plan_of(
    store: Store, request: Request, batches: Sequence[Batch], within: float | None = None, timed: bool = True
) -> Plan | None:
    """The plan of a run whose blocks visit a device; None for other stores.

    Raises:
        IOBSError: as the run would.
    """
    return store.foreseen(request, batches, within, timed) if isinstance(store, OffloadedStore) else None


def show_plan(plan: Plan, show: Callable[[str], None]) -> None:
    """Show the plan of a run by blocks, line by line."""
    show(f"{plan.layers} matrices; the whole model takes {plan.model_bytes / 1e9:.2f} GB")
    show(f"Predicted peak memory: {plan.peak_bytes / 1e9:.2f} GB")
    if plan.copied_bytes:
        show(f"Copies of the dense weights: {plan.copied_bytes / 1e9:.2f} GB in main memory, beside the model")
    if plan.form:
        show(plan.form)
    if plan.seconds:  # a run that ends within a time says its own
        show_time(plan.seconds, plan.phases, show)
    show(f"A checkpoint (--resume) takes up to {plan.checkpoint_bytes / 1e9:.2f} GB")
    place = {"device": "memory of the device", "memory": "main memory", "disk": "files"}[plan.streams]
    show(f"Hidden states between blocks: {plan.streams_bytes / 1e9:.2f} GB, in {place}")


def show_peak(peaks: Mapping[str, int], show: Callable[[str], None]) -> None:
    """Show the predicted peak memory of a run in memory, if it is foretold, and the phase that has it."""
    if peaks:
        phase = max(peaks, key=peaks.__getitem__)
        show(f"Predicted peak memory: {peaks[phase] / 1e9:.2f} GB ({phase})")


def show_time(seconds: float, phases: Mapping[str, float], show: Callable[[str], None]) -> None:
    """Show the predicted time of a run, and of its phases."""
    show(f"Predicted time: {in_words(seconds)}")
    for name, part in phases.items():
        show(f"  {name}: {in_words(part)}")


def prune_low_memory(
    model: str | None,
    settings: RunSettings,
    device: str | None,
    place: OutputPlace,
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
    options, recipe, output, checkpoint = settings.options, settings.recipe, place.output, place.checkpoint
    chosen, arithmetic = checked_device(device), checked_dtype(options.dtype)
    streams_place = parse_place(streams)
    require_streamable(recipe)
    directory = local_directory(model)
    if dry_run and not weight_files(directory):
        if current().first:
            _show_machines(directory, settings, as_json, arithmetic)
        return
    streamed = StreamedModel.open(directory, device=chosen, arithmetic=arithmetic)
    store = StreamedStore(streamed, output or Path(), streams_place)
    selection = selected_for(store, options.pattern, options.include, options.ignore, recipe.depthwise)
    selection, request = requested(
        store.model, recipe, options.pattern, selection, options.holdout, options.seed, checkpoint
    )
    if about := warning_of_days(selection.layers, recipe):
        console.warn(about)
    name, window, batches = batches_of_run(without_weights(directory, streamed.module), options)
    timed, within = options.within is None or dry_run, options.seconds
    plan = store.plan(request, batches, timed, within)
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
        facts = {"model": str(directory), "calibration": name, "seq_len": window}
        report = prune_with_progress(store, batches, settings, checkpoint, facts)
        if not current().first:
            return
        write_card(report, "transformers", store.folder, directory / "README.md")
        write_report(report, store.folder)
        settings.write(store.folder)
    place.finish()
    if as_json:
        console.print_json({"output": str(output), **report.as_dict()})
        return
    out = console.output_console()
    for line in summary_lines(report):
        out.print(line)
    out.print(f"Written: {output} ({report.sparsity:.2%} zeros)")
    if isinstance(options.pattern, Budget):
        folder = shlex.quote(str(output))
        out.print(f"These files are dense. Their size is that asked for after: iobs pack {folder} --dtype bfloat16")


def _show_machines(directory: Path, settings: RunSettings, as_json: bool, arithmetic: torch.dtype | None) -> None:
    """Show what a run takes on several GPUs; the directory holds a configuration and no weights.

    Args:
        directory: of the configuration.
        asked: recipe and options.
        as_json: print JSON.
        arithmetic: dtype of the computations in blocks; None: as the weights are stored.
    """
    options, recipe = settings.options, settings.recipe
    network = shapes_of(directory, options.include, options.ignore, recipe.depthwise)
    machines = [replace(gpu, count=count) for count in (1, 8) for gpu in GPUS]
    itemsize = None if arithmetic is None else arithmetic.itemsize
    needs = [
        need(
            network,
            recipe,
            options.samples,
            options.seq_len,
            options.batch_size,
            machine,
            options.holdout,
            itemsize,
        )
        for machine in machines
    ]
    if options.within is not None:
        console.warn(
            f"--within {options.within} is left out of account: without weights no time of this machine is foretold."
        )
    if as_json:
        described = [{**asdict(each), "fits": each.fits, "streams": each.streams} for each in needs]
        console.print_json({"weights": network.weights, "machines": described})
        return
    out = console.output_console().print
    out(f"{directory} holds no weights: predicted from config.json for {network.weights / 1e9:.1f} billion weights,")
    length = min(options.seq_len, network.context or options.seq_len)
    out(f"{options.samples} samples of {length} tokens, at half of each vendor's figures.")
    for each in needs:
        machine = each.machine
        peak, hours = max(each.peak_bytes.values()), sum(each.phases.values()) / 3600
        fits = "fits" if each.fits else "does not fit"
        out(f"{machine.count} x {machine.name}: peak {peak / 1e9:.1f} GB ({fits}), {hours:.2f} h")
        out("  peak by phase: " + ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in each.peak_bytes.items()))
        out("  time by phase: " + ", ".join(f"{name} {value / 60:.1f} min" for name, value in each.phases.items()))
        place = "the device" if each.streams == "device" else "main memory"
        out(f"  hidden states and fitted parameters: {each.streams_bytes / 1e9:.1f} GB in {place} of every rank")


def _warn_of_memory(plan: Plan, device: torch.device) -> None:
    """Warn if a run is predicted to take more memory than is free, or if its files do not stay in main memory."""
    free = memory.reachable(device) // (current().size if device.type == "cpu" else 1)
    if 0 < free < plan.peak_bytes:
        console.warn(
            f"Warning: the run is predicted to take {plan.peak_bytes / 1e9:.2f} GB of memory, and {device} has "
            f"{free / 1e9:.2f} GB for it; lower --batch-size, --seq-len or --samples, or take --recipe one-shot."
        )
    cached = available() // current().size
    if plan.streams == "disk" and 0 < cached < plan.streams_bytes:
        console.warn(
            f"Warning: files of hidden states and fitted parameters take {plan.streams_bytes / 1e9:.2f} GB, and main "
            f"memory has {cached / 1e9:.2f} GB left; they are read from the disk again and again, and the predicted "
            "time does not count that."
        )
