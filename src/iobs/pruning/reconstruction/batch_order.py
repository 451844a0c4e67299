"""Order of the batches of gradient steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch


def endless(positions: Sequence[int], seed: int) -> Iterator[int]:
    """Positions of batches in an endless loop, in a new random order in every pass.

    Args:
        positions: of the batches.
        seed: of the orders.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from (positions[place] for place in torch.randperm(len(positions), generator=generator).tolist())
