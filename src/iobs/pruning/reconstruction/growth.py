"""Order of a walk along the blocks: growing sparsities of a layer, and windows that slide."""

from __future__ import annotations

from iobs.core.grids import entries_of
from iobs.core.patterns import NM, Grid, Pattern
from iobs.pruning.layerwise.patterns import thinner
from iobs.pruning.network.layers import Layer

_FIRST_SHARE = 0.6  # of the sparsity, in the first of several projections
_GROWTH = 1.5  # exponent of the growth: about 42, 55, 65 and 70 % for four projections to 70 %


def growing(pattern: Pattern, layer: Layer, count: int) -> list[Pattern]:
    """The patterns of `count` projections of a layer: sparsity grows to that of `pattern`; equal ones are left out.

    Values lie on a grid after the last projection only. A dense grid has one projection.
    """
    found: list[Pattern] = []
    entries = entries_of(pattern)
    for step in range(0 if isinstance(pattern, Grid) else count - 1):
        share = 1 - (1 - _FIRST_SHARE) * ((count - 1 - step) / (count - 1)) ** _GROWTH
        if isinstance(entries, NM):
            zeros = max(1, round(share * (entries.of - entries.keep)))
            found.append(NM(entries.of - zeros, entries.of))
        else:
            found.append(thinner(entries, layer, share))
    return [*(one for one in dict.fromkeys(found) if one != pattern), pattern]


def next_start(full: list[int], stage: int, window: int) -> int:
    """The first block of the window that ends with the next block with layers.

    Args:
        full: blocks with layers.
        stage: the block with layers that the current window ends with.
        window: number of blocks with layers in a window.
    """
    start = full.index(stage) + 2 - window
    return full[max(0, start)] if start < len(full) else stage + 1


def windows(full: list[int], window: int) -> dict[int, range]:
    """The blocks of each window, by the block with layers that the window ends with; arguments as in `next_start`."""
    found: dict[int, range] = {}
    first = 0
    for stage in full:
        found[stage] = range(first, stage + 1)
        first = min(next_start(full, stage, window), stage + 1)
    return found
