"""One projection of a network whose weights need not be in memory all at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from iobs.core.patterns import Pattern
from iobs.prune.batches import Batch, Part
from iobs.prune.checkpoint import Journal
from iobs.prune.gram import Statistics, relative_output_error
from iobs.prune.layers import Layer
from iobs.prune.memory import MemoryWatch
from iobs.prune.progress import Progress
from iobs.prune.record import LayerRecord, RoundRecord, layer_record
from iobs.prune.settings import Settings
from iobs.prune.solving import solve_layer
from iobs.prune.spread import asked, share_of
from iobs.prune.stream import BEFORE, Stream
from iobs.prune.trace import Block
from iobs.prune.walk import Walk

Residence = Callable[[Block, bool], None]  # bring a block's weights into memory (True), or let them go (False)


@dataclass
class BlockWalk(Walk):
    """A walk along given blocks, each of them in memory only while it is its turn.

    Args:
        blocks: the chain; running along it must be exact.
        residence: told which block comes and which goes.
        begun: told when what lies before the blocks has been run, once and for all.
        spill: where the activations of a batch are kept between blocks; by default in memory.
        arithmetic: what blocks are computed in; None is as the network has it.
    """

    blocks: list[Block] = field(default_factory=list)
    residence: Residence = lambda block, present: None
    begun: Callable[[], None] = lambda: None
    spill: Callable[[int, Tensor], Tensor] = lambda index, hidden: hidden
    arithmetic: torch.dtype | None = None

    def __post_init__(self) -> None:
        self.chain = self.blocks

    @torch.no_grad()
    def sweep_blocks(
        self, visit: Callable[[list[Layer], Statistics], None], replay: Callable[[list[Layer]], bool]
    ) -> list[Layer]:
        """As `sweep`, with blocks that come and go."""
        stream = Stream(self.model, self._own[0].batches + self._own[1].batches, self.chain)
        stream.advance(BEFORE)
        if self.arithmetic is not None:
            stream.cast(self.arithmetic)
        self._spill(stream)
        self.begun()
        left = list(self.layers)
        for stage, block in enumerate(self.chain):
            self.residence(block, True)
            left = self.visit_stage([stream], stage, left, visit, replay)
            if stage + 1 < len(self.chain):
                stream.advance(stage)
                self._spill(stream)
            self.residence(block, False)
        return left

    def _spill(self, stream: Stream) -> None:
        stream.hidden = [self.spill(index, hidden) for index, hidden in enumerate(stream.hidden)]


@dataclass
class Projection:
    """Solves the layers that a walk comes by, and writes them down.

    Args:
        model: the network.
        patterns: of every layer.
        settings: solver, damping and the like.
        progress: is told of every layer.
        journal: keeps solved layers, or None.
        rounded: a layer's weights as the output's files can hold them.
    """

    model: nn.Module
    patterns: dict[Layer, Pattern]
    settings: Settings
    progress: Progress
    journal: Journal | None = None
    rounded: Callable[[Layer, Tensor], Tensor] = lambda layer, weight: weight
    memory: MemoryWatch = field(default_factory=MemoryWatch)

    def __post_init__(self) -> None:
        self.record = RoundRecord(0, asked(self.patterns), None, None, [])

    def visit(self, group: list[Layer], statistics: Statistics) -> None:
        """Prune every layer of a group that shares its input."""
        for layer in group:
            began = time.perf_counter()
            weight = layer.read(self.model)
            damping, dead = self._solve(layer, statistics, weight)
            written = layer.read(self.model)
            heldout = statistics.heldout
            error = relative_output_error(statistics.calibration, written, weight)
            entry = LayerRecord(
                name=layer.name,
                shape=layer.shape,
                asked=share_of(self.patterns[layer], layer),
                zeros=int((written == 0).sum()),
                error_calibration=error,
                error_heldout=None if heldout is None else relative_output_error(heldout, written, weight),
                error_dense=error,
                damping=damping,
                dead_columns=dead,
                inputs=statistics.calibration.count if statistics.tokens is None else statistics.tokens,
                seconds=time.perf_counter() - began,
                stats={"rule": statistics.rule} if statistics.rule else {},
            )
            if self.journal is not None:
                self.journal.put(layer.name, {"weight": layer.tensor(self.model)}, {"entry": asdict(entry)})
            self._done(entry)

    def _solve(self, layer: Layer, statistics: Statistics, weight: Tensor) -> tuple[float, int]:
        """Write a layer's pruned weights; what the solver needed for them is free again at the end."""
        solutions = solve_layer(layer, statistics, weight, weight, self.patterns[layer], self.settings)
        layer.write(self.model, self.rounded(layer, torch.cat([solution.weight for solution in solutions])))
        stats = [solution.stats for solution in solutions]
        return max(one["damping"] for one in stats), sum(one["dead_columns"] for one in stats)

    def replay(self, group: list[Layer]) -> bool:
        """Take a group from the journal if it is there."""
        if self.journal is None or not all(layer.name in self.journal for layer in group):
            return False
        for layer in group:
            tensors, values = self.journal.get(layer.name)
            layer.tensor(self.model).copy_(tensors["weight"])
            self._done(layer_record(values["entry"]))
        return True

    def _done(self, entry: LayerRecord) -> None:
        self.record.layers.append(entry)
        self.memory.look()
        self.progress.layer(0, entry)


def spilled_to(folder: Path) -> Callable[[int, Tensor], Tensor]:
    """Activations in files that are mapped into memory, one for each batch; they take no anonymous memory."""

    def spill(index: int, hidden: Tensor) -> Tensor:
        kept = torch.from_file(str(folder / f"{index}.hidden"), shared=True, size=hidden.numel(), dtype=hidden.dtype)
        return kept.reshape(hidden.shape).copy_(hidden)

    return spill


def samples(batches: list[Batch]) -> Part:
    """All batches, with their numbers."""
    return Part(list(batches), list(range(len(batches))))
