"""Layers that are not measured, since others of their kind are: in other blocks, or among the experts of a block.

A deep model repeats its kinds of layers. The first and last two layers of a kind differ most from their neighbours, so
they are measured, and two between them. Of the many experts in one parameter a few are measured.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from iobs.pruning.allocation.likeness import MEASURED_EXPERTS, Expert, among, between, measured_experts
from iobs.pruning.allocation.measurements import Measured
from iobs.pruning.calibration.blocks import Block, number_of_block
from iobs.pruning.calibration.experts import Stack
from iobs.pruning.network.layers import Layer
from iobs.pruning.runtime.checkpoint import Checkpoint

MEASURED_BLOCKS = 6  # most blocks in which layers of a kind are measured

Kind = tuple[str, tuple[int, int]]


def measured_blocks(count: int) -> list[int]:
    """The places that are measured, among `count` blocks with a layer of one kind."""
    if count <= MEASURED_BLOCKS:
        return [*range(count)]
    between = MEASURED_BLOCKS - 4
    inner = {round((count - 1) * (place + 1) / (between + 1)) for place in range(between)}
    return sorted({0, 1, count - 2, count - 1} | inner)


class Matrix(Protocol):
    """A weight matrix, of which only the shape is needed, and the number of an expert."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        ...

    @property
    def expert(self) -> int | None:
        """Number of an expert, otherwise None."""
        ...


def measured_shares(layers: Sequence[Matrix], blocks: int) -> list[float]:
    """The share of every layer in the measurements: their sum is the number of layers that are measured.

    Args:
        layers: the layers to prune.
        blocks: number of blocks along which the model can be run; 0 if it is run whole, and each layer is measured.
    """
    stacks: dict[tuple[int, int], int] = {}
    for layer in layers:
        if layer.expert is not None:
            stacks[layer.shape] = max(stacks.get(layer.shape, 0), layer.expert + 1)
    deep = min(1.0, MEASURED_BLOCKS / max(1, blocks))

    def share(layer: Matrix) -> float:
        experts = 0 if layer.expert is None else stacks[layer.shape]
        if not blocks or 0 < experts <= MEASURED_EXPERTS:
            return 1.0
        return deep * min(1.0, MEASURED_EXPERTS / max(1, experts))

    return [share(layer) for layer in layers]


@dataclass
class Kin:
    """The layers of one kind in each block: the same name inside the block, and the same shape.

    Experts in one parameter are of one kind. Their numbers have nothing in common from block to block, so an expert is
    likened by its load. Where a block has few experts, all of them are measured in all blocks.

    Args:
        layers: the layers to prune.
        chain: blocks along which the model can be run.
    """

    layers: Sequence[Layer]
    chain: Sequence[Block]
    _places: dict[Layer, tuple[Kind, int]] = field(default_factory=dict, init=False)
    _measured: dict[Kind, dict[int, list[Layer]]] = field(default_factory=dict, init=False)
    _loads: dict[Layer, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        every: dict[Kind, dict[int, list[Layer]]] = {}
        for layer in self.layers:
            stage = number_of_block(self.chain, layer.path)
            if stage is not None:
                name = layer.name if layer.expert is None else layer.key
                kind = name.removeprefix(self.chain[stage].path), layer.shape
                every.setdefault(kind, {}).setdefault(stage, []).append(layer)
        for kind, found in every.items():
            if any(layer.expert is not None for own in found.values() for layer in own) and not _has_many(found):
                continue
            self._places |= {layer: (kind, stage) for stage, own in found.items() for layer in own}
            stages = sorted(found)
            self._measured[kind] = {stages[at]: found[stages[at]] for at in measured_blocks(len(stages))}

    def meet(self, stack: Stack, checkpoint: Checkpoint) -> None:
        """Choose the experts of a stack that are measured, by their loads; before any of them is."""
        first = stack.layers[0]
        if first not in self._places or first in self._loads:
            return
        found = checkpoint.remembered(f"loads of {first.key}", lambda: {"loads": stack.loads()})["loads"]
        self._loads |= dict(zip(stack.layers, found, strict=True))
        kind, stage = self._places[first]
        if stage in self._measured[kind]:
            stack.wanted = self._measured[kind][stage] = [stack.layers[at] for at in measured_experts(found)]

    def covers(self, layer: Layer, measured: Container[Layer]) -> bool:
        """Check that a layer need not be measured: others of its kind are, in its block or in one before it."""
        if layer not in self._places:
            return False
        kind, stage = self._places[layer]
        own = self._measured[kind]
        if stage in own:
            return layer not in own[stage]
        return any(at < stage and one in measured for at, some in own.items() for one in some)

    def likened(self, layer: Layer, count: int, measured: Mapping[Layer, Measured]) -> Measured:
        """The measurements of a covered layer, from those of its kind in its block, or before and behind it.

        Args:
            layer: the layer.
            count: number of its nonzero weights.
            measured: layers with their measurements.
        """
        kind, stage = self._places[layer]
        own = {at: [one for one in some if one in measured] for at, some in self._measured[kind].items()}
        stages = [at for at, some in own.items() if some]
        before = max(at for at in stages if at <= stage)
        after = min((at for at in stages if at >= stage), default=before)

        def found(at: int) -> Measured:
            if layer.expert is None:
                return measured[own[at][0]]
            return among([Expert(self._loads[one], measured[one]) for one in own[at]], self._loads[layer], count)

        share = (stage - before) / (after - before) if after != before else 0.0
        return found(before) if before == stage else between(found(before), found(after), share, count)


def _has_many(found: Mapping[int, Sequence[Layer]]) -> bool:
    return max(map(len, found.values())) > MEASURED_EXPERTS
