"""Losses of gradient steps and of the choice of the best round: task, KL divergence, block outputs; and metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from iobs.core.late import library_object
from iobs.errors import CalibrationError, unless_out_of_memory
from iobs.pruning.network.calls import after_calls
from iobs.pruning.recipe import LossFunction
from iobs.pruning.runtime.memory import reusing_memory
from iobs.pruning.runtime.ranks import current
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch, Samples
from iobs.pruning.samples.outputs import attended, class_axis, logits, targets, unpadded

Reduction = Literal["mean", "sum"]
IGNORED = -100  # label of a position that is not scored, as in torch's cross-entropy
WHOLE = 2**24  # most scores whose loss is computed at once; more are computed in pieces
PIECE = 2**22  # scores of a piece
_IMPOSSIBLE = -1e30  # replaces scores of minus infinity (masked classes), which add nothing to a divergence


def task_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The model's own loss if its output has one, otherwise cross-entropy with the batch's labels.

    Floating labels give the mean squared error, and a mapping of token ids without labels gives the next-token loss.

    Raises:
        CalibrationError: the batch has no labels, or they do not fit the outputs.
    """
    with _own_loss_in_pieces(model, batch):
        output = batches.forward(model, batch, with_loss=True)
    loss = output.get("loss") if isinstance(output, Mapping) else None
    if isinstance(loss, Tensor):
        return loss
    values, labels = logits(output), targets(batch)
    if isinstance(batch, (tuple, list)) and labels is not None:
        if batches.size(batch) == 1 and values.shape[:1] != (1,):
            values = values[None]  # some models squeeze the dimension of a single sample
        try:
            return _label_loss(values, labels, class_axis(values, batch))
        except unless_out_of_memory(RuntimeError, ValueError, IndexError) as error:
            raise CalibrationError(
                f"Outputs of shape {tuple(values.shape)} and targets of shape {tuple(labels.shape)} and type "
                f'{labels.dtype} have no task loss ({error}); give a function as loss, or use loss="kl".'
            ) from error
    if isinstance(batch, Mapping) and "input_ids" in batch and values.ndim == 3:
        tokens = batch["input_ids"]
        if "attention_mask" in batch:
            tokens = tokens.masked_fill(batch["attention_mask"] == 0, IGNORED)
        if values.shape[1] == tokens.shape[1] and bool((tokens[:, 1:] < values.shape[2]).all()):
            return next_token_loss(values, tokens)
    raise CalibrationError(
        'The task loss needs targets: give batches (inputs, targets), or mappings with "labels" for a model that '
        'computes a loss from them; without targets use loss="kl", and methods that need no gradients of the task.'
    )


def _label_loss(values: Tensor, labels: Tensor, axis: int | None) -> Tensor:
    """Mean squared error for floating labels, otherwise cross-entropy over the classes at `axis`."""
    if labels.is_floating_point():
        return functional.mse_loss(values.float(), labels.float().reshape(values.shape))
    if axis is None:  # one output for two classes
        if bool((labels > 1).any()):
            raise ValueError("one output stands for classes 0 and 1; numbers are given as floats")
        return functional.binary_cross_entropy_with_logits(values.float(), labels.float().reshape(values.shape))
    return _class_loss(values.movedim(axis, -1).flatten(0, -2), labels.flatten().long())


