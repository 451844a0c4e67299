"""Curves of layers that are not measured, from those of the same kind in other blocks.

A deep model repeats its kinds of layers. The first and last two layers of a kind differ most from their neighbours, so
they are measured, and two between them. The curves of all others are interpolated: geometrically in relative errors and
in damages, linearly in the number of the block.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from iobs.pruning.allocation.counts import Curve
from iobs.pruning.allocation.measurements import Measured
from iobs.pruning.allocation.response import Trial
from iobs.pruning.calibration.blocks import Block, number_of_block
from iobs.pruning.network.layers import Layer

MEASURED_BLOCKS = 6  # most layers of a kind whose curves are measured
_LEAST = 1e-12  # relative error or damage below which its logarithm says nothing

Kind = tuple[str, tuple[int, int]]


def measured_blocks(count: int) -> list[int]:
    """The places that are measured, among `count` blocks with a layer of one kind."""
    if count <= MEASURED_BLOCKS:
        return [*range(count)]
    between = MEASURED_BLOCKS - 4
    inner = {round((count - 1) * (place + 1) / (between + 1)) for place in range(between)}
    return sorted({0, 1, count - 2, count - 1} | inner)


@dataclass
class Kin:
    """The layers of one kind in each block: the same name inside the block, and the same shape.

    Args:
        layers: the layers to prune.
        chain: blocks along which the model can be run.
    """

    layers: Sequence[Layer]
    chain: Sequence[Block]
    _places: dict[Layer, tuple[Kind, int]] = field(default_factory=dict, init=False)
    _measured: dict[Kind, dict[int, Layer]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        every: dict[Kind, dict[int, Layer]] = {}
        for layer in self.layers:
            stage = number_of_block(self.chain, layer.path)
            if stage is not None and layer.expert is None:  # experts of one number have nothing in common
                kind = (layer.name.removeprefix(self.chain[stage].path), layer.shape)
                self._places[layer] = kind, stage
                every.setdefault(kind, {})[stage] = layer
        for kind, found in every.items():
            stages = sorted(found)
            self._measured[kind] = {stages[at]: found[stages[at]] for at in measured_blocks(len(stages))}

    def covers(self, layer: Layer, measured: Container[Layer]) -> bool:
        """Check that a layer need not be measured: another block is, with a layer of its kind, and before its own."""
        if layer not in self._places:
            return False
        kind, stage = self._places[layer]
        own = self._measured[kind]
        return stage not in own and any(at < stage and one in measured for at, one in own.items())

    def likened(self, layer: Layer, count: int, measured: Mapping[Layer, Measured]) -> Measured:
        """The measurements of a covered layer, from those of its kind before and behind it.

        Args:
            layer: the layer.
            count: number of its nonzero weights.
            measured: layers with their measurements.
        """
        kind, stage = self._places[layer]
        own = {at: measured[one] for at, one in self._measured[kind].items() if one in measured}
        before = max(at for at in own if at < stage)
        after = min((at for at in own if at > stage), default=before)
        share = (stage - before) / (after - before) if after != before else 0.0
        return between(own[before], own[after], share, count)


def between(first: Measured, second: Measured, share: float, count: int) -> Measured:
    """Interpolated measurements, at the counts of the first; their energy is 1.

    Args:
        first: of the layer before.
        second: of the layer behind.
        share: of the second, in [0, 1].
        count: number of nonzero weights of the layer, at which the error is 0.
    """

    def mixed(one: float, other: float) -> float:
        return math.exp((1 - share) * math.log(max(one, _LEAST)) + share * math.log(max(other, _LEAST)))

    left, right = first.curve, second.curve
    scales = [1 / max(curve.energy, 1e-30) for curve in (left, right)]
    keeps = [keep for keep in left.keeps[:-1] if keep < count]
    errors = [mixed(left.at(keep) * scales[0], right.at(keep) * scales[1]) for keep in keeps]
    # Trials of both are at the same densities, unless one of them did no harm.
    pairs = [*zip(first.trials, second.trials, strict=False)] if len(first.trials) == len(second.trials) else []
    trials = [
        Trial(mixed(one.error * scales[0], other.error * scales[1]), mixed(one.damage, other.damage))
        for one, other in pairs
    ]
    return Measured(Curve([*keeps, count], [*errors, 0.0], 1.0), trials)
