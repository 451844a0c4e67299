"""The gradient steps between two projections, and the losses that they and the choice of the best round go by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from iobs.errors import CalibrationError, NonFiniteError, ProblemError
from iobs.prune import batches
from iobs.prune.augment import Augmentation
from iobs.prune.batches import Batch, Part
from iobs.prune.distributed import current

LossFunction = Callable[[nn.Module, Batch], Tensor]
Loss = Literal["task", "kl", "block"] | LossFunction
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
        parameters: "prunable" steps on the pruned matrices only, as the paper; "all" on every parameter.
        support: "dense" steps wake removed weights too, as the paper; "fixed" moves only the weights that the last
            projection kept (the next one may still choose others).
        decay: the learning rate rises over the first tenth of all steps of the run (else Adam moves every weight by the
            whole rate at once, which an exactly refitted layer resents) and falls linearly to zero.
        batch_size: samples a step, or None for the batches as they are; "auto" is 64, or a tenth of all where
            that is less (16 at least), or 2048 tokens of text.
        augment: changes a batch before it is used; "auto" is mirroring and shifts of pictures, as far as the dense
            network's predictions stay the same under them, and, where it gives the answers (losses "kl" and "block"),
            mixtures of two samples of real numbers; None changes nothing.

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
        if (self.lr != "auto" and not self.lr > 0) or self.steps < 1:
            raise ProblemError(f"A gradient step needs lr > 0 and steps >= 1, got lr={self.lr}, steps={self.steps}.")
        if self.most_steps is not None and self.most_steps < self.steps:
            raise ProblemError(f"most_steps={self.most_steps} is less than steps={self.steps}.")
        if isinstance(self.batch_size, int) and self.batch_size < 1:
            raise ProblemError(f"batch_size must be at least 1, got {self.batch_size}.")
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


def task_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The model's own loss where its output has one, else cross-entropy with the batch's targets.

    For floating targets it is the mean squared error, for a mapping of token ids without labels the next-token loss.

    Raises:
        CalibrationError: the batch holds no targets.
    """
    output = batches.forward(model, batch)
    own = output.get("loss") if isinstance(output, Mapping) else None
    if isinstance(own, Tensor):
        return own
    values = batches.logits(output).float()
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        if batches.size(batch) == 1 and values.shape[:1] != (1,):
            values = values[None]  # a network that squeezes a single sample's dimension away
        try:
            return _to_targets(values, batch)
        except (RuntimeError, ValueError, IndexError) as error:
            raise CalibrationError(
                f"Outputs of shape {tuple(values.shape)} and targets of shape {tuple(batch[1].shape)} and type "
                f'{batch[1].dtype} have no task loss ({error}); give a function as loss, or use loss="kl".'
            ) from error
    if isinstance(batch, Mapping) and "input_ids" in batch and values.ndim == 3:
        tokens = batch["input_ids"][:, 1:]
        if "attention_mask" in batch:
            tokens = tokens.masked_fill(batch["attention_mask"][:, 1:] == 0, -100)
        return functional.cross_entropy(values[:, :-1].flatten(0, 1), tokens.flatten())
    raise CalibrationError('The task loss needs targets: give batches (inputs, targets), or use loss="kl".')


def _to_targets(values: Tensor, batch: Batch) -> Tensor:
    targets, axis = batch[1], batches.class_axis(values, batch)
    if targets.is_floating_point():
        return functional.mse_loss(values, targets.float().reshape(values.shape))
    if axis is None:  # one output, for one of two classes
        if bool((targets > 1).any()):
            raise ValueError("one output stands for classes 0 and 1; numbers are given as floats")
        return functional.binary_cross_entropy_with_logits(values, targets.float().reshape(values.shape))
    return functional.cross_entropy(values.movedim(axis, -1).flatten(0, -2), targets.flatten().long())


