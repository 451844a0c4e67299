"""Widths that the configuration of a model can express, so that a narrower model is saved and loaded like any other.

A Hugging Face model is built from its configuration. Its class loads a narrower network only if some values of the
configuration give exactly the narrower shapes. These values are found by trial. The class is built without data from a
changed configuration, and the shapes that change are compared with those that a removal gives.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from iobs.errors import ModelError
from iobs.pruning.structure.config_fields import Configuration, config_inside, configurations
from iobs.pruning.structure.removal import CONFIG
from iobs.pruning.structure.shapes import Shapes, built, is_configured, narrowed, set_fields, shapes_of
from iobs.pruning.structure.trials import Width, width_of, with_bias
from iobs.pruning.structure.units import Site


@dataclass(frozen=True)
class Widths:
    """Sites that a model's class can load narrower, and the reasons why it cannot for others.

    Args:
        groups: sites with equal numbers of units.
        refused: reason by name of the site.
        biased: names of the sites whose first reader has a place for a bias without any change.
    """

    groups: tuple[Width, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    biased: frozenset[str] = frozenset()

    def bias(self, site: Site) -> bool:
        """Check that the narrower model can be loaded with a new bias of the site's first reader."""
        given = any(group.bias is not None for group in self.groups if site.name in group.sites)
        return site.name in self.biased or given

    def offered(self) -> dict[str, tuple[int, ...]]:
        """The numbers of units that can be loaded, by name of the site, where the class does not load every number."""
        return {name: group.counts for group in self.groups if group.counts is not None for name in group.sites}


def widths_of(model: nn.Module, sites: Sequence[Site]) -> Widths:
    """The widths that the model's configuration can express.

    For a model that is not built from a configuration every site is a group of its own.
    """
    if not is_configured(model):
        every = frozenset(site.name for site in sites)  # any layer of an own model can get a bias
        return Widths(tuple(Width((site.name,)) for site in sites), biased=every)
    before = built(model, model.config)
    if isinstance(before, str) or not shapes_of(model).items() <= before.items():
        reason = before if isinstance(before, str) else "its shapes differ from those that its configuration gives"
        return Widths((), {site.name: f"{type(model).__name__} cannot be built again: {reason}" for site in sites})
    groups: list[Width] = []
    refused: dict[str, str] = {}
    left = list(sites)
    while left:
        found = width_of(model, before, left)
        if isinstance(found, str):
            refused[left.pop(0).name] = found
        else:
            groups.append(with_bias(model, before, found, sites))
            left = [site for site in left if site.name not in found.sites]
    return Widths(tuple(groups), refused, frozenset(site.name for site in sites if site.can_bias))


def require_loadable(widths: Widths, counts: Mapping[str, int], biased: Collection[str] = ()) -> None:
    """Check that the model's class can load a network with these numbers of units.

    Args:
        widths: of the model.
        counts: units that are kept, by name of the site, for the sites that lose units.
        biased: names of sites whose reader gets a bias.

    Raises:
        ModelError: a site cannot become narrower, sites of one width keep different numbers of units, or a reader
            cannot have a bias.
    """
    possible = {name for group in widths.groups if group.bias is not None for name in group.sites} | widths.biased
    for name in biased:
        if name not in possible:
            raise ModelError(f"The reader of {name} has no bias, and no value of the configuration gives it one.")
    for name in counts:
        if name in widths.refused:
            raise ModelError(
                f"{name} must keep all units, or the saved model cannot be loaded: {widths.refused[name]}."
            )
    for group in widths.groups:
        kept = {name: counts.get(name) for name in group.sites}
        count = next(iter(kept.values()))
        if group.counts is not None and count is not None and count not in group.counts:
            raise ModelError(
                f"{group.sites[0]} cannot keep {count} units, or the saved model cannot be loaded: its class loads "
                f"{', '.join(map(str, group.counts))}."
            )
        if len(set(kept.values())) > 1:
            names = " and ".join(sorted({one.name for one in group.fields}))
            shown = ", ".join(f"{name}: {'all' if count is None else count}" for name, count in kept.items())
            raise ModelError(
                f"The configuration has one {names} for {len(kept)} layers, so they must keep equal numbers of units; "
                f"got {shown}."
            )


def configure(
    model: nn.Module, widths: Widths, counts: Mapping[str, int], biased: Collection[str] = ()
) -> dict[str, object]:
    """Let the configuration of a narrower model follow its widths.

    Args:
        model: after `remove`; its configuration is changed, and biases of zeros are added where the configuration gives
            several layers a bias at once.
        widths: of the model before the removal.
        counts: units that are kept, by name of the site, for the sites that lose units.
        biased: names of sites whose reader was given a bias.

    Returns:
        The new values by name of the field.

    Raises:
        ModelError: see `require_loadable`; or a bias was added that the class cannot have.
    """
    require_loadable(widths, counts, biased)
    if not is_configured(model):
        return {}
    config, changed, shapes = _configured(model, widths, counts, biased)
    _add_zero_biases(model, shapes)
    _require_shapes(model, shapes_of(model), shapes)
    set_configuration(model, config)
    return changed


