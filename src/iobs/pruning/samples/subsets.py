"""Subsets of the calibration samples: leading samples, splits, new batches, and windows of text that are joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from iobs.errors import CalibrationError
from iobs.pruning.samples.batches import Batch, is_whole, join, layout, mapped, positions, size, take

_JOINED = {"input_ids", "attention_mask"}  # arguments of a model that can be joined


@dataclass(frozen=True)
class Samples:
    """Samples in batches, and for each batch the number of the caller's batch that it comes from."""

    batches: list[Batch] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    def add(self, batch: Batch, flags: Tensor, number: int) -> None:
        """Add the samples of a batch at which `flags`, (samples,) bool, is True."""
        if bool(flags.any()):
            self.batches.append(batch if bool(flags.all()) else take(batch, flags.nonzero()[:, 0]))
            self.numbers.append(number)

    def first(self, count: int, tokens: int | None = None) -> Samples:
        """The first `count` samples; with `tokens`, at most as many as fit that many tokens, and at least one."""
        if tokens is not None:
            count = min(count, max(1, tokens // max(map(positions, self.batches), default=1)))
        first = Samples()
        for batch, number in zip(self.batches, self.numbers, strict=True):
            missing = count - first.samples
            if missing <= 0:
                break
            first.add(batch, torch.arange(size(batch)) < missing, number)
        return first

    def pick(self, rows: Tensor) -> Batch:
        """One batch of the samples at the given positions, int64, counted over all batches; needs `alike`.

        Samples of one batch come in the given order, and batches in theirs.
        """
        sizes = torch.tensor([size(batch) for batch in self.batches])
        ends = sizes.cumsum(0)
        owners = torch.searchsorted(ends, rows, right=True)
        places = rows - (ends - sizes)[owners]
        return join([take(self.batches[owner], places[owners == owner]) for owner in torch.unique(owners).tolist()])

    @property
    def alike(self) -> bool:
        """True if the samples of all batches have tensors of the same names and shapes, so that they can be joined."""
        if len(self.batches) > 1 and any(map(is_whole, self.batches)):
            return False
        return len({layout(batch) for batch in self.batches}) == 1

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> Samples:
        """All samples of the given batches, which are numbered from 0."""
        return cls(list(batches), list(range(len(batches))))

    @property
    def samples(self) -> int:
        """Number of samples."""
        return sum(size(batch) for batch in self.batches)


def rebatched(part: Samples, count: int) -> Samples:
    """The samples in batches of `count`; unchanged if their shapes differ."""
    return _regrouped(part, torch.split(torch.arange(part.samples), count))


def even(part: Samples) -> Samples:
    """The samples in batches whose sizes differ by at most one; unchanged if their shapes differ.

    There are as few batches as possible, and none is larger than the largest given batch.
    """
    count = -(-part.samples // max(map(size, part.batches)))
    return _regrouped(part, torch.tensor_split(torch.arange(part.samples), count))


def _regrouped(part: Samples, groups: Sequence[Tensor]) -> Samples:
    return Samples.of([part.pick(rows) for rows in groups]) if part.alike else part


def split(part: Samples, share: float, seed: int) -> tuple[Samples, Samples]:
    """Split the samples at random into calibration and held-out samples.

    Args:
        part: the samples.
        share: of the samples that is held out, in [0, 1).
        seed: of the draw over all batches.

    Returns:
        At least one calibration sample, and the held-out samples; there are none if the share rounds to zero.
    """
    sizes = [size(batch, index) for index, batch in enumerate(part.batches)]
    total = sum(sizes)
    count = min(round(total * share), total - 1)
    held = torch.zeros(total, dtype=torch.bool)
    held[torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count]] = True
    calibration, heldout = Samples(), Samples()
    for batch, flags, number in zip(part.batches, torch.split(held, sizes), part.numbers, strict=True):
        calibration.add(batch, ~flags, number)
        heldout.add(batch, flags, number)
    return calibration, heldout


def divide(part: Samples, parts: int, seed: int) -> list[Samples]:
    """Divide the samples at random into disjoint parts, one for each round.

    Raises:
        CalibrationError: there are fewer samples than parts.
    """
    if part.samples < parts:
        raise CalibrationError(f'data="fresh" needs a sample for each of {parts} rounds, got {part.samples} samples.')
    sizes = [size(batch) for batch in part.batches]
    owner = torch.randperm(part.samples, generator=torch.Generator().manual_seed(seed)) % parts
    divided = [Samples() for _ in range(parts)]
    for batch, owners, number in zip(part.batches, torch.split(owner, sizes), part.numbers, strict=True):
        for index, samples in enumerate(divided):
            samples.add(batch, owners == index, number)
    return divided


def packed(model: nn.Module, part: Samples, tokens: int) -> Samples:
    """Half of the windows of a text joined to windows of at most `tokens` tokens, beside the other half.

    Weights that are fitted on short windows only match the dense model at the positions of these windows, and lose at
    later positions. In a causal model the text that is joined behind a window changes no output of this window.

    Args:
        model: only a causal decoder with a stated context has its windows joined.
        part: samples. Windows with padding, of unequal length or with other arguments than ids and mask are unchanged.
        tokens: most tokens of a joined window; the context of the model is another limit.

    Returns:
        A batch of joined windows, and a batch of the others; or `part` itself if nothing is joined.
    """
    if not part.batches or not all(map(_is_full_text, part.batches)) or not part.alike or not _is_causal(model):
        return part
    length = positions(part.batches[0])
    context = int(getattr(getattr(model, "config", None), "max_position_embeddings", None) or 0)
    count = min(tokens, context) // length
    if count < 2 or part.samples < count:
        return part
    rows = torch.arange(part.samples)
    group = rows // count
    joins = (group % 2 == 0) & (group < part.samples // count)  # every second group of windows
    joined = mapped(part.pick(rows[joins]), lambda tensor: tensor.reshape(-1, count * length))
    others = [part.pick(rows[~joins])] if not bool(joins.all()) else []
    return Samples([joined, *others], [part.numbers[0], part.numbers[-1]][: 1 + len(others)])


def _is_full_text(batch: Batch) -> bool:
    """True if a batch holds ids of tokens, perhaps a mask, no padding, and nothing else."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch or not batch.keys() <= _JOINED:
        return False
    mask = batch.get("attention_mask")
    if any(not isinstance(value, Tensor) or value.ndim != 2 for value in batch.values()):
        return False
    return mask is None or (mask.shape == batch["input_ids"].shape and bool(mask.all()))


def _is_causal(model: nn.Module) -> bool:
    """True if every attention of a model declares itself causal, as Hugging Face modules do."""
    declared = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    return bool(declared) and all(declared)
