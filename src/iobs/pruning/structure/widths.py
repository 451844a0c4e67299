"""Widths that the class of a model can say, so that a narrower model is saved and loaded like any other.

A Hugging Face model is built from its configuration. Its class loads a narrower network only if some values of the
configuration give exactly the narrower shapes. These values are found by trial. The class is built without data from a
changed configuration, and the shapes that change are compared with those that a removal gives.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import nn

from iobs.errors import ModelError, first_line
from iobs.pruning.structure.config_fields import Configuration, Field, config_inside, configurations, proposals
from iobs.pruning.structure.removal import CONFIG
from iobs.pruning.structure.units import Site

Shapes: TypeAlias = dict[str, tuple[int, ...]]  # of stored parameters and buffers, by full name


@dataclass(frozen=True)
class Width:
    """Sites whose numbers of units are one value of the configuration, and so are equal.

    Args:
        sites: names of the sites.
        fields: the values that follow; none for a model that is not built from a configuration.
        bias: name of the field that gives all readers a bias, with the name of its configuration before it. None if the
            readers have a bias or cannot have one.
        counts: numbers of units, ascending, that the class can load; None: any number. Classes that divide the hidden
            size by the number of heads load its divisors only.
    """

    sites: tuple[str, ...]
    fields: tuple[Field, ...] = ()
    bias: str | None = None
    counts: tuple[int, ...] | None = None


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
    """The widths that the model's class can say.

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
        found = _trial(model, before, left)
        if isinstance(found, str):
            refused[left.pop(0).name] = found
        else:
            groups.append(_with_bias(model, before, found, sites))
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
    config = copy.deepcopy(model.config)
    changed: dict[str, object] = {}
    for group in widths.groups:
        if group.sites[0] in counts:
            changed |= _set(config, group.fields, counts[group.sites[0]])
        if group.bias is not None and set(group.sites) & set(biased):
            inner, _, name = group.bias.rpartition(".")
            setattr(config_inside(config, inner), name, True)
            changed[group.bias] = True
    shapes = built(model, config)
    if isinstance(shapes, str):
        raise ModelError(f"{type(model).__name__} cannot be built from the narrower configuration: {shapes}.")
    _add_zero_biases(model, shapes)
    if differing := [name for name, shape in shapes_of(model).items() if shapes.get(name) != shape]:
        raise ModelError(
            f"{type(model).__name__} cannot have the shape of {differing[0]}, {shapes_of(model)[differing[0]]}: its "
            f"configuration gives {shapes.get(differing[0], 'no such parameter')}."
        )
    share(model, config)
    return changed


def is_configured(model: nn.Module) -> bool:
    """Check that a model is built from a configuration, as those of transformers are."""
    return callable(getattr(model, "save_pretrained", None)) and hasattr(getattr(model, "config", None), "to_dict")


def shapes_of(model: nn.Module) -> Shapes:
    """Shapes of the stored parameters and buffers of a model."""
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def built(model: nn.Module, config: Configuration) -> Shapes | str:
    """The shapes of the model's class for a configuration, or the reason why it cannot be built."""
    try:
        # As saving and loading do: some values are checked or derived anew.
        loaded = type(config).from_dict(json.loads(config.to_json_string()))
        with torch.device("meta"), torch.no_grad():
            return shapes_of(type(model)(loaded))
    except Exception as error:  # every class has its own checks
        return first_line(error)


def _set(config: Configuration, fields: Iterable[Field], units: int) -> dict[str, object]:
    """Set the fields for a number of units, and return the values by full name of the field."""
    values = {}
    for one in fields:
        place = config_inside(config, one.config)
        new: object = one.value(units)
        if one.place is not None:
            new = [new if index == one.place else old for index, old in enumerate(getattr(place, one.name))]
        setattr(place, one.name, new)
        values[f"{one.config}.{one.name}" if one.config else one.name] = new
    return values


