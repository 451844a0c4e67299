"""Fields of a configuration that may follow the number of units of a site, as proposals for a trial."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from iobs.pruning.structure.units import Site

Configuration: TypeAlias = Any  # a configuration of transformers, or a value of one

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
        place: index in a list with one value for each layer; None: the field is a number.
        fixed: the field does not follow the units; it says a value that the class derives otherwise.
        whole: the value must be a whole number, as some ratios of widths must; other ratios are floats.
    """

    config: str
    name: str
    each: float
    place: int | None = None
    fixed: bool = False
    whole: bool = False

    def value(self, units: int) -> float:
        """The field's value for a number of units."""
        if self.fixed:
            return self.each
        found = self.each * units
        if self.whole:
            return round(found)
        if type(found) is int:
            return found
        return float(round(found)) if abs(found - round(found)) < _ROUNDING else found * (1 + _ROUNDING)

    def takes(self, units: int) -> bool:
        """Check that the field has a value for a number of units."""
        return not self.whole or abs(self.each * units - round(self.each * units)) < 1e-6


def configurations(config: Configuration) -> Iterator[tuple[str, Configuration]]:
    """A configuration and those inside it, with their names."""
    yield "", config
    for name, value in vars(config).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield name, value


def config_inside(config: Configuration, name: str) -> Configuration:
    """The configuration of this name inside another; itself for an empty name."""
    return getattr(config, name) if name else config


def proposals(config: Configuration, site: Site) -> Iterator[list[Field]]:
    """Fields that may give the number of units of a site; each list is one proposal."""
    for inner, one in configurations(config):
        if site.kind == "heads":
            yield from _head_fields(inner, one, site)
            continue
        for name, value in vars(one).items():
            if (type(value) is int and value == site.count) or (value is None and name in _OPTIONAL):
                yield [Field(inner, name, 1)]
            elif name in _RATIOS:
                several = isinstance(value, (list, tuple))
                for place, entry in enumerate(value if several else [value]):
                    if type(entry) in (int, float):
                        own = place if several else None
                        yield [Field(inner, name, entry / site.count, own, whole=type(entry) is int)]
            elif isinstance(value, (list, tuple)) and len(value) > 1 and all(type(entry) is int for entry in value):
                yield from ([Field(inner, name, 1, place)] for place, entry in enumerate(value) if entry == site.count)


def _head_fields(inner: str, config: Configuration, site: Site) -> Iterator[list[Field]]:
    """Numbers of heads that are multiples of the units, first all of one configuration, then each alone."""
    counts = [
        Field(inner, name, value // site.count)
        for name, value in vars(config).items()
        if type(value) is int and value and value % site.count == 0 and _counts_heads(name)
    ]
    for some in [counts, *([one] for one in counts if len(counts) > 1)]:
        if not some:
            continue
        yield some
        heads = max(int(one.each) for one in some) * site.count
        for name in _HEAD_WIDTHS:
            if hasattr(config, name) or name == _HEAD_WIDTHS[0]:  # many classes read head_dim if it is there
                yield [*some, Field(inner, name, len(site.columns[0]) * site.count // heads, fixed=True)]


def _counts_heads(name: str) -> bool:
    return ("head" in name and not name.endswith(("dim", "size"))) or name in ("num_kv_groups", "multi_query_group_num")
