"""Losses of gradient steps and of the choice of the best round: task, KL divergence, block outputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from iobs.errors import CalibrationError, is_out_of_memory
from iobs.pruning.recipe.finetune import LossFunction
from iobs.pruning.runtime.memory import reusing_memory
from iobs.pruning.runtime.ranks import current
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.samples.outputs import attended, class_axis, logits, targets, unpadded
from iobs.pruning.samples.subsets import Samples

_WHOLE = 2**24  # most scores whose divergence is computed at once; more are computed in pieces
PIECE = 2**22  # scores of a piece
_IMPOSSIBLE = -1e30  # replaces scores of minus infinity (masked classes), which add nothing to a divergence


def task_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The model's own loss if its output has one, otherwise cross-entropy with the batch's labels.

    Floating labels give the mean squared error, and a mapping of token ids without labels gives the next-token loss.

    Raises:
        CalibrationError: the batch has no labels, or they do not fit the outputs.
    """
    output = batches.forward(model, batch)
    own = output.get("loss") if isinstance(output, Mapping) else None
    if isinstance(own, Tensor):
        return own
    values, wanted = logits(output).float(), targets(batch)
    if isinstance(batch, (tuple, list)) and wanted is not None:
        if batches.size(batch) == 1 and values.shape[:1] != (1,):
            values = values[None]  # some models squeeze the dimension of a single sample
        try:
            return _label_loss(values, wanted, class_axis(values, batch))
        except (RuntimeError, ValueError, IndexError) as error:
            if is_out_of_memory(error):
                raise
            raise CalibrationError(
                f"Outputs of shape {tuple(values.shape)} and targets of shape {tuple(wanted.shape)} and type "
                f'{wanted.dtype} have no task loss ({error}); give a function as loss, or use loss="kl".'
            ) from error
    if isinstance(batch, Mapping) and "input_ids" in batch and values.ndim == 3:
        tokens = batch["input_ids"][:, 1:]
        if "attention_mask" in batch:
            tokens = tokens.masked_fill(batch["attention_mask"][:, 1:] == 0, -100)
        if values.shape[1] == tokens.shape[1] + 1 and bool((tokens < values.shape[2]).all()):
            return functional.cross_entropy(values[:, :-1].flatten(0, 1), tokens.flatten())
    raise CalibrationError(
        'The task loss needs targets: give batches (inputs, targets), or mappings with "labels" for a model that '
        'computes a loss from them; without targets use loss="kl", and methods that need no gradients of the task.'
    )


def _label_loss(values: Tensor, labels: Tensor, axis: int | None) -> Tensor:
    """Mean squared error for floating labels, otherwise cross-entropy over the classes at `axis`."""
    if labels.is_floating_point():
        return functional.mse_loss(values, labels.float().reshape(values.shape))
    if axis is None:  # one output for two classes
        if bool((labels > 1).any()):
            raise ValueError("one output stands for classes 0 and 1; numbers are given as floats")
        return functional.binary_cross_entropy_with_logits(values, labels.float().reshape(values.shape))
    return functional.cross_entropy(values.movedim(axis, -1).flatten(0, -2), labels.flatten().long())


def kl_to(reference: nn.Module) -> LossFunction:
    """KL(dense || sparse) of the outputs in nats, the mean over samples (and unpadded positions, or pixels).

    For outputs that are numbers, not a distribution (`outputs.class_axis`): ||sparse - dense||^2 / ||dense||^2.
    """

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            dense = logits(batches.forward(reference, batch))
        return divergence(model, batch, dense, logits(batches.forward(model, batch)))

    return loss


