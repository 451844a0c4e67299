"""The width of every site: equal shares, or least effect on the loss, within the cost that is asked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import lcm

from iobs.core.structured import Structured
from iobs.pruning.structure.units import Site
from iobs.pruning.widths.costs import CostModel
from iobs.pruning.widths.knapsack import WidthChoice, filled, least_effect, require_reachable
from iobs.pruning.widths.readers import SiteCurve

_ALIGNED = ("channels", "neurons")  # kinds of units that `multiple_of` aligns
_MOST_WIDTHS = 160  # widths of one site that an allocation chooses from
_UNUSED = 0.02  # share of the limit that equal shares may leave unused


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
