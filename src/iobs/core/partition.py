"""Groups of entries that compete with each other under a pattern, and the largest entries of a group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor


class Peers(Protocol):
    """Processes that hold consecutive rows of one matrix, in the order of their numbers."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of processes."""
        ...

    def sum(self, tensor: Tensor) -> None:
        """Add up a tensor over all processes, in place."""
        ...


@dataclass(frozen=True)
class Partition:
    """Partition of a (rows, columns) matrix, read row by row, into equal groups.

    With `peers` the matrix has further rows in other processes; a group may then reach over several of them.

    Attributes:
        count: number of groups.
        size: entries in each group.
        keep: entries kept in each group.
        peers: processes that hold the rows; None: all rows are here.
        rows: number of rows in all processes; 0 without `peers`.
        kept: number of kept entries in all processes; 0 without `peers`.
    """

    count: int
    size: int
    keep: int
    peers: Peers | None = None
    rows: int = 0
    kept: int = 0

    def all_rows(self, here: int) -> int:
        """Number of rows in all processes; `here` are in this process."""
        return here if self.peers is None else self.rows

    def in_columns(self, block: slice, columns: int) -> Partition:
        """Partition of some neighbouring columns, for groups of whole rows.

        The counts of the blocks of a matrix add up to its count.

        Args:
            block: the columns.
            columns: number of columns of the matrix.
        """
        for_each = self.keep / columns
        keep = round(block.stop * for_each) - round(block.start * for_each)
        return replace(self, size=self.size // columns * (block.stop - block.start), keep=keep)

    @property
    def all_kept(self) -> int:
        """Number of kept entries in all processes."""
        return self.count * self.keep if self.peers is None else self.kept

    def total(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over all processes, in place."""
        if self.peers is not None:
            self.peers.sum(tensor)
        return tensor


# ---- The k-th largest score of each group

_MANY = 64  # groups from which torch's selection keeps a GPU busy: it takes one block of threads for each group


def smallest_kept(table: Tensor, keep: int) -> Tensor:
    """The `keep`-th largest score of each row.

    Args:
        table: (groups, size), any floating dtype, not NaN.
        keep: rank, from 1 to `size`.

    Returns:
        (groups, 1), in the dtype of the table.
    """
    if table.device.type == "cpu" or len(table) >= _MANY:
        return table.kthvalue(table.shape[1] - keep + 1, dim=1, keepdim=True).values
    return smallest_kept_by_bits(table, keep)


def smallest_kept_by_bits(table: Tensor, keep: int) -> Tensor:
    """Form of `smallest_kept` for few large groups on a GPU: finds the bits of the score, the highest bit first.

    Each bit takes one count of the scores that are at least as large, which the whole GPU shares. The CPU waits for
    nothing.
    """
    exact = table.contiguous() if table.dtype is torch.float64 else table.float().contiguous()
    whole, bits = (torch.int64, 64) if exact.dtype is torch.float64 else (torch.int32, 32)
    limits, numbers = torch.iinfo(whole), exact.view(whole)
    codes = (numbers >> (bits - 1)).bitwise_and_(limits.max).bitwise_xor_(numbers)  # ordered as the scores are
    zero = torch.zeros(len(table), 1, dtype=whole, device=table.device)
    bound = torch.where((codes >= 0).sum(1, keepdim=True) >= keep, zero, zero + limits.min)
    for place in range(bits - 2, -1, -1):
        raised = bound + (1 << place)
        bound = torch.where((codes >= raised).sum(1, keepdim=True) >= keep, raised, bound)
    value = (bound >> (bits - 1)).bitwise_and_(limits.max).bitwise_xor_(bound)
    return value.view(exact.dtype).to(table.dtype)


# ---- The largest entries of a group that reaches over all processes

_HALF = 16  # bits of each of the two digits of a float32


def is_spanning(groups: Partition, entries: int) -> bool:
    """True if a group has more entries than are in this process, of which there are `entries`."""
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
