"""The store of `iobs prune`: the blocks of a model that does not fit on the GPU visit it from main memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from iobs.cli import console
from iobs.errors import ProblemError, is_out_of_memory

if TYPE_CHECKING:
    from iobs.data import Batch
    from iobs.models import LoadedModel
    from iobs.pruning.cost.memory_plan import Plan
    from iobs.pruning.store import Store
    from iobs.pruning.workspace import Request

Result = TypeVar("Result")


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


def run_where_it_fits(
    run: Callable[[Store], Result], loaded: LoadedModel, store: Store, request: Request | None
) -> Result:
    """Run with the whole model on the GPU, and begin again by blocks if the GPU becomes full.

    The memory of hidden states, Grams and solves is known only during a run. A failed run has restored the weights.

    Args:
        run: prunes the model of a store.
        loaded: the model.
        store: the first store.
        request: what is asked; None: whole units are removed, which needs the whole model on the device.

    Raises:
        IOBSError: as the runs.
        RuntimeError: memory ran out, and the recipe needs the whole model, or there are several ranks.
    """
    import torch

    from iobs.pruning.blockwise.offloaded import OffloadedStore

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
    return run(OffloadedStore(loaded.module, place))


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
    show(f"Predicted time: {plan.seconds / 60:.0f} min")
    for name, seconds in plan.phases.items():
        show(f"  {name}: {seconds / 60:.1f} min")
    show(f"A checkpoint (--resume) takes up to {plan.checkpoint_bytes / 1e9:.2f} GB")
    place = {"device": "memory of the device", "memory": "main memory", "disk": "files"}[plan.streams]
    show(f"Hidden states between blocks: {plan.streams_bytes / 1e9:.2f} GB, in {place}")
