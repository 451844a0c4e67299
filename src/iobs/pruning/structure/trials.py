"""Trials of fields of a configuration: which of them give the number of units of a site, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from iobs.errors import first_line
from iobs.pruning.structure.config_fields import Field, config_inside, configurations, proposals
from iobs.pruning.structure.shapes import Shapes, built, narrowed, set_fields
from iobs.pruning.structure.units import Site

_MOST_TRIED = 128  # numbers of units that are tried one by one


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


def width_of(model: nn.Module, before: Shapes, sites: Sequence[Site]) -> Width | str:
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
        changed = {name: shape for name, shape in shapes.items() if shape != before.get(name)}
        group = [one for one in sites if one.count == site.count and narrowed(before, [one], units) != before]
        same = [one for one in group if _changes(before, [one], units).items() <= changed.items()]
        if site in same and shapes == narrowed(before, same, units):
            counts = _counts(model, fields, before, same)
            if not isinstance(counts, str):
                return Width(tuple(one.name for one in same), tuple(fields), counts=counts)
            reason = counts
        elif any(name in changed for name in _changes(before, [site], units)):
            reason = _other_shapes(fields, shapes, narrowed(before, same, units))
    kind = type(model.config).__name__
    return f"no field of {kind} gives {site.reader} fewer {site.kind}" + (f" ({reason})" if reason else "")


def _counts(
    model: nn.Module, fields: Sequence[Field], before: Shapes, sites: Sequence[Site]
) -> tuple[int, ...] | str | None:
    """Numbers of units, ascending, that the class can load; None: any number; or why it cannot load many fewer.

    A width that is a share of another one may be rounded to its old value for one unit less, and change for fewer. Two
    widths that become equal may make a shortcut needless.
    """
    count, kind = sites[0].count, sites[0].kind
    every = [units for units in range(1, count) if all(one.takes(units) for one in fields)]
    misfits: dict[int, str] = {}  # the reason against a number of units; empty if the class has the shapes

    def fits(units: int) -> bool:
        if units not in misfits:
            shapes, expected = _shapes_at(model, fields, units), narrowed(before, sites, units)
            reason = shapes if isinstance(shapes, str) else _other_shapes(fields, shapes, expected)
            misfits[units] = "" if shapes == expected else reason
        return not misfits[units]

    if _any_count(sites[0], fields):
        few = kind == "channels" and count <= _MOST_TRIED
        if not few and all(map(fits, sorted({max(1, count * quarters // 4) for quarters in range(4)}, reverse=True))):
            return None
        every = every[:: -(-count // _MOST_TRIED)]
    found = [*filter(fits, reversed(every))][::-1]
    if len(found) == count - 1:
        return None
    if found and (found[0] <= count / 2 or kind == "heads"):
        return (*found, count)
    return next(filter(None, misfits.values()), "")


def _other_shapes(fields: Sequence[Field], shapes: Shapes, expected: Shapes) -> str:
    """The reason against fields that do not give the expected shapes: the first parameter that differs."""
    names = ", ".join(one.name for one in fields if not one.fixed)
    other = next((name for name, shape in shapes.items() if expected.get(name) != shape), None)
    return f"{names} also changes {other}" if other else f"{names} gives other shapes"


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
        set_fields(config, fields, units)
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


def _changes(before: Shapes, sites: Iterable[Site], units: int) -> Shapes:
    return {name: shape for name, shape in narrowed(before, sites, units).items() if shape != before[name]}


def with_bias(model: nn.Module, before: Shapes, width: Width, sites: Sequence[Site]) -> Width:
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
