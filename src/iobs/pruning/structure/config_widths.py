"""Widths that the configuration of a model can express, so that a narrower model is saved and loaded like any other.

A Hugging Face model is built from its configuration. Its class loads a narrower network only if some values of the
configuration give exactly the narrower shapes. `proposals` gives the fields that may count the units of a site, by
their usual names first, then by their values. A few trials say whether they do: the class is built without data from a
changed configuration, and its shapes are compared with those of a removal.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from math import gcd
from typing import Any, TypeAlias

import torch
from torch import nn

from iobs.errors import ModelError, first_line
from iobs.pruning.structure.units import CONFIG, Site

Configuration: TypeAlias = Any  # a configuration of transformers, or a value of one

# The names of 330 of the 350 families of the breadth table: tried before other fields that have the same value.
_NEURONS = ("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size")
_HEAD_WIDTHS = ("head_dim", "d_kv", "attention_head_size", "kv_channels")
_HEAD_GROUPS = ("num_kv_groups", "multi_query_group_num")
_OPTIONAL = ("n_inner", "ffn_hidden_size", "intermediate_size", "ffn_dim", "hidden_dim")  # None: a default of the class
_RATIOS = ("mlp_ratio", "mlp_ratios", "expand_ratio")
_ROUNDING = 1e-12  # relative; a class takes the whole part of a ratio times a width, which rounding may put just below
Shapes: TypeAlias = dict[str, tuple[int, ...]]  # of stored parameters and buffers, by full name

_MOST_TRIALS = 16  # numbers of units of one site with which a class is built, if it cannot be built with all of them


# ---- fields of a configuration
@dataclass(frozen=True)
class Field:
    """A field of a configuration that follows a number of units.

    Args:
        config: name of the configuration inside the model's one, such as `text_config`; empty for the model's own.
        name: of the field.
        each: its value for one unit; its value itself if `fixed`.
        index: in a list with one value for each layer; None: the field is a number.
        fixed: the field does not follow the units; it says a value that the class derives otherwise.
        whole: the value must be a whole number, as some ratios of widths must; other ratios are floats.
    """

    config: str
    name: str
    each: float
    index: int | None = None
    fixed: bool = False
    whole: bool = False

    @property
    def path(self) -> str:
        """The name, behind the name of the inner configuration."""
        return f"{self.config}.{self.name}" if self.config else self.name

    def value(self, units: int) -> float:
        """The field's value for a number of units."""
        if self.fixed:
            return self.each
        value = self.each * units
        if self.whole:
            return round(value)
        if type(value) is int:
            return value
        return float(round(value)) if abs(value - round(value)) < _ROUNDING else value * (1 + _ROUNDING)

    def takes(self, units: int) -> bool:
        """True if the field has a value for a number of units."""
        return not self.whole or abs(self.each * units - round(self.each * units)) < 1e-6


def inner_configs(config: Configuration) -> Iterator[tuple[str, Configuration]]:
    """A configuration and those inside it, with their names."""
    yield "", config
    for name, value in vars(config).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield name, value


def inner_config(config: Configuration, name: str) -> Configuration:
    """The configuration of this name inside another; itself for an empty name."""
    return getattr(config, name) if name else config


def set_fields(config: Configuration, fields: Iterable[Field], units: int) -> dict[str, object]:
    """Set the fields for a number of units, and return the values by path of the field."""
    values = {}
    for field in fields:
        holder = inner_config(config, field.config)
        value: object = field.value(units)
        if field.index is not None:
            before = getattr(holder, field.name)
            value = [value if index == field.index else old for index, old in enumerate(before)]
        setattr(holder, field.name, value)
        values[field.path] = value
    return values


def without_entries(config: Configuration, fields: Iterable[Field], removed: Collection[int]) -> Configuration:
    """A copy of a configuration whose lists with one value for each counted part lack the removed parts."""
    changed = copy.deepcopy(config)
    for name in {field.config for field in fields}:
        counts = {getattr(inner_config(config, name), field.name) for field in fields if field.config == name}
        holder = inner_config(changed, name)
        for key, value in list(vars(holder).items()):
            if isinstance(value, (list, tuple)) and len(value) in counts:
                setattr(holder, key, type(value)(entry for index, entry in enumerate(value) if index not in removed))
    return changed


