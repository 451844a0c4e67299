"""Masters and their gradients: of a loss of a model or a window of blocks, and of a whole network block by block.

A window of blocks, a network whose blocks visit memory one by one, and a model with labels differ in nothing else:
`Descent` takes the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from iobs.errors import ProblemError
from iobs.pruning.calibration.losses import divergence, relative_distance
from iobs.pruning.calibration.replay import Residency, Stream
from iobs.pruning.calibration.sweep import Sweep
from iobs.pruning.recipe import LossFunction
from iobs.pruning.runtime.memory import reusing_memory
from iobs.pruning.runtime.ranks import Ranks
from iobs.pruning.samples import batches, outputs
from iobs.pruning.samples.batches import Batch
from iobs.pruning.store import Store

# ---- masters: float32 copies of parameters that gradient steps change, with the masks and grids that the steps keep
Rounding = Callable[[str, Tensor, torch.dtype], Tensor]


@dataclass
class Masters:
    """Copies of parameters in float32 or wider, which gradient steps change.

    Args:
        store: holds the model; takes the result.
        values: copies, by parameter name.
        masks: True where an entry may change, by parameter name; without a mask every entry may change.
        rounding: (name, master, dtype) -> value that is written into the model. Gradients are those at these values.
            None: the masters themselves.
        zero_outside: entries outside the masks are zeros, and are written again after every step: momentum of steps
            with other masks may have moved them.
        resident: the parameters stay in memory, and are written after every step. False: their block visits memory,
            and `copy_to_model` writes them when it comes.
    """

    store: Store
    values: dict[str, Tensor]
    masks: dict[str, Tensor]
    rounding: Rounding | None = None
    zero_outside: bool = False
    resident: bool = True

    @classmethod
    def of(
        cls,
        store: Store,
        names: Iterable[str],
        masks: dict[str, Tensor],
        rounding: Rounding | None = None,
        *,
        zero_outside: bool = False,
        shared: bool = False,
    ) -> Masters:
        """The masters of the model's current parameters.

        Args:
            store, masks, rounding, zero_outside: as in the class.
            names: of the parameters.
            shared: parameters in float32 or wider, of a model without grids, are masters themselves and not copied.
        """
        copied = rounding is not None or not shared
        parameters = {name: store.model.get_parameter(name).detach() for name in names}
        values = {
            name: value.to(torch.promote_types(value.dtype, torch.float32), copy=copied)
            for name, value in parameters.items()
        }
        return cls(store, values, masks, rounding, zero_outside)

    def held(self, hold: Callable[[Tensor], Tensor]) -> Masters:
        """The same masters and masks, each stored by `hold`, of a block that visits memory."""
        values, masks = ({name: hold(value) for name, value in part.items()} for part in (self.values, self.masks))
        return Masters(self.store, values, masks, self.rounding, self.zero_outside, resident=False)

    def parameters(self) -> list[nn.Parameter]:
        """The model's parameters in the order of the masters; they require gradients from now on."""
        parameters = [self.store.model.get_parameter(name) for name in self.values]
        for parameter in parameters:
            parameter.requires_grad_(True)
        return parameters

    def snapshot(self, hold: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Copies of masters that no step has changed, each stored by `hold`; in memory in the dtype of the model."""
        if not self.resident:  # the parameters may have another dtype while their block is away
            return {name: hold(value.clone()) for name, value in self.values.items()}
        pairs = zip(self.values.items(), self.parameters(), strict=True)
        return {name: hold(value.to(parameter.dtype, copy=True)) for (name, value), parameter in pairs}

    @torch.no_grad()
    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Write a snapshot into the masters and, unless the block visits memory, into the model."""
        self.replace(snapshot)
        if self.resident:
            for name, parameter in zip(self.values, self.parameters(), strict=True):
                parameter.detach().copy_(snapshot[name])

    @torch.no_grad()
    def replace(self, values: Mapping[str, Tensor]) -> None:
        """Take the values of masters from elsewhere; the model stays as it is."""
        for name, value in values.items():
            self.values[name].copy_(value)

    @torch.no_grad()
    def copy_from_model(self) -> None:
        """Take the model's current weights, as after a projection."""
        self.replace({name: self.store.model.get_parameter(name).detach() for name in self.values})

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Write the masters into the model, in its dtype and on its grids; steps leave entries outside the masks."""
        for name, parameter in zip(self.values, self.parameters(), strict=True):
            parameter.detach().copy_(self._rounded(name, parameter.dtype))

    @torch.no_grad()
    def keep(self) -> None:
        """Give the result to the store, which may round it to the dtype of a file."""
        for name in self.values:
            self.store.write_tensor(name, self._rounded(name, self.store.model.get_parameter(name).dtype))

    def masked(self, name: str, gradient: Tensor) -> Tensor:
        """The gradient of a master without the entries that stay."""
        return gradient * self.masks[name].to(gradient.device) if name in self.masks else gradient

    @torch.no_grad()
    def finish_step(self) -> None:
        """Write masters that an optimizer has changed into the model."""
        if self.zero_outside:
            for name, mask in self.masks.items():
                if name in self.values:
                    self.values[name] *= mask
        if self.resident:
            self.copy_to_model()

    def _rounded(self, name: str, dtype: torch.dtype) -> Tensor:
        """The value of a master in the model, on the grids of its layers."""
        value = self.values[name]
        return value if self.rounding is None else self.rounding(name, value, dtype)


# ---- their gradients
@dataclass
class StepGradients:
    """The loss and the gradients of one step on this rank.

    Args:
        loss: on this rank.
        weight: of this rank in a mean over ranks.
        groups: (number of the group of masters, its gradients in their order), each group once. A group may be
            updated before the next one is computed.
    """

    loss: float
    weight: float
    groups: Generator[tuple[int, list[Tensor]], None, None]


@dataclass(frozen=True)
class ModelLoss:
    """A loss of batches of samples.

    Like a `Window` it has the mean loss of an item, its weight in the mean of several items, about the number by which
    the loss divides a sum, and the error text for a loss that is not finite.

    Args:
        model: the model.
        function: (model, batch) -> scalar.
    """

    model: nn.Module
    function: LossFunction
    failure: ClassVar[str] = "The loss of gradient step {step} is {loss}; lower the learning rate."

    def loss(self, batch: Batch) -> Tensor:
        """The loss on a batch.

        Raises:
            ProblemError: the loss has no gradient.
        """
        loss = self.function(self.model, batch)
        if not loss.requires_grad:
            raise ProblemError(
                "The loss has no gradient: the model or the loss computes under torch.no_grad or detaches its outputs. "
                "Prune without gradient steps, or remove no_grad and detach."
            )
        return loss

    def weight(self, batch: Batch) -> float:
        """The number of samples."""
        return batches.size(batch)

    def denominator(self, batch: Batch) -> float:
        """The number of positions of all samples."""
        return batches.position_count(batch)


@dataclass(frozen=True)
class Streams:
    """The streams of a reconstruction, and the batches that they hold.

    Args:
        pruned: hidden states at the first block that is fitted, in the pruned model.
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

    def divergence(self, index: int, hidden: Tensor, dense: Tensor) -> Tensor:
        """KL divergence in nats of the network's outputs from those of the dense network.

        Args:
            index: of the batch.
            hidden: after the last block of the pruned network.
            dense: after the last block of the dense network.
        """
        with torch.no_grad():
            target = outputs.logits(self.dense.output(index, dense))
        logits = outputs.logits(self.pruned.output(index, hidden))
        return divergence(self.pruned.model, self.pruned.data[index], target, logits)

    @torch.no_grad()
    def judged(self, losses: Iterable[Tensor], ranks: Ranks) -> float:
        """The mean over the judging batches of all ranks of the losses of this rank's batches."""
        total = torch.zeros(2, dtype=torch.float64)
        with reusing_memory():
            for index, loss in zip(self.judges, losses, strict=True):
                count = batches.size(self.pruned.data[index])
                total += torch.tensor([float(loss) * count, count], dtype=torch.float64)
        ranks.sum(total)
        return float(total[0] / total[1])


@dataclass(frozen=True)
class Window:
    """Blocks that are fitted together.

    Args:
        streams: hidden states at the first block.
        stages: of the blocks.
        targets: output of the last block in the dense model, by batch.
        kl: compare the outputs of the network by their KL divergence, otherwise those of the last block.
        final: the layers have their final patterns; values on a grid stay there.
    """

    streams: Streams
    stages: range
    targets: list[Tensor]
    kl: bool = False
    final: bool = True
    failure: ClassVar[str] = "The loss of a block reconstruction is {loss}; lower the learning rate."

    def loss(self, index: int) -> Tensor:
        """The loss on the batch at `index`: relative squared distance without padding, or KL divergence in nats."""
        pruned, dense = self.streams.pruned, self.streams.dense
        hidden = pruned.through(self.stages, index, pruned.state(index))
        target = dense.fetch(self.targets[index])
        if self.kl:
            return self.streams.divergence(index, hidden, target)
        mask = outputs.attended(pruned.model, pruned.data[index])
        return relative_distance(outputs.unpadded(hidden, mask), outputs.unpadded(target, mask))

    def weight(self, index: int) -> float:
        """The weight of the batch at `index` in a mean over ranks: the denominator of its loss."""
        pruned, batch = self.streams.pruned, self.streams.pruned.data[index]
        if self.kl:
            return float(outputs.attended_count(pruned.model, batch))
        target = self.streams.dense.fetch(self.targets[index])
        return float(outputs.unpadded(target, outputs.attended(pruned.model, batch)).float().square().sum())

    def denominator(self, index: int) -> float:
        """The denominator of the loss."""
        return self.weight(index)

    @torch.no_grad()
    def judged_loss(self, ranks: Ranks) -> float:
        """The mean loss on the judging batches of all ranks."""
        return self.streams.judged((self.loss(index) for index in self.streams.judges), ranks)


@dataclass(frozen=True)
class LossGradient:
    """The gradient of the mean loss of some items, for a model or a window that is in memory.

    Args:
        objective: the loss.
        masters: of the parameters.
        ranks: processes that share the items.
    """

    objective: ModelLoss | Window
    masters: Masters
    ranks: Ranks

    @property
    def groups(self) -> list[Masters]:
        """All masters are updated together."""
        return [self.masters]

    @property
    def failure(self) -> str:
        """The objective's own failure, for error texts."""
        return self.objective.failure

    def of(self, items: Sequence[Any]) -> StepGradients:
        """Loss and gradients on the items of this rank, possibly none of several ranks."""
        parameters, alone = self.masters.parameters(), len(items) == 1 and self.ranks.size == 1
        half = any(parameter.dtype is torch.float16 for parameter in parameters)
        weights = [1.0] if alone else [self.objective.weight(item) for item in items]
        loss, total = 0.0, sum(weights)
        gradients: list[Tensor] = []
        for item, weight in zip(items, weights, strict=True):
            share = weight / total if len(items) > 1 else 1.0
            scale = scale_of(self.objective.denominator(item) / share if half else 1.0, parameters)
            value, raw, scale = scaled_gradients(partial(self._share_of_loss, item, share), parameters, scale)
            loss += float(value)
            new = in_dtype_of(self.masters, raw, parameters, scale)
            # Not in place: two parameters may have the same tensor as gradient.
            gradients = [first + other for first, other in zip(gradients, new, strict=True)] if gradients else new
        if not items:
            gradients = [torch.zeros_like(master) for master in self.masters.values.values()]
        return StepGradients(loss, total, (pair for pair in [(0, gradients)]))

    def _share_of_loss(self, item: Any, share: float) -> Tensor:
        return self.objective.loss(item) * share


@dataclass(frozen=True)
class BlockwiseGradient:
    """The exact gradient of the KL divergence of a whole network, with one block in memory.

    The forward pass goes block by block and keeps the input of every block. The backward pass loads each block again,
    and recomputes it; its masters can be updated at once. A store of a model in memory loads nothing, with the same
    steps.

    Args:
        streams: the pruned model, with the inputs of the first block as hidden states (`keep` stores others), and the
            dense model, with the outputs of the last block.
        groups: masters of each block, and those behind the blocks at the end.
        residency: brings the blocks into memory.
    """

    streams: Streams
    groups: list[Masters]
    residency: Residency
    failure: ClassVar[str] = "The loss of the whole network's steps is {loss}; lower the rate."

    def of(self, index: int) -> StepGradients:
        """Loss and gradients on the batch at `index`."""
        stream = self.streams.pruned
        inputs = [stream.state(index)]
        for stage in range(len(self.groups) - 1):
            with self._visit(stage), torch.no_grad():
                inputs.append(stream.through([stage], index, inputs[-1].clone()))
        last = inputs.pop()
        weight = float(outputs.attended_count(stream.model, stream.data[index]))
        self.groups[-1].copy_to_model()
        dense = self.streams.dense.state(index)
        loss, gradients, scale = self._gradients(
            len(inputs), last, partial(self.streams.divergence, index, dense=dense), scale_of(weight, [last])
        )
        return StepGradients(float(loss), weight, self._backward(index, inputs, gradients, scale))

    def _backward(
        self, index: int, inputs: list[Tensor], gradients: list[Tensor], scale: float
    ) -> Generator[tuple[int, list[Tensor]], None, None]:
        """The gradients of the groups from the last to the first.

        Args:
            index: of the batch.
            inputs: of the blocks; each is removed after its use.
            gradients: of the output of the last block, and of the masters behind it, both times `scale`.
            scale: of these gradients.
        """
        pull = gradients.pop(0)
        yield len(inputs), gradients
        for stage in reversed(range(len(inputs))):
            with self._visit(stage):
                through = partial(self.streams.pruned.through, [stage], index)
                _, gradients, scale = self._gradients(stage, inputs.pop(), through, scale, pull)
                pull = gradients.pop(0)
                yield stage, gradients

    @contextmanager
    def _visit(self, stage: int) -> Iterator[None]:
        """Context in which a block is in memory, with the weights of its masters."""
        self.residency.enter(stage)
        try:
            self.groups[stage].copy_to_model()
            yield
        finally:
            self.residency.release(stage)

    def _gradients(
        self,
        stage: int,
        hidden: Tensor,
        compute: Callable[[Tensor], Tensor],
        scale: float,
        pull: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor], float]:
        """A function of a hidden state and of the masters of a group, the gradients of these, and a scale.

        Only the gradient of the hidden state has the scale, for the block before.
        """
        masters = self.groups[stage]
        parameters = masters.parameters()
        hidden.requires_grad_(True)
        value, raw, scale = scaled_gradients(partial(compute, hidden), [hidden, *parameters], scale, pull)
        first = raw.pop(0)
        pulled = torch.zeros_like(hidden) if first is None else first
        return value, [pulled, *in_dtype_of(masters, raw, parameters, scale)], scale

    @torch.no_grad()
    def judged_loss(self, ranks: Ranks) -> float:
        """The mean loss on the judging batches of all ranks; their hidden states are stored between the blocks."""
        stream, judges = self.streams.pruned, self.streams.judges
        hidden = [stream.hidden[index] for index in judges]
        for stage in range(len(self.groups) - 1):
            with self._visit(stage):
                hidden = [
                    stream.keep(index, stream.through([stage], index, stream.fetch(state)))
                    for index, state in zip(judges, hidden, strict=True)
                ]
        self.groups[-1].copy_to_model()
        losses = (
            self.streams.divergence(index, stream.fetch(state), self.streams.dense.state(index))
            for index, state in zip(judges, hidden, strict=True)
        )
        return self.streams.judged(losses, ranks)


