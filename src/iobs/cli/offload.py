"""The store of `iobs prune`: the blocks of a model that does not fit on the GPU visit it from main memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from iobs.cli import console
from iobs.errors import ProblemError

if TYPE_CHECKING:
    from iobs.data import Batch
    from iobs.models import LoadedModel
    from iobs.pruning.cost.memory_plan import Plan
    from iobs.pruning.store import Store
    from iobs.pruning.workspace import Request


def store_of(loaded: LoadedModel, request: Request | None, device: str) -> Store:
    """The store of a model in main memory, for a run on a device.

    Args:
        loaded: the model; it moves to the device if a run fits there.
        request: what is asked; None: whole units are removed, which needs the whole model on the device.
        device: of the computations.

    Raises:
        ProblemError: the model does not fit, and the recipe needs the whole model.
    """
    import torch

    from iobs.models.factory import is_built_by_code
    from iobs.pruning.blockwise.choice import fits, resident_bytes
    from iobs.pruning.blockwise.offloaded import OffloadedStore
    from iobs.pruning.store import Store

    place = torch.empty(0, device=device).device
    if request is None or fits(loaded.module, [*request.patterns], request.recipe, place):
        loaded.module.to(place)
        return Store(loaded.module, is_built_by_code(loaded.source))
    needed = resident_bytes(loaded.module, [*request.patterns], request.recipe) / 1e9
    store, reason = OffloadedStore(loaded.module, place), f"The model and its copies take {needed:.1f} GB on {place}"
    try:
        store.require_possible(request.recipe)
    except ProblemError as error:
        raise ProblemError(f"{reason}, which has less. Its blocks would visit {place}, but: {error}") from error
    console.say(f"{reason}, which has less: the model stays in main memory, and its blocks visit {place}.")
    return store


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
    show(f"Predicted time: {plan.seconds / 60:.0f} min")
    for name, seconds in plan.phases.items():
        show(f"  {name}: {seconds / 60:.1f} min")
    show(f"A checkpoint (--resume) takes up to {plan.checkpoint_bytes / 1e9:.2f} GB")
    place = {"device": "memory of the device", "memory": "main memory", "disk": "files"}[plan.streams]
    show(f"Hidden states between blocks: {plan.streams_bytes / 1e9:.2f} GB, in {place}")
