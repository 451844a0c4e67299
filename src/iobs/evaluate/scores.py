"""Metrics of a network: perplexity on text, accuracy or squared error on labelled inputs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from iobs.core.formats import plural
from iobs.core.modes import full_precision
from iobs.data import ArraySource, PairSource, Source, TextSource, array_batches, token_windows
from iobs.errors import DataError, ModelError, NonFiniteError
from iobs.models import LoadedModel
from iobs.pruning.calibration.losses import IGNORED, embedded, next_token_loss
from iobs.pruning.network.modes import without_cache
from iobs.pruning.samples.batches import Batch, Samples, called, rebatched, shapes
from iobs.pruning.samples.outputs import class_axis
from iobs.pruning.samples.outputs import targets as targets_of

Progress = Callable[[int, int], None]


def no_progress(done: int, total: int) -> None:
    """Ignore progress."""


@torch.no_grad()
@full_precision()
def perplexity(
    module: nn.Module,
    windows: Tensor,
    batch: int = 8,
    progress: Progress = no_progress,
    labels: Tensor | None = None,
) -> float:
    """Perplexity: exp of the mean negative log-likelihood of all tokens except the first of each window.

    Args:
        module: a causal language model, called with `input_ids`, whose output has `logits` (batch, length, vocabulary).
        windows: (windows, length) int64, from `token_windows`.
        batch: windows per forward pass.
        progress: called with (windows done, total).
        labels: a copy of the windows with `IGNORED` for tokens that are not scored; None scores all tokens.

    Returns:
        The perplexity; infinity if it overflows.

    Raises:
        DataError: every label is `IGNORED`, or the module rejects a window.
        ModelError: the outputs have no logits.
        NonFiniteError: a logit is NaN; the message names the windows.
    """
    labels = windows if labels is None else labels
    count = int((labels[:, 1:] != IGNORED).sum())
    if not count:
        raise DataError(f"Every label is {IGNORED} (ignored), so no token is left to score.")
    total, done = 0.0, 0
    device = next(module.parameters()).device
    for part, targets in zip(torch.split(windows, batch), torch.split(labels, batch), strict=True):
        tokens = part.to(device)
        name = f"windows {done} to {done + len(part) - 1}"
        with without_cache(module):
            logits = output_logits(called(module, {"input_ids": tokens}, name, DataError))
        loss = next_token_loss(logits, targets.to(device), "sum").item()
        if not math.isfinite(loss):
            raise NonFiniteError(f"The model gives NaN or infinity on {name}.")
        total += loss
        done += len(part)
        progress(done, len(windows))
    try:
        return math.exp(total / count)
    except OverflowError:
        return math.inf


def bits_per_byte(
    model: LoadedModel, texts: Sequence[str], length: int, batch: int | None = None, progress: Progress = no_progress
) -> float:
    """Bits that a language model needs for a byte of text, which can be compared between tokenizers.

    It is the mean over all tokens but the first of each window, times the number of tokens per byte.

    Args:
        model: a causal language model with its tokenizer.
        texts: texts; each gets the special tokens of the tokenizer.
        length: tokens per window.
        batch: windows per forward pass; None: about 4,096 tokens.
        progress: called with (windows done, total).

    Raises:
        DataError: the texts have fewer than two tokens.
        ModelError, NonFiniteError: as `perplexity`.
    """
    tokens = [number for each in model.require_tokenizer()([*texts], verbose=False)["input_ids"] for number in each]
    if len(tokens) < 2:
        raise DataError(f"The text has {plural(len(tokens), 'token')}; bits per byte need two at least.")
    missing = -len(tokens) % length
    windows = torch.tensor(tokens + missing * tokens[:1]).view(-1, length)
    labels = windows.clone()
    labels.view(-1)[len(tokens) :] = IGNORED
    each = math.log2(perplexity(model.module, windows, batch or max(1, 4096 // length), progress, labels))
    return each * len(tokens) / sum(len(text.encode("utf8", "replace")) for text in texts)


@torch.no_grad()
@full_precision()
def accuracy(module: nn.Module, batches: Iterable[Batch], progress: Progress = no_progress) -> float:
    """Accuracy in per cent: share of targets whose class has the highest output.

    Args:
        module: its output, or `output.logits`, is (batch, classes) or, for pixels, (batch, classes, ...). A single
            output is class 1 if it is positive, else class 0.
        batches: (inputs, targets), or mappings with `labels`; integer targets, `IGNORED` for samples not scored.
        progress: called with (batches done, total); total is 0 if unknown.

    Raises:
        DataError: there is no batch or no target, or a batch does not fit the module.
        NonFiniteError: an output is NaN; the message names the batch.
    """
    hits = count = 0
    for number, logits, targets in _answers(module, batches, progress):
        axis = class_axis(logits, (None, targets))
        best = (logits > 0).long() if axis is None else logits.argmax(axis)
        unclear = targets.is_floating_point() or targets.numel() != best.numel()
        if unclear or (axis is None and bool((targets > 1).any())):
            raise DataError(
                f"Batch {number} has no classes to score: outputs are of shape {tuple(logits.shape)}, targets "
                f"of shape {tuple(targets.shape)} and type {targets.dtype}; accuracy takes one integer a sample."
            )
        targets = targets.reshape(best.shape)
        hits += int(((best == targets) & (targets != IGNORED)).sum())
        count += int((targets != IGNORED).sum())
    if not count:
        raise DataError(f"Every target is {IGNORED} (ignored), so no sample is left to score.")
    return 100 * hits / count


@torch.no_grad()
@full_precision()
def squared_error(module: nn.Module, batches: Iterable[Batch], progress: Progress = no_progress) -> float:
    """Mean squared error of outputs against real-valued targets. Arguments and errors are those of `accuracy`."""
    total, count = 0.0, 0
    for number, outputs, targets in _answers(module, batches, progress):
        if outputs.numel() != targets.numel():
            raise DataError(
                f"Batch {number} has outputs of shape {tuple(outputs.shape)} and targets of shape "
                f"{tuple(targets.shape)}: one number is needed for each."
            )
        total += float((outputs.reshape(targets.shape).double() - targets.double()).square().sum())
        count += targets.numel()
    return total / count


def _answers(module: nn.Module, batches: Iterable[Batch], progress: Progress) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Iterate over (batch number from 1, logits, targets) of all batches."""
    total = len(batches) if isinstance(batches, Sequence) else 0
    number = 0
    for number, batch in enumerate(batches, 1):
        targets = targets_of(batch)
        if targets is None:
            raise DataError(f"Batch {number} has no targets to compare with.")
        if isinstance(batch, Mapping):  # without labels the module computes no loss
            batch = {name: value for name, value in batch.items() if name != "labels"}
        with without_cache(module):
            logits = output_logits(called(module, batch, f"batch {number}, {shapes(batch)}", DataError))
        if torch.isnan(logits).any():
            raise NonFiniteError(f"The model gives NaN on batch {number}.")
        yield number, logits, targets.to(logits.device)
        progress(number, total)
    if not number:
        raise DataError("There is no batch to score the model on.")


