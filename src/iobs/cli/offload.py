"""The store of `iobs prune`: the blocks of a model that does not fit on the GPU visit it from main memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

import typer

from iobs.cli import console
from iobs.errors import ProblemError, is_out_of_memory

if TYPE_CHECKING:
    import torch
    from torch import nn

    from iobs.data import Batch
    from iobs.models import LoadedModel
    from iobs.pruning.blockwise.offloaded import OffloadedStore
    from iobs.pruning.cost.memory import Plan
    from iobs.pruning.store import Store
    from iobs.pruning.workspace import Request

Result = TypeVar("Result")


@dataclass(frozen=True)
class Streams:
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
        from iobs.pruning.blockwise.offloaded import OffloadedStore
        from iobs.pruning.blockwise.spill import place_named

        return OffloadedStore(module, device, place_named(self.place or "auto"), self.folder)


def refuse_streams(streams: str, device: str | None) -> None:
    """Refuse `--streams` where no block will visit a device: the option does nothing there.

    Raises:
        typer.BadParameter: the device is the CPU.
        ProblemError: there is no such place.
    """
    import torch

    from iobs.cli.loading import checked_device
    from iobs.pruning.blockwise.spill import place_named

    place_named(streams)
    if torch.device(checked_device(device)).type == "cpu":
        raise typer.BadParameter(
            "only with --low-memory, or on a GPU that is too small for the model: otherwise no hidden states are kept. "
            "Add --low-memory, or leave it out",
            param_hint="--streams",
        )


def store_of(loaded: LoadedModel, request: Request | None, device: str, streams: Streams) -> Store:
    """The store of a model in main memory, for a run on a device.

    Args:
        loaded: the model; it moves to the device if a run fits there.
        request: what is asked; None: whole units are removed, which needs the whole model on the device.
        device: of the computations.
        streams: place of the hidden states, if the model does not fit.

    Raises:
        ProblemError: the model does not fit, and the recipe needs the whole model.
    """
    import torch

    from iobs.models.factory import is_built_by_code
    from iobs.pruning.blockwise.choice import fits, resident_bytes
    from iobs.pruning.cost.work import warning_of_days
    from iobs.pruning.store import Store

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
    run: Callable[[Store], Result], loaded: LoadedModel, store: Store, request: Request | None, streams: Streams
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
    import torch

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
    """Check that a run failed because its GPU was full, and that its recipe does not need the whole model there."""
    from iobs.pruning.blockwise.streamable import require_streamable
    from iobs.pruning.runtime.ranks import current

    if not (store.whole and store.device.type == "cuda" and current().size == 1 and is_out_of_memory(error)):
        return False
    try:
        require_streamable(request.recipe)
    except ProblemError:
        return False
    return True


def plan_of(store: Store, request: Request, batches: Sequence[Batch]) -> Plan | None:
    """The plan of a run whose blocks visit a device; None for other stores.

    Raises:
        IOBSError: as the run would.
    """
    from iobs.pruning.blockwise.offloaded import OffloadedStore
    from iobs.pruning.network.selection import Selection

    if not isinstance(store, OffloadedStore):
        return None
    return store.foreseen(Selection(tuple(request.patterns), {}), batches, request.recipe, request.holdout)


def show_plan(plan: Plan, show: Callable[[str], None]) -> None:
    """Show the plan of a run by blocks, line by line."""
    show(f"{plan.layers} matrices; the whole model takes {plan.model_bytes / 1e9:.2f} GB")
    show(f"Predicted peak memory: {plan.peak_bytes / 1e9:.2f} GB")
    if plan.copied_bytes:
        show(f"Copies of the dense weights: {plan.copied_bytes / 1e9:.2f} GB in main memory, beside the model")
    show_time(plan.seconds, plan.phases, show)
    show(f"A checkpoint (--resume) takes up to {plan.checkpoint_bytes / 1e9:.2f} GB")
    place = {"device": "memory of the device", "memory": "main memory", "disk": "files"}[plan.streams]
    show(f"Hidden states between blocks: {plan.streams_bytes / 1e9:.2f} GB, in {place}")


def show_time(seconds: float, phases: Mapping[str, float], show: Callable[[str], None]) -> None:
    """Show the predicted time of a run, and of its phases."""
    from iobs.pruning.progress import in_words

    show(f"Predicted time: {in_words(seconds)}")
    for name, part in phases.items():
        show(f"  {name}: {in_words(part)}")
