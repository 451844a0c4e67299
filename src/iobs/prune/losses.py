"""What a network is judged by: the losses of the gradient steps and of the choice of the best round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from iobs.errors import CalibrationError
from iobs.prune import batches
from iobs.prune.batches import Batch
from iobs.prune.distributed import current
from iobs.prune.memory import reusing_memory
from iobs.prune.parts import Part

_IMPOSSIBLE = -1e30  # stands for a score of minus infinity, as of masked classes: those have no part in a divergence

LossFunction = Callable[[nn.Module, Batch], Tensor]
Loss = Literal["task", "kl", "block"] | LossFunction


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
    values, targets = batches.logits(output).float(), batches.targets(batch)
    if isinstance(batch, (tuple, list)) and targets is not None:
        if batches.size(batch) == 1 and values.shape[:1] != (1,):
            values = values[None]  # a network that squeezes a single sample's dimension away
        try:
            return _to_targets(values, targets, batches.class_axis(values, batch))
        except (RuntimeError, ValueError, IndexError) as error:
            raise CalibrationError(
                f"Outputs of shape {tuple(values.shape)} and targets of shape {tuple(targets.shape)} and type "
                f'{targets.dtype} have no task loss ({error}); give a function as loss, or use loss="kl".'
            ) from error
    if isinstance(batch, Mapping) and "input_ids" in batch and values.ndim == 3:
        tokens = batch["input_ids"][:, 1:]
        if "attention_mask" in batch:
            tokens = tokens.masked_fill(batch["attention_mask"][:, 1:] == 0, -100)
        if values.shape[1] == tokens.shape[1] + 1 and bool((tokens < values.shape[2]).all()):
            return functional.cross_entropy(values[:, :-1].flatten(0, 1), tokens.flatten())
    raise CalibrationError(
        'The task loss needs targets: give batches (inputs, targets), or mappings with "labels" for a model that makes '
        'a loss of them; without them use loss="kl", and methods that need no gradients of the task.'
    )


def _to_targets(values: Tensor, targets: Tensor, axis: int | None) -> Tensor:
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
            if answer.ndim == 0:  # a network that squeezes a single sample's dimension away
                answer = answer[None]
            if len(answer) > count and len(answer) % count == 0:  # one row a position
                answer = answer.reshape(count, -1, *answer.shape[1:])
            kept = torch.arange(count) < max(1, (most - numbers) // answer[0].numel())
            wanted = batches.targets(batch)  # they say whether answers are classes
            found.add((batches.inputs(batch), answer, *(() if wanted is None else (wanted,))), kept, number)
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
        sparse.reshape(-1, classes).clamp_min(_IMPOSSIBLE).log_softmax(-1),
        dense.reshape(-1, classes).clamp_min(_IMPOSSIBLE).log_softmax(-1),
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
    with reusing_memory():
        for batch in ranks.share(part).batches:
            total += float(loss(model, batches.to_device(batch, device))) * batches.size(batch)
    ranks.sum(total)
    return float(total) / part.samples
