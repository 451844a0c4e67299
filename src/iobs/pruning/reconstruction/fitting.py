"""Fit of a window of blocks: gradient steps that bring its output to that of the dense model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from iobs.errors import NonFiniteError
from iobs.pruning.calibration.losses import divergence
from iobs.pruning.calibration.replay import Stream
from iobs.pruning.calibration.sweep import Sweep
from iobs.pruning.finetune.scaled import scale_of, scaled_gradients
from iobs.pruning.reconstruction.batch_order import endless
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
        judges: positions of the batches that judge a fit: held-out batches, or the calibration batches if no rank has
            held-out batches. Possibly empty on some ranks.
    """

    pruned: Stream
    dense: Stream
    fit: list[int]
    judges: list[int]

    @classmethod
    def of(cls, sweep: Sweep, pruned: Stream, dense: Stream) -> Streams:
        """The streams of a sweep, with the positions of its batches."""
        count = len(sweep.ranks.share(sweep.calibration).batches)
        heldout = [*range(count, len(pruned.data))]
        judged = bool(sweep.heldout.batches)  # on all ranks alike: a rank may have no held-out batch of its own
        return cls(pruned, dense, [*range(count)], heldout if judged else [*range(count)])


@dataclass(frozen=True)
class Window:
    """Blocks that are fitted together.

    Args:
        streams: hidden states at the first block.
        stages: of the blocks.
        wanted: output of the last block in the dense model, by batch.
        kl: compare the outputs of the network by their KL divergence, otherwise those of the last block.
        final: the layers have their final patterns; values on a grid stay there.
    """

    streams: Streams
    stages: range
    wanted: list[Tensor]
    kl: bool = False
    final: bool = True

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

    def weight(self, index: int) -> float:
        """The weight of the batch at `index` in a mean over ranks: the denominator of its loss."""
        pruned, batch = self.streams.pruned, self.streams.pruned.data[index]
        if self.kl:
            return float(outputs.attended_count(pruned.model, batch))
        wanted = self.streams.dense.fetch(self.wanted[index])
        return float(outputs.unpadded(wanted, outputs.attended(pruned.model, batch)).float().square().sum())


@dataclass
class Fit:
    """Gradient steps of Adam on the parameters of a window.

    Args:
        window: the blocks and their outputs.
        masters: the fitted parameters, made from the current parameters of the model.
        ranks: processes that share the batches. A step takes one batch on every rank, and its gradients are those of
            all these batches together.
        seed: of the order of the batches.

    Attributes:
        start: the parameters before the fit, in the dtype of the model.
    """

    window: Window
    masters: Masters
    ranks: Ranks
    seed: int
    start: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        pairs = zip(self.masters.values, self.masters.differentiable(), strict=True)
        self.start = {name: parameter.detach().clone() for name, parameter in pairs}

    def undo(self) -> None:
        """Return to the parameters before the fit."""
        self.masters.restore(self.start)

    def has_gradient(self) -> bool:
        """Check that the loss depends on the parameters; a model may compute under `torch.no_grad`."""
        self.masters.differentiable()
        with torch.enable_grad():
            return self.window.loss(self.window.streams.fit[0]).requires_grad

    def run(self, steps: int, rate: float, decay: bool = True) -> None:
        """Take steps on the calibration batches.

        Args:
            steps: their number.
            rate: learning rate.
            decay: warm up, then let the rate fall to zero; otherwise it is constant.

        Raises:
            NonFiniteError: the loss became NaN or infinite.
        """
        optimizer, order = Adam(self.masters.values.values()), endless(self.window.streams.fit, self.seed)
        with reusing_memory():
            for step in range(steps):
                optimizer.step(self._gradients(next(order)), rate * (rate_at(step, steps) if decay else 1.0))
                self.masters.copy_to_model()

    def _gradients(self, index: int) -> list[Tensor]:
        """The gradients of the masters on the batch at `index` of every rank; the step is their only holder.

        Raises:
            NonFiniteError: the loss is NaN or infinite.
        """
        parameters = self.masters.differentiable()
        half = any(one.dtype is torch.float16 for one in parameters)
        scale = scale_of(self.window.weight(index) if half else 1.0, parameters)
        loss, found, scale = scaled_gradients(lambda: self.window.loss(index), parameters, scale)
        given = [loss]
        for master in self.masters.values.values():
            gradient = found.pop(0)  # so that the gradient in the dtype of the model is freed at once
            own = torch.zeros_like(master) if gradient is None else gradient.to(master.dtype)
            given.append(own if scale == 1.0 else own / scale)
        weight = self.window.weight(index) if self.ranks.size > 1 else 1.0
        mean, *gradients = self.ranks.means(given, weight)
        del given
        self._require_finite(float(mean))  # of all ranks, so that all of them stop
        for place, name in enumerate(self.masters.values):
            if name in self.masters.masks:
                gradients[place] = gradients[place] * self.masters.masks[name]
        return gradients

    @torch.no_grad()
    def loss(self) -> float:
        """The mean loss on the judging batches of all ranks."""
        streams = self.window.streams
        total = torch.zeros(2, dtype=torch.float64)
        with reusing_memory():
            for index in streams.judges:
                count = batches.size(streams.pruned.data[index])
                total += torch.tensor([float(self.window.loss(index)) * count, count], dtype=torch.float64)
        self.ranks.sum(total)
        return float(total[0] / total[1])

    def _require_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise NonFiniteError(f"The loss of a block reconstruction is {loss}; lower the learning rate.")
