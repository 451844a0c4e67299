"""Sites of a network: units that can be removed, found by traced forward passes and gradients between layers.

A backward pass from some columns of a layer's input reaches exactly the rows that they depend on. Columns are tested in
groups: two backward passes for each bit of the unit's number, one for each value of the bit. They tell which unit each
row belongs to, and whether a row belongs to one unit only. The cost is about 2 log2(units) backward passes through one
region of the network.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn

from iobs.pruning.network.layers import CONVOLUTIONS, TRANSPOSED, joined
from iobs.pruning.samples.batches import Batch
from iobs.pruning.structure.expected import Verified, verify
from iobs.pruning.structure.trace import Read, Source, Trace, refused, trace
from iobs.pruning.structure.units import Index, Kind, Reader, Site, Slices, common_path

_VIEWS = (2, 3, 4)  # numbers of equal views of all channels that a layer may read side by side
UNTOUCHED, SHARED = -1, -2  # labels of entries that no column, or columns of several units, depend on
_UNSEEN = "noise in place of a few samples does not reach it; more calibration data may"


# ---- units of one layer's columns: which columns depend on which rows of the layers before
@dataclass(frozen=True)
class Columns:
    """Units of the columns of one layer.

    Args:
        index: the columns of every unit, ascending; empty if the columns do not fall into units.
        labels: for every source that the columns depend on: unit of each channel, int64 (channels,), or of each entry
            of a parameter, in its shape. UNTOUCHED and SHARED stand for no unit and for several units.
    """

    index: Index
    labels: Mapping[str, Tensor]


@dataclass(frozen=True)
class _Leaf:
    """The noise of one call of a source.

    Args:
        name: of the source.
        source: a layer, or a parameter between layers.
        call: number of the call.
        tensor: the noise, a leaf of the graph.
    """

    name: str
    source: Source
    call: int
    tensor: Tensor


class Dependencies:
    """Gradients of columns with respect to the sources of a trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.leaves = [
            _Leaf(name, source, call, leaf)
            for name, source in trace.sources.items()
            for call, leaf in enumerate(source.leaves)
        ]
        self.places = {name: place for place, name in enumerate(trace.sources)}
        self.random = torch.Generator().manual_seed(1)
        # By the tensors that layers read: queries, keys and values share theirs.
        self.units_read: dict[object, Columns] = {}

    def touched(
        self, inputs: list[Tensor], weights: list[Tensor], region: Sequence[_Leaf] | None = None
    ) -> dict[str, Tensor]:
        """Entries of sources that a sum of tensors depends on, bool, in the form of `Columns.labels`.

        Args:
            inputs: tensors in the graph.
            weights: of the entries of each tensor, in a shape that broadcasts; noise replaces the ones.
            region: the leaves that the tensors may depend on; all leaves without it.

        Raises:
            ModelError: a backward pass of the model's own fails.
        """
        noise = [
            torch.randn(value.shape, generator=self.random).to(value.device, value.dtype).mul_(weight)
            for value, weight in zip(inputs, weights, strict=True)
        ]
        masks: dict[str, Tensor] = {}
        leaves = self.leaves if region is None else region
        if not leaves:
            return masks
        reason = "they need gradients between layers, and a backward pass that the model defines fails in eval mode"
        with refused(reason):
            tensors = [leaf.tensor for leaf in leaves]
            grads = torch.autograd.grad(inputs, tensors, noise, retain_graph=True, allow_unused=True)
        for leaf, grad in zip(leaves, grads, strict=True):
            if grad is not None:
                mask = _by_channel(leaf.source, leaf.call, grad != 0)
                masks[leaf.name] = masks[leaf.name] | mask if leaf.name in masks else mask
        return masks

    def of_outputs(self) -> dict[str, Tensor]:
        """Entries that the model's outputs depend on, without a layer between."""
        outputs = self.trace.outputs
        return self.touched(outputs, [torch.ones((), device=output.device) for output in outputs]) if outputs else {}

    def of_columns(self, read: Read, columns: Tensor, region: Sequence[_Leaf] | None = None) -> dict[str, Tensor]:
        """Entries that some columns of a layer depend on; `columns` is bool (columns,), `region` as in `touched`."""
        weights = []
        for value, channel in zip(read.inputs, read.channels, strict=True):
            shape = [1] * value.ndim
            shape[channel] = -1
            weights.append(columns.to(value.device, value.dtype).view(shape))
        return self.touched(read.inputs, weights, region)

    def units(self, read: Read) -> Columns:
        """The smallest units of a layer's columns that do not share a row.

        Units are equal numbers of neighbouring columns, or columns at the same place in several equal views, such as
        joined averages and maxima of channels. Rows that the first and the last unit share are in no unit, such as the
        only key and value head of multi-query attention.
        """
        tensors = tuple(map(id, read.inputs)), tuple(read.channels)
        if tensors not in self.units_read:
            self.units_read[tensors] = self._units(read)
        return self.units_read[tensors]

    def _units(self, read: Read) -> Columns:
        everything = self.of_columns(read, torch.ones(read.columns, dtype=torch.bool))
        region = [leaf for leaf in self.leaves if leaf.name in everything]
        # The first and the last unit of every form hold the first and the last column. If these two share all rows, as
        # behind a norm over all channels, where the regions are largest, then no form has a unit with a row of its own.
        shared = self._shared(read, torch.arange(read.columns), region)
        if any(
            self.trace.sources[name].axis is not None and (name not in shared or bool((mask & ~shared[name]).any()))
            for name, mask in everything.items()
        ):
            for units in _forms(read.columns):
                labels = self._labels(read, units, region)
                if labels is not None:
                    return Columns(_index(units), labels)
        return Columns((), {name: torch.where(mask, SHARED, UNTOUCHED) for name, mask in everything.items()})

    def _shared(self, read: Read, units: Tensor, region: Sequence[_Leaf]) -> dict[str, Tensor]:
        """Entries that both the first and the last unit depend on."""
        first, last = (self.of_columns(read, units == unit, region) for unit in (0, int(units[-1])))
        return {name: first[name] & last[name] for name in first.keys() & last.keys()}

    def _labels(self, read: Read, units: Tensor, region: Sequence[_Leaf]) -> dict[str, Tensor] | None:
        """The unit of every entry, or None if a row of a layer belongs to several units."""
        shared = self._shared(read, units, region)
        labels: dict[str, Tensor] = {}
        for bit in range(max(1, int(units[-1]).bit_length())):
            lows, highs = (self.of_columns(read, (units >> bit) & 1 == value, region) for value in (0, 1))
            for name in sorted({*lows, *highs}, key=self.places.__getitem__):
                none = torch.zeros_like(lows.get(name, highs.get(name)))  # type: ignore[arg-type]
                low, high = lows.get(name, none), highs.get(name, none)
                both = low & high
                common = both & shared.get(name, none)
                if self.trace.sources[name].axis is not None and bool((both & ~common).any()):
                    return None
                label = labels.setdefault(name, torch.full(none.shape, UNTOUCHED, device=none.device))
                label[(label == UNTOUCHED) & (low | high)] = 0
                label[both] = SHARED
                label[high & (label >= 0)] += 1 << bit
        private = any(
            self.trace.sources[name].axis is not None and bool((label >= 0).any()) for name, label in labels.items()
        )
        return labels if private else None


