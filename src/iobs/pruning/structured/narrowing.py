"""Units of layers, from channels to heads: found, checked and chosen, then removed with what writes and reads them.

During the run a removed unit is a group of zero columns of the layer that reads it. The network then computes the same
as the narrower network. The loop, the held-out choice and the gradient steps are those of all other patterns. Other
layers keep their columns, and are refitted to the dense outputs on what is left of their inputs. At the end the units
are removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from iobs.core.structured import Cost
from iobs.errors import LayerSelectionError, listed
from iobs.pruning.algorithm import run
from iobs.pruning.calibration.hooks import reached
from iobs.pruning.calibration.observe import multiplied_as_they_are
from iobs.pruning.callbacks import Callbacks
from iobs.pruning.cost.foresight import Foresight
from iobs.pruning.coverage import Reason
from iobs.pruning.network.copies import copied
from iobs.pruning.network.layers import Layer, find_layers, joined
from iobs.pruning.network.modes import keeping_buffers
from iobs.pruning.network.selection import Selection, matching, other_weights
from iobs.pruning.plan.widths import TIMINGS
from iobs.pruning.report import LayerRecord, Report
from iobs.pruning.samples.batches import Batch
from iobs.pruning.store import Store
from iobs.pruning.structure.config_widths import is_configured, widths_of
from iobs.pruning.structure.expected import Expected, can_copy, require_narrower
from iobs.pruning.structure.sites import checked_sites
from iobs.pruning.structure.trace import traced_batches
from iobs.pruning.structure.units import Site, SitesOfLayers, remove, take_biases
from iobs.pruning.structured_report import (
    CostRecord,
    PlannedCost,
    PlannedUnits,
    StructuredRequest,
    UnitsPlan,
    WidthRecord,
)
from iobs.pruning.widths.costs import Products
from iobs.pruning.widths.knapsack import choices_of, chosen_widths, possible_widths, require_reachable
from iobs.pruning.widths.latency import seconds_of_measuring, seconds_of_shares
from iobs.pruning.workspace import Request, Workspace

_WHERE = ("in the layers that hold units", "in all layers")  # of costs


class SiteRemoval:
    """The removal of channels, neurons and heads from a model.

    Args:
        store: of the model, which is unchanged until `solve`.
        data: calibration batches that the model takes.
        request: its pattern asks for units of layers.
        callbacks: of the run; sites that keep all units are noted.

    Raises:
        LayerSelectionError: no units were found, or names match nothing.
        ModelError: the class of the model cannot have the narrower shapes.
    """

    def __init__(self, store: Store, data: list[Batch], request: StructuredRequest, callbacks: Callbacks) -> None:
        self.store, self.model, self.data, self.request, self.callbacks = store, store.model, data, request, callbacks
        self.stays: list[str] = []  # why units stay, one sentence for each reason
        model, pattern = self.model, request.pattern
        store.observe(data, request.seed)  # finds layers that no class shows, such as transposed convolutions
        short_batches = traced_batches(model, data)
        self.sites = self._find_sites(short_batches)
        if store.built_by_code:
            self._keep_rebuilt()
        self.widths = widths_of(model, self.sites.sites)
        self.loadable = pattern.uniform is not False  # the class must be able to load the narrower model
        if self.loadable:
            self._keep_refused()
            if pattern.sparsity:
                refits = request.recipe.refits_biases
                self.widths.require_together(model, self.sites.sites, pattern.sparsity, refits)
        if not is_configured(model):  # otherwise the shapes of the class tell which layers read units
            self._note_uncalled()
        self._keep_unreached()
        if len(short_batches) > 1:
            require_narrower(model, self.sites.sites, short_batches)
        with keeping_buffers(model):
            self.selection = multiplied_as_they_are(model, self._readers_and_refitted(), data[0])
        self.sites = self.sites.read_by(self.selection.layers)
        self.products = Products.count(model, data[0], self.sites.sites)
        if not self.products.held.of({}):
            raise LayerSelectionError(
                "The first calibration batch reaches no layer that holds units, so that no cost can be counted; give "
                "data that reach them first."
            )

    @property
    def offered(self) -> dict[str, tuple[int, ...]]:
        """Numbers of units, by name of the site, for sites that cannot keep every number."""
        return self.widths.offered() if self.loadable else {}

    # ---- sites that may lose units
    def _find_sites(self, short_batches: Sequence[Batch]) -> SitesOfLayers:
        """The sites with the layers that read them, as far as the names of the readers are asked for.

        Raises:
            LayerSelectionError: there are none.
        """
        include, ignore = self.request.include, self.request.ignore
        layers = find_layers(self.model)
        solvable = {layer.path: layer for layer in layers if layer.parameter == "weight" and layer.groups == 1}
        verified = checked_sites(self.model, short_batches, self.request.pattern.units == "auto")
        reasons, sites = dict(verified.refused), []
        for site in verified.sites:
            weights = [reader.weight for reader in site.readers]
            if keys := [part.key for part in weights if part.path not in solvable or part.parameter != "weight"]:
                reasons[site.name] = f"{keys[0]}, which reads them, is no weight that a solver takes"
            else:
                sites.append(site)
        self._note_kept(layers, reasons, sites)
        chosen = set(layers) if include is None else _named(layers, include, "include")
        chosen -= set() if ignore is None else _named(layers, ignore, "ignore")
        named = tuple(site for site in sites if all(solvable[reader.path] in chosen for reader in site.readers))
        if not named:
            raise LayerSelectionError("include= and ignore= leave no layer whose units can be removed.")
        return SitesOfLayers(named, solvable)

    def _note_kept(self, layers: list[Layer], reasons: Mapping[str, str], sites: Sequence[Site]) -> None:
        """Note which units are kept although they were found, and why.

        Raises:
            LayerSelectionError: no sites are left.
        """
        model = self.model
        names: dict[str, list[str]] = {}
        for name, reason in reasons.items():
            names.setdefault(reason, []).append(name)
        notes = [f"{listed(some)}: all units are kept, since {reason}." for reason, some in names.items()]
        computed = [name for name, why in other_weights(model, layers).items() if why.kind == "transformed"]
        if computed:
            notes.append(
                f"Layers that compute their weight in every forward pass neither lose nor read units: "
                f"{listed(computed)}. iobs.fold(model, batch) makes plain weights of them."
            )
        fixed = [path or "the model" for path, each in model.named_modules() if isinstance(each, nn.MultiheadAttention)]
        if fixed:
            notes.append(
                f"nn.MultiheadAttention keeps its heads, since they share its embed_dim: {listed(fixed)}. Attention "
                "made of Linear layers loses heads."
            )
        if not sites:
            nothing = "No channels, neurons or heads were found that can be removed from this model."
            if not notes:
                notes.append(
                    "Units lie between two layers, outside the outputs and the residual stream, where no norm, softmax "
                    'or shuffle mixes them. units="stream" also takes the stream of a network with batch norms; '
                    "Unstructured and NM remove entries of any layer."
                )
            raise LayerSelectionError(" ".join([nothing, *notes]))
        for note in notes:
            self._stay(note)

    def _stay(self, note: str) -> None:
        """Note why units stay, for the run and for the report."""
        self.stays.append(note)
        self.callbacks.on_note(note)

    def _keep(self, reasons: Mapping[str, str], message: str) -> None:
        """Let sites keep all units, with a note each; reasons by name of the site.

        Raises:
            LayerSelectionError: with the message, if there are no others.
        """
        for name, reason in reasons.items():
            self._stay(f"{name} keeps all units: {reason}.")
        sites = tuple(site for site in self.sites.sites if site.name not in reasons)
        if not sites:
            raise LayerSelectionError(message)
        self.sites = replace(self.sites, sites=sites)

    def _keep_rebuilt(self) -> None:
        """Let sites keep all units that have a part in a buffer which no file of weights holds."""
        modules = self.model.named_modules()
        rebuilt = {joined(path, name) for path, module in modules for name in module._non_persistent_buffers_set}
        lost = {site.name: [part.key for part in site.slices if part.key in rebuilt] for site in self.sites.sites}
        self._keep(
            {
                name: f"{keys[0]} has entries of them, and no file of weights holds it"
                for name, keys in lost.items()
                if keys
            },
            "All units have entries in buffers that no file of weights holds, so a narrower network could not be "
            "loaded. Use iobs.prune in Python, and torch.save(model, file).",
        )

    def _keep_refused(self) -> None:
        """Let sites keep all units whose number the configuration cannot express."""
        refused = self.widths.refused
        self._keep(
            refused,
            f"A narrower model of this class could not be loaded again: {next(iter(refused.values()), '')}. With "
            "uniform=False it is pruned nevertheless, to be exported or stored as a whole.",
        )
        sites = {site.name: site for site in self.sites.sites}
        for group in self.widths.groups:
            alike = [sites[name] for name in group.sites if name in sites]
            if alike and group.counts is not None:
                some = ", ".join(map(str, group.counts[:-1])) or "none"
                self.callbacks.on_note(
                    f"{listed([site.name for site in alike])}: of {alike[0].count} units the class loads {some} or "
                    "all. With uniform=False any number can stay, but the class does not load the model: export it."
                )

    def _note_uncalled(self) -> None:
        """Name the layers that calibration data do not reach and that have the width of removable units."""
        readers = [reader.weight for site in self.sites.sites for reader in site.readers]
        widths = {part.stored(self.model).shape[part.axis] for part in readers}
        paths = {part.path for part in readers}
        alike = {
            layer
            for layer in self.sites.layers.values()
            if layer.path not in paths and layer.stored(self.model).shape[1 - int(layer.transposed)] in widths
        }
        if uncalled := sorted(layer.name for layer in alike - reached(self.model, alike, self.data)):
            self.callbacks.on_note(
                f"No calibration sample reaches {listed(uncalled)}. If they read units that are removed, a forward "
                "pass that calls them fails: give data that reach them."
            )

    def _keep_unreached(self) -> None:
        """Let sites keep all units if calibration data do not reach all of their readers, with a note.

        Nothing is known of the units of an expert without a token, and its absence would seem to do no harm. If the
        configuration has one number for several sites, and data do not reach all of them, all of them keep all units.

        Raises:
            LayerSelectionError: there are no others.
        """
        readers = {layer for site in self.sites.sites for layer in self.sites.readers(site)}
        fed = self.sites.read_by(reached(self.model, readers, self.data))
        unfed = [site.name for site in self.sites.sites if site not in fed.sites]
        if unfed:
            self._stay(f"{', '.join(unfed)}: all units are kept, since no calibration sample reaches them.")
        groups = [group.sites for group in self.widths.groups if self.loadable and set(group.sites) & set(unfed)]
        tied = {name for names in groups for name in names}
        if beside := [site.name for site in fed.sites if site.name in tied]:
            self._stay(
                f"{', '.join(beside)}: all units are kept, since the configuration has one number for them and for "
                "sites that no calibration sample reaches."
            )
            fed = replace(fed, sites=tuple(site for site in fed.sites if site.name not in tied))
        if not fed.sites and beside:
            raise LayerSelectionError(
                f"No calibration sample reaches {unfed[0]}, and the configuration has one number for it and for the "
                "layers that samples reach. Give data that reach it; uniform=False narrows the others alone, to be "
                "exported."
            )
        if not fed.sites:
            raise LayerSelectionError(
                "No calibration sample reaches a layer that holds units; give data that reach them."
            )
        self.sites = fed

    def _readers_and_refitted(self) -> Selection:
        """The readers of units; if targets are dense outputs, also the layers that are refitted with all their columns.

        These are the layers that `iobs.prune` prunes by default. Their inputs have drifted by what layers before them
        lost.
        """
        request, sites = self.request, self.sites
        read = {layer for site in sites.sites for layer in sites.readers(site)}
        written = {writer.path for site in sites.sites for writer in site.writers}
        refitted: set[Layer] = set()
        if request.recipe.target != "layer":
            usual = self.store.select(request.include, request.ignore, depthwise=False).layers
            refitted = {layer for layer in usual if layer.parameter == "weight" and layer.groups == 1}
        every = find_layers(self.model)
        chosen = tuple(layer for layer in every if layer in read or layer in refitted)
        skipped = {
            layer.name: Reason("asked", "its rows go with units" if layer.path in written else "reads no units")
            for layer in every
            if layer not in chosen
        }
        return Selection(chosen, skipped)

    @property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Names of the sites that keep equal numbers of units."""
        uniform = self.request.pattern.uniform
        if uniform is False:
            return ()
        alike: dict[object, list[str]] = {}
        groups = {name: index for index, group in enumerate(self.widths.groups) for name in group.sites}
        for site in self.sites.sites:
            alike.setdefault((site.kind, site.count) if uniform else groups[site.name], []).append(site.name)
        return tuple(map(tuple, alike.values()))

    # ---- the run
    def plan(self) -> UnitsPlan:
        """The removal of a run, as far as it is known without measurements.

        Raises:
            PatternError: the cost cannot be reached.
        """
        pattern, sites = self.request.pattern, self.sites.sites
        choices = choices_of(sites, pattern, self.tied, None, self.offered)
        kept: Mapping[str, int] | None = None
        if pattern.sparsity == 0:
            kept = {site.name: site.count for site in sites}
        elif pattern.of != "latency":
            held = self._removable(pattern.of)
            limit = (1 - pattern.sparsity) * held.of({})
            require_reachable(choices, held, limit)
            if self.request.recipe.division.criterion == "uniform":
                kept = chosen_widths(choices, held, limit, True)
        least = {name: choice.widths[0] for choice in choices for name in choice.sites} if kept is None else kept
        units = []
        for site in sites:
            paths, count = tuple(reader.path for reader in site.readers), None if kept is None else kept[site.name]
            units.append(PlannedUnits(site.name, site.kind, paths, site.count, count, least[site.name]))
        planned = []
        for name, cost, where in self._cost_models():
            before = cost.of({})
            most = before - pattern.sparsity * self._removable(name).of({}) if name == pattern.of else None
            planned.append(PlannedCost(name, before, most if kept is None else cost.of(kept), where))
        return UnitsPlan(tuple(units), tuple(planned), tuple(self.callbacks.notes))

    def foretell(self) -> float:
        """Seconds of a run after the search for units, on this machine."""
        seconds = Foresight.of(self.store, self._solving(), self.data).forecast(self.request.recipe).seconds
        pattern = self.request.pattern
        if pattern.of == "latency":
            widths = {
                site: possible_widths(pattern, site, offered=self.offered.get(site.name)) for site in self.sites.sites
            }
            calls = self.model, self.data[0]
            seconds += seconds_of_measuring(*calls, widths, pattern.runtime, pattern.batch)
            seconds += TIMINGS * seconds_of_shares(*calls, pattern.runtime, pattern.batch)
        return seconds

    def _solving(self) -> Request:
        """The request of the solves of the layers that read units."""
        request, sites = self.request, self.sites
        patterns = {layer: sites.groups(layer) for layer in self.selection.layers}
        common = request.recipe, patterns, request.pattern, request.holdout, request.seed, request.checkpoint
        return Request(*common, sites, self.tied, self.offered)

    def solve(self, frozen: frozenset[str]) -> Report:
        """Choose the units, set the columns of the others to zero, and solve for what reads the rest.

        Raises:
            PatternError: the cost cannot be reached.
        """
        request, model, sites = self.request, self.model, self.sites
        self.refitted_sites = sites.sites if request.recipe.refits_biases else ()
        require_counts = partial(self.widths.require_counts, model, sites.sites, bool(self.refitted_sites))
        with self._added_biases() as self.added:
            solving = replace(
                self._solving(),
                require_counts=require_counts if self.loadable else None,
                added=tuple(self.added),
            )
            workspace = Workspace(self.store, solving, self.selection, self.data, self.callbacks, frozen)
            report = run(workspace, ends=False)
        self.kept = {site.name: self._kept_units(site, workspace.decided.widths[site.name]) for site in sites.sites}
        self.expected = Expected.of(model, self.data[0])
        return report

    @contextmanager
    def _added_biases(self) -> Iterator[list[str]]:
        """Give readers of refitted sites a bias of zeros for the run, where the narrower network has a place for it.

        Yields:
            The paths of these readers. Their biases are still there afterwards if the run succeeded.
        """
        added = []
        for site in self.refitted_sites:
            for reader, layer in zip(site.readers, self.sites.readers(site), strict=True):
                module = self.model.get_submodule(layer.path)
                first = reader is site.readers[0]  # a configuration has a field for the bias of this layer only
                placed = reader.bias or reader.norm is not None or not self.loadable
                placed = placed or (first and self.widths.bias(site))
                if placed and "bias" in module._parameters and module._parameters["bias"] is None:
                    weight = layer.stored(self.model)
                    module.bias = nn.Parameter(torch.zeros(layer.shape[0], dtype=weight.dtype, device=weight.device))
                    added.append(layer.path)
        try:
            yield added
        except BaseException:
            take_biases(self.model, added)
            raise

    @torch.no_grad()
    def _kept_units(self, site: Site, width: int) -> list[int]:
        """Indices of the units of a site that its readers keep, ascending.

        A kept unit whose weights are all zero, because it is always off, fills the count like any other.
        """
        energy = torch.zeros(site.count, dtype=torch.float64)
        for layer in self.sites.readers(site):
            squares = layer.read(self.model).double().square().sum(0).cpu()
            energy += torch.stack([squares[list(columns)].sum() for columns in self.sites.columns(site, layer)])
        kept: list[int] = energy.sort(descending=True, stable=True).indices[:width].sort().values.tolist()
        return kept

    def remove(self) -> None:
        """Remove the units from the model, and check what is left.

        Raises:
            AuditError: the narrower model gives other outputs.
            ModelError: its class cannot have its widths.
        """
        model, sites = self.model, self.sites.sites
        self._wide = copied(model) if can_copy(model) else None
        remove(model, sites, self.kept, take_biases(model, self.added))
        if self.loadable:
            counts = {site.name: len(self.kept[site.name]) for site in sites if len(self.kept[site.name]) < site.count}
            biased = [site.name for site in sites if site.reader in self.added and not site.can_bias]
            self.widths.configure(model, counts, biased)
        self.expected.require(model, self._wide)

    def wide(self) -> nn.Module | None:
        """The network with zeros, whose time is that of the dense network; None if it is too large for a copy."""
        if self._wide is not None:
            take_biases(self._wide, self.added)  # the dense network does not compute them
        return self._wide

    def width_records(self, report: Report) -> list[WidthRecord]:
        """The units of every site before and after."""
        records: dict[str, LayerRecord] = {record.name: record for record in report.layers}
        widths = []
        for site in self.sites.sites:
            layer = self.sites.readers(site)[0]
            error = records[layer.name].error_dense if layer.name in records else 0.0  # no sample reached it
            kept = len(self.kept[site.name])
            widths.append(WidthRecord(site.name, site.kind, layer.path, site.count, kept, error))
        return widths

    def costs(self) -> list[CostRecord]:
        """Multiplications and entries before and after."""
        after = {name: len(units) for name, units in self.kept.items()}
        return [CostRecord(name, cost.of({}), cost.of(after), where) for name, cost, where in self._cost_models()]

    def _cost_models(self) -> Iterator[tuple[Cost, Products, str]]:
        """Every cost with its name, and of which layers it is."""
        for where, products in zip(_WHERE, (self.products.held, self.products), strict=True):
            yield "macs", products, where
            yield "parameters", products.entries, where

    def _removable(self, cost: Cost) -> Products:
        """A cost of the layers that hold units, whose share is removed."""
        return self.products.held if cost == "macs" else self.products.held.entries

    def refitted(self, report: Report) -> list[str]:
        """Names of the layers that lost no inputs, if they were fitted to the dense outputs."""
        fits = self.request.recipe.target != "layer"
        return [record.name for record in report.layers if not record.asked] if fits else []


def _named(layers: Sequence[Layer], names: str | Sequence[str], argument: str) -> set[Layer]:
    matched = matching(layers, names, argument)
    return {layer for layer in layers if layer.name in matched}
