"""Rows of a matrix that is divided among processes, and the largest entries of the whole matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from iobs.core.partition import Partition, Peers

if TYPE_CHECKING:
    from iobs.core.patterns import Pattern

_HALF = 16  # bits of each of the two digits of a float32


@dataclass(frozen=True)
class RowsOf:
    """The pattern of a whole matrix, as the process sees it that has some of the rows.

    Args:
        pattern: of the whole matrix, a `Pattern` of entries.
        rows: number of rows of the whole matrix.
        peers: processes that have the rows, each a consecutive part.
    """

    pattern: Pattern
    rows: int
    peers: Peers

    def groups(self, shape: tuple[int, int]) -> Partition:
        """Partition of the rows in this process; a group of the whole matrix reaches over all processes.

        Raises:
            PatternError: the pattern does not fit the matrix.
        """
        whole = self.pattern.groups((self.rows, shape[1]))
        count = 1 if whole.size > shape[1] else shape[0] * shape[1] // whole.size
        return Partition(count, whole.size, whole.keep, self.peers, self.rows, whole.count * whole.keep)

    def __str__(self) -> str:
        return str(self.pattern)

    def most(self, value: float) -> float:
        """The largest of the values that the processes give."""
        found = torch.zeros(self.peers.size, dtype=torch.float64)
        found[self.peers.rank] = value
        self.peers.sum(found)
        return float(found.max())


def is_spanning(groups: Partition, entries: int) -> bool:
    """Check that a group has more entries than are in this process, of which there are `entries`."""
    return groups.peers is not None and groups.size > entries


def spanning_mask(scores: Tensor, groups: Partition) -> Tensor:
    """Mask of the highest scores of one group that reaches over all processes, with its exact count.

    Of equal scores the scores in earlier rows are kept, as in `top_mask` of the whole matrix.

    Args:
        scores: non-negative, (rows, columns) in this process, float32 or narrower.
        groups: one group, with `peers`.

    Returns:
        Boolean (rows, columns), True where an entry is kept.
    """
    if groups.keep in (0, groups.size):
        return torch.full_like(scores, groups.keep > 0, dtype=torch.bool)
    assert groups.peers is not None
    assert scores.dtype is not torch.float64
    peers, bits = groups.peers, scores.float().contiguous().view(torch.int32)  # ordered as the numbers are
    high, above = _digit(bits >> _HALF, groups.keep, groups)
    low, more = _digit((bits & 0xFFFF)[bits >> _HALF == high], groups.keep - above, groups)
    threshold = (high << _HALF) | low
    tied = bits == threshold
    counts = torch.zeros(peers.size, dtype=torch.int64, device=scores.device)
    counts[peers.rank] = tied.sum()
    peers.sum(counts)
    missing = groups.keep - above - more - int(counts[: peers.rank].sum())  # ties that earlier processes leave
    if missing < int(counts[peers.rank]):
        tied &= (tied.flatten().cumsum(0) <= missing).reshape(tied.shape)
    return (bits > threshold) | tied


def _digit(digits: Tensor, keep: int, groups: Partition) -> tuple[int, int]:
    """The digit of the `keep`-th largest entry of all processes, and the number of entries with a larger digit."""
    counts = torch.bincount(digits.flatten(), minlength=1 << _HALF)
    reached = groups.total(counts).flip(0).cumsum(0)
    place = int(torch.searchsorted(reached, torch.tensor(keep, device=reached.device)))
    return len(counts) - 1 - place, int(reached[place - 1]) if place else 0
