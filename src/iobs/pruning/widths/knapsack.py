"""Widths of least effect on the loss under a limit of the cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iobs.errors import PatternError
from iobs.pruning.widths.costs import CostModel, WidthBySite

_BINS = 2000  # equal parts of the saving that the knapsack tells apart
_CORRECTIONS = 12  # solutions with another limit, where the cost is not additive over sites


@dataclass(frozen=True)
class Choice:
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


def least_effect(choices: Sequence[Choice], cost: CostModel, limit: float) -> dict[str, int]:
    """Widths with the least sum of effects and a cost of at most `limit`.

    The savings of two sites add up unless one reads what the other writes. Where they do not add up, the saving that
    the knapsack is asked for is corrected until the exact cost is just within the limit.

    Raises:
        PatternError: even the smallest widths cost more.
    """
    smallest = require_reachable(choices, cost, limit)
    dense = cost.of({})
    wanted = dense - limit
    if wanted <= 0:
        return {name: choice.widths[-1] for choice in choices for name in choice.sites}
    asked, best = wanted, smallest
    for _ in range(_CORRECTIONS):
        found = _knapsack(choices, cost, best if best is not smallest else {}, asked)
        saved = dense - cost.of(found)
        if saved >= wanted * (1 - 1e-9):
            if best is smallest or _effect(choices, found) <= _effect(choices, best):
                best = found
            if saved <= wanted * 1.002:
                break
        asked *= wanted / saved if saved > 0 else 1.2
    return filled(choices, cost, limit, best)


def require_reachable(choices: Sequence[Choice], cost: CostModel, limit: float) -> dict[str, int]:
    """Check that the smallest widths cost at most `limit`.

    Returns:
        The smallest width of every site, by its name.

    Raises:
        PatternError: they cost more.
    """
    smallest = {name: choice.widths[0] for choice in choices for name in choice.sites}
    if cost.of(smallest) > limit * (1 + 1e-9):
        share = 1 - cost.of(smallest) / cost.of({})
        raise PatternError(
            f"At most {max(0.0, share):.1%} of this cost can be removed with the widths that these layers may have; "
            "ask for less, or allow more widths if multiple_of is above 1 or uniform is True."
        )
    return smallest


def _effect(choices: Sequence[Choice], widths: WidthBySite) -> float:
    return sum(choice.effects[choice.widths.index(widths[choice.sites[0]])] for choice in choices)


def _knapsack(choices: Sequence[Choice], cost: CostModel, others: WidthBySite, saving: float) -> dict[str, int]:
    """Least effect with at least this saving, by dynamic programming; savings are measured beside `others`."""
    best: NDArray[np.float64] = np.full(_BINS + 1, np.inf)
    best[0] = 0.0
    picks = []
    for choice in choices:
        alone: Mapping[str, int] = {name: width for name, width in others.items() if name not in choice.sites}
        dense = cost.of({**alone, **choice.at(choice.widths[-1])})
        chosen, new = np.zeros(_BINS + 1, np.int64), np.full(_BINS + 1, np.inf)
        source = np.zeros(_BINS + 1, np.int64)
        for number, (width, effect) in enumerate(zip(choice.widths, choice.effects, strict=True)):
            saved = max(0.0, dense - cost.of({**alone, **choice.at(width)}))
            bins = min(_BINS, int(saved / saving * _BINS + 1e-6))
            origin = np.arange(-bins, _BINS + 1 - bins)  # for every bin the bin before this choice
            value = best + effect
            origin[-1] = _BINS - np.argmin(value[::-1][: bins + 1])  # the last bin holds larger savings too
            table = np.where(origin < 0, np.inf, value[origin])
            better = table < new
            new[better], chosen[better], source[better] = table[better], number, origin[better]
        best = new
        picks.append((chosen, source))
    # Rounding down may leave the last bin out of reach.
    at = _BINS if np.isfinite(best[_BINS]) else int(np.flatnonzero(np.isfinite(best))[-1])
    found: dict[str, int] = {}
    for choice, (chosen, source) in zip(reversed(choices), reversed(picks), strict=True):
        found |= choice.at(choice.widths[chosen[at]])
        at = int(source[at])
    return found


def filled(choices: Sequence[Choice], cost: CostModel, limit: float, widths: dict[str, int]) -> dict[str, int]:
    """Widen sites as far as the limit allows, the largest gain for its cost first."""
    widths = dict(widths)
    while True:
        best: tuple[float, Choice, int] | None = None
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
