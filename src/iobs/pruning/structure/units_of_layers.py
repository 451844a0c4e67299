"""Sites with the layers that read them: the columns of every layer by unit, and the patterns that follow."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from iobs.core.column_groups import Groups
from iobs.pruning.network.layers import Layer
from iobs.pruning.structure.units import Index, Site


@dataclass(frozen=True)
class ChosenGroups(Groups):
    """Groups of columns of which some are kept for sure: a solver finds weights, not groups.

    Args:
        chosen: numbers of the kept groups, ascending; `keep` is their count.
    """

    chosen: tuple[int, ...] = ()

    def zeros(self, shape: tuple[int, int]) -> int:
        """Number of zeros of a (rows, columns) matrix without the other groups."""
        return shape[0] * int((~self.mask(shape[1])).sum())

    def mask(self, columns: int) -> Tensor:
        """The kept columns, bool (columns,)."""
        return torch.isin(self.labels(columns), torch.tensor(self.chosen, dtype=torch.int64))


@dataclass(frozen=True)
class SitesOfLayers:
    """Sites of a run and the layers that read them.

    Attributes:
        sites: in the order of the forward pass.
        layers: the layers that read units, by path.
    """

    sites: tuple[Site, ...] = ()
    layers: Mapping[str, Layer] = field(default_factory=dict)

    def readers(self, site: Site) -> tuple[Layer, ...]:
        """The layers that read the units of a site, the layer with the most multiplications first."""
        return tuple(self.layers[reader.path] for reader in site.readers)

    def of(self, layer: Layer) -> list[Site]:
        """The sites whose units a layer reads."""
        return [site for site in self.sites if layer in self.readers(site)]  # a module may have other matrices too

    def read_by(self, layers: Collection[Layer]) -> SitesOfLayers:
        """The sites whose readers are all among some layers."""
        read = tuple(site for site in self.sites if all(layer in layers for layer in self.readers(site)))
        return replace(self, sites=read)

    def columns(self, site: Site, layer: Layer) -> Index:
        """Columns of every unit of a site in the matrix of a layer that reads them."""
        return next(reader.columns for reader in site.readers if reader.path == layer.path)

    def single(self, site: Site) -> bool:
        """True if one layer reads the units of a site, and nothing else.

        Its columns then fall into units, and its solver chooses the units. Other sites are chosen beforehand.
        """
        layer = self.readers(site)[0]
        return len(site.readers) == 1 and sum(map(len, site.columns)) == layer.shape[1]

    def groups(self, layer: Layer) -> Groups:
        """Columns of a layer in groups, all of them kept: those of every unit, and those that belong to no unit."""
        labels, count = torch.full((layer.shape[1],), -1), 0
        for site in self.of(layer):
            for columns in self.columns(site, layer):
                labels[list(columns)] = count
                count += 1
        if bool((labels < 0).any()):
            labels[labels < 0] = count
            count += 1
        return Groups(tuple(labels.tolist()), keep=count)

    def chosen(self, layer: Layer, kept: Mapping[str, Collection[int]]) -> ChosenGroups:
        """The groups of a layer with the units that sites keep, by name of the site."""
        every = self.groups(layer)
        chosen, count = [], 0
        for site in self.of(layer):
            chosen += [count + unit for unit in sorted(kept[site.name])]
            count += site.count
        assert every.keep is not None
        chosen += range(count, every.keep)
        return ChosenGroups(every.index, keep=len(chosen), chosen=tuple(chosen))

    def mask(self, layer: Layer, removed: Mapping[str, Iterable[int]]) -> Tensor:
        """Columns of a layer without those of removed units, bool (columns,); units by name of the site."""
        mask = torch.ones(layer.shape[1], dtype=torch.bool)
        for site in self.of(layer):
            columns = self.columns(site, layer)
            for unit in removed.get(site.name, ()):
                mask[list(columns[unit])] = False
        return mask
