"""Gradient steps on float32 copies of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from iobs.errors import NonFiniteError, ProblemError
from iobs.pruning.finetune.scaled import scale_of, scaled_gradients
from iobs.pruning.recipe import Augmentation, FineTune, LossFunction
from iobs.pruning.runtime.memory import reusing_memory
from iobs.pruning.runtime.ranks import current
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.samples.subsets import Samples


@dataclass
class Trainer:
    """Take gradient steps on float32 (or wider) masters of parameters, and write them back in the model's dtype.

    Args:
        model: the model; changed in place, in eval mode (dropout off, batch-norm statistics fixed).
        parameters: trained parameters, by name.
        step: optimizer, learning rate, steps and batch size; neither optimizer nor rate is "auto".
        loss: (model, batch) -> scalar.
        total: steps in the whole run, for the decay of the learning rate.
        seed: of the order of the samples.
        masks: by parameter name, True at entries that may change (the others stay zero); None: no mask.
        augmentation: changes every batch before it is used; None: none.
        rounding: (name, master, dtype) -> value that is written into the model for a master. The gradients are those at
            these values. None: the masters themselves.
        taken: steps taken so far.

    Attributes:
        masters: copies of the parameters, by name.
        optimizer: steps on the masters.
    """

    model: nn.Module
    parameters: dict[str, nn.Parameter]
    step: FineTune
    loss: LossFunction
    total: int
    seed: int
    masks: dict[str, Tensor] | None = None
    augmentation: Augmentation | None = None
    rounding: Callable[[str, Tensor, torch.dtype], Tensor] | None = None
    taken: int = 0

    def __post_init__(self) -> None:
        assert self.step.lr != "auto"
        assert self.step.optimizer != "auto"
        self.masters = {
            name: value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)
            for name, value in self.parameters.items()
        }
        values = list(self.masters.values())
        moving = self.step.optimizer == "momentum"
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.Adam(values, lr=self.step.lr)
            if self.step.optimizer == "adam"
            else torch.optim.SGD(values, lr=self.step.lr, momentum=0.9 if moving else 0.0, nesterov=moving)
        )

    def adopt(self) -> None:
        """Copy the model's current weights (after a projection) into the masters."""
        for name, value in self.parameters.items():
            self.masters[name].copy_(value.detach())

    def run(
        self,
        part: Samples,
        progress: Callable[[int, int, float], None],
        before: Sequence[float] = (),
        keep: Callable[[list[float]], None] = lambda losses: None,
    ) -> list[float]:
        """Take the steps of one round.

        Args:
            part: samples.
            progress: called with (steps done, total steps, last loss).
            before: losses of the first steps of the round, which a restored snapshot has already taken.
            keep: called with the losses so far after every step; it may take a snapshot.

        Returns:
            The loss before each step.

        Raises:
            NonFiniteError: the loss became NaN or infinite.
            ProblemError: the loss has no gradient.
        """
        if len(before) == self.step.steps:
            return [*before]
        device = next(self.model.parameters()).device
        generator = torch.Generator().manual_seed(self.seed + self.taken - len(before))
        whole = self.step.steps == 1 and self.step.batch_size is None
        stream = _endless(part, None if self.step.batch_size is None else samples_a_step(self.step, part), generator)
        losses = [*before]
        with reusing_memory():
            for index in range(self.step.steps):
                used = part.batches if whole else [next(stream)]
                if index < len(before):
                    for batch in used:
                        self._augmented(batch, generator)  # advances the generator as in the first run
                    continue
                losses.append(self._step([batches.to_device(batch, device) for batch in used], generator))
                progress(index + 1, self.step.steps, losses[-1])
                keep(losses)
        return losses

    def _augmented(self, batch: Batch, generator: torch.Generator) -> Batch:
        return batch if self.augmentation is None else self.augmentation(batch, generator)

    def snapshot(self) -> dict[str, Tensor]:
        """The tensors that the next steps depend on, by name: masters and moments. They also depend on `taken`."""
        moments = {
            f"moment {position} {name}": value
            for position, values in self.optimizer.state_dict()["state"].items()
            for name, value in values.items()
            if isinstance(value, Tensor)
        }
        return {**{f"master {name}": value for name, value in self.masters.items()}, **moments}

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor], taken: int) -> None:
        """Restore a snapshot taken after `taken` steps, and copy the masters into the model."""
        for name, parameter in self.parameters.items():
            self.masters[name].copy_(tensors[f"master {name}"])
            self._write(name, parameter)
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("moment "):
                _, position, moment = name.split(" ", 2)
                state.setdefault(int(position), {})[moment] = value
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        self.taken = taken

    def _step(self, used: list[Batch], generator: torch.Generator) -> float:
        """Take one step on the mean gradient of some batches; returns the loss before the step."""
        samples = sum(batches.size(batch) for batch in used)
        gradients = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        value = 0.0
        for whole in used:
            # All ranks augment the whole batch in the same way, then take their rows. For a loss that is a mean over
            # samples, the result does not depend on the number of ranks.
            given = current().rows(self._augmented(whole, generator))
            if batches.size(given) == 0:
                continue
            loss, found, scale = self._gradients(given, samples)
            value += float(loss)
            for name, gradient in zip(self.parameters, found, strict=True):
                if gradient is not None:
                    gradients[name].add_(gradient, alpha=1 / scale)
        value = self._summed(value, gradients)
        if not torch.isfinite(torch.tensor(value)):
            raise NonFiniteError(f"The loss of gradient step {self.taken + 1} is {value}; lower the learning rate.")
        for name, gradient in gradients.items():
            if not bool(torch.isfinite(gradient).all()):
                raise NonFiniteError(f"The gradient of {name} holds NaN or infinity in gradient step {self.taken + 1}.")
        self._apply(gradients)
        return value

    def _gradients(self, given: Batch, samples: int) -> tuple[Tensor, list[Tensor | None], float]:
        """The part of a step's loss that some of its samples have, its gradients times a scale, and the scale."""
        share = batches.size(given) / samples
        parameters = list(self.parameters.values())
        scale = scale_of(samples * batches.positions(given), parameters)
        return scaled_gradients(lambda: differentiable(self.loss(self.model, given)) * share, parameters, scale)

    def _summed(self, value: float, gradients: dict[str, Tensor]) -> float:
        """Sum loss and gradients over the ranks; gradients in place."""
        ranks = current()
        if ranks.size == 1:
            return value
        for gradient in gradients.values():
            ranks.sum(gradient)
        total = torch.tensor([value], dtype=torch.float64, device=next(self.model.parameters()).device)
        ranks.sum(total)
        return float(total)

    @torch.no_grad()
    def _apply(self, gradients: dict[str, Tensor]) -> None:
        """Step the optimizer on masked gradients, and copy the masked masters into the model."""
        assert self.step.lr != "auto"
        rate = self.step.lr
        if self.step.decay:
            rate *= (1 - self.taken / self.total) * min(1.0, 10 * (self.taken + 1) / self.total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for name, master in self.masters.items():
            master.grad = (
                gradients[name] if not self.masks or name not in self.masks else gradients[name] * self.masks[name]
            )
        self.optimizer.step()
        for name, parameter in self.parameters.items():
            if self.masks and name in self.masks:
                self.masters[name] *= self.masks[name]
            self._write(name, parameter)
        self.taken += 1

    def _write(self, name: str, parameter: Tensor) -> None:
        """Write a master into the model, rounded if the parameter lies on a grid."""
        master = self.masters[name]
        parameter.copy_(master if self.rounding is None else self.rounding(name, master, parameter.dtype))


def differentiable(loss: Tensor) -> Tensor:
    """The loss itself, after a check that it has a gradient.

    Raises:
        ProblemError: the loss has no gradient.
    """
    if not loss.requires_grad:
        raise ProblemError(
            "The loss has no gradient: the model or the loss computes under torch.no_grad or detaches its outputs. "
            "Prune without gradient steps, or remove no_grad and detach."
        )
    return loss


def samples_a_step(step: FineTune, part: Samples) -> int:
    """Number of samples in a step.

    "auto" is 64, or less: 2048 tokens of text, or a tenth of all samples (16 at least).
    """
    if step.batch_size is None:
        return part.samples if step.steps == 1 else batches.size(part.batches[0])
    usual = max(1, min(64, max(16, part.samples // 10), 2048 // batches.positions(part.batches[0])))
    wanted = usual if step.batch_size == "auto" else step.batch_size
    return min(wanted, part.samples if part.alike else max(map(batches.size, part.batches)))


def _endless(part: Samples, batch_size: int | None, generator: torch.Generator) -> Iterator[Batch]:
    """Batches in an endless loop, in a new random order in every pass.

    With a batch size, samples are shuffled across the caller's batches and the incomplete last batch is dropped: it
    would be the noisiest step. Samples of different shapes stay in the caller's batches.
    """
    while batch_size is not None and part.alike:
        order = torch.randperm(part.samples, generator=generator)
        for rows in torch.split(order, batch_size)[: max(1, part.samples // batch_size)]:
            yield part.pick(rows)
    while True:
        for position in torch.randperm(len(part.batches), generator=generator).tolist():
            batch = part.batches[position]
            count = batches.size(batch)
            order = torch.randperm(count, generator=generator)
            for rows in torch.split(order, batch_size or count):
                yield batches.take(batch, rows)
