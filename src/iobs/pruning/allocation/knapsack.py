"""One choice for every layer with the least sum of effects under a total of bits: multiple-choice knapsack."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_STEPS = 1 << 14  # cells of the table; costs are rounded up to them


def best_choices(costs: Sequence[Sequence[int]], effects: Sequence[Sequence[float]], total: int) -> list[int]:
    """The index of the choice of every layer, by dynamic programming over the total.

    Args:
        costs: bits of every choice of every layer.
        effects: effect on the model of every choice of every layer; effects of layers add up.
        total: most bits of all layers together. Costs are rounded up to total / 2^14, so sums never exceed the total,
            and the result is exact for totals of at most 2^14.

    Returns:
        The indices; the cheapest choices if even these exceed the total.
    """
    unit = max(1, -(-total // _STEPS))
    room = total // unit
    best = np.zeros(room + 1)
    chosen = []
    for own, worth in zip(costs, effects, strict=True):
        table, index = np.full(room + 1, np.inf), np.zeros(room + 1, dtype=np.int64)
        for number, (cost, effect) in enumerate(zip(own, worth, strict=True)):
            cells = -(-cost // unit)
            if cells > room:
                continue
            trial = np.full(room + 1, np.inf)
            trial[cells:] = best[: room + 1 - cells] + effect
            better = trial < table
            table[better], index[better] = trial[better], number
        best = table
        chosen.append(index)
    if not np.isfinite(best[room]):
        return [int(np.argmin(own)) for own in costs]
    found, left = [], room
    for own, index in zip(reversed(costs), reversed(chosen), strict=True):
        number = int(index[left])
        found.append(number)
        left -= -(-own[number] // unit)
    return found[::-1]
