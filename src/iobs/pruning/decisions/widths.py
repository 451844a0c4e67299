"""The width of every site of a run that removes units."""

from __future__ import annotations

from dataclasses import asdict, replace

from iobs.core.column_groups import Groups
from iobs.core.patterns import Pattern
from iobs.core.structured import Structured
from iobs.pruning.network.layers import Layer
from iobs.pruning.recipe import as_allocation
from iobs.pruning.report import AllocationRecord, JsonObject, allocation_record
from iobs.pruning.widths.costs import Products
from iobs.pruning.widths.curves import Curves, SiteCurve
from iobs.pruning.widths.plan import choices_of, chosen_widths
from iobs.pruning.workspace import Workspace


def allocate_widths(work: Workspace, pattern: Structured) -> tuple[dict[Layer, Pattern], list[AllocationRecord]]:
    """Groups of every reader with the number of units to keep; for an allocation also the measurements behind it."""
    patterns = {layer: one for layer, one in work.request.patterns.items() if isinstance(one, Groups)}

    def planned() -> JsonObject:
        widths, records = _planned(work, pattern, patterns)
        return {"widths": widths, "records": [asdict(record) for record in records]}

    found = work.checkpoint.remembered("allocation", planned)
    names = {layer: site.name for layer, site in work.request.sites.items()}
    plan: dict[Layer, Pattern] = {
        layer: replace(one, keep=found["widths"][names[layer]], sparsity=None, multiple_of=1)
        for layer, one in patterns.items()
    }
    return plan, [allocation_record(record) for record in found["records"]]


def _planned(
    work: Workspace, pattern: Structured, patterns: dict[Layer, Groups]
) -> tuple[dict[str, int], list[AllocationRecord]]:
    sites = {layer: work.request.sites[layer] for layer in patterns}
    cost = Products.count(work.store.model, work.fit.batches[0], tuple(sites.values())).held
    cost = cost.entries if pattern.of == "parameters" else cost
    tied, limit = work.request.tied, (1 - pattern.sparsity) * cost.of({})
    if as_allocation(work.recipe.allocation).criterion == "uniform":
        choices = choices_of(tuple(sites.values()), pattern, tied, None)
        return chosen_widths(choices, cost, limit, equal=True), []
    curves = Curves(
        work.store.model,
        patterns,
        work.biases,
        work.chain,
        work.fit,
        work.heldout,
        work.recipe.damping,
        work.request.seed,
        work.callbacks.on_measure,
    ).measured()
    named = {sites[layer].name: curve for layer, curve in curves.items()}
    choices = choices_of(tuple(sites.values()), pattern, tied, named)
    widths = chosen_widths(choices, cost, limit, equal=False)
    return widths, [_record(curve, widths[sites[layer].name]) for layer, curve in curves.items()]


def _record(curve: SiteCurve, width: int) -> AllocationRecord:
    count = len(curve.errors) - 1
    shown = sorted({round(count * step / 16) for step in range(16)} | {count - width})
    return AllocationRecord(
        name=curve.layer.name,
        shape=curve.layer.shape,
        sparsities=[removed / count for removed in reversed(shown)],
        errors=[2 * curve.errors[removed] / max(curve.energy, 1e-30) for removed in reversed(shown)],
        effects=[curve.effects[removed] for removed in reversed(shown)],
        chosen=1 - width / count,
    )
