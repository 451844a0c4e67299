"""The largest entries of a group that reaches over all processes."""

from __future__ import annotations

import torch
from torch import Tensor

from iobs.core.partition import Partition

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