def require_together(model: nn.Module, widths: Widths, sites: Sequence[Site], share: float, biases: bool) -> None:
    """Check before any work that the model's class can have all its widths narrower at once.

    Args:
        model: unchanged.
        widths: of the model; each was tried alone.
        sites: those that the class can have narrower.
        share: of the units of every site that is removed for the trial: at least one unit, and not all.
        biases: readers may get a bias where the configuration has a field for it.

    Raises:
        ModelError: it cannot.
    """
    groups = {name: group for group in widths.groups for name in group.sites}
    counts = {site.name: _fewer(groups[site.name], site.count, share) for site in sites}
    check_of_counts(model, widths, sites, biases)(counts)


def check_of_counts(
    model: nn.Module, widths: Widths, sites: Sequence[Site], biases: bool
) -> Callable[[Mapping[str, int]], None]:
    """A function that raises `ModelError` if the model's class cannot have some numbers of units, by name of the site.

    Args:
        model: unchanged; later changes of its parameters do not matter.
        widths: of the model.
        sites: those that the class can have narrower.
        biases: as in `require_together`.
    """
    if not is_configured(model):
        return lambda counts: None
    before = shapes_of(model)
    named = [name for group in widths.groups if biases and group.bias is not None for name in group.sites]

    def require(counts: Mapping[str, int]) -> None:
        expected = before
        for site in sites:
            expected = narrowed(expected, [site], counts.get(site.name, site.count))
        fewer = {site.name: counts[site.name] for site in sites if counts.get(site.name, site.count) < site.count}
        _require_shapes(model, expected, _configured(model, widths, fewer, named)[2])

    return require


def _fewer(width: Width, count: int, share: float) -> int:
    """The number of units below `count`, of those that the class can load, that is nearest without the share."""
    wanted = max(1, min(count - 1, round((1 - share) * count)))
    return min([one for one in width.counts or [wanted] if one < count] or [count], key=lambda one: abs(one - wanted))


def _configured(
    model: nn.Module, widths: Widths, counts: Mapping[str, int], biased: Collection[str]
) -> tuple[Configuration, dict[str, object], Shapes]:
    """The configuration of a narrower model, its new values by name of the field, and the shapes that it gives.

    Raises:
        ModelError: the class cannot be built from it.
    """
    config = copy.deepcopy(model.config)
    changed: dict[str, object] = {}
    for group in widths.groups:
        if group.sites[0] in counts:
            changed |= set_fields(config, group.fields, counts[group.sites[0]])
        if group.bias is not None and set(group.sites) & set(biased):
            inner, _, name = group.bias.rpartition(".")
            setattr(config_inside(config, inner), name, True)
            changed[group.bias] = True
    shapes = built(model, config)
    if isinstance(shapes, str):
        raise ModelError(f"{type(model).__name__} cannot be built from the narrower configuration: {shapes}.")
    return config, changed, shapes


def _require_shapes(model: nn.Module, expected: Shapes, shapes: Shapes) -> None:
    """Check that a configuration gives the shapes of a narrower model.

    Raises:
        ModelError: names the first parameter with another shape.
    """
    if differing := [name for name, shape in expected.items() if shapes.get(name) != shape]:
        raise ModelError(
            f"{type(model).__name__} cannot have the shape of {differing[0]}, {expected[differing[0]]}: its "
            f"configuration gives {shapes.get(differing[0], 'no such parameter')}."
        )


def _add_zero_biases(model: nn.Module, shapes: Shapes) -> None:
    """Add biases of zeros that the configuration gives and the model lacks."""
    for name in shapes.keys() - shapes_of(model).keys():
        path, _, parameter = name.rpartition(".")
        module = model.get_submodule(path)
        if parameter == "bias" and "weight" in module._parameters:
            weight = module._parameters["weight"]
            assert weight is not None
            zeros = torch.zeros(shapes[name], dtype=weight.dtype, device=weight.device)
            module._parameters["bias"] = nn.Parameter(zeros, weight.requires_grad)


def set_configuration(model: nn.Module, config: Configuration) -> None:
    """Give the model's own configuration objects the new values, and all modules these objects again.

    A module whose configuration differs from them, such as that of a decoder, keeps it with the new values.
    """
    objects, changes = dict(configurations(model.config)), []
    for name, new in configurations(config):
        old = vars(objects[name])
        changed = {key: value for key, value in vars(new).items() if not hasattr(value, "to_dict")}
        changed = {key: value for key, value in changed.items() if key not in old or old[key] != value}
        old.update(changed)
        changes.append((objects[name], changed))
    settled = {id(one): one for one in objects.values()}
    kept = []  # so that no identity is given twice
    for module in model.modules():
        given = vars(module).get(CONFIG[:-1])
        if given is not None:
            if id(given) not in settled:
                kept.append(given)
                settled[id(given)] = _followed(given, changes)
            module.config = settled[id(given)]


def _followed(given: Configuration, changes: Sequence[tuple[Configuration, dict[str, object]]]) -> Configuration:
    """The changed configuration that a module's own one equals with the same changes, or its own one with them."""
    similar = [(one, changed) for one, changed in changes if type(one) is type(given)]
    for one, changed in similar:
        own = copy.copy(given)
        own.__dict__.update(changed)
        if own.to_dict() == one.to_dict():
            return one
    if len(similar) == 1:
        given.__dict__.update(similar[0][1])
    return given
