"""Sites of a network: units that can be removed, found by traced forward passes and gradients between layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from iobs.pruning.network.layers import CONVOLUTIONS, TRANSPOSED, joined
from iobs.pruning.samples.batches import Batch
from iobs.pruning.structure.coupling import SHARED, Columns, Dependencies
from iobs.pruning.structure.equal_parts import with_equal_parts
from iobs.pruning.structure.trace import Read, Source, Trace, trace
from iobs.pruning.structure.traced_batches import shortened
from iobs.pruning.structure.units import Index, Kind, Reader, Site, Slices, common_path
from iobs.pruning.structure.verification import Verified, verify

_UNSEEN = "noise in place of a few samples does not reach it; more calibration data may"


def find_sites(model: nn.Module, batch: Batch, inner: bool = True) -> list[Site]:
    """Places of a network where units can be removed, in forward order, checked by a removal from a copy.

    Args:
        model: any network; it is unchanged.
        batch: a batch that the model accepts. Only its shapes and masks matter, since layers return noise.
        inner: only units that all of their writers finish before a layer reads them. False: also channels that are
            written again later, such as the residual stream of a network with batch norms.
    """
    return checked_sites(model, [shortened(batch)], inner).sites


def checked_sites(model: nn.Module, given: Sequence[Batch], inner: bool = True) -> Verified:
    """The sites of `find_sites`, and the reasons why the check refused others.

    Args:
        model: as there.
        given: short batches, from `traced_batches`.
        inner: as there.
    """
    traced = trace(model, given)
    sites = _sites(model, traced, inner)
    found = with_equal_parts(model, given, sites, verify(model, given, sites))
    unseen = {path: _UNSEEN for path in traced.unreached if _mixes_channels(model.get_submodule(path))}
    return replace(found, refused=found.refused | unseen)


def traced_sites(model: nn.Module, batch: Batch, inner: bool = True) -> list[Site]:
    """The sites of `find_sites` before the check, without the attributes that count units."""
    return _sites(model, trace(model, [shortened(batch)]), inner)


def _mixes_channels(module: nn.Module) -> bool:
    return any(value.ndim > 1 for value in module.parameters(recurse=False))


def _sites(model: nn.Module, traced: Trace, inner: bool) -> list[Site]:
    reads = [read for read in traced.reads.values() if read.inputs and read.columns > 1]
    dependencies = Dependencies(traced)
    columns = [dependencies.units(read) for read in reads]
    graph = _Graph(traced, reads, columns)
    graph.block(dependencies.of_outputs())
    graph.block_shared()
    graph.block_tied(model)
    sites = [_site(model, traced, reads, columns, group) for group in graph.groups()]
    shared = [site.name for site in sites]
    named = _numbered([_renamed(site) if shared.count(site.name) > 1 else site for site in sites])
    return [site for site in named if site.count > 1 and (site.inner or not inner)]


@dataclass(frozen=True)
class _Group:
    """Units of one site.

    Args:
        units: for every reader (its number): the reader's units, one tuple for each unit of the site.
        entries: for every source (its name): flat positions in the source's labels, one tuple for each unit.
    """

    units: dict[int, Index]
    entries: dict[str, Index]


class _Graph:
    """Units of all layers, joined where they depend on the same row."""

    def __init__(self, traced: Trace, reads: Sequence[Read], columns: Sequence[Columns]) -> None:
        self.traced, self.reads, self.columns = traced, reads, columns
        counts = [len(one.index) for one in columns]
        self.starts = [sum(counts[:number]) for number in range(len(counts))]
        self.parent = list(range(sum(counts)))
        self.blocked: set[int] = set()  # units whose removal would change other parts of the network
        self.nodes: dict[str, dict[int, int]] = defaultdict(dict)  # source -> entry -> one of its units
        for number, one in enumerate(columns):
            for name, labels in one.labels.items():
                flat, known = labels.flatten(), self.nodes[name]
                for entry in (flat >= 0).nonzero().flatten().tolist():
                    node = self.starts[number] + int(flat[entry])
                    self._join(known.setdefault(entry, node), node)

    def _root(self, node: int) -> int:
        while self.parent[node] != node:
            self.parent[node] = node = self.parent[self.parent[node]]
        return node

    def _join(self, one: int, other: int) -> None:
        first, second = self._root(one), self._root(other)
        self.parent[max(first, second)] = min(first, second)

    def block(self, entries: dict[str, Tensor]) -> None:
        """Exclude the units that own one of the entries; bool tensors in the form of `Columns.labels`."""
        for name, mask in entries.items():
            known = self.nodes.get(name, {})
            self.blocked |= {known[entry] for entry in mask.flatten().nonzero().flatten().tolist() if entry in known}

    def block_shared(self) -> None:
        """Exclude units that own a row which another layer reads in a way that mixes channels."""
        for one in self.columns:
            self.block({name: labels == SHARED for name, labels in one.labels.items()})

    def block_tied(self, model: nn.Module) -> None:
        """Exclude units stored in a parameter that several modules hold, or that is read along both of its axes."""
        held: dict[int, list[str]] = defaultdict(list)
        for path, module in model.named_modules():
            for name, value in module._parameters.items():
                if value is not None:
                    held[id(value)].append(joined(path, name))
        tied = {name for names in held.values() if len(names) > 1 for name in names}
        axes: dict[str, set[int]] = defaultdict(set)
        for read in self.traced.reads.values():
            axes[joined(read.path, read.parameter)].add(read.axis)
        tied |= {name for name, own in axes.items() if len(own) > 1}
        for name, source in self.traced.sources.items():
            if joined(source.path, source.parameter) in tied:
                self.blocked |= set(self.nodes[name].values())
        for number, read in enumerate(self.reads):
            if joined(read.path, read.parameter) in tied and self.columns[number].index:
                end = self.starts[number + 1] if number + 1 < len(self.starts) else len(self.parent)
                self.blocked |= set(range(self.starts[number], end))

    def groups(self) -> list[_Group]:
        """Joined units with rows in a layer, grouped by their readers and sources, in order of their first column."""
        blocked = {self._root(node) for node in self.blocked}
        units: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        number = 0
        for node in range(len(self.parent)):
            while number + 1 < len(self.starts) and node >= self.starts[number + 1]:
                number += 1
            root = self._root(node)
            if root not in blocked:
                units[root][number].append(node - self.starts[number])
        entries: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for name, known in ((name, self.nodes[name]) for name in self.traced.sources if name in self.nodes):
            for entry, node in known.items():
                entries[self._root(node)][name].append(entry)
        kinds: dict[object, list[int]] = defaultdict(list)
        for root, read in units.items():
            own = entries[root]
            if any(self.traced.sources[name].axis is not None for name in own):
                rows = tuple((name, len(found)) for name, found in own.items())
                kinds[tuple((number, len(found)) for number, found in read.items()), rows].append(root)
        return [_group([units[root] for root in roots], [entries[root] for root in roots]) for roots in kinds.values()]


def _group(units: Sequence[dict[int, list[int]]], entries: Sequence[dict[str, list[int]]]) -> _Group:
    return _Group(
        {number: tuple(tuple(one[number]) for one in units) for number in units[0]},
        {name: tuple(tuple(sorted(one[name])) for one in entries) for name in entries[0]},
    )


def _site(model: nn.Module, traced: Trace, reads: Sequence[Read], columns: Sequence[Columns], group: _Group) -> Site:
    readers = []
    for number, units in group.units.items():
        read, known = reads[number], columns[number].index
        index = tuple(tuple(sorted(column for unit in own for column in known[unit])) for own in units)
        weight = Slices(read.path, read.parameter, read.axis, index)
        bias = _has_bias(model, read.path, weight.stored(model).shape[1 - read.axis])
        readers.append(Reader(weight, read.width, read.positions, read.norm, bias))
    found = tuple(sorted(readers, key=lambda one: -one.products(model)))
    writers: list[Slices] = []
    for name, entries in group.entries.items():
        writers += _rows(model, traced.sources[name], entries)
    paths = [one.key for one in writers] + [reader.weight.key for reader in found]
    kind = _kind(model, found[0], writers)
    order = {key: read.place for key, read in traced.reads.items()}
    last = max(order.get(one.key, -1) for one in writers)
    first = min(order[one.weight.key] for one in found if one is found[0] or not _reads_averages(one, traced.samples))
    inner = last < first
    name = found[0].path or found[0].weight.parameter  # of the model itself
    return Site(name, kind, found, tuple(writers), common_path(paths), inner)


def _reads_averages(reader: Reader, samples: int) -> bool:
    """Check that a layer reads one vector of each sample, as the gate of a squeeze-and-excitation block does."""
    return reader.positions <= samples


def _rows(model: nn.Module, source: Source, entries: Index) -> list[Slices]:
    """The slices of a source that belong to the units: rows of weight and bias, or one axis of a parameter."""
    if source.axis is not None:
        rows = [Slices(source.path, source.parameter, source.axis, entries)]
        biased = _has_bias(model, source.path, rows[0].stored(model).shape[source.axis])
        return [*rows, Slices(source.path, "bias", 0, entries)] if biased else rows
    shape = getattr(model.get_submodule(source.path), source.parameter).shape
    for axis in range(len(shape)):
        places = [tuple(sorted(set(torch.unravel_index(torch.tensor(own), shape)[axis].tolist()))) for own in entries]
        every = [place for own in places for place in own]
        if len(set(every)) == len(every) and len({len(own) for own in places}) == 1:
            return [Slices(source.path, source.parameter, axis, tuple(places))]
    return []  # no axis of the parameter belongs to the units


def _has_bias(model: nn.Module, path: str, rows: int) -> bool:
    """Check that a layer has a bias with one entry for each row; `bias` may also be the argument of a class."""
    bias = getattr(model.get_submodule(path), "bias", None)
    return isinstance(bias, Tensor) and bias.shape == (rows,)


def _kind(model: nn.Module, reader: Reader, writers: Iterable[Slices]) -> Kind:
    modules = [model.get_submodule(one.path) for one in writers]
    if any(isinstance(one, (*CONVOLUTIONS, *TRANSPOSED)) for one in (model.get_submodule(reader.path), *modules)):
        return "channels"
    first, *others = reader.weight.index[0]
    return "heads" if first + 1 in others else "neurons"  # columns that are no neighbours are views of one neuron


def _renamed(site: Site) -> Site:
    return replace(site, name=f"{site.name}:{site.writers[0].path}")


def _numbered(sites: Sequence[Site]) -> list[Site]:
    """The sites with a number behind a name that sites before them have."""
    seen: dict[str, int] = defaultdict(int)
    found = []
    for site in sites:
        seen[site.name] += 1
        found.append(site if seen[site.name] == 1 else replace(site, name=f"{site.name}:{seen[site.name]}"))
    return found