def output_logits(output: object) -> Tensor:
    """The logits of a module's output: the output itself if it is a tensor, else `output.logits`.

    Raises:
        ModelError: the output has no logits.
    """
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise ModelError(f"The model returns {type(output).__name__}, which has no logits to score.")
    return logits


def evaluate(
    model: LoadedModel,
    source: Source,
    *,
    length: int = 2048,
    limit: int | None = None,
    batch: int | None = None,
    progress: Progress = no_progress,
) -> dict[str, float]:
    """Evaluate a model on a source.

    The metric is the perplexity on text, the accuracy for classes, the mean squared error for real targets, and for
    labelled pairs of texts the rank correlation of their cosines with the labels.

    Args:
        model: the model.
        source: result of `iobs.data.open_source`.
        length: tokens per window, at most the context of the model.
        limit: maximum number of windows or samples; a fixed random subset of arrays and images. None for all.
        batch: samples per forward pass. Default: about 4,096 tokens of text, or 64 images; batches of a function are
            unchanged, except for a language model, which takes 8 windows.
        progress: called with (done, total).

    Returns:
        The metric, and the number of tokens or samples, by name.

    Raises:
        DataError: the text is shorter than one window, the inputs have no targets, token labels are neither the tokens
            nor `IGNORED`, or `batch` is given for batches whose samples differ in shape.
        ModelError: the source is text, and the model has no tokenizer or is not a causal language model.
    """
    if isinstance(source, TextSource):
        tokenizer = model.require_tokenizer()
        if model.task != "causal-lm":
            raise ModelError(
                f"{model.source} is not a causal language model, so it has no perplexity on text. An "
                "embedding model is scored on a table of two columns of text and one of numbers (.csv)."
            )
        window = model.window_length(length)
        windows = token_windows(tokenizer, source.documents(), window, limit)
        score = perplexity(model.module, windows, batch or max(1, 4096 // window), progress)
        return {"perplexity": score, "tokens": float(windows.numel())}
    if isinstance(source, PairSource):
        pairs = PairSource(source.name, source.pairs[:limit], source.labels[:limit])
        return {"rank correlation": rank_correlation(model, pairs, batch or 32), "labels": float(len(pairs.labels))}
    if isinstance(source, ArraySource):
        order = _spread(len(source.inputs), limit)
        size = batch or 64
        arrays = array_batches(source, model, order, size)
        total = math.ceil(len(order) / size)  # of an iterator it is unknown
        scores = _of_targets(model.module, arrays, source.targets, lambda done, _: progress(done, total))
        return {**scores, "samples": float(len(order))}
    part = Samples.of(source.batches) if limit is None else Samples.of(source.batches).first(limit)
    if model.task == "causal-lm":
        windows, labels = _stacked_windows(part.batches)
        return {
            "perplexity": perplexity(model.module, windows, batch or 8, progress, labels),
            "tokens": float((labels != IGNORED).sum()),
        }
    if batch is not None and part.batches:
        if not part.alike:
            raise DataError("Samples of different shapes cannot share new batches: leave the batch size out.")
        part = rebatched(part, batch)
    targets = targets_of(part.batches[0]) if part.batches else None
    return {**_of_targets(model.module, part.batches, targets, progress), "samples": float(part.samples)}


def _spread(count: int, limit: int | None) -> Tensor:
    """Indices of the samples to score: all, or `limit` at random, since the first images are all of one class."""
    if limit is None or limit >= count:
        return torch.arange(count)
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))[:limit].sort().values