def counting_fields(config: Configuration, count: int, counts: Callable[[str], bool] | None = None) -> list[Field]:
    """The fields whose value is a number of parts; with `counts` those for whose name it is true."""
    return [
        Field(name, key, 1)
        for name, holder in inner_configs(config)
        for key, value in vars(holder).items()
        if type(value) is int and value == count and (counts is None or counts(key))
    ]


def proposals(config: Configuration, site: Site) -> Iterator[list[Field]]:
    """Fields that may count the units of a site, the likeliest first; each list is one proposal."""
    for inner, holder in inner_configs(config):
        if site.kind == "heads":
            yield from _head_fields(inner, holder, site)
            continue
        values = vars(holder)
        for name in sorted(values, key=lambda name: name not in _NEURONS):
            value = values[name]
            if (type(value) is int and value == site.count) or (value is None and name in _OPTIONAL):
                yield [Field(inner, name, 1)]
            elif name in _RATIOS:
                several = isinstance(value, (list, tuple))
                for index, entry in enumerate(value if several else [value]):
                    if type(entry) in (int, float):
                        at = index if several else None
                        yield [Field(inner, name, entry / site.count, at, whole=type(entry) is int)]
            elif isinstance(value, (list, tuple)) and len(value) > 1 and all(type(entry) is int for entry in value):
                yield from ([Field(inner, name, 1, index)] for index, entry in enumerate(value) if entry == site.count)


