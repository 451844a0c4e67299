"""One choice for every layer or site with the least sum of damages under a limit of the cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from iobs.errors import PatternError
from iobs.pruning.widths.costs import CostModel, WidthBySite

STEPS = 1 << 14  # cells of the table of the knapsack; costs are rounded up to them
_CORRECTIONS = 12  # solutions with another limit, where the cost is not additive over sites


@dataclass(frozen=True)
class WidthChoice:
    """One width for one site, or for several sites of equal width.

    Attributes:
        sites: names of the sites.
        widths: widths to choose from, ascending; the last is the dense width.
        effects: effect on the loss at each width.
    """

    sites: tuple[str, ...]
    widths: tuple[int, ...]
    effects: tuple[float, ...]

    def at(self, width: int) -> dict[str, int]:
        """The width for all sites."""
        return dict.fromkeys(self.sites, width)


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
    unit = max(1, -(-total // STEPS))
    room = total // unit
    best = np.zeros(room + 1)
    chosen = []
    for of_layer, worth in zip(costs, effects, strict=True):
        table, index = np.full(room + 1, np.inf), np.zeros(room + 1, dtype=np.int64)
        for number, (cost, effect) in enumerate(zip(of_layer, worth, strict=True)):
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
        return [int(np.argmin(of_layer)) for of_layer in costs]
    picks, left = [], room
    for of_layer, index in zip(reversed(costs), reversed(chosen), strict=True):
        number = int(index[left])
        picks.append(number)
        left -= -(-of_layer[number] // unit)
    return picks[::-1]


def least_effect(choices: Sequence[WidthChoice], cost: CostModel, limit: float) -> dict[str, int]:
    """Widths with the least sum of effects and a cost of at most `limit`.

    The savings of two sites add up unless one reads what the other writes. Where they do not add up, the saving that
    the knapsack is asked for is corrected until the exact cost is just within the limit.

    Raises:
        PatternError: even the smallest widths cost more.
    """
    smallest = require_reachable(choices, cost, limit)
    dense = cost.of({})
    needed = dense - limit
    if needed <= 0:
        return {name: choice.widths[-1] for choice in choices for name in choice.sites}
    saving, best = needed, smallest
    for _ in range(_CORRECTIONS):
        widths = _knapsack(choices, cost, best if best is not smallest else {}, saving)
        saved = dense - cost.of(widths)
        if saved >= needed * (1 - 1e-9):
            if best is smallest or _effect(choices, widths) <= _effect(choices, best):
                best = widths
            if saved <= needed * 1.002:
                break
        saving *= needed / saved if saved > 0 else 1.2
    return filled(choices, cost, limit, best)


def require_reachable(choices: Sequence[WidthChoice], cost: CostModel, limit: float) -> dict[str, int]:
    """Raise unless the smallest widths cost at most `limit`.

    Returns:
        The smallest width of every site, by its name.

    Raises:
        PatternError: they cost more.
    """
    smallest = {name: choice.widths[0] for choice in choices for name in choice.sites}
    if cost.of(smallest) > limit * (1 + 1e-9):
        share = 1 - cost.of(smallest) / cost.of({})
        restricted = any(len(choice.widths) < choice.widths[-1] for choice in choices)
        raise PatternError(
            f"At most {max(0.0, share):.1%} of this cost can be removed with the widths that these layers may have; "
            f"ask for less{', or allow more widths (multiple_of, uniform)' if restricted else ''}."
        )
    return smallest


def _effect(choices: Sequence[WidthChoice], widths: WidthBySite) -> float:
    return sum(choice.effects[choice.widths.index(widths[choice.sites[0]])] for choice in choices)


def _knapsack(choices: Sequence[WidthChoice], cost: CostModel, others: WidthBySite, saving: float) -> dict[str, int]:
    """Least effect with at least this saving; costs are measured beside `others`."""
    costs = []
    for choice in choices:
        alone = {name: width for name, width in others.items() if name not in choice.sites}
        costs.append([cost.of({**alone, **choice.at(width)}) for width in choice.widths])
    least = [min(of_choice) for of_choice in costs]
    total = sum(of_choice[-1] - low for of_choice, low in zip(costs, least, strict=True)) - saving
    beyond = [[value - low for value in of_choice] for of_choice, low in zip(costs, least, strict=True)]
    unit = max(total, 1e-300) / STEPS
    cells = [[math.ceil(value / unit - 1e-9) for value in part] for part in beyond]
    picks = best_choices(cells, [choice.effects for choice in choices], STEPS)
    widths: dict[str, int] = {}
    for choice, pick in zip(choices, picks, strict=True):
        widths |= choice.at(choice.widths[pick])
    return widths


def filled(choices: Sequence[WidthChoice], cost: CostModel, limit: float, widths: dict[str, int]) -> dict[str, int]:
    """Widen sites as far as the limit allows, the largest gain for its cost first."""
    widths = dict(widths)
    while True:
        best: tuple[float, WidthChoice, int] | None = None
        for choice in choices:
            at = choice.widths.index(widths[choice.sites[0]])
            if at + 1 == len(choice.widths):
                continue
            wider = {**widths, **choice.at(choice.widths[at + 1])}
            if cost.of(wider) > limit * (1 + 1e-9):
                continue
            price = cost.of(wider) - cost.of(widths)
            gain = (choice.effects[at] - choice.effects[at + 1]) / max(price, 1e-30)
            if best is None or gain > best[0]:
                best = gain, choice, choice.widths[at + 1]
        if best is None:
            return widths
        widths |= best[1].at(best[2])
