"""Batches of gradient steps: their size and their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from iobs.pruning.recipe import Augmentation, BlockFit, FineTune
from iobs.pruning.runtime.ranks import current
from iobs.pruning.samples.batches import Batch, Samples, neighbours, packed, positions, size, take, to_device

_TOKENS, _SAMPLES = 1024, 16  # size of a step of block reconstruction: of text, and of other data
_MOST_TOKENS, _MOST_SAMPLES, _LEAST_SAMPLES = 2048, 64, 16  # size of a step of fine-tuning


# ---- block reconstruction: batches have the size of a step, and a step takes one on every rank
def in_steps(model: nn.Module, part: Samples, fit: BlockFit) -> Samples:
    """The samples in batches of the size of one gradient step, half of short windows of text joined to longer ones."""
    if fit.batch_size == "auto":
        part = packed(model, part, _TOKENS)
    steps = Samples()
    for batch, number in zip(part.batches, part.numbers, strict=True):
        count = samples_of_block_step(positions(batch), fit)
        for start in range(0, size(batch), count):
            steps.batches.append(neighbours(batch, start, start + count))  # views: nothing is copied
            steps.numbers.append(number)
    return steps


def samples_of_block_step(tokens: int, fit: BlockFit) -> int:
    """Number of samples in one gradient step, each of `tokens` tokens."""
    if fit.batch_size != "auto":
        return fit.batch_size
    return max(1, _TOKENS // tokens) if tokens > 1 else _SAMPLES


def tokens_of_block_step(length: int, batch: int, fit: BlockFit) -> int:
    """Tokens of one gradient step on full windows of text.

    Args:
        length: tokens of a window.
        batch: samples per forward pass; a step has no more of them, unless its size is "auto" and windows are joined.
        fit: settings.
    """
    count = samples_of_block_step(length, fit)
    return length * (count if fit.batch_size == "auto" else min(batch, count))


def shuffled_positions(numbers: Sequence[int], seed: int) -> Iterator[int]:
    """Positions of batches in an endless loop, in a new random order in every pass."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from (numbers[place] for place in torch.randperm(len(numbers), generator=generator).tolist())


# ---- fine-tuning: samples are drawn across the caller's batches, and ranks share the samples of a step
def samples_of_step(step: FineTune, part: Samples) -> int:
    """Number of samples in a step.

    "auto" is 64, or less: 2048 tokens of text, or a tenth of all samples (16 at least).
    """
    if step.batch_size is None:
        return part.samples if step.steps == 1 else size(part.batches[0])
    shares = max(_LEAST_SAMPLES, part.samples // 10), _MOST_TOKENS // positions(part.batches[0])
    count = max(1, min(_MOST_SAMPLES, *shares)) if step.batch_size == "auto" else step.batch_size
    return min(count, part.samples if part.alike else max(map(size, part.batches)))


def drawn_batches(
    step: FineTune, part: Samples, augmentation: Augmentation | None, device: torch.device, seed: int
) -> Iterator[list[Batch]]:
    """The batches of every step, endlessly: one, or all of them for a single step without a batch size.

    All ranks augment the whole batch in the same way, then take their rows. For a loss that is a mean over samples, the
    result does not depend on the number of ranks. A rank may get no rows.

    Args:
        step: settings.
        part: samples.
        augmentation: changes every batch before it is used; None: none.
        device: of the model.
        seed: of the order of the samples.
    """
    generator = torch.Generator().manual_seed(seed)
    whole = step.batch_size is None and step.steps == 1
    stream = _shuffled_samples(part, None if step.batch_size is None else samples_of_step(step, part), generator)
    while True:
        chosen = [to_device(batch, device) for batch in (part.batches if whole else [next(stream)])]
        if augmentation is not None:
            chosen = [augmentation(batch, generator) for batch in chosen]
        yield [rows for batch in chosen if size(rows := current().rows(batch))]


def _shuffled_samples(part: Samples, batch_size: int | None, generator: torch.Generator) -> Iterator[Batch]:
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
            count = size(batch)
            order = torch.randperm(count, generator=generator)
            for rows in torch.split(order, batch_size or count):
                yield take(batch, rows)
