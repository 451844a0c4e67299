"""Fields of a configuration that count the units of a site: by their usual names first, then by their values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from iobs.pruning.structure.units import Site

Configuration: TypeAlias = Any  # a configuration of transformers, or a value of one

# The names of 330 of the 350 families of the breadth table: tried before other fields that have the same value.
_NEURONS = ("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size")
_HEAD_WIDTHS = ("head_dim", "d_kv", "attention_head_size", "kv_channels")
_OPTIONAL = ("n_inner", "ffn_hidden_size", "intermediate_size", "ffn_dim", "hidden_dim")  # None: a default of the class
_RATIOS = ("mlp_ratio", "mlp_ratios", "expand_ratio")
_ROUNDING = 1e-12  # relative; a class takes the whole part of a ratio times a width, which rounding may put just below


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
        if type(value) is int and value and value % site.count == 0 and _counts_heads(name)
    ]
    for fields in [counts, *([field] for field in counts if len(counts) > 1)]:
        if not fields:
            continue
        yield fields
        heads = max(int(field.each) for field in fields) * site.count
        for name in _HEAD_WIDTHS:
            if hasattr(config, name) or name == _HEAD_WIDTHS[0]:  # many classes read head_dim if it is there
                yield [*fields, Field(inner, name, len(site.columns[0]) * site.count // heads, fixed=True)]


def _counts_heads(name: str) -> bool:
    return ("head" in name and not name.endswith(("dim", "size"))) or name in ("num_kv_groups", "multi_query_group_num")