def _of_targets(
    module: nn.Module, batches: Iterable[Batch], targets: Tensor | None, progress: Progress
) -> dict[str, float]:
    """Mean squared error for floating targets, else accuracy."""
    if targets is not None and targets.is_floating_point():
        return {"mean squared error": squared_error(module, batches, progress)}
    return {"accuracy": accuracy(module, batches, progress)}


def _stacked_windows(batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    """Concatenate the token windows of batches, and their labels.

    Raises:
        DataError: windows differ in length or hold padding, or labels are neither the tokens nor `IGNORED`.
    """
    windows = [batch["input_ids"] for batch in batches if isinstance(batch, Mapping) and "input_ids" in batch]
    if len(windows) != len(batches) or len({window.shape[1] for window in windows}) != 1:
        raise DataError("A language model is scored on batches that are mappings with input_ids of one length.")
    masks = [batch["attention_mask"] for batch in batches if isinstance(batch, Mapping) and "attention_mask" in batch]
    if not all(bool(mask.all()) for mask in masks):
        raise DataError("The batches hold padding; a language model is scored on whole windows without any.")
    labels = [batch.get("labels", batch["input_ids"]) for batch in batches if isinstance(batch, Mapping)]
    if not all(map(_labels_of, labels, windows)):
        raise DataError(
            "A language model is scored on its own tokens: labels are the input_ids, not shifted, or "
            f"{IGNORED} where a token is not to be scored."
        )
    return torch.cat(windows), torch.cat(labels)


def _labels_of(labels: Tensor, tokens: Tensor) -> bool:
    return labels.shape == tokens.shape and bool(((labels == tokens) | (labels == IGNORED)).all())


# ---- embeddings of texts
@full_precision()
def rank_correlation(model: LoadedModel, source: PairSource, batch: int = 32) -> float:
    """Spearman's correlation of the cosines of pairs of texts with the labels of the pairs.

    The embedding of a text is the mean of the states of its tokens, or the state of the first token if the folder of
    sentence-transformers says so (1_Pooling/config.json).

    Args:
        model: an encoder, whose output has `last_hidden_state`, with its tokenizer.
        source: labelled pairs of texts.
        batch: texts per forward pass.

    Raises:
        ModelError: the model has no tokenizer, or other outputs.
        DataError: all labels or all cosines are equal.
    """
    texts = [*dict.fromkeys(text for pair in source.pairs for text in pair)]
    tokens = model.require_tokenizer()(texts, verbose=False)["input_ids"]
    if model.context is not None:
        tokens = [ids if len(ids) <= model.context else [*ids[: model.context - 1], ids[-1]] for ids in tokens]
    order = sorted(range(len(texts)), key=lambda number: len(tokens[number]))  # little padding
    device = next(model.module.parameters()).device
    batches = []
    for start in range(0, len(order), batch):
        rows = [torch.tensor(tokens[number]) for number in order[start : start + batch]]
        batches.append(
            {
                "input_ids": nn.utils.rnn.pad_sequence(rows, True).to(device),
                "attention_mask": nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], True).to(device),
            }
        )
    vectors = embedded(model.module, Samples.of(batches), _pools_first(Path(model.source)))
    if vectors is None:
        raise ModelError(
            f"{model.source} returns no last_hidden_state, so it has no embeddings of texts to compare with pairs."
        )
    place = {texts[number]: row for row, number in enumerate(order)}
    first, second = (vectors[[place[pair[side]] for pair in source.pairs]] for side in (0, 1))
    cosines = nn.functional.cosine_similarity(first, second).numpy()
    if len({*source.labels}) == 1 or len({*cosines.tolist()}) == 1:
        what = "labels" if len({*source.labels}) == 1 else "cosines"
        raise DataError(f"All {what} of {source.name} are equal, so they have no order to compare.")
    return float(spearmanr(cosines, source.labels).statistic)


def _pools_first(directory: Path) -> bool:
    """True if a folder of sentence-transformers takes the state of the first token for the embedding."""
    try:
        return bool(
            json.loads((directory / "1_Pooling" / "config.json").read_text(encoding="utf8"))["pooling_mode_cls_token"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False
