"""Non-zero entries of a matrix as values with short column offsets, in plain torch.

Non-zero entries of a row lie in groups of `GROUP`. A group has the column of its first entry, and each entry its offset
from there. The last group of a row is filled up with zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32  # entries of a group, which share the column that their offsets count from
_WIDTHS = {torch.uint8: 2**8, torch.int16: 2**15, torch.int32: 2**31}  # columns that a group of offsets can span


def in_bounds(values: Tensor, offsets: Tensor, bases: Tensor, starts: Tensor, columns: int) -> bool:
    """Check that the starts divide all groups among the rows, and that every entry has one of the columns."""
    counts = starts.long().diff()
    if int(starts[0]) != 0 or int(starts[-1]) != len(bases) or bool((counts < 0).any()):
        return False
    places = (bases.long()[:, None] + offsets.view(-1, GROUP).long()).flatten()[values != 0]
    return bool(((places >= 0) & (places < columns)).all())


def smallest(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values, offsets, bases and starts of a matrix, with offsets of 8 bits or of 16, whichever take fewer bytes.

    Args:
        weight: (rows, columns).
    """
    columns = weight.shape[1]
    dtypes = torch.uint8, torch.int16 if columns <= _WIDTHS[torch.int16] else torch.int32
    found = [packed(weight, dtype) for dtype in dtypes]
    return min(found, key=lambda parts: sum(part.numel() * part.element_size() for part in parts))


def packed(weight: Tensor, offset: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values (32 n,), offsets (32 n,), bases (n,) and starts (rows + 1,) of a matrix (rows, columns).

    A group has 32 entries of a row, or fewer and zeros after them where the row ends or an offset would be too large.
    """
    (rows, columns), device = weight.shape, weight.device
    kept = weight != 0
    counts = kept.sum(1)
    ends = counts.cumsum(0)
    at = ends - counts  # the first entry of every row that is in no group yet
    past = torch.zeros(1, dtype=torch.long, device=device)  # a window may reach past the last entry
    places = torch.cat([kept.nonzero()[:, 1], past])
    entries, lane = weight[kept], torch.arange(GROUP, device=device)
    found = [torch.zeros(3, 0, dtype=torch.long, device=device)]
    # One group of every row at a time: how far it reaches depends on where the last one ended.
    while bool((left := at < ends).any()):
        window = at[left, None] + lane
        own = places[window.clamp(max=len(entries))]
        taken = (window < ends[left, None]) & (own - own[:, :1] < _WIDTHS[offset])
        found.append(torch.stack([left.nonzero()[:, 0], at[left], taken.sum(1)]))
        at[left] += found[-1][2]
    groups = torch.cat(found, 1)
    groups = groups[:, groups[0].argsort(stable=True)]  # by row, in the order of columns
    row, first, length = groups
    taken, window = lane < length[:, None], first[:, None] + lane
    window = torch.where(taken, window, first[:, None])
    base = places[first]
    values = torch.where(taken, entries[window], 0) if len(first) else weight.new_zeros(0, GROUP)
    offsets = torch.where(taken, places[window] - base[:, None], 0)
    starts = torch.zeros(rows + 1, dtype=torch.int32, device=device)
    starts[1:] = torch.bincount(row, minlength=rows).cumsum(0)
    narrow = torch.int16 if columns <= _WIDTHS[torch.int16] else torch.int32
    return values.flatten(), offsets.flatten().to(offset), base.to(narrow), starts


def dense(values: Tensor, offsets: Tensor, bases: Tensor, starts: Tensor, columns: int) -> Tensor:
    """The matrix (rows, columns) of `packed` parts, in plain torch."""
    rows = len(starts) - 1
    row = torch.arange(rows, device=starts.device).repeat_interleave(starts.diff().long())
    place = (row * columns + bases.long())[:, None] + offsets.view(-1, GROUP).long()
    kept = values != 0
    found = torch.zeros(rows * columns, dtype=values.dtype, device=values.device)
    found[place.flatten()[kept]] = values[kept]
    return found.view(rows, columns)
