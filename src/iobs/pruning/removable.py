"""Units of a model that a run may remove, found and checked before any of its work."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from iobs.core.structured import Structured
from iobs.errors import LayerSelectionError, ModelError, NonFiniteError, ProblemError, listed
from iobs.pruning.calibration.hooks import reached
from iobs.pruning.callbacks import Callbacks
from iobs.pruning.network.layers import Layer, find_layers, joined
from iobs.pruning.network.modes import keeping_buffers
from iobs.pruning.network.selection import (
    adapters_of,
    matching,
    other_weights,
    require_module,
    require_shapes,
    require_unstored,
)
from iobs.pruning.recipe import Recipe
from iobs.pruning.recipe.structured import require_structured
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.store import Store
from iobs.pruning.structure.expected import require_narrower
from iobs.pruning.structure.shapes import is_configured
from iobs.pruning.structure.sites import checked_sites
from iobs.pruning.structure.traced_batches import traced_batches
from iobs.pruning.structure.units import Site
from iobs.pruning.structure.units_of_layers import SitesOfLayers
from iobs.pruning.structure.widths import Widths, require_together, widths_of
from iobs.pruning.widths.clock import require_runtime
from iobs.pruning.widths.costs import Products, note_differing_shapes

Names = str | Sequence[str] | None


@dataclass(frozen=True)
class Asked:
    """Arguments of `iobs.prune` for a run that removes units; `iobs.prune` describes them."""

    pattern: Structured
    recipe: Recipe
    include: Names
    ignore: Names
    holdout: float
    seed: int
    checkpoint: str | Path | None


@dataclass(frozen=True)
class Found:
    """The units of a model that a run may remove.

    Attributes:
        sites: with the layers that read them.
        form: the widths that the model's configuration can express.
        loadable: True if the class must be able to load the narrower model.
        dense: products of the dense model.
    """

    sites: SitesOfLayers
    form: Widths
    loadable: bool
    dense: Products

    @property
    def offered(self) -> dict[str, tuple[int, ...]]:
        """Numbers of units, by name of the site, for sites that cannot keep every number."""
        return self.form.offered() if self.loadable else {}


def find_units(store: Store, collected: Sequence[Batch], asked: Asked, callbacks: Callbacks) -> Found:
    """Find the units of a model on its calibration data; the model is unchanged. Sites that keep all units are noted.

    Raises:
        LayerSelectionError: no units were found, or names match nothing.
        CalibrationError: the model does not take a batch.
        ModelError: the class of the model cannot have the narrower shapes.
    """
    model = store.model
    require_taken(model, collected)
    store.observe(collected, asked.seed)  # finds layers that no class shows, such as transposed convolutions
    given = traced_batches(model, collected)
    sites = _sites(model, given, asked, callbacks)
    if store.built_by_code:
        sites = _written(model, sites, callbacks)
    form = widths_of(model, sites.sites)
    loadable = asked.pattern.uniform is not False
    if loadable:
        sites = _loadable(sites, form, callbacks)
        if asked.pattern.sparsity:
            require_together(model, form, sites.sites, asked.pattern.sparsity, asked.recipe.refits_biases)
    if not is_configured(model):  # otherwise the shapes of the class tell which layers read units
        _note_uncalled(model, sites, collected, callbacks)
    sites = _reached(model, sites, form, loadable, collected, callbacks)
    if len(given) > 1:
        require_narrower(model, sites.sites, given)
    dense = Products.count(model, collected[0], sites.sites)
    if not dense.held.of({}):
        raise LayerSelectionError(
            "The first calibration batch reaches no layer that holds units, so that no cost can be counted; give "
            "data that reach them first."
        )
    note_differing_shapes(collected, callbacks.on_note)
    return Found(sites, form, loadable, dense)


def require_possible(store: Store, asked: Asked) -> None:
    """Check the model and the recipe before any work, the calibration data included.

    Raises:
        ProblemError: the recipe, or the model's weights are not in memory.
        ModelError: the model is no module, has no parameters, or has adapters or matrices of `iobs.accelerate`.
        LayerSelectionError: a lazy layer was never called.
        NonFiniteError: a parameter holds NaN or infinity.
    """
    if not store.whole:
        raise ProblemError("Structured removes units of a model in memory; load the model whole.")
    require_module(store.model)
    if next(store.model.parameters(), None) is None:
        raise ModelError(
            f"{type(store.model).__name__} has no parameters. Modules in a plain list or dict are not registered: use "
            "nn.ModuleList or nn.ModuleDict. Quantised modules of torch have none: prune before you quantise."
        )
    require_shapes(store.model)
    require_unstored(store.model)
    for path, _ in adapters_of(store.model):
        raise ModelError(
            f"{path!r} has an adapter, which would keep the old widths. Merge the adapters first "
            "(iobs.transformers.merge_adapters), or prune the base model and train adapters on it afterwards."
        )
    for name, parameter in store.model.named_parameters():
        if parameter.element_size() > 1 and not bool(torch.isfinite(parameter).all()):  # float8 has no such test
            raise NonFiniteError(f"{name} holds NaN or infinity; repair the model first.")
    require_structured(asked.recipe)
    require_runtime(asked.pattern.runtime)


def require_taken(model: nn.Module, data: Sequence[Batch]) -> None:
    """Check that a model takes its calibration data, before anything is looked for in it.

    Raises:
        CalibrationError: the model does not take a batch.
    """
    with keeping_buffers(model):
        batches.require_all_accepted(model, data)


def _sites(model: nn.Module, given: Sequence[Batch], asked: Asked, callbacks: Callbacks) -> SitesOfLayers:
    """The sites of a model with the layers that read them, as far as the names of the readers are asked for."""
    every_layer = find_layers(model)
    layers = {layer.path: layer for layer in every_layer if layer.parameter == "weight" and layer.groups == 1}
    checked = checked_sites(model, given, asked.pattern.units == "auto")
    unsolved = {site.name: key for site in checked.sites if (key := _unsolved(site, layers)) is not None}
    every = [site for site in checked.sites if site.name not in unsolved]
    reasons = {name: f"{key}, which reads them, is no weight that a solver takes" for name, key in unsolved.items()}
    _note_kept(model, every_layer, checked.refused | reasons, every, callbacks)
    chosen = set(every_layer) if asked.include is None else _named(every_layer, asked.include, "include")
    chosen -= set() if asked.ignore is None else _named(every_layer, asked.ignore, "ignore")
    found = tuple(site for site in every if all(layers[one.path] in chosen for one in site.readers))
    if not found:
        raise LayerSelectionError("include= and ignore= leave no layer whose units can be removed.")
    return SitesOfLayers(found, layers)


def _unsolved(site: Site, layers: Collection[str]) -> str | None:
    """The name of a parameter that reads units and is not the weight of a layer; None if there is none."""
    keys = [one.weight.key for one in site.readers if one.path not in layers or one.weight.parameter != "weight"]
    return keys[0] if keys else None


def _note_kept(
    model: nn.Module, layers: list[Layer], reasons: Mapping[str, str], left: Sequence[Site], callbacks: Callbacks
) -> None:
    """Say which units are kept although they were found, and why.

    Raises:
        LayerSelectionError: none are left.
    """
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    notes = [f"{listed(one)}: all units are kept, since {reason}." for reason, one in names.items()]
    computed = [name for name, one in other_weights(model, layers).items() if one.kind == "transformed"]
    if computed:
        notes.append(
            f"Layers that compute their weight in every forward pass neither lose nor read units: {listed(computed)}. "
            "iobs.fold(model, batch) makes plain weights of them."
        )
    fixed = [path or "the model" for path, one in model.named_modules() if isinstance(one, nn.MultiheadAttention)]
    if fixed:
        notes.append(
            f"nn.MultiheadAttention keeps its heads, since they share its embed_dim: {listed(fixed)}. Attention made "
            "of Linear layers loses heads."
        )
    every = [path for path, one in model.named_modules() if isinstance(one, torch.jit.ScriptModule)]
    scripted = [path for path in every if path and path.rpartition(".")[0] not in every]
    if isinstance(model, torch.jit.ScriptModule) or scripted:
        names_of = listed(scripted) or type(model).__name__
        notes.append(f"torch.jit hides the layers of {names_of}: prune the Python modules, and script them afterwards.")
    if not left:
        nothing = "No channels, neurons or heads were found that can be removed from this model."
        if not notes:
            notes.append(
                "Units lie between two layers, outside the outputs and the residual stream, where no norm, softmax or "
                'shuffle mixes them. units="stream" also takes the stream of a network with batch norms; Unstructured '
                "and NM remove entries of any layer."
            )
        raise LayerSelectionError(" ".join([nothing, *notes]))
    for note in notes:
        callbacks.on_note(note)


def _named(found: Sequence[Layer], names: str | Sequence[str], argument: str) -> set[Layer]:
    wanted = matching(found, names, argument)
    return {layer for layer in found if layer.name in wanted}


def _written(model: nn.Module, sites: SitesOfLayers, callbacks: Callbacks) -> SitesOfLayers:
    """The sites that files of weights hold; those with a part in a buffer that code makes anew keep all units.

    Raises:
        LayerSelectionError: there are none.
    """
    rebuilt = {joined(path, name) for path, one in model.named_modules() for name in one._non_persistent_buffers_set}
    found = []
    for site in sites.sites:
        lost = [one.key for one in site.slices if one.key in rebuilt]
        if lost:
            callbacks.on_note(
                f"{site.name} keeps all units: {lost[0]} has entries of them, and no file of weights holds it."
            )
        else:
            found.append(site)
    if not found:
        raise LayerSelectionError(
            "All units have entries in buffers that no file of weights holds, so a narrower network could not be "
            "loaded. Use iobs.prune in Python, and torch.save(model, file)."
        )
    return replace(sites, sites=tuple(found))


def _loadable(sites: SitesOfLayers, form: Widths, callbacks: Callbacks) -> SitesOfLayers:
    """The sites whose number of units the configuration can express; the others keep all units, with a note.

    Raises:
        LayerSelectionError: there are none.
    """
    found = tuple(site for site in sites.sites if site.name not in form.refused)
    for name, reason in form.refused.items():
        callbacks.on_note(f"{name} keeps all units: {reason}.")
    if not found:
        reason = next(iter(form.refused.values()))
        raise LayerSelectionError(
            f"A narrower model of this class could not be loaded again: {reason}. With uniform=False it is pruned "
            "nevertheless, to be exported or stored as a whole."
        )
    by_name = {site.name: site for site in found}
    for group in form.groups:
        own = [by_name[name] for name in group.sites if name in by_name]
        if own and group.counts is not None:
            some = ", ".join(map(str, group.counts[:-1])) or "none"
            callbacks.on_note(
                f"{listed([site.name for site in own])}: of {own[0].count} units the class loads {some} or all. With "
                "uniform=False any number can stay, but the class does not load the model: export it."
            )
    return replace(sites, sites=found)


def _note_uncalled(model: nn.Module, sites: SitesOfLayers, data: Sequence[Batch], callbacks: Callbacks) -> None:
    """Name the layers that calibration data do not reach and that have the width of removable units."""
    readers = [reader.weight for site in sites.sites for reader in site.readers]
    widths = {one.stored(model).shape[one.axis] for one in readers}
    known = {one.path for one in readers}
    alike = {
        layer
        for layer in sites.layers.values()
        if layer.path not in known and layer.stored(model).shape[1 - int(layer.transposed)] in widths
    }
    if uncalled := sorted(layer.name for layer in alike - reached(model, alike, data)):
        callbacks.on_note(
            f"No calibration sample reaches {listed(uncalled)}. If they read units that are removed, a forward pass "
            "that calls them fails: give data that reach them."
        )


def _reached(
    model: nn.Module, sites: SitesOfLayers, form: Widths, loadable: bool, data: Sequence[Batch], callbacks: Callbacks
) -> SitesOfLayers:
    """The sites that calibration data reach, all readers included; the others keep all units, with a note.

    Nothing is known of the units of an expert without a token, and its absence would seem to do no harm. If the
    configuration has one number for several sites, and data do not reach all of them, all of them keep all units.

    Raises:
        LayerSelectionError: there are none.
    """
    fed = reached(model, {layer for site in sites.sites for layer in sites.readers(site)}, data)
    found = sites.read_by(fed)
    unfed = [site.name for site in sites.sites if site not in found.sites]
    if unfed:
        callbacks.on_note(f"{', '.join(unfed)}: all units are kept, since no calibration sample reaches them.")
    tied = {name for group in form.groups if loadable and set(group.sites) & set(unfed) for name in group.sites}
    if beside := [site.name for site in found.sites if site.name in tied]:
        callbacks.on_note(
            f"{', '.join(beside)}: all units are kept, since the configuration has one number for them and for sites "
            "that no calibration sample reaches."
        )
        found = replace(found, sites=tuple(site for site in found.sites if site.name not in tied))
    if not found.sites and beside:
        raise LayerSelectionError(
            f"No calibration sample reaches {unfed[0]}, and the configuration has one number for it and for the layers "
            "that samples reach. Give data that reach it; uniform=False narrows the others alone, to be exported."
        )
    if not found.sites:
        raise LayerSelectionError("No calibration sample reaches a layer that holds units; give data that reach them.")
    return found
