"""From scores to the boolean mask of a pattern, with exact counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core.partition import Partition, Peers
from iobs.core.patterns import Pattern


def top_mask(scores: Tensor, pattern: Pattern) -> Tensor:
    """Mask of the highest scores in each group, with the exact counts of the pattern.

    Of equal scores the one with the lower index is kept, so equal scores give equal masks.

    Args:
        scores: (rows, columns), any floating dtype, not NaN.
        pattern: the sparsity pattern.

    Returns:
        Boolean (rows, columns), True where an entry is kept.
    """
    return top_mask_of(scores, pattern.groups((scores.shape[0], scores.shape[1])))


def top_mask_of(scores: Tensor, groups: Partition) -> Tensor:
    """`top_mask` for the groups of a pattern."""
    shape = scores.shape
    if is_spanning(groups, scores.numel()):
        return spanning_mask(scores, groups)
    table = scores.reshape(groups.count, groups.size)
    if groups.keep == 0:
        return torch.zeros(shape, dtype=torch.bool, device=scores.device)
    if groups.keep == groups.size:
        return torch.ones(shape, dtype=torch.bool, device=scores.device)
    if groups.size <= 32:  # one batched stable sort is fastest for short groups
        order = table.sort(dim=1, descending=True, stable=True).indices[:, : groups.keep]
        return torch.zeros_like(table, dtype=torch.bool).scatter_(1, order, True).reshape(shape)
    threshold = smallest_kept(table, groups.keep)
    mask = table > threshold
    # Entries equal to the threshold fill the remaining count, lowest index first.
    tied = table == threshold
    missing = groups.keep - mask.sum(1, keepdim=True)
    count = torch.int32 if groups.size < 2**31 else torch.int64
    mask |= tied & (tied.cumsum(1, dtype=count) <= missing)
    return mask.reshape(shape)


# ---- Rows of a matrix that is divided among processes, with the pattern of the whole matrix


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
        values = torch.zeros(self.peers.size, dtype=torch.float64)
        values[self.peers.rank] = value
        self.peers.sum(values)
        return float(values.max())


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