Gradient = LossGradient | BlockwiseGradient


def in_dtype_of(masters: Masters, raw: list[Tensor | None], parameters: Sequence[Tensor], scale: float) -> list[Tensor]:
    """Gradients of parameters, without their scale, in the dtype of the masters; zeros for unused parameters.

    `raw` is emptied, so that each gradient in the dtype of the model is freed at once.
    """
    gradients: list[Tensor] = []
    for master, parameter in zip(masters.values.values(), parameters, strict=True):
        gradient = raw.pop(0)
        value = torch.zeros_like(parameter, dtype=master.dtype) if gradient is None else gradient.to(master.dtype)
        gradients.append(value if scale == 1.0 else value / scale)
    return gradients


def scale_of(denominator: float, tensors: Sequence[Tensor]) -> float:
    """The scale of a loss that is a sum divided by `denominator`: a power of two, so that it changes no bits.

    Without a scale, small gradients of float16 parameters would be rounded to zero.

    Args:
        denominator: of the loss.
        tensors: whose gradients are computed; without float16 among them the scale is 1.
    """
    if not any(tensor.dtype is torch.float16 for tensor in tensors):
        return 1.0
    return 2.0 ** max(0, math.floor(math.log2(max(denominator, 1.0))))


def scaled_gradients(
    compute: Callable[[], Tensor], tensors: Sequence[Tensor], scale: float, pull: Tensor | None = None
) -> tuple[Tensor, list[Tensor | None], float]:
    """The value, and the gradients of a scaled value; the scale is halved until they are finite.

    Args:
        compute: the value; called again after each halving.
        tensors: whose gradients are computed.
        scale: of the value, or of `pull`.
        pull: gradient of the value, with its scale; None: the value is a loss.

    Returns:
        The value, the gradients times a scale, and the scale.
    """
    with torch.enable_grad():
        while True:
            value = compute()
            scaled = value * scale if pull is None and scale != 1.0 else value
            gradients = torch.autograd.grad(scaled, tensors, pull, allow_unused=True)
            if scale <= 1.0 or not bool(value.isfinite().all()) or _finite(gradients):
                return value.detach(), [*gradients], scale
            scale, pull = scale / 2, None if pull is None else pull / 2


def _finite(gradients: Sequence[Tensor | None]) -> bool:
    return all(gradient is None or bool(gradient.isfinite().all()) for gradient in gradients)
