"""A walk along a network whose weights need not be in memory all at once."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from iobs.errors import IOBSError, ModelError, first_line, is_out_of_memory
from iobs.prune.batches import REFUSALS
from iobs.prune.gram import Statistics
from iobs.prune.layers import Layer
from iobs.prune.stream import BEFORE, Stream
from iobs.prune.trace import Block
from iobs.prune.walk import Walk

Residence = Callable[[Block, bool], None]  # bring a block's weights into memory (True), or let them go (False)


@dataclass
class BlockWalk(Walk):
    """A walk along blocks, each of them in memory only while it is its turn.

    Args:
        residence: told which block comes and which goes.
        begun: told when what lies before the blocks has been run, once and for all.
        spill: puts the activations of a batch where they are kept between blocks; by default in memory.
        arithmetic: what blocks are computed in; None is as the network has it.
    """

    residence: Residence = lambda block, present: None
    begun: Callable[[], None] = lambda: None
    spill: Callable[[int, Tensor], Tensor] = lambda index, hidden: hidden
    arithmetic: torch.dtype | None = None

    @torch.no_grad()
    def sweep_blocks(
        self, visit: Callable[[list[Layer], Statistics], None], replay: Callable[[list[Layer]], bool]
    ) -> list[Layer]:
        """As `sweep`, with blocks that come and go.

        Raises:
            ModelError: the network does not run while its blocks hand on nothing but their hidden state.
            NonFiniteError: as `sweep`.
        """
        stream = Stream(self.model, self._own[0].batches + self._own[1].batches, self.chain, keep=self._kept)
        try:
            stream.advance(BEFORE)
        except REFUSALS as error:
            if isinstance(error, IOBSError) or is_out_of_memory(error):
                raise
            raise ModelError(
                f"{type(self.model).__name__} cannot be run block by block on these data ({type(error).__name__}: "
                f"{first_line(error)}); prune it in memory instead."
            ) from error
        if self.arithmetic is not None:
            stream.cast_arguments(self.arithmetic)
        self.begun()
        left = list(self.layers)
        for stage, block in enumerate(self.chain):
            self.residence(block, True)
            left = self.visit_stage([stream], stage, left, visit, replay)
            if stage + 1 < len(self.chain):
                stream.advance(stage)
            self.residence(block, False)
        return left

    def _kept(self, index: int, hidden: Tensor) -> Tensor:
        return self.spill(index, hidden if self.arithmetic is None else hidden.to(self.arithmetic))


def reserve(file: Path, size: int) -> None:
    """Make a file of so many bytes that has its place on the disk: to write into a mapped hole of a full one kills.

    Raises:
        OSError: the disk is full.
    """
    with file.open("wb") as opened:
        if sys.platform != "linux" or not size:
            return
        try:
            os.posix_fallocate(opened.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that reserves nothing
                raise


def spilled_to(folder: Path) -> Callable[[int, Tensor], Tensor]:
    """Activations in files that are mapped into memory, one for each batch; they take no anonymous memory."""

    def spill(index: int, hidden: Tensor) -> Tensor:
        file = folder / f"{index}.hidden"
        reserve(file, hidden.numel() * hidden.element_size())
        kept = torch.from_file(str(file), shared=True, size=hidden.numel(), dtype=hidden.dtype)
        return kept.reshape(hidden.shape).copy_(hidden)

    return spill
