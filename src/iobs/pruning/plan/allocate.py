"""The planner: the pattern of every layer, so that the sum of the damages to the model is least.

One backward pass prices the errors of rows (`calibration/row_fisher.py`). One sweep through the dense model solves each
layer at a few densities (`curves.py`). Then zeros (`counts.py`), bits (`rates.py`) or whole units (`widths.py`) are
divided. The cost is linear in the number of layers.

Damages of layers add up only roughly. A search needs no such assumption: it moves weights between two layers while the
divergence of the whole network falls. It wins on networks that are shallow enough to be run many times (EvoPress has
the moves, for the levels of layers of equal size).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace

import torch
from torch import Tensor

from iobs.core.grids import on_grid_of
from iobs.core.patterns import Pattern, Rate, Unstructured
from iobs.core.structured import Structured
from iobs.pruning.calibration.losses import answered, kl_to_answers, mean_loss
from iobs.pruning.calibration.row_fisher import PROBE, PROBE_TOKENS
from iobs.pruning.network.layers import Layer
from iobs.pruning.plan.counts import (
    global_sparsity,
    keep_ranges,
    measured_densities,
    optimal_counts,
    total_kept,
    under_pattern,
    within_support,
)
from iobs.pruning.plan.curves import CurveSweep, allocation_record_of, judges_of, recipe_of_curves, weights_written
from iobs.pruning.plan.rates import divide_rate, equal_rate
from iobs.pruning.plan.widths import allocate_widths
from iobs.pruning.recipe import Allocation
from iobs.pruning.report import AllocationRecord, JsonObject, allocation_record
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Samples
from iobs.pruning.workspace import Workspace

_ENTRIES = 2**24  # most entries of all stored Grams; a search solves layers from stored Grams
ENOUGH_OUTPUTS = 150  # least number of outputs that can judge a search; with fewer, the best of 100 trials is noise
_LEAST_SHARE, _MOST_SHARE = 0.02, 0.2  # of the smaller of two counts that a move takes

Counts = dict[Layer, int]


def allocate(workspace: Workspace) -> tuple[dict[Layer, Pattern], list[AllocationRecord]]:
    """The pattern of every layer; for a non-uniform allocation also the measurements behind it.

    Layers whose pattern a rule sets keep it; the others share the pattern of the run.

    Raises:
        PatternError: the bounds of the layers that receive input do not allow the sparsity, or they need more bits.
    """
    pattern = workspace.request.pattern
    if isinstance(pattern, Structured):
        # Of whole blocks and experts the layers that are refitted keep all columns.
        return (dict(workspace.request.patterns), []) if pattern.whole else allocate_widths(workspace, pattern)
    patterns = dict(workspace.request.patterns)
    if isinstance(pattern, Rate):
        return {**patterns, **_rates(workspace, pattern)}, []
    allocation = under_pattern(workspace.recipe.division, pattern)
    layers = workspace.request.sharing
    if allocation.criterion == "uniform" or not layers:
        return patterns, []
    if allocation.criterion == "auto" and not workspace.fisher.prices_rows:
        return patterns, []
    plan, records = _zeros(workspace, pattern, allocation, layers)
    return {**patterns, **plan}, records


def _zeros(
    workspace: Workspace, pattern: Pattern, allocation: Allocation, layers: tuple[Layer, ...]
) -> tuple[dict[Layer, Pattern], list[AllocationRecord]]:
    """The pattern of every layer under one count for all, and the measurements behind it."""
    fast = recipe_of_curves(workspace.recipe)
    sparsity = global_sparsity(pattern)
    assert sparsity is not None, "under_pattern accepts no other pattern"

    criterion, judges = _criterion(workspace, allocation, layers)

    def planned() -> JsonObject:
        ranges = keep_ranges(allocation, layers, sparsity)
        sweep = CurveSweep(
            workspace,
            layers,
            fast.for_layers(layers),
            measured_densities(sparsity),
            trial_density=1 - sparsity,
            statistics={} if criterion == "search" else None,
        )
        curves = sweep.curves()
        total = total_kept([*curves], sparsity)
        ranges = within_support(curves, {layer: ranges[layer] for layer in curves}, total)
        counts = optimal_counts(curves, total, ranges)
        if criterion == "search":
            counts = search(
                workspace,
                counts,
                ranges={layer: ranges[layer] for layer, curve in curves.items() if curve.priced},
                weight_at=sweep.weight_at,
                judges=judges,
                generations=allocation.generations,
            )
        records = [allocation_record_of(layer, curve, counts[layer]) for layer, curve in curves.items()]
        keeps = {layer.name: keep for layer, keep in counts.items()}
        return {"keeps": keeps, "records": [asdict(record) for record in records]}

    values = workspace.remembered("allocation", planned)
    # A layer that receives no input has no count and keeps the pattern of the run.
    keeps = {layer: values["keeps"][layer.name] for layer in layers if layer.name in values["keeps"]}
    plan = {layer: on_grid_of(pattern, Unstructured(keep=keep)) for layer, keep in keeps.items()}
    return plan, [allocation_record(record) for record in values["records"]]


def _rates(workspace: Workspace, rate: Rate) -> dict[Layer, Pattern]:
    """The rate of every layer that shares that of the run; the same for all if the recipe says so."""
    layers, equal = workspace.request.sharing, workspace.recipe.division.criterion == "uniform"
    if not layers or (equal and not workspace.request.in_file):
        return {}
    rates = equal_rate if equal else divide_rate
    values = workspace.remembered(
        "rates", lambda: {layer.name: bits for layer, bits in rates(workspace, rate, layers).items()}
    )
    bits = {layer: values[layer.name] for layer in layers if layer.name in values}
    if not bits:
        return {}
    workspace.note(f"Bits of {len(bits)} layers: {min(bits.values()):.2f} to {max(bits.values()):.2f} a weight.")
    return {layer: replace(rate, bits=of_layer) for layer, of_layer in bits.items()}


def _criterion(workspace: Workspace, allocation: Allocation, layers: tuple[Layer, ...]) -> tuple[str, Samples]:
    """The criterion that an allocation means on this model, and the samples that judge a search.

    A search judges one-shot masks: before steps of the whole network its allocations lose (LOG.md).
    """
    judges = judges_of(workspace).first(PROBE, PROBE_TOKENS)
    if allocation.criterion != "auto":
        return allocation.criterion, judges
    blocks = workspace.decided.blocks
    network_steps = bool(workspace.chain) and blocks is not None and blocks.network_steps > 0
    possible = allocation.generations > 0 and workspace.store.whole and can_keep_grams(layers) and not network_steps
    outputs = sum(map(batches.position_count, judges.batches))
    if possible and outputs >= ENOUGH_OUTPUTS:
        workspace.note(f"Sparsities of layers: by a search, judged by {outputs} outputs.")
        return "search", judges
    workspace.note("Sparsities of layers: by their damages in nats, without a search.")
    return "fisher", judges


# ---- search
def can_keep_grams(layers: tuple[Layer, ...]) -> bool:
    """True if the Grams of all layers are small enough to be kept for a search."""
    return sum(layer.groups * layer.shape[1] ** 2 for layer in layers) <= _ENTRIES


def search(
    workspace: Workspace,
    counts: Counts,
    *,
    ranges: Mapping[Layer, tuple[int, int]],
    weight_at: Callable[[Layer, int], Tensor],
    judges: Samples,
    generations: int,
) -> Counts:
    """Counts of the least divergence that some random moves find.

    Args:
        workspace: state of the run; the model is dense.
        counts: entries that each layer keeps.
        ranges: least and greatest count of each layer.
        weight_at: (layer, count) -> the weight of the layer with that many entries.
        judges: samples on which divergences are measured.
        generations: number of moves.
    """
    layers, model = tuple(ranges), workspace.store.model
    if len(layers) < 2:
        return counts
    generator = torch.Generator().manual_seed(workspace.request.seed)
    answers = answered(model, judges)

    def divergence(weights: Mapping[Layer, Tensor]) -> float:
        with weights_written(model, weights):
            return mean_loss(model, answers, kl_to_answers)

    weights = {layer: weight_at(layer, keep) for layer, keep in counts.items()}
    best = divergence(weights)
    for generation in range(1, generations + 1):
        workspace.callbacks.on_measure("moves of weights between layers", generation, generations)
        giver, taker = (layers[i] for i in torch.randperm(len(layers), generator=generator)[:2].tolist())
        share = _LEAST_SHARE + (_MOST_SHARE - _LEAST_SHARE) * float(torch.rand((), generator=generator))
        moved = round(share * min(counts[giver], counts[taker]))
        moved = min(moved, counts[giver] - ranges[giver][0], ranges[taker][1] - counts[taker])
        if moved <= 0:
            continue
        trial = {giver: counts[giver] - moved, taker: counts[taker] + moved}
        changed = {layer: weight_at(layer, keep) for layer, keep in trial.items()}
        loss = divergence({**weights, **changed})
        if loss < best:
            best, counts, weights = loss, {**counts, **trial}, {**weights, **changed}
    return counts