def kl_to(reference: nn.Module) -> LossFunction:
    """Mean over samples (and positions or pixels, but for padding) of KL(dense || sparse) of the outputs, in nats.

    Outputs that are numbers and no distribution (`batches.class_axis`): ||sparse - dense||^2 / ||dense||^2.
    """

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            dense = batches.logits(batches.forward(reference, batch))
        return _divergence(model, batch, dense, batches.logits(batches.forward(model, batch)))

    return loss


def kl_to_answers(model: nn.Module, batch: Batch) -> Tensor:
    """The same for a batch (inputs, the dense model's answers to them, targets if any), which `answered` makes."""
    inputs, answers, *targets = batch
    return _divergence(model, (inputs, *targets), answers, batches.logits(batches.forward(model, batch)))


@torch.no_grad()
def answered(model: nn.Module, part: Part, most: int) -> Part:
    """The leading batches of a part with the model's answers beside the inputs, until they hold `most` numbers."""
    found, numbers = Part(), 0
    for batch, number in zip(part.batches, part.numbers, strict=True):
        if numbers < most:
            answer = batches.logits(batches.forward(model, batch))
            count = batches.size(batch)
            if len(answer) > count and len(answer) % count == 0:  # one row a position
                answer = answer.reshape(count, -1, *answer.shape[1:])
            kept = torch.arange(count) < max(1, (most - numbers) // answer[0].numel())
            rest = batch[1:] if isinstance(batch, (tuple, list)) else ()
            found.add((batches.inputs(batch), answer, *rest), kept, number)
            numbers += answer.numel()
    return found


def _divergence(model: nn.Module, batch: Batch, dense: Tensor, sparse: Tensor) -> Tensor:
    axis, attended = batches.class_axis(dense, batch), batches.attended(model, batch)
    if axis is not None:
        dense, sparse = dense.movedim(axis, -1), sparse.reshape(dense.shape).movedim(axis, -1)
    dense, sparse = (batches.unpadded(values, attended).float() for values in (dense, sparse))
    if axis is None:
        return (sparse.reshape(dense.shape) - dense).square().sum() / dense.square().sum().clamp_min(1e-30)
    classes = dense.shape[-1]
    return functional.kl_div(
        sparse.reshape(-1, classes).log_softmax(-1),
        dense.reshape(-1, classes).log_softmax(-1),
        reduction="batchmean",
        log_target=True,
    )


def block_distance_to(reference: nn.Module, paths: list[str]) -> LossFunction:
    """Mean over blocks of ||sparse output - dense output||^2 / ||dense output||^2."""

    def outputs(model: nn.Module, batch: Batch) -> list[Tensor]:
        kept: list[Tensor] = []

        def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            kept.append(batches.logits(output))

        handles = [model.get_submodule(path).register_forward_hook(keep) for path in paths]
        try:
            kept.append(batches.logits(batches.forward(model, batch)))
        finally:
            for handle in handles:
                handle.remove()
        return kept

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            dense = outputs(reference, batch)
        pairs = zip(outputs(model, batch), dense, strict=True)
        return torch.stack([(s.float() - d.float()).square().sum() / d.float().square().sum() for s, d in pairs]).mean()

    return loss


@torch.no_grad()
def mean_loss(model: nn.Module, part: Part, loss: LossFunction) -> float:
    """Average of a loss over samples."""
    device = next(model.parameters()).device
    ranks = current()
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for batch in ranks.share(part).batches:
        total += float(loss(model, batches.to_device(batch, device))) * batches.size(batch)
    ranks.sum(total)
    return float(total) / part.samples


@dataclass
class Trainer:
    """Takes gradient steps on float32 masters of a model's parameters and writes them back in the model's dtype.

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
        self.masters = {name: value.detach().float().clone() for name, value in self.parameters.items()}
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
        """
        device = next(self.model.parameters()).device
        generator = torch.Generator().manual_seed(self.seed + self.taken - len(before))
        whole = self.step.steps == 1 and self.step.batch_size is None
        stream = _endless(part, None if self.step.batch_size is None else samples_a_step(self.step, part), generator)
        losses = [*before]
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
                loss = self.loss(self.model, given) * share
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