def next_token_loss(values: Tensor, labels: Tensor, reduction: Reduction = "mean") -> Tensor:
    """Cross-entropy of the next tokens in float32, in pieces if there are many scores.

    Args:
        values: scores, (samples, positions, vocabulary).
        labels: tokens, (samples, positions) int64; `IGNORED` is not scored, and neither is the first token.
        reduction: over the scored positions.
    """
    if values.numel() <= WHOLE:
        return _class_loss(values[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction)
    shifted = functional.pad(labels[:, 1:], (0, 1), value=IGNORED)  # the scores, which are many, are not copied
    return _class_loss(values.flatten(0, 1), shifted.flatten(), reduction)


def _class_loss(scores: Tensor, labels: Tensor, reduction: Reduction = "mean") -> Tensor:
    """Cross-entropy of scores (rows, classes) in float32; `IGNORED` is not scored."""
    labels = labels.to(scores.device)
    if scores.numel() <= WHOLE:
        return functional.cross_entropy(scores.float(), labels, reduction=reduction)
    total = _in_pieces(_summed_class_loss, scores, labels)
    return total / (labels != IGNORED).sum() if reduction == "mean" else total


def _summed_class_loss(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(scores.float(), labels, reduction="sum")


@contextmanager
def _own_loss_in_pieces(model: nn.Module, batch: Batch) -> Iterator[None]:
    """Let a language model of transformers compute its own loss in pieces, if there are many scores.

    Its usual loss copies all scores in float32, and keeps another copy for the gradient.
    """
    usual: Callable[..., Tensor] | None = library_object("transformers.loss.loss_utils", "ForCausalLMLoss")
    has_labels = isinstance(batch, Mapping) and batch.get("labels") is not None
    if not has_labels or usual is None or getattr(model, "loss_function", None) is not usual:
        yield
        return

    def loss(logits: Tensor, labels: Tensor, vocab_size: int, **others: object) -> object:
        changed = any(others.get(name) is not None for name in ("num_items_in_batch", "shift_labels", "ignore_index"))
        shaped = logits.ndim == 3 and logits.shape == (*labels.shape, vocab_size)
        if logits.numel() <= WHOLE or changed or not shaped:
            assert usual is not None
            return usual(logits=logits, labels=labels, vocab_size=vocab_size, **others)
        return next_token_loss(logits, labels)

    before = vars(model).get("_loss_function")
    vars(model)["_loss_function"] = loss
    try:
        yield
    finally:
        del vars(model)["_loss_function"]
        if before is not None:
            vars(model)["_loss_function"] = before


def kl_to(reference: nn.Module) -> LossFunction:
    """KL(dense || sparse) of the outputs in nats, the mean over samples (and unpadded positions, or pixels).

    For outputs that are numbers or hidden states, not a distribution (`outputs.class_axis`): ||sparse - dense||^2 /
    ||dense||^2.
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
    answers, numbers = Samples(), 0
    sizes: dict[tuple[object, ...], int] = {}  # numbers in the outputs of a sample, by its layout
    for batch, number in zip(part.batches, part.numbers, strict=True):
        if numbers < most:
            count, kind = batches.size(batch), batches.layout(batch)
            if kind not in sizes:  # outputs of a whole batch may need much more memory than those that are kept
                sizes[kind] = _by_sample(model, batches.first_sample(batch))[0].numel()
            kept = min(count, max(1, (most - numbers) // max(1, sizes[kind])))
            batch = batches.neighbours(batch, 0, kept) if kept < count else batch
            labels = targets(batch)  # needed to decide if outputs are classes
            pair = batches.inputs(batch), _by_sample(model, batch), *(() if labels is None else (labels,))
            answers.add(pair, torch.ones(kept, dtype=torch.bool), number)
            numbers += sizes[kind] * count
    return answers


def _by_sample(model: nn.Module, batch: Batch) -> Tensor:
    """The model's outputs on a batch, (samples, ...).

    Raises:
        CalibrationError: the outputs are not those of every sample.
    """
    answer, count = logits(batches.forward(model, batch)), batches.size(batch)
    if answer.ndim == 0 and count > 1:
        raise CalibrationError(
            f"{type(model).__name__} returns a single number for {count} samples, such as a loss. Let its forward "
            "return the outputs of every sample (logits or predictions); iobs computes the losses itself."
        )
    if answer.ndim == 0:  # some models squeeze the dimension of a single sample
        answer = answer[None]
    if len(answer) > count and len(answer) % count == 0:  # one row per position
        answer = answer.reshape(count, -1, *answer.shape[1:])
    return answer


def divergence(model: nn.Module, batch: Batch, dense: Tensor, sparse: Tensor) -> Tensor:
    """The loss of `kl_to` from the outputs of both models."""
    axis, mask = class_axis(dense, batch, model), attended(model, batch)
    if axis is not None:
        dense, sparse = dense.movedim(axis, -1), sparse.reshape(dense.shape).movedim(axis, -1)
    dense, sparse = (unpadded(values, mask) for values in (dense, sparse))
    if axis is None:
        return relative_distance(sparse.reshape(dense.shape), dense)
    dense, sparse = (values.reshape(-1, values.shape[-1]) for values in (dense, sparse))
    if dense.numel() <= WHOLE:
        return _divergence(dense, sparse, "batchmean")
    return _in_pieces(partial(_divergence, reduction="sum"), dense, sparse) / len(dense)


def _divergence(dense: Tensor, sparse: Tensor, reduction: str) -> Tensor:
    """KL divergence of scores (rows, classes) in float32."""
    return functional.kl_div(
        sparse.float().clamp_min(_IMPOSSIBLE).log_softmax(-1),
        dense.float().clamp_min(_IMPOSSIBLE).log_softmax(-1),
        reduction=reduction,
        log_target=True,
    )


def _in_pieces(loss: Callable[[Tensor, Tensor], Tensor], scores: Tensor, targets: Tensor) -> Tensor:
    """The summed loss of rows of scores (rows, classes), whose float32 copies are made again for the gradient."""
    count = max(1, PIECE // scores.shape[1])
    pieces = zip(torch.split(scores, count), torch.split(targets, count), strict=True)
    sums = [checkpoint(loss, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    return torch.stack(sums).sum()


def relative_distance(values: Tensor, target: Tensor) -> Tensor:
    """||values - target||^2 / ||target||^2 in float32."""
    values, target = values.float(), target.float()
    return (values - target).square().sum() / target.square().sum().clamp_min(1e-30)


def block_distance_to(reference: nn.Module, paths: list[str]) -> LossFunction:
    """The mean over blocks of ||sparse output - dense output||^2 / ||dense output||^2."""

    def outputs(model: nn.Module, batch: Batch) -> list[Tensor]:
        kept: list[Tensor] = []
        with after_calls(model, paths, lambda *called: kept.append(logits(called[-1]))):
            kept.append(logits(batches.forward(model, batch)))
        return kept

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            dense = outputs(reference, batch)
        pairs = zip(outputs(model, batch), dense, strict=True)
        return torch.stack([relative_distance(*pair) for pair in pairs]).mean()

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


class MetricSums:
    """Sums of the metric that people know for the task of a model, over batches of its outputs.

    Token ids and outputs of one row per token give the perplexity of the next tokens. Integer labels give the accuracy
    in per cent. Anything else gives nothing.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._sums = torch.zeros(2, dtype=torch.float64)

    def add(self, values: Tensor, batch: Batch) -> bool:
        """Add the outputs of a batch; False if they and its labels allow no metric."""
        measured = _batch_metric(values, batch)
        if measured is None:
            self._names.add("")
            return False
        name, *sums = measured
        self._names.add(name)
        self._sums += torch.tensor(sums, dtype=torch.float64)
        return True

    def result(self, device: torch.device) -> dict[str, float]:
        """The metric over the batches of all ranks, and beside it the number of tokens or labels; empty if none is.

        Args:
            device: of the model, where ranks add up.
        """
        sums = self._sums.to(device)
        current().sum(sums)
        total, count = sums.tolist()
        if not count or (self._names - {"accuracy"} and self._names - {"perplexity"}):
            return {}
        if "perplexity" in self._names:
            return {"perplexity": math.exp(min(total / count, 700.0)), "tokens": count}
        return {"accuracy": 100 * total / count, "labels": count}


@torch.no_grad()
def metric(model: nn.Module, samples: Samples) -> dict[str, float]:
    """The metric of a model on samples of this run, of which several ranks each take a share; see `MetricSums`."""
    sums = MetricSums()
    with reusing_memory():
        for batch in current().share(samples).batches:
            if not sums.add(logits(batches.forward(model, batch)), batch):
                break
    return sums.result(next(model.parameters()).device)


def divergence_with_metrics(
    reference: nn.Module, model: nn.Module, samples: Samples
) -> tuple[float, dict[str, float], dict[str, float]]:
    """The mean loss of `kl_to` on samples, and the metrics of the reference and of the model from the same outputs."""
    of_reference, of_model = MetricSums(), MetricSums()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        dense, sparse = (logits(batches.forward(each, batch)) for each in (reference, model))
        of_reference.add(dense, batch)
        of_model.add(sparse, batch)
        return divergence(model, batch, dense, sparse)

    mean, device = mean_loss(model, samples, loss), next(model.parameters()).device
    return mean, of_reference.result(device), of_model.result(device)


def _batch_metric(values: Tensor, batch: Batch) -> tuple[str, float, float] | None:
    """The name of the metric, its sum over the scored positions of a batch, and their number."""
    arguments, labels = batches.inputs(batch), targets(batch)
    tokens = arguments.get("input_ids") if isinstance(arguments, Mapping) else None
    if isinstance(tokens, Tensor) and values.ndim == 3 and values.shape[:2] == tokens.shape:
        if labels is not None and labels.shape != tokens.shape:
            return None
        return _next_tokens(values, tokens if labels is None else labels, arguments)
    if labels is None or labels.is_floating_point() or labels.dtype == torch.bool:
        return None
    axis = class_axis(values, batch)
    if axis is None and bool((labels > 1).any()):
        return None  # counts, say, which one output predicts
    best = (values > 0).long() if axis is None else values.argmax(axis)
    if best.numel() != labels.numel():
        return None
    labels = labels.to(best.device).reshape(best.shape)
    scored = labels != IGNORED
    return "accuracy", float(((best == labels) & scored).sum()), float(scored.sum())


def _next_tokens(values: Tensor, labels: Tensor, arguments: object) -> tuple[str, float, float] | None:
    """Sum of the negative log-likelihoods of the next tokens, and their number; padding is not scored."""
    labels = labels.to(values.device)
    mask = arguments.get("attention_mask") if isinstance(arguments, Mapping) else None
    if isinstance(mask, Tensor) and mask.shape == labels.shape:
        labels = labels.masked_fill(mask.to(values.device) == 0, IGNORED)
    if labels.shape[1] < 2 or int(labels[:, 1:].max()) >= values.shape[2]:
        return None
    total = next_token_loss(values, labels, "sum")
    return "perplexity", float(total), float((labels[:, 1:] != IGNORED).sum())


# ---- embeddings of texts before and after a run: their cosine, and whether pairs of texts keep their order
# A model whose output is a state for every token, without scores, is compared by the squared distance of its states.
# What users of such models compare is the angle between the mean states of texts.
_STATES = "last_hidden_state"
_MOST = 512  # texts whose pairs are compared


@torch.no_grad()
def embedded(model: nn.Module, samples: Samples, first: bool = False) -> Tensor | None:
    """The mean state of every sample, (samples, width) float32 on the CPU; None for models with other outputs.

    Args:
        model: in eval mode.
        samples: of this run; with several ranks None, since each has other samples.
        first: take the state of the first token instead of the mean.
    """
    vectors = []
    for batch in samples.batches if current().size == 1 else []:
        output = batches.forward(model, batch)
        states = output.get(_STATES) if isinstance(output, Mapping) and "logits" not in output else None
        if not isinstance(states, Tensor) or states.ndim != 3:
            return None
        if first:
            vectors.append(states[:, 0].float().cpu())
            continue
        mask = attended(model, batch)
        weights = torch.ones(states.shape[:2]) if mask is None else mask.float()
        weights = weights.to(states.device)[..., None]
        vectors.append(((states.float() * weights).sum(1) / weights.sum(1).clamp(min=1)).cpu())
    return torch.cat(vectors) if vectors else None


def similarity(dense: Tensor, pruned: Tensor) -> dict[str, float]:
    """The mean cosine of embeddings (n, width) to those of the dense model, and the rank correlation of all pairs."""
    scores = {"cosine to the dense embedding": float(functional.cosine_similarity(dense, pruned).mean())}
    if len(dense) > 2:
        first, second = torch.triu_indices(min(len(dense), _MOST), min(len(dense), _MOST), 1)
        ranks = []
        for vectors in (dense, pruned):
            unit = functional.normalize(vectors[:_MOST])
            ranks.append((unit @ unit.T)[first, second].argsort().argsort().double())
        scores["rank correlation of pairs"] = float(torch.corrcoef(torch.stack(ranks))[0, 1])
    return scores
