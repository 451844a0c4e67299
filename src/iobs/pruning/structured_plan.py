"""Plan of a run that removes units: what it may remove, and what is left at most, without removing anything.

A run chooses most widths by measurements. What is known before: the units, the cost of the dense model, and the share
of the cost that is asked. With equal shares of all sites (`allocation="uniform"`) the widths are known too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from iobs.core.structured import Cost
from iobs.pruning.callbacks import Callbacks
from iobs.pruning.network.modes import evaluating, seeded
from iobs.pruning.recipe import as_allocation
from iobs.pruning.removable import Asked, find_units, require_possible
from iobs.pruning.samples.batches import Batch
from iobs.pruning.store import Store
from iobs.pruning.structured import readers_and_refitted, tied_sites
from iobs.pruning.whole.run import kept_parts, parts_of
from iobs.pruning.widths.costs import Products
from iobs.pruning.widths.knapsack import require_reachable
from iobs.pruning.widths.plan import choices_of, chosen_widths


@dataclass(frozen=True)
class PlannedUnits:
    """Units of one site, or blocks or experts of one stack.

    Attributes:
        name: of the site, as in the report.
        kind: "channels", "neurons", "heads", "blocks" or "experts".
        layers: paths of the layers that read the units; none of blocks and experts.
        count: number of units.
        kept: number that stays; None: the run chooses it.
        least: fewest that the run may keep.
    """

    name: str
    kind: str
    layers: tuple[str, ...]
    count: int
    kept: int | None
    least: int


@dataclass(frozen=True)
class PlannedCost:
    """One cost of the dense model, and what is left of it.

    Attributes:
        name: "macs" or "parameters".
        before: of the dense model.
        most: upper bound of what is left; None: known after the run.
        where: of which layers.
    """

    name: str
    before: float
    most: float | None
    where: str


@dataclass(frozen=True)
class UnitsPlan:
    """Plan of a run that removes units.

    Attributes:
        units: in the order of the forward pass.
        costs: of the dense model.
        notes: what the run would note, such as sites that keep all units.
    """

    units: tuple[PlannedUnits, ...]
    costs: tuple[PlannedCost, ...]
    notes: tuple[str, ...]


def planned_units(store: Store, collected: Sequence[Batch], asked: Asked) -> UnitsPlan:
    """Plan a run of `iobs.prune` with the pattern `Structured`; the model is unchanged.

    Args:
        store: of the model.
        collected: calibration data.
        asked: as for the run.

    Raises:
        LayerSelectionError: no units were found, or names match nothing.
        PatternError: the cost cannot be reached.
        CalibrationError: the model does not take a batch.
        ModelError: the class of the model cannot have the narrower shapes.
        ProblemError: the recipe, or names of layers for blocks or experts.
    """
    require_possible(store, asked)
    callbacks = Callbacks([])
    with torch.inference_mode(False), evaluating(store.model), seeded(store.model, asked.seed):
        if asked.pattern.whole:
            return _whole(store.model, collected, asked)
        return _widths(store, collected, asked, callbacks)


def _widths(store: Store, collected: Sequence[Batch], asked: Asked, callbacks: Callbacks) -> UnitsPlan:
    pattern, found = asked.pattern, find_units(store, collected, asked, callbacks)
    selection = store.check(collected, readers_and_refitted(store, found.sites, asked), asked.holdout)
    sites = found.sites.read_by(selection.layers).sites
    tied = tied_sites(sites, found.form, pattern.uniform)
    choices = choices_of(sites, pattern, tied, None, found.offered)
    products = Products.count(store.model, collected[0], sites)
    costs: dict[Cost, Products] = {"macs": products, "parameters": products.entries}
    kept: Mapping[str, int] | None = None
    if pattern.sparsity == 0:
        kept = {site.name: site.count for site in sites}
    elif pattern.of != "latency":
        held = costs[pattern.of].held
        limit = (1 - pattern.sparsity) * held.of({})
        require_reachable(choices, held, limit)
        if as_allocation(asked.recipe.allocation).criterion == "uniform":
            kept = chosen_widths(choices, held, limit, True)
    least = {name: choice.widths[0] for choice in choices for name in choice.sites}
    units = tuple(
        PlannedUnits(
            site.name,
            site.kind,
            tuple(reader.path for reader in site.readers),
            site.count,
            None if kept is None else kept[site.name],
            least[site.name] if kept is None else kept[site.name],
        )
        for site in sites
    )
    planned = []
    for whole in (False, True):
        for name, cost in costs.items():
            of = cost if whole else cost.held
            removed = pattern.sparsity * cost.held.of({})
            most = of.of({}) - removed if name == pattern.of else None
            if kept is not None:
                most = of.of(kept)
            where = "in all layers" if whole else "in the layers that hold units"
            planned.append(PlannedCost(name, of.of({}), most, where))
    return UnitsPlan(units, tuple(planned), tuple(callbacks.notes))


def _whole(model: nn.Module, collected: Sequence[Batch], asked: Asked) -> UnitsPlan:
    parts = parts_of(model, collected, asked)
    keep = kept_parts(parts, asked.pattern.sparsity)
    parts.require_possible(keep)
    units = tuple(PlannedUnits(one.path, parts.name, (), one.count, keep, keep) for one in parts.stacks)
    before = float(sum(value.numel() for value in model.parameters()))
    costs = (PlannedCost("parameters", before, before - parts.least_removed(keep), "in all layers"),)
    return UnitsPlan(units, costs, ())
