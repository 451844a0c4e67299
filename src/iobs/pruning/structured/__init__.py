"""`iobs.prune` with the pattern `Structured`: check, find units, choose them and solve for what reads them, remove.

Channels, neurons and heads (`narrowing`) and blocks and experts (`parts`) take the same path. A plan stops before
anything is solved.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import nn

from iobs.core.structured import Structured
from iobs.errors import ModelError, NonFiniteError, PatternError, ProblemError, first_line
from iobs.pruning.calibration.observe import require_repeatable
from iobs.pruning.callbacks import Callbacks
from iobs.pruning.keep_sparse import live_on
from iobs.pruning.network.modes import evaluating, keeping_buffers, seeded
from iobs.pruning.network.selection import adapters_of, require_usable
from iobs.pruning.plan.counts import under_pattern
from iobs.pruning.recipe import Recipe, require_structured
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.store import Store
from iobs.pruning.structure.expected import can_copy
from iobs.pruning.structured.narrowing import SiteRemoval
from iobs.pruning.structured.parts import PartRemoval, StoreBesideDense
from iobs.pruning.structured_report import SECONDS, CostRecord, StructuredReport, StructuredRequest, UnitsPlan
from iobs.pruning.widths.costs import note_differing_shapes
from iobs.pruning.widths.latency import NAMES, require_runtime, seconds_of_shares, shares_of

_NO_CHANGE = Recipe(solver="magnitude")  # keeps all units with their weights, and reads a few samples


def prune_structured(
    store: Store, data: list[Batch], request: StructuredRequest, callbacks: Callbacks
) -> StructuredReport:
    """Remove units of the model of a store; the model becomes smaller, or after an error it is as before.

    `require_possible` comes first.

    Raises:
        LayerSelectionError: no units were found, no layer could repair their absence, or names match nothing.
        PatternError: the cost cannot be reached, or the share is none or too many of the blocks or experts.
        CalibrationError: the model does not take a batch.
        ModelError: the class of the model cannot have the smaller shapes.
        AuditError: the smaller model gives other outputs.
        ProblemError: names of layers for blocks or experts.
    """
    model, pattern = store.model, request.pattern
    if pattern.whole:
        store = StoreBesideDense(model)
    elif pattern.sparsity == 0:
        callbacks.on_note("Nothing is removed, since 0 % were asked: no widths are measured, and no weight changes.")
        request = replace(request, recipe=_NO_CHANGE, pattern=replace(pattern, of="macs"))
    with store.unchanged_by_failure():
        with evaluating(model) as frozen, seeded(model, request.seed):
            removal = _find_removal(store, data, request, callbacks)
            with _naming_what_stays(removal):
                report = removal.solve(frozen)
        removal.remove()
        with evaluating(model) if pattern.whole else nullcontext():  # the dense model is timed in the mode of its copy
            costs = removal.costs()
            costs += _seconds(removal.wide(), model, data[0], pattern, callbacks)
        # The zeros were counted before the units were removed; the smaller matrices have none that were asked for.
        structured_report = StructuredReport(
            **{**vars(report), "audit": []},
            widths=removal.width_records(report),
            costs=costs,
            refitted=removal.refitted(report),
            stays=[*removal.stays],
        )
        with evaluating(model):
            callbacks.on_end(structured_report)
    return structured_report


def plan_structured(store: Store, data: list[Batch], request: StructuredRequest, timed: bool = False) -> UnitsPlan:
    """The plan of `prune_structured` with the same arguments and errors; the model is unchanged.

    Args:
        store: of the model.
        data: calibration samples.
        request: of the run.
        timed: foretell the time of the run.
    """
    require_possible(store, request)
    model = store.model
    with torch.inference_mode(False), evaluating(model), seeded(model, request.seed):
        store = StoreBesideDense(model) if request.pattern.whole else store
        began = time.perf_counter()
        removal = _find_removal(store, data, request, Callbacks([]))
        with _naming_what_stays(removal):
            plan = removal.plan()
        if not timed:
            return plan
        seconds = time.perf_counter() - began + removal.foretell()  # the run searches again
        if can_copy(model):
            seconds += seconds_of_shares(model, data[0], request.pattern.runtime, request.pattern.batch)
        return replace(plan, seconds=seconds)


@contextmanager
def _naming_what_stays(removal: SiteRemoval | PartRemoval) -> Iterator[None]:
    """Let an error about a cost that cannot be reached say why units stay."""
    try:
        yield
    except PatternError as error:
        raise PatternError(" ".join([str(error), *removal.stays])) from error


def require_possible(store: Store, request: StructuredRequest) -> None:
    """Raise unless the model and the recipe fit, before any work, the calibration data included.

    Raises:
        ProblemError: the recipe, bounds of its allocation, tokens of a vocabulary, or the model's weights are not in
            memory.
        ModelError, LayerSelectionError: as in `require_usable`, or the model has no parameters, or adapters.
        NonFiniteError: a parameter holds NaN or infinity.
        PatternError: a search is to divide the units.
    """
    if request.pattern.units == "vocabulary":
        raise ProblemError(
            'units="vocabulary" changes the tokenizer too, which a network does not hold: use '
            "iobs.reduce_vocabulary(model, texts, keep=...)."
        )
    if not store.whole:
        raise ProblemError("Structured removes units of a model in memory; load the model whole.")
    model = store.model
    require_usable(model, removes_units=True)
    if next(model.parameters(), None) is None:
        raise ModelError(
            f"{type(model).__name__} has no parameters. Modules in a plain list or dict are not registered: use "
            "nn.ModuleList or nn.ModuleDict. Quantised modules of torch have none: prune before you quantise."
        )
    if live_on(model):
        raise ModelError(
            "iobs.keep_sparse is live on the model, whose optimizer steps on parameters that would be replaced. Call "
            "remove() on its handle first, and make a new optimizer afterwards."
        )
    for path, _ in adapters_of(model):
        raise ModelError(
            f"{path!r} has an adapter, which would keep the old widths. Merge the adapters first "
            "(iobs.transformers.merge_adapters), or prune the base model and train adapters on it afterwards."
        )
    for name, parameter in model.named_parameters():
        if parameter.element_size() > 1 and not bool(torch.isfinite(parameter).all()):  # float8 has no such test
            raise NonFiniteError(f"{name} holds NaN or infinity; repair the model first.")
    require_structured(request.recipe)
    under_pattern(request.recipe.division, request.pattern)
    require_runtime(request.pattern.runtime)


def _find_removal(
    store: Store, data: list[Batch], request: StructuredRequest, callbacks: Callbacks
) -> SiteRemoval | PartRemoval:
    """The units that the run may remove, after a check that the model takes the data."""
    with keeping_buffers(store.model):
        batches.require_all_accepted(store.model, data)
        require_repeatable(store.model, data[0])
    removal: SiteRemoval | PartRemoval
    if isinstance(store, StoreBesideDense):
        removal = PartRemoval(store, data, request, callbacks)
    else:
        removal = SiteRemoval(store, data, request, callbacks)
    note_differing_shapes(data, callbacks.on_note)
    return removal


def _seconds(
    wide: nn.Module | None, narrow: nn.Module, batch: Batch, pattern: Structured, callbacks: Callbacks
) -> list[CostRecord]:
    """The measured time of a call before and after; nothing for a network that is too large to have it twice."""
    if wide is None:
        callbacks.on_note("The time of the narrower network was not measured, since both do not fit into memory.")
        return []
    try:
        before, after = shares_of(wide, narrow, batch, pattern.runtime, samples=pattern.batch)
    except Exception as error:  # of any runtime; the run has succeeded
        callbacks.on_note(f"Time not measured: {first_line(error)}")
        return []
    samples = "one sample" if pattern.batch == 1 else f"{pattern.batch} samples at once"
    return [CostRecord(SECONDS, before, after, f"of {samples} in {NAMES[pattern.runtime]}")]
