"""Batches of the size of one gradient step of block reconstruction."""

from __future__ import annotations

from torch import nn

from iobs.pruning.recipe import BlockFit
from iobs.pruning.samples.batches import Batch, neighbours, positions, size
from iobs.pruning.samples.subsets import Samples, packed

_TOKENS, _SAMPLES = 1024, 16  # size of a step: of text, and of other data


def in_steps(model: nn.Module, part: Samples, fit: BlockFit) -> Samples:
    """The samples in batches of the size of one gradient step, half of short windows of text joined to longer ones."""
    if fit.batch_size == "auto":
        part = packed(model, part, _TOKENS)
    found = Samples()
    for batch, number in zip(part.batches, part.numbers, strict=True):
        count = samples_a_step(batch, fit)
        for start in range(0, size(batch), count):
            found.batches.append(neighbours(batch, start, start + count))  # views: nothing is copied
            found.numbers.append(number)
    return found


def samples_a_step(batch: Batch, fit: BlockFit) -> int:
    """Number of samples of a batch in one gradient step."""
    return _samples_of(positions(batch), fit)


def tokens_a_step(length: int, batch: int, fit: BlockFit) -> int:
    """Tokens of one gradient step on full windows of text.

    Args:
        length: tokens of a window.
        batch: samples per forward pass; a step has no more of them, unless its size is "auto" and windows are joined.
        fit: settings.
    """
    count = _samples_of(length, fit)
    return length * (count if fit.batch_size == "auto" else min(batch, count))


def _samples_of(tokens: int, fit: BlockFit) -> int:
    """Number of samples in one gradient step, each of `tokens` tokens."""
    if fit.batch_size != "auto":
        return fit.batch_size
    return max(1, _TOKENS // tokens) if tokens > 1 else _SAMPLES