def _head_fields(inner: str, config: Configuration, site: Site) -> Iterator[list[Field]]:
    """Numbers of heads that are multiples of the units, first all of one configuration, then each alone."""
    counts = [
        Field(inner, name, value // site.count)
        for name, value in vars(config).items()
        if type(value) is int and value and value % site.count == 0 and (counts_heads(name) or name in _HEAD_GROUPS)
    ]
    for fields in [counts, *([field] for field in counts if len(counts) > 1)]:
        if not fields:
            continue
        yield fields
        heads = max(int(field.each) for field in fields) * site.count
        for name in _HEAD_WIDTHS:
            if hasattr(config, name) or name == _HEAD_WIDTHS[0]:  # many classes read head_dim if it is there
                yield [*fields, Field(inner, name, len(site.columns[0]) * site.count // heads, fixed=True)]


def counts_heads(name: str) -> bool:
    """True if an attribute or a field of this name is a number of heads, not the width of one."""
    return "head" in name and not name.endswith(("dim", "size"))


# ---- widths
def is_configured(model: nn.Module) -> bool:
    """True if a model is built from a configuration, as those of transformers are."""
    return callable(getattr(model, "save_pretrained", None)) and hasattr(getattr(model, "config", None), "to_dict")


def shapes_of(model: nn.Module) -> Shapes:
    """Shapes of the stored parameters and buffers of a model."""
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def built_shapes(model: nn.Module, config: Configuration) -> Shapes:
    """The shapes that the model's class has for a configuration.

    Raises:
        ModelError: it cannot be built from it; the message is the reason alone.
    """
    try:
        # As saving and loading do: some values are checked or derived anew. Infinite values stay numbers here.
        loaded = type(config).from_dict(json.loads(json.dumps(config.to_diff_dict())))
        with torch.device("meta"), torch.no_grad():
            return shapes_of(type(model)(loaded))
    except Exception as error:  # every class has its own checks
        raise ModelError(first_line(error)) from error


def shapes_with(model: nn.Module, fields: Sequence[Field], units: int) -> Shapes:
    """The shapes that the model's class has with other values of some fields.

    Raises:
        ModelError: as `built_shapes`.
    """
    config = copy.deepcopy(model.config)
    try:
        set_fields(config, fields, units)
    except Exception as error:  # configurations check their values
        raise ModelError(first_line(error)) from error
    return built_shapes(model, config)


def narrowed_shapes(before: Shapes, sites: Iterable[Site], units: int) -> Shapes:
    """The shapes after the removal of all but `units` units of every site."""
    shapes = {name: list(shape) for name, shape in before.items()}
    for site in sites:
        for part in site.slices:
            if part.key in shapes:  # otherwise a buffer that is not stored
                shapes[part.key][part.axis] -= len(part.index[0]) * (site.count - units)
    return {name: tuple(shape) for name, shape in shapes.items()}


@dataclass(frozen=True)
class WidthGroup:
    """Sites whose numbers of units are one value of the configuration, and so are equal.

    Args:
        sites: names of the sites.
        fields: the values that follow; none for a model that is not built from a configuration.
        bias: path of the field that gives all readers a bias. None if the readers have a bias or cannot have one.
        counts: numbers of units, ascending, that the class can load; None: any number. Classes that divide the hidden
            size by the number of heads load its divisors only.
    """

    sites: tuple[str, ...]
    fields: tuple[Field, ...] = ()
    bias: str | None = None
    counts: tuple[int, ...] | None = None

    def nearest(self, count: int, share: float) -> int:
        """The number of units below `count`, of those that the class can load, that is nearest without the share."""
        target = max(1, min(count - 1, round((1 - share) * count)))
        possible = [units for units in self.counts or [target] if units < count]
        return min(possible or [count], key=lambda units: abs(units - target))


@dataclass(frozen=True)
class ConfigWidths:
    """Sites that a model's class can load narrower, and the reasons why it cannot for others.

    Args:
        groups: sites with equal numbers of units.
        refused: reason by name of the site.
        biased: names of the sites whose first reader has a place for a bias without any change.
        shapes: of the dense model; None if it is not built from a configuration.
    """

    groups: tuple[WidthGroup, ...]
    refused: Mapping[str, str] = dataclass_field(default_factory=dict)
    biased: frozenset[str] = frozenset()
    shapes: Shapes | None = None

    def bias(self, site: Site) -> bool:
        """True if the narrower model can be loaded with a new bias of the site's first reader."""
        return site.name in self.biased or any(group.bias for group in self.groups if site.name in group.sites)

    def offered(self) -> dict[str, tuple[int, ...]]:
        """The numbers of units that can be loaded, by name of the site, where the class does not load every number."""
        return {name: group.counts for group in self.groups if group.counts is not None for name in group.sites}

    def require_together(self, model: nn.Module, sites: Sequence[Site], share: float, biases: bool) -> None:
        """Raise unless the model's class can have all its widths narrower at once, before any work.

        Args:
            model: unchanged.
            sites: those that the class can have narrower; each was tried alone.
            share: of the units of every site that is removed for the trial: at least one unit, and not all.
            biases: readers may get a bias where the configuration has a field for it.

        Raises:
            ModelError: it cannot.
        """
        groups = {name: group for group in self.groups for name in group.sites}
        counts = {site.name: groups[site.name].nearest(site.count, share) for site in sites}
        self.require_counts(model, sites, biases, counts)

    def require_counts(self, model: nn.Module, sites: Sequence[Site], biases: bool, counts: Mapping[str, int]) -> None:
        """Raise unless the model's class can have some numbers of units, by name of the site.

        Args:
            model: only its class and configuration count, so its parameters may have changed.
            sites: those that the class can have narrower.
            biases: as in `require_together`.
            counts: sites without a number keep all units.

        Raises:
            ModelError: it cannot.
        """
        if self.shapes is None:
            return
        expected = self.shapes
        for site in sites:
            expected = narrowed_shapes(expected, [site], counts.get(site.name, site.count))
        fewer = {site.name: counts[site.name] for site in sites if counts.get(site.name, site.count) < site.count}
        biased = [name for group in self.groups if biases and group.bias is not None for name in group.sites]
        _require_shapes(model, expected, self._configured(model, fewer, biased)[2])

    def configure(self, model: nn.Module, counts: Mapping[str, int], biased: Collection[str] = ()) -> dict[str, object]:
        """Let the configuration of a narrower model follow its widths.

        Args:
            model: after `remove`; its configuration is changed, and biases of zeros are added where the configuration
                gives several layers a bias at once.
            counts: units that are kept, by name of the site, for the sites that lose units.
            biased: names of sites whose reader was given a bias.

        Returns:
            The new values by path of the field.

        Raises:
            ModelError: the class cannot have these widths, sites of one group keep different numbers, or a bias was
                added that the class cannot have.
        """
        if not is_configured(model):
            return {}
        config, values, shapes = self._configured(model, counts, biased)
        _add_zero_biases(model, shapes)
        _require_shapes(model, shapes_of(model), shapes)
        set_configuration(model, config)
        return values

    def _configured(
        self, model: nn.Module, counts: Mapping[str, int], biased: Collection[str]
    ) -> tuple[Configuration, dict[str, object], Shapes]:
        """The configuration of a narrower model, its new values by path of the field, and the shapes that it gives.

        Raises:
            ModelError: the class cannot be built from it.
        """
        config = copy.deepcopy(model.config)
        values: dict[str, object] = {}
        for group in self.groups:
            if group.sites[0] in counts:
                values |= set_fields(config, group.fields, counts[group.sites[0]])
            if group.bias is not None and set(group.sites) & set(biased):
                inner, _, name = group.bias.rpartition(".")
                setattr(inner_config(config, inner), name, True)
                values[group.bias] = True
        try:
            return config, values, built_shapes(model, config)
        except ModelError as error:
            raise ModelError(
                f"{type(model).__name__} cannot be built from the narrower configuration: {error}."
            ) from error


def widths_of(model: nn.Module, sites: Sequence[Site]) -> ConfigWidths:
    """The widths that the model's configuration can express.

    For a model that is not built from a configuration every site is a group of its own.
    """
    if not is_configured(model):
        every = frozenset(site.name for site in sites)  # any layer of an own model can get a bias
        return ConfigWidths(tuple(WidthGroup((site.name,)) for site in sites), biased=every)
    before, reason = shapes_of(model), "its shapes differ from those that its configuration gives"
    try:
        shapes = built_shapes(model, model.config)
    except ModelError as error:
        shapes, reason = {}, str(error)
    if not before.items() <= shapes.items():
        reason = f"{type(model).__name__} cannot be built again: {reason}"
        return ConfigWidths((), {site.name: reason for site in sites}, shapes=before)
    groups: list[WidthGroup] = []
    refused: dict[str, str] = {}
    remaining = list(sites)
    while remaining:
        try:
            group = _find_group(model, shapes, remaining)
        except ModelError as error:
            refused[remaining.pop(0).name] = str(error)
        else:
            groups.append(_with_bias(model, shapes, group, sites))
            remaining = [site for site in remaining if site.name not in group.sites]
    biased = frozenset(site.name for site in sites if site.can_bias)
    return ConfigWidths(tuple(groups), refused, biased, before)


def _find_group(model: nn.Module, before: Shapes, sites: Sequence[Site]) -> WidthGroup:
    """The group that the first site belongs to.

    Raises:
        ModelError: its number of units cannot change; the message is the reason alone.
    """
    site, reason = sites[0], ""
    if site.count == 1:
        raise ModelError("it has a single unit")
    for fields in proposals(model.config, site):
        possible = [units for units in range(1, site.count) if all(field.takes(units) for field in fields)]
        # A class may refuse single numbers of heads; it has every number of other units, or none.
        trials = possible[: -_MOST_TRIALS - 1 : -1] if site.kind == "heads" else possible[-1:]
        try:
            units, shapes = _first_shapes(model, fields, trials)
        except ModelError as error:
            reason = reason or str(error)
            continue
        changed = {name: shape for name, shape in shapes.items() if shape != before.get(name)}
        changes = {other.name: _changes(before, other, units) for other in sites if other.count == site.count}
        alike = [other for other in sites if (part := changes.get(other.name)) and part.items() <= changed.items()]
        expected = narrowed_shapes(before, alike, units)
        if site in alike and shapes == expected:
            try:
                counts = _loadable_counts(model, fields, before, alike, possible)
                return WidthGroup(tuple(other.name for other in alike), tuple(fields), counts=counts)
            except ModelError as error:
                reason = str(error)
        elif any(name in changed for name in changes[site.name]):
            reason = _difference(fields, shapes, expected)
    kind = type(model.config).__name__
    raise ModelError(f"no field of {kind} gives {site.reader} fewer {site.kind}" + (f" ({reason})" if reason else ""))


def _first_shapes(model: nn.Module, fields: Sequence[Field], trials: Sequence[int]) -> tuple[int, Shapes]:
    """The first number of units with which the class can be built, and its shapes.

    Raises:
        ModelError: there is none; the message is the reason against the first.
    """
    reason: ModelError | None = None
    for units in trials:
        try:
            return units, shapes_with(model, fields, units)
        except ModelError as error:
            reason = reason or error
    raise reason or ModelError("")


def _changes(before: Shapes, site: Site, units: int) -> Shapes:
    return {name: shape for name, shape in narrowed_shapes(before, [site], units).items() if shape != before[name]}


def _difference(fields: Sequence[Field], shapes: Shapes, expected: Shapes) -> str:
    """The reason against fields that do not give the expected shapes: the first parameter that differs."""
    names = ", ".join(field.name for field in fields if not field.fixed)
    other = next((name for name, shape in shapes.items() if expected.get(name) != shape), None)
    return f"{names} also changes {other}" if other else f"{names} gives other shapes"


def _loadable_counts(
    model: nn.Module, fields: Sequence[Field], before: Shapes, sites: Sequence[Site], possible: Sequence[int]
) -> tuple[int, ...] | None:
    """Numbers of units, ascending, that the class can load, after trials of a few; None: any number.

    A width that is a share of another one may be rounded to its old value for one unit less, and change for fewer.
    Two widths that become equal may make a shortcut needless.

    Raises:
        ModelError: it cannot load many fewer; the message is the reason alone.
    """
    count, kind = sites[0].count, sites[0].kind
    misfits: dict[int, str] = {}  # the reason against a number of units; empty if the class has the shapes

    def fits(units: int) -> bool:
        if units not in misfits:
            expected = narrowed_shapes(before, sites, units)
            try:
                shapes = shapes_with(model, fields, units)
                misfits[units] = "" if shapes == expected else _difference(fields, shapes, expected)
            except ModelError as error:
                misfits[units] = str(error)
        return not misfits[units]

    spread = {possible[-1], *(possible[len(possible) * quarter // 4] for quarter in range(4))}
    if all(map(fits, sorted(spread, reverse=True))):
        sizes = {size for shape in before.values() for size in shape} if kind == "channels" else set[int]()
        counts = [units for units in possible if units not in sizes or fits(units)]
    else:  # such as divisors of the hidden size alone, which often share a divisor with the number of heads
        trials = sorted(possible, key=lambda units: -gcd(units, count))[:_MOST_TRIALS]
        counts = sorted(filter(fits, {*trials, *spread}))
        if not counts or (counts[0] > count / 2 and kind != "heads"):
            raise ModelError(next(filter(None, misfits.values()), ""))
    return None if len(counts) == count - 1 else (*counts, count)


def _with_bias(model: nn.Module, before: Shapes, group: WidthGroup, sites: Sequence[Site]) -> WidthGroup:
    """The group with the field that gives its readers a bias."""
    readers = [site.readers[0] for site in sites if site.name in group.sites]
    if all(reader.bias for reader in readers):
        return group
    for inner, holder in inner_configs(model.config):
        for name in [name for name, value in vars(holder).items() if value is False and "bias" in name]:
            config = copy.deepcopy(model.config)
            setattr(inner_config(config, inner), name, True)
            try:
                shapes = built_shapes(model, config)
            except ModelError:
                continue
            if before.items() <= shapes.items() and all(f"{reader.path}.bias" in shapes for reader in readers):
                return replace(group, bias=f"{inner}.{name}" if inner else name)
    return group


def _require_shapes(model: nn.Module, expected: Shapes, shapes: Shapes) -> None:
    """Raise unless a configuration gives the shapes of a narrower model.

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
    objects, changes = dict(inner_configs(model.config)), []
    for name, new in inner_configs(config):
        old = vars(objects[name])
        changed = {key: value for key, value in vars(new).items() if not hasattr(value, "to_dict")}
        changed = {key: value for key, value in changed.items() if key not in old or old[key] != value}
        old.update(changed)
        changes.append((objects[name], changed))
    replacements = {id(holder): holder for holder in objects.values()}
    kept = []  # so that no identity is given twice
    for module in model.modules():
        before = vars(module).get(CONFIG[:-1])
        if before is not None:
            if id(before) not in replacements:
                kept.append(before)
                replacements[id(before)] = _with_changes(before, changes)
            module.config = replacements[id(before)]


def _with_changes(config: Configuration, changes: Sequence[tuple[Configuration, dict[str, object]]]) -> Configuration:
    """The changed configuration that a module's own one equals with the same changes, or its own one with them."""
    similar = [(changed, values) for changed, values in changes if type(changed) is type(config)]
    for changed, values in similar:
        copied = copy.copy(config)
        copied.__dict__.update(values)
        if copied.to_dict() == changed.to_dict():
            return changed
    if len(similar) == 1:
        config.__dict__.update(similar[0][1])
    return config
