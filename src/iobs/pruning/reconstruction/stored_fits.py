"""Results of block reconstruction in a checkpoint, of which only those stay that a resumed run reads.

A window of blocks has an entry for each block, and one entry more that names it complete. The fit of the next window
replaces the entries of the blocks that both share. Once the window that ends with a block is fitted, a resumed run
takes the last projection of the block and the window. The block's projections at lower sparsity, and the fits between
them, are not needed any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from iobs.pruning.calibration.blocks import Block
from iobs.pruning.layerwise.projection import key_of
from iobs.pruning.network.layers import Layer
from iobs.pruning.report import JsonObject
from iobs.pruning.runtime.checkpoint import Checkpoint


@dataclass(frozen=True)
class StoredFits:
    """Entries of one reconstruction.

    A fit is named by its block and its level. Level None is the fit of the window that ends with the block. A number is
    the fit of the block alone after its projection at that level.

    Args:
        checkpoint: of the run.
        index: number of the round.
        chain: the blocks.
        windows: blocks of each window, by its last block.
    """

    checkpoint: Checkpoint
    index: int
    chain: Sequence[Block]
    windows: Mapping[int, range]

    def holds(self, stage: int, level: int | None) -> bool:
        """True if a fit was stored when the run began."""
        return self._key(stage, level) in self.checkpoint

    def put(self, stage: int, level: int | None, values: Mapping[str, Tensor], notes: Sequence[str] = ()) -> None:
        """Store the parameters of a fit and its notes; remove the parameters of the window before that it replaces."""
        rest = dict(values)
        for block in self.windows[stage] if level is None else ():
            inside = {name: rest.pop(name) for name in [*rest] if self.chain[block].holds(name)}
            if self._part(stage, block) not in self.checkpoint:  # a killed run stored it: the fit has the same bits
                self.checkpoint.put(self._part(stage, block), inside, {})
        self.checkpoint.put(self._key(stage, level), rest, {"notes": [*notes]})  # last: all blocks are stored now
        self._remove_replaced(stage, level)

    def get(self, stage: int, level: int | None) -> tuple[dict[str, Tensor], JsonObject]:
        """The stored parameters of a fit, without those that the next window has replaced, and its values."""
        parameters: dict[str, Tensor] = {}
        if level is None:
            after = min((end for end in self.windows if end > stage), default=stage)
            replaced = self.windows[after] if after > stage and self.holds(after, None) else range(0)
            for block in self.windows[stage]:
                parameters |= {} if block in replaced else self.checkpoint.get(self._part(stage, block))[0]
        rest, values = self.checkpoint.get(self._key(stage, level))
        self._remove_replaced(stage, level)
        return parameters | rest, values

    def finished(self, stage: int) -> JsonObject | None:
        """The values that `finish` stored of a block; None if the block was not finished when the run began."""
        key = self._finished(stage)
        return self.checkpoint.get(key)[1] if key in self.checkpoint else None

    def finish(
        self,
        stage: int,
        names: Sequence[str],
        without_input: Mapping[Layer, bool],
        layers: Iterable[Layer],
        levels: int,
        notes: Sequence[str],
    ) -> None:
        """Note that a block and its window are stored, and remove the entries that a resumed run does not read.

        Args:
            stage: the block.
            names: its pruned layers, in the order of their projection.
            without_input: layers that have received no input up to this block.
            layers: all its layers.
            levels: number of its projections.
            notes: of its projections and of the fits between them.
        """
        if self._finished(stage) not in self.checkpoint:
            left = {layer.name: used for layer, used in without_input.items()}
            values = {"layers": [*names], "without_input": left, "notes": [*notes]}
            self.checkpoint.put(self._finished(stage), {}, values)
        for level in range(levels - 1):
            self.checkpoint.drop(self._key(stage, level))
            for layer in layers:
                self.checkpoint.drop(key_of(self.index, layer, level))

    def _remove_replaced(self, stage: int, level: int | None) -> None:
        before = max((end for end in self.windows if end < stage), default=stage)
        if level is None and before < stage:
            for block in self.windows[stage]:
                self.checkpoint.drop(self._part(before, block))

    @staticmethod
    def name(stage: int, level: int | None) -> str:
        """Name of a fit in notes and keys."""
        return f"window of block {stage}" if level is None else f"block {stage} at level {level}"

    def _key(self, stage: int, level: int | None) -> str:
        return f"round {self.index} {self.name(stage, level)}"

    def _part(self, stage: int, block: int) -> str:
        return f"{self._key(stage, None)}, block {block}"

    def _finished(self, stage: int) -> str:
        return f"round {self.index} block {stage} is finished"
