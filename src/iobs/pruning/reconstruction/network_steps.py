"""Gradient steps of the whole network with one block in memory, by the exact gradient of the KL divergence.

The forward pass goes block by block and keeps the input of every block. The backward pass loads each block again,
recomputes it, and updates it at once. A store of a model in memory loads nothing, with the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from iobs.errors import NonFiniteError
from iobs.pruning.calibration.losses import divergence
from iobs.pruning.calibration.replay import Stream
from iobs.pruning.calibration.residency import Residency
from iobs.pruning.finetune.scaled import scale_of, scaled_gradients
from iobs.pruning.reconstruction.batch_order import endless
from iobs.pruning.reconstruction.optimizers import Factored, rate_at
from iobs.pruning.reconstruction.parameters import Masters
from iobs.pruning.runtime.checkpoint import Checkpoint
from iobs.pruning.runtime.ranks import Ranks
from iobs.pruning.samples import batches, outputs

SAVED_EVERY = 50  # steps between two entries of the checkpoint


@dataclass(frozen=True)
class StepCheckpoint:
    """The state of steps of the whole network in a checkpoint, one entry per block, so that one block is in memory.

    The entries of two states alternate, and an entry written last names the valid ones: a kill between two blocks
    leaves the state before. Then the state before is removed.

    Args:
        checkpoint: of the run.
        key: of the steps.
        every: steps between two states.
    """

    checkpoint: Checkpoint
    key: str
    every: int = SAVED_EVERY

    def save(self, step: int, masters: list[Masters], optimizers: list[Factored]) -> None:
        """Store the state after `step` steps."""
        slot = step // self.every % 2
        for block, (one, optimizer) in enumerate(zip(masters, optimizers, strict=True)):
            moments = optimizer.state()
            self.checkpoint.put(self._entry(slot, block), {**one.values, **moments}, {"taken": optimizer.taken})
        self.checkpoint.put(self.key, {}, {"step": step, "slot": slot})
        self.remove(len(masters), [1 - slot])

    def remove(self, count: int, slots: Sequence[int] = (0, 1)) -> None:
        """Remove the entries of states, by default of both; `count` is the number of their blocks."""
        for slot in slots:
            for block in range(count):
                self.checkpoint.drop(self._entry(slot, block))

    def load(self, masters: list[Masters], optimizers: list[Factored]) -> int:
        """Read the last state into masters and optimizers; returns its number of steps, or 0 if there is none."""
        if self.key not in self.checkpoint:
            return 0
        found = self.checkpoint.get(self.key)[1]
        for block, (one, optimizer) in enumerate(zip(masters, optimizers, strict=True)):
            tensors, values = self.checkpoint.get(self._entry(found["slot"], block))
            one.replace({name: tensors[name] for name in one.values})
            optimizer.restore(tensors, values["taken"])
        return int(found["step"])

    def _entry(self, slot: int, block: int) -> str:
        return f"{self.key} {slot} block {block}"


@dataclass
class NetworkSteps:
    """Steps of all blocks and of the vectors behind them, with a factored second moment.

    Args:
        stream: the pruned model; its hidden states are the inputs of the first block. `keep` stores others.
        dense: the dense model; its hidden states are the outputs of the last block.
        masters: fitted parameters of each block, and those behind the blocks at the end.
        residency: brings the blocks into memory.
        fit: positions of the calibration batches.
        judges: positions of the batches that judge the steps; see `Streams`.
        ranks: processes that share the batches. A step takes one batch on every rank.
        seed: of the order of the batches.
    """

    stream: Stream
    dense: Stream
    masters: list[Masters]
    residency: Residency
    fit: list[int]
    judges: list[int]
    ranks: Ranks
    seed: int
    start: list[dict[str, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        hold = self.residency.hold
        self.start = [{name: hold(value.clone()) for name, value in one.values.items()} for one in self.masters]

    def undo(self) -> None:
        """Return to the parameters before the steps."""
        for one, values in zip(self.masters, self.start, strict=True):
            one.replace(values)

    def run(
        self,
        steps: int,
        rate: float,
        saved: StepCheckpoint | None = None,
        on_step: Callable[[int, int], object] = lambda done, total: None,
    ) -> None:
        """Take steps on the calibration batches.

        Args:
            steps: their number.
            rate: learning rate.
            saved: where the steps begin if they were interrupted; None: at the first one, and nothing is stored.
            on_step: called with (done, total) after every step.

        Raises:
            NonFiniteError: the loss became NaN or infinite.
        """
        optimizers = [Factored(one.values) for one in self.masters]
        order = endless(self.fit, self.seed)
        done = 0 if saved is None else saved.load(self.masters, optimizers)
        for _ in range(done):
            next(order)
        for step in range(done, steps):
            self._step(next(order), optimizers, rate * rate_at(step, steps))
            if saved is not None and (step + 1) % saved.every == 0 and step + 1 < steps:
                saved.save(step + 1, self.masters, optimizers)
            on_step(step + 1, steps)

    def _step(self, index: int, optimizers: list[Factored], rate: float) -> None:
        """One step on the batch at `index`."""
        inputs = [self.stream.state(index)]
        for stage in range(len(self.masters) - 1):
            inputs.append(self._forward(stage, index, inputs[-1]))
        last = inputs.pop().requires_grad_(True)
        self.masters[-1].copy_to_model()
        weight = float(outputs.attended_count(self.stream.model, self.stream.data[index]))
        scale = scale_of(weight, [last])
        loss, found, scale = _gradients(lambda: self._loss(index, last), last, self.masters[-1], scale)
        # The mean of all ranks, so that all of them stop at a loss that is not finite.
        mean = float(self.ranks.means([loss], weight)[0])
        if not math.isfinite(mean):
            raise NonFiniteError(f"The loss of the whole network's steps is {mean}; lower the rate.")
        self._update(optimizers[-1], self.masters[-1], found[1:], scale, rate, weight)
        pull = found[0]
        for stage in reversed(range(len(inputs))):
            given = inputs.pop().requires_grad_(True)
            self.residency.enter(stage)
            self.masters[stage].copy_to_model()
            through = partial(self.stream.through, [stage], index, given)
            _, found, scale = _gradients(through, given, self.masters[stage], scale, pull)
            self._update(optimizers[stage], self.masters[stage], found[1:], scale, rate, weight)
            self.residency.release(stage)
            pull = found[0]

    @torch.no_grad()
    def _forward(self, stage: int, index: int, hidden: Tensor) -> Tensor:
        self.residency.enter(stage)
        self.masters[stage].copy_to_model()
        found = self.stream.through([stage], index, hidden.clone())
        self.residency.release(stage)
        return found

    def _loss(self, index: int, hidden: Tensor) -> Tensor:
        """KL divergence of the network's outputs from those of the dense network, in nats."""
        with torch.no_grad():
            goal = outputs.logits(self.dense.output(index, self.dense.state(index)))
        found = outputs.logits(self.stream.output(index, hidden))
        return divergence(self.stream.model, self.stream.data[index], goal, found)

    def _update(
        self,
        optimizer: Factored,
        masters: Masters,
        gradients: list[Tensor],
        scale: float,
        rate: float,
        weight: float,
    ) -> None:
        """One update of the masters of a block by gradients, which have a scale, that are means over the ranks."""
        names = [*masters.values]
        if not names:
            return
        given = [one.to(masters.values[name].dtype) for name, one in zip(names, gradients, strict=True)]
        given = given if scale == 1.0 else [one / scale for one in given]
        masked = {
            name: one * masters.masks[name].to(one.device) if name in masters.masks else one
            for name, one in zip(names, self.ranks.means(given, weight), strict=True)
        }
        optimizer.step(masked, rate)

    @torch.no_grad()
    def loss(self) -> float:
        """The mean loss on the judging batches of all ranks; their hidden states are stored between the blocks."""
        chosen, stream = self.judges, self.stream
        hidden = [stream.hidden[index] for index in chosen]
        for stage in range(len(self.masters) - 1):
            self.residency.enter(stage)
            self.masters[stage].copy_to_model()
            hidden = [
                stream.keep(index, stream.through([stage], index, stream.fetch(one)))
                for index, one in zip(chosen, hidden, strict=True)
            ]
            self.residency.release(stage)
        self.masters[-1].copy_to_model()
        total = torch.zeros(2, dtype=torch.float64)
        for index, one in zip(chosen, hidden, strict=True):
            count = batches.size(self.stream.data[index])
            total += torch.tensor([float(self._loss(index, stream.fetch(one))) * count, count], dtype=torch.float64)
        self.ranks.sum(total)
        return float(total[0] / total[1])


def _gradients(
    compute: Callable[[], Tensor], given: Tensor, masters: Masters, scale: float, pull: Tensor | None = None
) -> tuple[Tensor, list[Tensor], float]:
    """A value, the gradients of the hidden state and of the masters in their order, or zeros, and their scale."""
    every = [given, *masters.differentiable()]
    value, found, scale = scaled_gradients(compute, every, scale, pull)
    gradients = [
        torch.zeros_like(one) if gradient is None else gradient for one, gradient in zip(every, found, strict=True)
    ]
    return value, gradients, scale
