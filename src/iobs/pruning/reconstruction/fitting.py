"""Fit of a window of blocks: gradient steps that bring its output to that of the dense model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from iobs.errors import NonFiniteError
from iobs.pruning.calibration.losses import divergence
from iobs.pruning.calibration.replay import Stream
from iobs.pruning.reconstruction.optimizers import Adam, rate_at
from iobs.pruning.reconstruction.parameters import Masters
from iobs.pruning.runtime.memory import reusing_memory
from iobs.pruning.runtime.ranks import Ranks
from iobs.pruning.samples import batches, outputs


@dataclass(frozen=True)
class Streams:
    """The streams of a walk along the blocks, and the batches that they hold.

    Args:
        pruned: hidden states at the first block of the window, in the pruned model.
        dense: hidden states of the dense model; its model gives the outputs to match.
        fit: positions of the calibration batches.
        heldout: positions of the held-out batches.
    """

    pruned: Stream
    dense: Stream
    fit: list[int]
    heldout: list[int]


@dataclass(frozen=True)
class Window:
    """Blocks that are fitted together.

    Args:
        streams: hidden states at the first block.
        stages: of the blocks.
        wanted: output of the last block in the dense model, by batch.
        kl: compare the outputs of the network by their KL divergence, otherwise those of the last block.
    """

    streams: Streams
    stages: range
    wanted: list[Tensor]
    kl: bool = False

    def loss(self, index: int) -> Tensor:
        """The loss on the batch at `index`: relative squared distance without padding, or KL divergence in nats."""
        pruned, dense = self.streams.pruned, self.streams.dense
        hidden = pruned.through(self.stages, index, pruned.state(index))
        wanted, batch = dense.fetch(self.wanted[index]), pruned.data[index]
        if self.kl:
            with torch.no_grad():
                goal = outputs.logits(dense.output(index, wanted))
            return divergence(pruned.model, batch, goal, outputs.logits(pruned.output(index, hidden)))
        mask = outputs.attended(pruned.model, batch)
        hidden, wanted = (outputs.unpadded(value, mask).float() for value in (hidden, wanted))
        return (hidden - wanted).square().sum() / wanted.square().sum().clamp_min(1e-30)


@dataclass
class Fit:
    """Gradient steps of Adam on the parameters of a window.

    Args:
        window: the blocks and their outputs.
        masters: the fitted parameters.
        ranks: processes that share the batches; gradients are means over them.
        seed: of the order of the batches.

    Attributes:
        start: the masters before the fit.
    """

    window: Window
    masters: Masters
    ranks: Ranks
    seed: int
    start: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.start = self.masters.snapshot()

    def undo(self) -> None:
        """Return to the parameters before the fit."""
        self.masters.restore(self.start)

    def run(self, steps: int, rate: float, decay: bool = True) -> None:
        """Take steps on the calibration batches.

        Args:
            steps: their number.
            rate: learning rate.
            decay: warm up, then let the rate fall to zero; otherwise it is constant.

        Raises:
            NonFiniteError: the loss became NaN or infinite.
        """
        parameters, optimizer = self.masters.parameters, Adam(self.masters.values.values())
        order = self._endless()
        with reusing_memory():
            for step in range(steps):
                with torch.enable_grad():
                    loss = self.window.loss(next(order))
                    found = torch.autograd.grad(loss, parameters, allow_unused=True)
                self._require_finite(float(loss.detach()))
                gradients = []
                for (name, master), gradient in zip(self.masters.values.items(), found, strict=True):
                    given = torch.zeros_like(master) if gradient is None else gradient.to(master.dtype)
                    self.ranks.sum(given)
                    given = given / self.ranks.size if self.ranks.size > 1 else given
                    gradients.append(given * self.masters.masks[name] if name in self.masters.masks else given)
                optimizer.step(gradients, rate * (rate_at(step, steps) if decay else 1.0))
                self.masters.copy_to_model()

    @torch.no_grad()
    def loss(self) -> float:
        """The mean loss on the held-out batches of all ranks, or on the calibration batches if none are held out."""
        streams = self.window.streams
        total = torch.zeros(2, dtype=torch.float64)
        with reusing_memory():
            for index in streams.heldout or streams.fit:
                count = batches.size(streams.pruned.data[index])
                total += torch.tensor([float(self.window.loss(index)) * count, count], dtype=torch.float64)
        self.ranks.sum(total)
        return float(total[0] / total[1])

    def _endless(self) -> Iterator[int]:
        """Positions of the calibration batches in an endless loop, in a new random order in every pass."""
        generator = torch.Generator().manual_seed(self.seed)
        fit = self.window.streams.fit
        while True:
            yield from (fit[place] for place in torch.randperm(len(fit), generator=generator).tolist())

    def _require_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise NonFiniteError(f"The loss of a block reconstruction is {loss}; lower the learning rate.")