def _forms(count: int) -> Iterator[Tensor]:
    """The unit of every column, int64 (columns,), in each form of units: neighbouring columns, then repeated views."""
    columns = torch.arange(count)
    yield from (columns // size for size in range(1, count // 2 + 1) if count % size == 0)
    yield from (columns % (count // views) for views in _VIEWS if count % views == 0 and count > views)


def _index(units: Tensor) -> Index:
    columns: list[list[int]] = [[] for _ in range(int(units.max()) + 1)]
    for column, unit in enumerate(units.tolist()):
        columns[unit].append(column)
    return tuple(map(tuple, columns))


def _by_channel(source: Source, call: int, mask: Tensor) -> Tensor:
    """The channels of a layer's output with a true entry; for a parameter the mask itself."""
    if source.axis is None:
        return mask
    return mask.movedim(source.channels[call], 0).reshape(mask.shape[source.channels[call]], -1).any(1)


# ---- sites: units of all layers, joined where they depend on the same row
def checked_sites(model: nn.Module, short_batches: Sequence[Batch], inner: bool) -> Verified:
    """Places of a network where units can be removed, in forward order, checked by a removal from a copy.

    Args:
        model: any network; it is unchanged.
        short_batches: from `traced_batches`. Only their shapes and masks matter, since layers return noise.
        inner: only units that all of their writers finish before a layer reads them. False: also channels that are
            written again later, such as the residual stream of a network with batch norms.

    Returns:
        The sites, and the reasons why the check refused others.
    """
    traced = trace(model, short_batches)
    sites = unchecked_sites(model, traced, inner)
    verified = _with_equal_parts(model, short_batches, sites, verify(model, short_batches, sites))
    mixing = [
        path
        for path in traced.unreached
        if any(value.ndim > 1 for value in model.get_submodule(path).parameters(recurse=False))
    ]
    return replace(verified, refused=verified.refused | dict.fromkeys(mixing, _UNSEEN))


def unchecked_sites(model: nn.Module, traced: Trace, inner: bool) -> list[Site]:
    """The sites of `checked_sites` before the check, without the attributes that count units."""
    reads = [read for read in traced.reads.values() if read.inputs and read.columns > 1]
    dependencies = Dependencies(traced)
    columns = [dependencies.units(read) for read in reads]
    graph = _Graph(traced, reads, columns)
    graph.block(dependencies.of_outputs())
    graph.block_shared()
    graph.block_tied(model)
    sites = [_site(model, traced, reads, columns, group) for group in graph.groups()]
    uses = Counter(site.name for site in sites)
    sites = [
        replace(site, name=f"{site.name}:{site.writers[0].path}") if uses[site.name] > 1 else site for site in sites
    ]
    named = _numbered(sites)
    return [site for site in named if site.count > 1 and (site.inner or not inner)]


@dataclass(frozen=True)
class _JointUnits:
    """Units of one site.

    Args:
        units: for every reader (its number): the reader's units, one tuple for each unit of the site.
        entries: for every source (its name): flat positions in the source's labels, one tuple for each unit.
    """

    units: dict[int, Index]
    entries: dict[str, Index]


class _Graph:
    """Units of all layers, joined where they depend on the same row.

    A node is a unit of the columns of one layer.
    """

    def __init__(self, traced: Trace, reads: Sequence[Read], columns: Sequence[Columns]) -> None:
        self.traced, self.reads, self.columns = traced, reads, columns
        # The layer of every node, by its number, and the unit of this layer.
        self.units = [(number, unit) for number, each in enumerate(columns) for unit in range(len(each.index))]
        self.blocked: set[int] = set()  # nodes whose removal would change other parts of the network
        self.nodes: dict[str, dict[int, int]] = defaultdict(dict)  # source -> entry -> the first node that owns it
        joined_nodes: list[tuple[int, int]] = []
        start = 0
        for each in columns:
            for name, labels in each.labels.items() if each.index else ():
                flat, nodes = labels.flatten(), self.nodes[name]
                for entry in (flat >= 0).nonzero().flatten().tolist():
                    node = start + int(flat[entry])
                    joined_nodes.append((nodes.setdefault(entry, node), node))
            start += len(each.index)
        count = len(self.units)
        rows, others = zip(*joined_nodes, strict=True) if joined_nodes else ((), ())
        edges = coo_array(([True] * len(rows), (rows, others)), shape=(count, count))
        self.component: list[int] = connected_components(edges, directed=False)[1].tolist() if count else []

    def block(self, entries: dict[str, Tensor]) -> None:
        """Exclude the units that own one of the entries; bool tensors in the form of `Columns.labels`."""
        for name, mask in entries.items():
            nodes = self.nodes.get(name, {})
            self.blocked |= {nodes[entry] for entry in mask.flatten().nonzero().flatten().tolist() if entry in nodes}

    def block_shared(self) -> None:
        """Exclude units that own a row which another layer reads in a way that mixes channels."""
        shared: dict[str, Tensor] = {}
        for each in {id(each): each for each in self.columns}.values():  # layers that read one tensor share theirs
            for name, labels in each.labels.items():
                mask = labels == SHARED
                shared[name] = shared[name] | mask if name in shared else mask
        self.block(shared)

    def block_tied(self, model: nn.Module) -> None:
        """Exclude units stored in a parameter that several modules hold, or that is read along both of its axes."""
        holders: dict[int, list[str]] = defaultdict(list)
        for path, module in model.named_modules():
            for name, value in module._parameters.items():
                if value is not None:
                    holders[id(value)].append(joined(path, name))
        axes: dict[str, set[int]] = defaultdict(set)
        for read in self.traced.reads.values():
            axes[joined(read.path, read.parameter)].add(read.axis)
        tied = {name for names in holders.values() if len(names) > 1 for name in names}
        tied |= {name for name, read_axes in axes.items() if len(read_axes) > 1}
        for name, source in self.traced.sources.items():
            if joined(source.path, source.parameter) in tied:
                self.blocked |= set(self.nodes[name].values())
        for node, (number, _) in enumerate(self.units):
            if joined(self.reads[number].path, self.reads[number].parameter) in tied:
                self.blocked.add(node)

    def groups(self) -> list[_JointUnits]:
        """Joined units with rows in a layer, grouped by their readers and sources, in order of their first column."""
        blocked = {self.component[node] for node in self.blocked}
        units: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for component, (number, unit) in zip(self.component, self.units, strict=True):
            if component not in blocked:
                units[component][number].append(unit)
        entries: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for name, nodes in ((name, self.nodes[name]) for name in self.traced.sources if name in self.nodes):
            for entry, node in nodes.items():
                entries[self.component[node]][name].append(entry)
        kinds: dict[object, list[int]] = defaultdict(list)
        for component, by_read in units.items():
            by_source = entries[component]
            if any(self.traced.sources[name].axis is not None for name in by_source):
                rows = tuple((name, len(some)) for name, some in by_source.items())
                kinds[tuple((number, len(some)) for number, some in by_read.items()), rows].append(component)
        return [_group([units[each] for each in alike], [entries[each] for each in alike]) for alike in kinds.values()]


def _group(units: Sequence[dict[int, list[int]]], entries: Sequence[dict[str, list[int]]]) -> _JointUnits:
    return _JointUnits(
        {number: tuple(tuple(unit[number]) for unit in units) for number in units[0]},
        {name: tuple(tuple(sorted(unit[name])) for unit in entries) for name in entries[0]},
    )


def _site(
    model: nn.Module, traced: Trace, reads: Sequence[Read], columns: Sequence[Columns], group: _JointUnits
) -> Site:
    readers = []
    for number, units in group.units.items():
        read, columns_of = reads[number], columns[number].index
        index = tuple(tuple(sorted(column for unit in joint for column in columns_of[unit])) for joint in units)
        weight = Slices(read.path, read.parameter, read.axis, index)
        bias = _has_bias(model, read.path, weight.stored(model).shape[1 - read.axis])
        readers.append(Reader(weight, read.width, read.positions, read.norm, bias))
    readers.sort(key=lambda reader: -reader.products(model))
    writers = [part for name, entries in group.entries.items() for part in _rows(model, traced.sources[name], entries)]
    paths = [part.key for part in (*writers, *(reader.weight for reader in readers))]
    order = {key: read.place for key, read in traced.reads.items()}
    last = max(order.get(writer.key, -1) for writer in writers)
    # One that reads one vector of each sample, such as the gate of a squeeze-and-excitation block, may come before.
    reads_late = [reader for reader in readers if reader is readers[0] or reader.positions > traced.samples]
    inner = last < min(order[reader.weight.key] for reader in reads_late)
    name = readers[0].path or readers[0].weight.parameter  # of the model itself
    return Site(name, _kind(model, readers[0], writers), tuple(readers), tuple(writers), common_path(paths), inner)


def _rows(model: nn.Module, source: Source, entries: Index) -> list[Slices]:
    """The slices of a source that belong to the units: rows of weight and bias, or one axis of a parameter."""
    if source.axis is not None:
        rows = [Slices(source.path, source.parameter, source.axis, entries)]
        biased = _has_bias(model, source.path, rows[0].stored(model).shape[source.axis])
        return [*rows, Slices(source.path, "bias", 0, entries)] if biased else rows
    shape = getattr(model.get_submodule(source.path), source.parameter).shape
    for axis in range(len(shape)):
        places = [tuple(sorted(set(torch.unravel_index(torch.tensor(unit), shape)[axis].tolist()))) for unit in entries]
        every = [place for unit in places for place in unit]
        if len(set(every)) == len(every) and len(set(map(len, places))) == 1:
            return [Slices(source.path, source.parameter, axis, tuple(places))]
    return []  # no axis of the parameter belongs to the units


def _has_bias(model: nn.Module, path: str, rows: int) -> bool:
    """True if a layer has a bias with one entry for each row; `bias` may also be the argument of a class."""
    bias = getattr(model.get_submodule(path), "bias", None)
    return isinstance(bias, Tensor) and bias.shape == (rows,)


def _kind(model: nn.Module, reader: Reader, writers: Iterable[Slices]) -> Kind:
    modules = [model.get_submodule(path) for path in (reader.path, *(writer.path for writer in writers))]
    if any(isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)) for module in modules):
        return "channels"
    first, *others = reader.weight.index[0]
    return "heads" if first + 1 in others else "neurons"  # columns that are no neighbours are views of one neuron


def _numbered(sites: Sequence[Site]) -> list[Site]:
    """The sites with a number behind a name that sites before them have."""
    seen: Counter[str] = Counter()
    numbered = []
    for site in sites:
        seen[site.name] += 1
        numbered.append(site if seen[site.name] == 1 else replace(site, name=f"{site.name}:{seen[site.name]}"))
    return numbered


# ---- rows that code splits into equal parts, as `chunk` and `split` do
# A removal from one part alone would leave unequal parts. The units of all parts at one place form one unit instead.
def _with_equal_parts(
    model: nn.Module, short_batches: Sequence[Batch], sites: Sequence[Site], verified: Verified
) -> Verified:
    """Join sites that the check refused with sites in the rows of the same layers, where the check takes them together.

    The last part of `split(x, width)` may lose units alone, so sites that passed are joined too if nothing else helps.
    """
    groups = [parts for parts in _equal_parts(sites) if any(site.name in verified.refused for site in parts)]
    joint: list[Site] = []
    settled: set[str] = set()
    for every in (False, True) if groups else ():
        candidates = [[site for site in parts if every or site.name in verified.refused] for parts in groups]
        candidates = [parts for parts in candidates if len(parts) > 1 and settled.isdisjoint(s.name for s in parts)]
        joined_sites = [_joint(model, parts) for parts in candidates]
        passing = verify(model, short_batches, joined_sites).sites if joined_sites else []
        names = {site.name for site in passing}
        joint += passing
        settled |= {site.name for parts in candidates if parts[0].name in names for site in parts}
    order = [site.name for site in sites]
    alone = [site for site in verified.sites if site.name not in settled]
    return Verified(
        sorted([*alone, *joint], key=lambda site: order.index(site.name)),
        {name: reason for name, reason in verified.refused.items() if name not in settled},
    )


def _equal_parts(sites: Sequence[Site]) -> list[list[Site]]:
    """Sites with equal numbers of units in the rows of one layer, at least two together."""
    written = [{writer.key for writer in site.writers} for site in sites]
    uses = Counter(key for keys in written for key in keys)
    parts: dict[object, list[Site]] = defaultdict(list)
    for site, keys in zip(sites, written, strict=True):
        shared = min((key for key in keys if uses[key] > 1), default=None)
        if shared is not None:
            parts[shared, site.count, site.kind].append(site)
    return [alike for alike in parts.values() if len(alike) > 1]


def _joint(model: nn.Module, parts: Sequence[Site]) -> Site:
    """The site, named as the first of some equal parts, whose units are those of all parts at one place."""
    readers: dict[str, Reader] = {}
    for reader in (reader for part in parts for reader in part.readers):
        key = reader.weight.key
        readers[key] = replace(reader, weight=_together(readers[key].weight if key in readers else None, reader.weight))
    writers: dict[object, Slices] = {}
    for writer in (writer for part in parts for writer in part.writers):
        writers[writer.key, writer.axis] = _together(writers.get((writer.key, writer.axis)), writer)
    ordered = sorted(readers.values(), key=lambda reader: -reader.products(model))
    paths = [part.key for part in (*writers.values(), *(reader.weight for reader in ordered))]
    inner = all(part.inner for part in parts)
    return replace(
        parts[0], readers=tuple(ordered), writers=tuple(writers.values()), owner=common_path(paths), inner=inner
    )


def _together(slices: Slices | None, others: Slices) -> Slices:
    if slices is None:
        return others
    return replace(slices, index=tuple(tuple(sorted(a + b)) for a, b in zip(slices.index, others.index, strict=True)))
