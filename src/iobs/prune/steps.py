"""The gradient steps between two projections, and the polish after the last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from iobs.errors import NonFiniteError, ProblemError, is_a
from iobs.prune import batches
from iobs.prune.augment import Augmentation
from iobs.prune.batches import Batch
from iobs.prune.distributed import current
from iobs.prune.losses import Loss, LossFunction
from iobs.prune.memory import reusing_memory
from iobs.prune.parts import Part

Optimizer = Literal["sgd", "momentum", "adam", "auto"]


@dataclass(frozen=True)
class GradientStep:
    """What happens between two projections (Algorithm 2, line 9).

    Args:
        lr: step size, or "auto": chosen from the calibration data by short trials after the first projection.
        optimizer: "sgd", as the paper; "momentum", the same with Nesterov's momentum of 0.9; "adam"; or "auto" with
            lr="auto": the better of the last two in the same trials.
        steps: how many steps a round; each takes the next batch of the round's data, round and round. A single
            step without a batch_size takes the gradient of the whole round's data, as in the paper.
        most_steps: up to so many are taken where they are cheap (1.25e13 multiplications, each with its addition, in
            all); text keeps to `steps`.
        loss: "task" (the model's own loss, or cross-entropy with the targets), "kl" (to the dense model),
            "block" (mean squared distance to the dense model's block outputs), or a function (model, batch) -> scalar.
        parameters: "prunable" steps on the parameters that hold pruned matrices, as the paper (the whole of one that
            holds several, such as queries, keys and values); "all" on every parameter.
        support: "dense" steps wake removed weights too, as the paper; "fixed" moves only the weights that the last
            projection kept (the next one may still choose others).
        decay: the learning rate rises over the first tenth of all steps of the run (else Adam moves every weight by the
            whole rate at once, which an exactly refitted layer resents) and falls linearly to zero.
        batch_size: samples a step, or None for the batches as they are; "auto" is 64, or a tenth of all where
            that is less (16 at least), or 2048 tokens of text.
        augment: changes a batch before it is used, (batch, torch.Generator) -> batch; "auto" is mirroring and shifts of
            pictures, as far as the dense network's predictions stay the same under them, and, where it gives the
            answers (losses "kl" and "block"), mixtures of two samples of real numbers; None changes nothing.

    Raises:
        ProblemError: a setting outside its range.
    """

    lr: float | Literal["auto"] = 0.01
    optimizer: Optimizer = "sgd"
    steps: int = 1
    most_steps: int | None = None
    loss: Loss = "task"
    parameters: Literal["prunable", "all"] = "prunable"
    support: Literal["dense", "fixed"] = "dense"
    decay: bool = False
    batch_size: int | Literal["auto"] | None = None
    augment: Augmentation | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        if self.lr != "auto" and not (is_a(Real, self.lr) and self.lr > 0):
            raise ProblemError(f'lr must be "auto" or a number above zero, got {self.lr!r}.')
        if not is_a(Integral, self.steps) or self.steps < 1:
            raise ProblemError(f"steps must be a whole number of at least 1, got {self.steps!r}.")
        if self.most_steps is not None and self.most_steps < self.steps:
            raise ProblemError(f"most_steps={self.most_steps} is less than steps={self.steps}.")
        size = None if self.batch_size == "auto" else self.batch_size
        if size is not None and not (is_a(Integral, size) and size >= 1):
            raise ProblemError(f'batch_size must be a whole number of at least 1, "auto" or None, got {size!r}.')
        if isinstance(self.augment, str) and self.augment != "auto":
            raise ProblemError(f'augment must be "auto", None or a function, got {self.augment!r}.')
        if self.optimizer not in get_args(Optimizer):
            raise ProblemError(f'optimizer must be "sgd", "momentum", "adam" or "auto", got {self.optimizer!r}.')
        if self.optimizer == "auto" and self.lr != "auto":
            raise ProblemError(f'optimizer="auto" is chosen together with lr="auto", got lr={self.lr}.')
        if self.parameters not in ("prunable", "all"):
            raise ProblemError(f'parameters must be "prunable" or "all", got {self.parameters!r}.')
        if self.support not in ("dense", "fixed"):
            raise ProblemError(f'support must be "dense" or "fixed", got {self.support!r}.')
        if isinstance(self.loss, str) and self.loss not in ("task", "kl", "block"):
            raise ProblemError(f'loss must be "task", "kl", "block" or a function, got {self.loss!r}.')


@dataclass
class Trainer:
    """Takes gradient steps on masters of a model's parameters, in float32 or wider, and writes them back in its dtype.

    Args:
        model: the network; changed in place, in eval mode (dropout off, batch-norm statistics fixed).
        parameters: by name, what is stepped on.
        step: the settings.
        loss: the loss as a function.
        total: steps in the whole run, which the decay is laid over.
        seed: order of the samples.
        masks: by parameter name, entries that may change (others stay zero), or nothing.
        augmentation: changes every batch before it is used, or nothing.
    """

    model: nn.Module
    parameters: dict[str, nn.Parameter]
    step: GradientStep
    loss: LossFunction
    total: int
    seed: int
    masks: dict[str, Tensor] | None = None
    augmentation: Augmentation | None = None
    taken: int = 0

    def __post_init__(self) -> None:
        assert self.step.lr != "auto"
        assert self.step.optimizer != "auto"
        self.ranks = current()
        self.rate = self.step.lr
        self.masters = {
            name: value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)
            for name, value in self.parameters.items()
        }
        values = list(self.masters.values())
        moving = self.step.optimizer == "momentum"
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.Adam(values, lr=self.rate)
            if self.step.optimizer == "adam"
            else torch.optim.SGD(values, lr=self.rate, momentum=0.9 if moving else 0.0, nesterov=moving)
        )

    def adopt(self) -> None:
        """Take the model's present weights (after a projection) as the masters."""
        for name, value in self.parameters.items():
            self.masters[name].copy_(value.detach())

    def run(
        self,
        part: Part,
        progress: Callable[[int, int, float], None],
        before: Sequence[float] = (),
        keep: Callable[[list[float]], None] = lambda losses: None,
    ) -> list[float]:
        """Take the steps of one round.

        Args:
            part: samples.
            progress: is told (steps done, of how many, the last loss).
            before: losses of the round's first steps, which a snapshot that was restored had taken.
            keep: is given the losses so far after every step, and may take a snapshot.

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
                        self._augmented(batch, generator)  # draws what it drew then
                    continue
                losses.append(self._step([batches.to_device(batch, device) for batch in used], generator))
                progress(index + 1, self.step.steps, losses[-1])
                keep(losses)
        return losses

    def _augmented(self, batch: Batch, generator: torch.Generator) -> Batch:
        return batch if self.augmentation is None else self.augmentation(batch, generator)

    def snapshot(self) -> dict[str, Tensor]:
        """Everything that the next steps depend on, by name; `taken` besides."""
        moments = {
            f"moment {position} {name}": value
            for position, values in self.optimizer.state_dict()["state"].items()
            for name, value in values.items()
            if isinstance(value, Tensor)
        }
        return {**{f"master {name}": value for name, value in self.masters.items()}, **moments}

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor], taken: int) -> None:
        """Return to a snapshot; the model's weights follow the masters."""
        for name, parameter in self.parameters.items():
            self.masters[name].copy_(tensors[f"master {name}"])
            parameter.copy_(self.masters[name])
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("moment "):
                _, position, moment = name.split(" ", 2)
                state.setdefault(int(position), {})[moment] = value
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        self.taken = taken

    def _step(self, used: list[Batch], generator: torch.Generator) -> float:
        samples = sum(batches.size(batch) for batch in used)
        gradients = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        value = 0.0
        names, parameters = list(self.parameters), list(self.parameters.values())
        for whole in used:
            # All ranks change the whole batch alike, then take their rows: where the loss is a mean over samples, any
            # number of them agrees with one.
            given = self.ranks.rows(self._augmented(whole, generator))
            share = batches.size(given) / samples
            if share == 0:
                continue
            with torch.enable_grad():
                loss = differentiable(self.loss(self.model, given)) * share
                found = torch.autograd.grad(loss, parameters, allow_unused=True)
            value += float(loss.detach())
            for name, gradient in zip(names, found, strict=True):
                if gradient is not None:
                    gradients[name] += gradient
        value = self._summed(value, gradients)
        if not torch.isfinite(torch.tensor(value)):
            raise NonFiniteError(f"The loss of gradient step {self.taken + 1} is {value}; lower the learning rate.")
        for name, gradient in gradients.items():
            if not bool(torch.isfinite(gradient).all()):
                raise NonFiniteError(f"The gradient of {name} holds NaN or infinity in gradient step {self.taken + 1}.")
        self._apply(gradients)
        return value

    def _summed(self, value: float, gradients: dict[str, Tensor]) -> float:
        """Add up loss and gradients over the ranks, each of which saw its share of the samples."""
        if self.ranks.size == 1:
            return value
        for gradient in gradients.values():
            self.ranks.sum(gradient)
        total = torch.tensor([value], dtype=torch.float64, device=next(self.model.parameters()).device)
        self.ranks.sum(total)
        return float(total)

    @torch.no_grad()
    def _apply(self, gradients: dict[str, Tensor]) -> None:
        rate = self.rate
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
            parameter.copy_(self.masters[name])
        self.taken += 1


def differentiable(loss: Tensor) -> Tensor:
    """The loss itself.

    Raises:
        ProblemError: it has no gradient.
    """
    if not loss.requires_grad:
        raise ProblemError(
            "The loss has no gradient: the network or the loss computes under torch.no_grad or detaches its outputs. "
            "Prune without gradient steps, or let them through."
        )
    return loss


def samples_a_step(step: GradientStep, part: Part) -> int:
    """How many samples a step sees.

    By default 64: fewer where they are long rows of tokens, or where ten steps would see more than there are.
    """
    if step.batch_size is None:
        return part.samples if step.steps == 1 else batches.size(part.batches[0])
    usual = max(1, min(64, max(16, part.samples // 10), 2048 // batches.positions(part.batches[0])))
    wanted = usual if step.batch_size == "auto" else step.batch_size
    return min(wanted, part.samples if part.alike else max(map(batches.size, part.batches)))


def _endless(part: Part, batch_size: int | None, generator: torch.Generator) -> Iterator[Batch]:
    """Batches for ever, in a new random order every time round.

    Batches of a size that was asked for hold samples from anywhere, however the caller's were made up, and no ragged
    end, which would be the noisiest step; samples of different shapes stay in the batches that they came in.
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
