"""Joint sites of layers whose rows code splits into equal parts, as `chunk` and `split` do.

A removal from one part alone would leave unequal parts. The units of all parts at one place form one unit instead.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from iobs.pruning.samples import batches
from iobs.pruning.structure.units import Reader, Site, Slices, common_path
from iobs.pruning.structure.verification import Verified, verify


def with_equal_parts(
    model: nn.Module, given: Sequence[batches.Batch], sites: Sequence[Site], found: Verified
) -> Verified:
    """Join sites that the check refused with sites in the rows of the same layers, where the check takes them together.

    The last part of `split(x, width)` may lose units alone, so sites that passed are joined too if nothing else helps.

    Args:
        model: as in `verify`.
        given: as in `verify`.
        sites: all sites in forward order.
        found: result of their check.
    """
    groups = [own for own in _equal_parts(sites) if any(site.name in found.refused for site in own)]
    joined: list[Site] = []
    settled: set[str] = set()
    for every in (False, True) if groups else ():
        tried = [[site for site in own if every or site.name in found.refused] for own in groups]
        tried = [own for own in tried if len(own) > 1 and settled.isdisjoint(site.name for site in own)]
        passed = verify(model, given, [_joined(model, own) for own in tried]).sites if tried else []
        names = {site.name for site in passed}
        joined += passed
        settled |= {site.name for own in tried if own[0].name in names for site in own}
    order = {site.name: place for place, site in enumerate(sites)}
    alone = [site for site in found.sites if site.name not in settled]
    return Verified(
        sorted([*alone, *joined], key=lambda site: order[site.name]),
        {name: reason for name, reason in found.refused.items() if name not in settled},
    )


def _equal_parts(sites: Sequence[Site]) -> list[list[Site]]:
    """Sites with equal numbers of units in the rows of one layer, at least two together."""
    keys = [{one.key for one in site.writers} for site in sites]
    uses = Counter(key for own in keys for key in own)
    parts: dict[object, list[Site]] = defaultdict(list)
    for site, own in zip(sites, keys, strict=True):
        shared = min((key for key in own if uses[key] > 1), default=None)
        if shared is not None:
            parts[shared, site.count, site.kind].append(site)
    return [own for own in parts.values() if len(own) > 1]


def _joined(model: nn.Module, parts: Sequence[Site]) -> Site:
    """The site, named as the first of some equal parts, whose units are those of all parts at one place."""
    readers: dict[str, Reader] = {}
    for one in (reader for part in parts for reader in part.readers):
        known = readers.get(one.weight.key)
        readers[one.weight.key] = one if known is None else replace(one, weight=_together(known.weight, one.weight))
    writers: dict[object, Slices] = {}
    for writer in (writer for part in parts for writer in part.writers):
        key = writer.key, writer.axis
        writers[key] = _together(writers[key], writer) if key in writers else writer
    found = sorted(readers.values(), key=lambda one: -one.products(model))
    paths = [one.key for one in writers.values()] + [one.weight.key for one in found]
    return replace(
        parts[0],
        readers=tuple(found),
        writers=tuple(writers.values()),
        owner=common_path(paths),
        inner=all(part.inner for part in parts),
    )


def _together(one: Slices, other: Slices) -> Slices:
    index = tuple(tuple(sorted((*a, *b))) for a, b in zip(one.index, other.index, strict=True))
    return replace(one, index=index)
