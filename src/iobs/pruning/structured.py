"""`iobs.prune` with the pattern `Structured`: find units, run Algorithm 2 on their readers, remove the units.

During the run a removed unit is a group of zero columns of the layer that reads it. The network then computes the same
as the narrower network. The loop, the held-out choice and the gradient steps are those of all other patterns. Other
layers keep their columns, and are refitted to the dense outputs on what is left of their inputs. At the end the units
are removed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from iobs.core.structured import Runtime
from iobs.errors import first_line
from iobs.pruning.algorithm import run
from iobs.pruning.callbacks import Callbacks
from iobs.pruning.coverage import Reason
from iobs.pruning.network.layers import Layer, find_layers
from iobs.pruning.network.modes import evaluating, seeded
from iobs.pruning.network.selection import Selection
from iobs.pruning.recipe import Recipe
from iobs.pruning.removable import Asked, find_units
from iobs.pruning.report import LayerRecord, Report
from iobs.pruning.samples.batches import Batch
from iobs.pruning.store import Store
from iobs.pruning.structure.expected import Expected, can_copy
from iobs.pruning.structure.removal import remove, take_biases
from iobs.pruning.structure.units import Site
from iobs.pruning.structure.units_of_layers import SitesOfLayers
from iobs.pruning.structure.widths import Widths, check_of_counts, configure
from iobs.pruning.structured_report import SECONDS, CostRecord, StructuredReport, WidthRecord
from iobs.pruning.widths.clock import NAMES
from iobs.pruning.widths.costs import Products
from iobs.pruning.widths.latency import shares_of
from iobs.pruning.workspace import Request, Workspace

_NO_CHANGE = Recipe(solver="magnitude")  # keeps all units with their weights, and reads a few samples


def prune_units(store: Store, collected: list[Batch], asked: Asked, callbacks: Callbacks) -> StructuredReport:
    """Remove units of the model of a store; the model becomes narrower, or after an error it is as before.

    Raises:
        LayerSelectionError: no units were found, or names match nothing.
        PatternError: the cost cannot be reached.
        CalibrationError: the model does not take a batch.
        ModelError: the class of the model cannot have the narrower shapes.
        AuditError: the narrower model gives other outputs.
    """
    with store.unchanged_by_failure():
        report = _narrower(store, collected, asked, callbacks)
        with evaluating(store.model):
            callbacks.on_end(report)
        return report


def _narrower(store: Store, collected: list[Batch], asked: Asked, callbacks: Callbacks) -> StructuredReport:
    if asked.pattern.sparsity == 0:
        callbacks.on_note("Nothing is removed, since 0 % were asked: no widths are measured, and no weight changes.")
        asked = replace(asked, recipe=_NO_CHANGE, pattern=replace(asked.pattern, of="macs"))
    model = store.model
    with evaluating(model) as frozen, seeded(model, asked.seed):
        units = find_units(store, collected, asked, callbacks)
        sites, form, loadable, dense = units.sites, units.form, units.loadable, units.dense
        refitted = sites.sites if asked.recipe.refits_biases else ()
        require_counts = check_of_counts(model, form, sites.sites, bool(refitted)) if loadable else None
        with _added_biases(model, refitted, sites, form, loadable) as added:
            selection = store.check(collected, readers_and_refitted(store, sites, asked), asked.holdout)
            patterns = {layer: sites.groups(layer) for layer in selection.layers}
            sites = sites.read_by(selection.layers)
            tied = tied_sites(sites.sites, form, asked.pattern.uniform)
            request = Request(
                asked.recipe,
                patterns,
                asked.pattern,
                asked.holdout,
                asked.seed,
                asked.checkpoint,
                sites,
                tied,
                units.offered,
                require_counts,
                tuple(added),
            )
            work = Workspace.of(store, request, selection, collected, callbacks, frozen)
            report = run(work, ends=False)
            kept = {site.name: kept_units(model, site, sites, work.decided.widths[site.name]) for site in sites.sites}
    expected = Expected.of(model, collected[0])
    wide = copy.deepcopy(model) if can_copy(model) else None  # its zeros take the time of the dense network
    remove(model, sites.sites, {name: units.tolist() for name, units in kept.items()}, take_biases(model, added))
    if loadable:
        counts = {site.name: len(kept[site.name]) for site in sites.sites if len(kept[site.name]) < site.count}
        given = [site.name for site in sites.sites if site.reader in added and not site.can_bias]
        configure(model, form, counts, given)
    expected.require(model, wide)
    if wide is not None:
        take_biases(wide, added)  # the dense network does not compute them
    found = reported(report, sites, kept, dense, asked.recipe.target != "layer")
    return replace(
        found, costs=[*found.costs, *seconds_of(wide, model, collected[0], asked.pattern.runtime, callbacks)]
    )


def seconds_of(
    wide: nn.Module | None, narrow: nn.Module, batch: Batch, runtime: Runtime, callbacks: Callbacks
) -> list[CostRecord]:
    """The measured time of one sample before and after; nothing for a network that is too large to have it twice."""
    if wide is None:
        callbacks.on_note("The time of the narrower network was not measured, since both do not fit into memory.")
        return []
    try:
        before, after = shares_of(wide, narrow, batch, runtime)
    except Exception as error:  # of any runtime; the run has succeeded
        callbacks.on_note(f"Time not measured: {first_line(error)}")
        return []
    return [CostRecord(SECONDS, before, after, f"of one sample in {NAMES[runtime]}")]


def readers_and_refitted(store: Store, sites: SitesOfLayers, asked: Asked) -> Selection:
    """The readers of units; if targets are dense outputs, also the layers that are refitted with all their columns.

    These are the layers that `iobs.prune` prunes by default. Their inputs have drifted by what layers before them lost.
    """
    read = {layer for site in sites.sites for layer in sites.readers(site)}
    written = {writer.path for site in sites.sites for writer in site.writers}
    refitted: set[Layer] = set()
    if asked.recipe.target != "layer":
        usual = store.select(asked.include, asked.ignore, depthwise=False).layers
        refitted = {layer for layer in usual if layer.parameter == "weight" and layer.groups == 1}
    every = find_layers(store.model)
    chosen = tuple(layer for layer in every if layer in read or layer in refitted)
    skipped = {
        layer.name: Reason("asked", "its rows go with units" if layer.path in written else "reads no units")
        for layer in every
        if layer not in chosen
    }
    return Selection(chosen, skipped)


def tied_sites(sites: Iterable[Site], form: Widths, uniform: bool | None) -> tuple[tuple[str, ...], ...]:
    """Names of the sites that keep equal numbers of units."""
    if uniform is False:
        return ()
    alike: dict[object, list[str]] = {}
    groups = {name: number for number, group in enumerate(form.groups) for name in group.sites}
    for site in sites:
        alike.setdefault((site.kind, site.count) if uniform else groups[site.name], []).append(site.name)
    return tuple(map(tuple, alike.values()))


@contextmanager
def _added_biases(
    model: nn.Module, refitted: Iterable[Site], sites: SitesOfLayers, form: Widths, loadable: bool
) -> Iterator[list[str]]:
    """Give readers of refitted sites a bias of zeros for the run, where the narrower network has a place for it.

    Yields:
        The paths of these readers. Their biases are still there afterwards if the run succeeded.
    """
    added = []
    for site in refitted:
        for reader, layer in zip(site.readers, sites.readers(site), strict=True):
            module = model.get_submodule(layer.path)
            first = reader is site.readers[0]  # a configuration has a field for the bias of this layer only
            possible = reader.bias or reader.norm is not None or not loadable or (first and form.bias(site))
            if possible and "bias" in module._parameters and module._parameters["bias"] is None:
                weight = layer.stored(model)
                module.bias = nn.Parameter(torch.zeros(layer.shape[0], dtype=weight.dtype, device=weight.device))
                added.append(layer.path)
    try:
        yield added
    except BaseException:
        take_biases(model, added)
        raise


@torch.no_grad()
def kept_units(model: nn.Module, site: Site, sites: SitesOfLayers, width: int) -> Tensor:
    """Numbers of the units of a site that its readers keep, int64, ascending.

    A kept unit whose weights are all zero, because it is always off, fills the count like any other.
    """
    energy = torch.zeros(site.count, dtype=torch.float64)
    for layer in sites.readers(site):
        squares = layer.read(model).double().square().sum(0).cpu()
        energy += torch.stack([squares[list(columns)].sum() for columns in sites.columns(site, layer)])
    return energy.sort(descending=True, stable=True).indices[:width].sort().values


def reported(
    report: Report, sites: SitesOfLayers, kept: Mapping[str, Tensor], dense: Products, refits: bool
) -> StructuredReport:
    """The report of a run with widths and costs.

    Args:
        report: of Algorithm 2.
        sites: with the layers that read them.
        kept: numbers of the units of each site that are left.
        dense: products of the dense network.
        refits: True if layers that lose no inputs were fitted to the dense outputs.
    """
    records: dict[str, LayerRecord] = {one.name: one for one in report.layers}
    widths = []
    for site in sites.sites:
        layer = sites.readers(site)[0]
        error = records[layer.name].error_dense if layer.name in records else 0.0  # no sample reached it
        widths.append(WidthRecord(site.name, site.kind, layer.path, site.count, len(kept[site.name]), error))
    refitted = [one.name for one in report.layers if not one.asked] if refits else []
    after = {one.name: one.after for one in widths}
    costs = []
    for where, products in (("in the layers that hold units", dense.held), ("in all layers", dense)):
        costs.append(CostRecord("macs", products.of({}), products.of(after), where))
        costs.append(CostRecord("parameters", products.entries.of({}), products.entries.of(after), where))
    # The zeros were counted before the units were removed; the narrower matrices have none that were asked for.
    return StructuredReport(**{**vars(report), "audit": []}, widths=widths, costs=costs, refitted=refitted)