def kl_to_answers(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of `kl_to` for a batch (inputs, outputs of the dense model, labels if any), from `answered`."""
    assert isinstance(batch, (tuple, list))
    inputs, answers, *labels = batch
    return divergence(model, (inputs, *labels), answers, logits(batches.forward(model, batch)))


@torch.no_grad()
def answered(model: nn.Module, part: Samples, most: int = 2**26) -> Samples:
    """Store the model's outputs with the first samples, as batches (inputs, outputs, labels if any).

    Args:
        model: the dense model.
        part: the samples.
        most: limit on the numbers in the stored outputs; every batch that is started keeps at least one sample.
    """
    found, numbers = Samples(), 0
    for batch, number in zip(part.batches, part.numbers, strict=True):
        if numbers < most:
            answer = logits(batches.forward(model, batch))
            count = batches.size(batch)
            if answer.ndim == 0:  # some models squeeze the dimension of a single sample
                answer = answer[None]
            if len(answer) > count and len(answer) % count == 0:  # one row per position
                answer = answer.reshape(count, -1, *answer.shape[1:])
            kept = torch.arange(count) < max(1, (most - numbers) // answer[0].numel())
            wanted = targets(batch)  # needed to decide if outputs are classes
            found.add((batches.inputs(batch), answer, *(() if wanted is None else (wanted,))), kept, number)
            numbers += answer.numel()
    return found


def divergence(model: nn.Module, batch: Batch, dense: Tensor, sparse: Tensor) -> Tensor:
    """The loss of `kl_to` from the outputs of both models."""
    axis, mask = class_axis(dense, batch), attended(model, batch)
    if axis is not None:
        dense, sparse = dense.movedim(axis, -1), sparse.reshape(dense.shape).movedim(axis, -1)
    dense, sparse = (unpadded(values, mask) for values in (dense, sparse))
    if axis is None:
        dense, sparse = dense.float(), sparse.float()
        return (sparse.reshape(dense.shape) - dense).square().sum() / dense.square().sum().clamp_min(1e-30)
    dense, sparse = (values.reshape(-1, values.shape[-1]) for values in (dense, sparse))
    rows, classes = dense.shape
    if rows * classes <= _WHOLE:
        return _divergence(dense, sparse, "batchmean")
    count = max(1, PIECE // classes)
    pieces = zip(torch.split(dense, count), torch.split(sparse, count), strict=True)
    return torch.stack([_recomputed(dense_piece, sparse_piece) for dense_piece, sparse_piece in pieces]).sum() / rows


def _divergence(dense: Tensor, sparse: Tensor, reduction: str) -> Tensor:
    """KL divergence of scores (rows, classes) in float32."""
    return functional.kl_div(
        sparse.float().clamp_min(_IMPOSSIBLE).log_softmax(-1),
        dense.float().clamp_min(_IMPOSSIBLE).log_softmax(-1),
        reduction=reduction,
        log_target=True,
    )


def _recomputed(dense: Tensor, sparse: Tensor) -> Tensor:
    """The sum of the divergences of some rows, whose float32 scores are computed again for the gradient."""
    found: Tensor = checkpoint(_divergence, dense, sparse, "sum", use_reentrant=False, preserve_rng_state=False)
    return found


def block_distance_to(reference: nn.Module, paths: list[str]) -> LossFunction:
    """The mean over blocks of ||sparse output - dense output||^2 / ||dense output||^2."""

    def outputs(model: nn.Module, batch: Batch) -> list[Tensor]:
        kept: list[Tensor] = []

        def keep(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            kept.append(logits(output))

        handles = [model.get_submodule(path).register_forward_hook(keep) for path in paths]
        try:
            kept.append(logits(batches.forward(model, batch)))
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
def mean_loss(model: nn.Module, part: Samples, loss: LossFunction) -> float:
    """The average of a loss over the samples of all ranks."""
    device = next(model.parameters()).device
    ranks = current()
    total = torch.zeros(1, dtype=torch.float64, device=device)
    with reusing_memory():
        for batch in ranks.share(part).batches:
            total += float(loss(model, batches.to_device(batch, device))) * batches.size(batch)
    ranks.sum(total)
    return float(total) / part.samples
