"""The samples of a run, whatever batches the caller made of them: parts, portions, and batches made anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from iobs.errors import CalibrationError
from iobs.prune.batches import Batch, join, layout, positions, size, take


@dataclass(frozen=True)
class Part:
    """Some of the caller's samples, and for each batch the number of the caller's batch that it comes from."""

    batches: list[Batch] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    def add(self, batch: Batch, flags: Tensor, number: int) -> None:
        """Add the flagged samples of a batch, if there are any."""
        if bool(flags.any()):
            self.batches.append(batch if bool(flags.all()) else take(batch, flags.nonzero()[:, 0]))
            self.numbers.append(number)

    def first(self, count: int, tokens: int | None = None) -> Part:
        """The leading samples, so many or all that there are; of text no more than have so many tokens, or one."""
        if tokens is not None:
            count = min(count, max(1, tokens // max(map(positions, self.batches), default=1)))
        chosen = Part()
        for batch, number in zip(self.batches, self.numbers, strict=True):
            left = count - chosen.samples
            if left <= 0:
                break
            chosen.add(batch, torch.arange(size(batch)) < left, number)
        return chosen

    def pick(self, rows: Tensor) -> Batch:
        """Samples by their places in the whole part, int64, as one batch; where `alike`."""
        sizes = torch.tensor([size(batch) for batch in self.batches])
        ends = sizes.cumsum(0)
        owners = torch.searchsorted(ends, rows, right=True)
        places = rows - (ends - sizes)[owners]
        return join([take(self.batches[owner], places[owners == owner]) for owner in torch.unique(owners).tolist()])

    @property
    def alike(self) -> bool:
        """Whether samples of different batches have tensors of the same names and shapes."""
        return len({layout(batch) for batch in self.batches}) == 1

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> Part:
        """All of the caller's samples."""
        return cls(list(batches), list(range(len(batches))))

    @property
    def samples(self) -> int:
        """Number of samples."""
        return sum(size(batch) for batch in self.batches)


def rebatched(part: Part, count: int) -> Part:
    """The samples of a part in batches of so many; as they are where their shapes differ."""
    return _regrouped(part, torch.split(torch.arange(part.samples), count))


def even(part: Part) -> Part:
    """The samples of a part in as few batches, none larger than its largest, of sizes that differ by one at most.

    As they are where their shapes differ.
    """
    count = -(-part.samples // max(map(size, part.batches)))
    return _regrouped(part, torch.tensor_split(torch.arange(part.samples), count))


def _regrouped(part: Part, groups: Sequence[Tensor]) -> Part:
    return Part.of([part.pick(rows) for rows in groups]) if part.alike else part


def split(part: Part, share: float, seed: int) -> tuple[Part, Part]:
    """Hold some samples out, a share in [0, 1) drawn by seed over all batches.

    Returns:
        What to fit on, of which there is some, and what is held out; that is empty where the share rounds to no sample.
    """
    sizes = [size(batch, index) for index, batch in enumerate(part.batches)]
    total = sum(sizes)
    count = min(round(total * share), total - 1)
    held = torch.zeros(total, dtype=torch.bool)
    held[torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count]] = True
    fit, kept = Part(), Part()
    for batch, flags, number in zip(part.batches, torch.split(held, sizes), part.numbers, strict=True):
        fit.add(batch, ~flags, number)
        kept.add(batch, flags, number)
    return fit, kept


def divide(part: Part, parts: int, seed: int) -> list[Part]:
    """Disjoint portions of the samples, one for each round.

    Raises:
        CalibrationError: fewer samples than portions.
    """
    if part.samples < parts:
        raise CalibrationError(f'data="fresh" needs a sample for each of {parts} rounds, got {part.samples} samples.')
    sizes = [size(batch) for batch in part.batches]
    owner = torch.randperm(part.samples, generator=torch.Generator().manual_seed(seed)) % parts
    portions = [Part() for _ in range(parts)]
    for batch, owners, number in zip(part.batches, torch.split(owner, sizes), part.numbers, strict=True):
        for index, portion in enumerate(portions):
            portion.add(batch, owners == index, number)
    return portions