def _trial(model: nn.Module, before: Shapes, sites: Sequence[Site]) -> Width | str:
    """The width that the first site belongs to, or the reason why its number of units cannot change."""
    site, reason = sites[0], ""
    if site.count == 1:
        return "it has a single unit"
    for fields in proposals(model.config, site):
        found = _narrower(model, fields, _tried(site, fields))
        if isinstance(found, str):
            reason = reason or found
            continue
        units, shapes = found
        group = [one for one in sites if one.count == site.count and _narrowed(before, [one], units) != before]
        expected = {name: shape for name, shape in shapes.items() if shape != before.get(name)}
        same = [one for one in group if _changes(before, [one], units).items() <= expected.items()]
        if site in same and _changes(before, same, units) == expected and shapes.keys() == before.keys():
            counts = None if _any_count(site, fields) else _possible(model, fields, site.count)
            return Width(tuple(one.name for one in same), tuple(fields), counts=counts)
        if any(name in expected for name in _changes(before, [site], units)):
            other = next(iter(expected.keys() - _changes(before, same, units).keys()), None)
            names = ", ".join(one.name for one in fields if not one.fixed)
            reason = f"{names} also changes {other}" if other else f"{names} gives other shapes"
    kind = type(model.config).__name__
    return f"no field of {kind} gives {site.reader} fewer {site.kind}" + (f" ({reason})" if reason else "")


def _any_count(site: Site, fields: Sequence[Field]) -> bool:
    """Check that a class that loads one number of units less loads every number."""
    return site.kind != "heads" and not any(one.whole for one in fields)


def _tried(site: Site, fields: Sequence[Field]) -> Iterable[int]:
    """Numbers of units that a trial may use; the hidden size may have to be a multiple of the number of heads."""
    if _any_count(site, fields):
        return (site.count - 1,)
    return (units for units in range(site.count - 1, 0, -1) if all(one.takes(units) for one in fields))


def _shapes_at(model: nn.Module, fields: Sequence[Field], units: int) -> Shapes | str:
    """The shapes of the model's class with other values of the fields, or the reason why it cannot be built."""
    config = copy.deepcopy(model.config)
    try:
        _set(config, fields, units)
    except Exception as error:  # configurations check their values
        return first_line(error)
    return built(model, config)


def _narrower(model: nn.Module, fields: Sequence[Field], tried: Iterable[int]) -> tuple[int, Shapes] | str:
    """The first number of units that the class can be built with, and its shapes; or why the first cannot."""
    reason = ""
    for units in tried:
        found = _shapes_at(model, fields, units)
        if not isinstance(found, str):
            return units, found
        reason = reason or found
    return reason


def _possible(model: nn.Module, fields: Sequence[Field], count: int) -> tuple[int, ...] | None:
    """Numbers of units, ascending, that the class can be built with; None: any number."""
    some = (units for units in range(1, count) if all(one.takes(units) for one in fields))
    fits = [units for units in some if not isinstance(_shapes_at(model, fields, units), str)]
    return None if len(fits) == count - 1 else (*fits, count)


def _narrowed(before: Shapes, sites: Iterable[Site], units: int) -> Shapes:
    """The shapes after the removal of all but `units` units of every site."""
    shapes = {name: list(shape) for name, shape in before.items()}
    for site in sites:
        for one in site.slices:
            if one.key in shapes:  # otherwise a buffer that is not stored
                shapes[one.key][one.axis] -= len(one.index[0]) * (site.count - units)
    return {name: tuple(shape) for name, shape in shapes.items()}


def _changes(before: Shapes, sites: Iterable[Site], units: int) -> Shapes:
    return {name: shape for name, shape in _narrowed(before, sites, units).items() if shape != before[name]}


def _with_bias(model: nn.Module, before: Shapes, width: Width, sites: Sequence[Site]) -> Width:
    """The width with the field that gives its readers a bias."""
    readers = [site.readers[0] for site in sites if site.name in width.sites]
    if all(reader.bias for reader in readers):
        return width
    for inner, one in configurations(model.config):
        for name in [name for name, value in vars(one).items() if value is False and "bias" in name]:
            config = copy.deepcopy(model.config)
            setattr(config_inside(config, inner), name, True)
            shapes = built(model, config)
            if isinstance(shapes, str) or not before.items() <= shapes.items():
                continue
            if all(f"{reader.path}.bias" in shapes for reader in readers):
                return replace(width, bias=f"{inner}.{name}" if inner else name)
    return width


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


def share(model: nn.Module, config: Configuration) -> None:
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
