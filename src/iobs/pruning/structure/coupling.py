"""Units of one layer's columns: which columns depend on which rows of the layers before.

A backward pass from some columns of a layer's input reaches exactly the rows that they depend on. Columns are tested in
groups: two backward passes for each bit of the unit's number, one for each value of the bit. They tell which unit each
row belongs to, and whether a row belongs to one unit only. The cost is about 2 log2(units) backward passes through one
region of the network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.pruning.structure.trace import Read, Source, Trace, refused
from iobs.pruning.structure.units import Index

_VIEWS = (2, 3, 4)  # numbers of equal views of all channels that a layer may read side by side
UNTOUCHED, SHARED = -1, -2  # labels of entries that no column, or columns of several units, depend on


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
        self.known: dict[object, Columns] = {}  # by the tensors that layers read: queries, keys and values share theirs

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
        for leaf, grad in self._gradients(inputs, noise, self.leaves if region is None else region):
            mask = _by_channel(leaf.source, leaf.call, grad != 0)
            masks[leaf.name] = masks[leaf.name] | mask if leaf.name in masks else mask
        return masks

    def _gradients(
        self, inputs: list[Tensor], noise: list[Tensor], leaves: Sequence[_Leaf]
    ) -> list[tuple[_Leaf, Tensor]]:
        """The leaves that some tensors depend on, with gradients of the products of the tensors and noise."""
        if not leaves:
            return []
        reason = "they need gradients between layers, and a backward pass that the model defines fails in eval mode"
        tensors = [leaf.tensor for leaf in leaves]
        with refused(reason):
            grads = torch.autograd.grad(inputs, tensors, noise, retain_graph=True, allow_unused=True)
        return [(leaf, grad) for leaf, grad in zip(leaves, grads, strict=True) if grad is not None]

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
        if tensors not in self.known:
            self.known[tensors] = self._units(read)
        return self.known[tensors]

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
