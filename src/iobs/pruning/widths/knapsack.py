"""One choice for every layer or site with the least sum of damages under a limit of the cost.

The widths that a site may choose from are here too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm

import numpy as np

from iobs.core.structured import Structured
from iobs.errors import PatternError
from iobs.pruning.structure.units import Site
from iobs.pruning.widths.costs import CostModel, WidthBySite
from iobs.pruning.widths.readers import SiteCurve

STEPS = 1 << 14  # cells of the table of the knapsack; costs are rounded up to them
_CORRECTIONS = 12  # solutions with another limit, where the cost is not additive over sites
_ALIGNED = ("channels", "neurons")  # kinds of units that `multiple_of` aligns
_MOST_WIDTHS = 160  # widths of one site that an allocation chooses from
_UNUSED = 0.02  # share of the limit that equal shares may leave unused


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
    picks, room_left = [], room
    for of_layer, index in zip(reversed(costs), reversed(chosen), strict=True):
        number = int(index[room_left])
        picks.append(number)
        room_left -= -(-of_layer[number] // unit)
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


# ---- the width of every site: equal shares, or least effect on the loss
def possible_widths(pattern: Structured, *family: Site, offered: Collection[int] | None = None) -> tuple[int, ...]:
    """Widths that sites of equal width may get, ascending; only the dense one, the last, may be below `multiple_of`.

    Args:
        pattern: what is asked.
        family: the sites.
        offered: widths that they can have, the dense one included; None: every width.
    """
    count = family[0].count
    # Units may have several channels, as those of a convolution with groups have.
    unit = lcm(*(site.step(pattern.multiple_of) if site.kind in _ALIGNED else 1 for site in family))
    if offered is not None:
        return tuple(sorted(width for width in offered if width % unit == 0 or width == count))
    step = unit * max(1, -(-count // (unit * _MOST_WIDTHS)))
    return (*range(step, count, step), count)


def choices_of(
    sites: Sequence[Site],
    pattern: Structured,
    tied: Sequence[Sequence[str]],
    curves: Mapping[str, SiteCurve] | None,
    offered: Mapping[str, Sequence[int]] | None = None,
) -> list[WidthChoice]:
    """The widths to choose from and their effects; without curves the effect is the square of the removed share.

    Args:
        sites: the sites.
        pattern: what is asked.
        tied: names of sites that get equal widths; the other sites are chosen alone.
        curves: measured effects by name of the site, or None.
        offered: widths by name of the site, in place of `possible_widths`, for sites that cannot have every width.
    """
    number = {name: position for position, names in enumerate(tied) for name in names}
    families: dict[object, list[Site]] = {}
    for site in sites:
        families.setdefault(number.get(site.name, site.name), []).append(site)
    choices = []
    for family in families.values():
        limited = [set(offered[site.name]) for site in family if site.name in offered] if offered else []
        widths = possible_widths(pattern, *family, offered=set.intersection(*limited) if limited else None)

        def effect(width: int, family: list[Site] = family) -> float:
            if curves is None:
                return sum((1 - width / site.count) ** 2 for site in family)
            return sum(curves[site.name].damage(width) for site in family if site.name in curves)

        choices.append(WidthChoice(tuple(site.name for site in family), widths, tuple(map(effect, widths))))
    return choices


def equal_shares(choices: Sequence[WidthChoice], cost: CostModel, limit: float) -> dict[str, int]:
    """Widths of about the same share of units in all sites, the largest within the limit of the cost.

    Sites with few widths may get wider only together, and leave much of the limit unused. Then single sites get wider
    by one step.

    Raises:
        PatternError: even the smallest widths cost more.
    """
    require_reachable(choices, cost, limit)

    def at(share: float) -> dict[str, int]:
        widths: dict[str, int] = {}
        for choice in choices:
            target = share * choice.widths[-1]
            widths |= choice.at(min(choice.widths, key=lambda width: (abs(width - target), width)))
        return widths

    low, high = 0.0, 1.0
    if cost.of(at(high)) <= limit:
        return at(high)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if cost.of(at(middle)) <= limit * (1 + 1e-9) else (low, middle)
    widths = at(low)
    return widths if cost.of(widths) >= limit * (1 - _UNUSED) else filled(_near(choices, widths), cost, limit, widths)


def _near(choices: Sequence[WidthChoice], widths: Mapping[str, int]) -> list[WidthChoice]:
    """The choices without the widths more than one step above the given ones, so that shares stay about equal."""
    ends = [choice.widths.index(widths[choice.sites[0]]) + 2 for choice in choices]
    return [
        replace(choice, widths=choice.widths[:end], effects=choice.effects[:end])
        for choice, end in zip(choices, ends, strict=True)
    ]


def chosen_widths(choices: Sequence[WidthChoice], cost: CostModel, limit: float, equal: bool) -> dict[str, int]:
    """The width of every site with a cost of at most `limit`."""
    return equal_shares(choices, cost, limit) if equal else least_effect(choices, cost, limit)
