"""Optimal counts: divide a global number of kept weights among the layers.

Every layer l has a curve u_l(k), the damage to the model with k kept weights. The allocation minimises sum_l u_l(k_l)
subject to sum_l k_l = K, exactly, within bounds for every k_l.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from iobs.core.grids import entries_of
from iobs.core.patterns import Budget, Grid, Pattern, Rate, Unstructured, keep_count
from iobs.core.structured import Structured
from iobs.errors import PatternError, ProblemError
from iobs.pruning.network.layers import Layer
from iobs.pruning.network.selection import matching
from iobs.pruning.recipe import Allocation, Recipe

# Measured densities of a layer, relative to that of the whole model, and the greatest of them: at density 1 the damage
# is zero.
LEVELS = (1 / 3, 2 / 3, 1.0, 1.6, 2.5)
_DENSEST = 0.9
_STEPS = 400  # points at which a curve is evaluated; counts between two points are possible


@dataclass(frozen=True)
class Curve:
    """Damage of one layer at a few counts of kept entries.

    Args:
        keeps: ascending counts.
        damages: falling, in nats for one output of the model.
        energy: damage with no entries.
        priced: True if a price in nats is known for the layer.
    """

    keeps: list[int]
    damages: list[float]
    energy: float
    priced: bool = True

    @classmethod
    def of(cls, points: Sequence[tuple[int, float]], energy: float, priced: bool) -> Curve:
        """The curve through (count, damage), ascending."""
        return cls([keep for keep, _ in points], [damage for _, damage in points], energy, priced)

    def at(self, keep: float) -> float:
        """The damage with `keep` entries, by interpolation of its logarithm.

        In the last piece, where the damage falls to 0, the slope of the piece before continues, below a straight line.
        """
        keeps, damages = self.keeps, self.damages
        if keep >= keeps[-1]:
            return damages[-1]
        if len(keeps) == 1:
            return self.energy + keep / keeps[0] * (damages[0] - self.energy)
        index = next((i for i in range(1, len(keeps)) if keep <= keeps[i]), len(keeps) - 1)
        share = (keep - keeps[index - 1]) / (keeps[index] - keeps[index - 1])
        low, high = damages[index - 1], damages[index]
        if min(low, high) <= 0:
            straight = max(0.0, low + share * (high - low))
            if index < 2 or not 0 < low < damages[index - 2]:
                return straight
            # A straight line would overestimate the damage of small layers, which are cheap to keep almost dense.
            fall = (math.log(low) - math.log(damages[index - 2])) / (keeps[index - 1] - keeps[index - 2])
            return min(straight, low * math.exp(fall * (keep - keeps[index - 1])))
        return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))

    def times(self, factor: float) -> Curve:
        """The curve with all damages multiplied by a factor."""
        return replace(self, damages=[factor * damage for damage in self.damages], energy=factor * self.energy)


def under_pattern(allocation: Allocation, pattern: Pattern) -> Allocation:
    """The allocation for a pattern: "auto" becomes "uniform" if the pattern fixes the count of every layer.

    Bits and units are divided by damages, without a search.

    Raises:
        PatternError: the pattern fixes every count, and the criterion is not "auto" or "uniform"; or a search is to
            divide bits or units.
        ProblemError: bounds, `least` or `most` are given, although no zeros are divided.
    """
    bounded = bool(allocation.bounds) or allocation.least > 0 or allocation.most is not None
    no_zeros = isinstance(pattern, (Rate, Budget, Structured))
    fixed = not no_zeros and global_sparsity(pattern) is None
    if no_zeros and allocation.criterion == "search":
        raise PatternError(f'A search divides zeros alone, not {pattern}; use "fisher" or "uniform".')
    if fixed and allocation.criterion not in ("auto", "uniform"):
        raise PatternError(
            f'The pattern {pattern} fixes the count in every layer, so there is nothing to allocate; use "uniform" '
            "or Unstructured(sparsity)."
        )
    if bounded and (no_zeros or fixed or allocation.criterion == "uniform"):
        raise ProblemError(
            "Bounds of an allocation have no effect if no zeros are divided among the layers: choose another "
            "criterion, and a pattern that leaves the counts of layers open."
        )
    if no_zeros and allocation.criterion == "auto":
        return replace(allocation, criterion="fisher")
    return replace(allocation, criterion="uniform") if fixed else allocation


def divides(recipe: Recipe, pattern: Pattern) -> bool:
    """True if a run measures what zeros, bits or units of the layers cost, to divide them."""
    return under_pattern(recipe.division, pattern).criterion != "uniform"


def keep_ranges(allocation: Allocation, layers: Sequence[Layer], sparsity: float) -> dict[Layer, tuple[int, int]]:
    """The least and the most entries that each layer may keep under an allocation.

    Args:
        allocation: `least`, `most` and `bounds`.
        layers: the layers to prune.
        sparsity: of the whole model.

    Raises:
        LayerSelectionError: a name pattern of `bounds` matches no layer.
        ProblemError: the least sparsity of a layer is above its most.
    """
    usual = allocation.least, 1 - (1 - sparsity) / 8 if allocation.most is None else allocation.most
    sparsities = {layer.name: usual for layer in layers}
    for pattern, ends in allocation.bounds.items():
        sparsities |= dict.fromkeys(matching(layers, pattern, "allocation bounds"), ends)
    ranges = {}
    for layer in layers:
        least, most = sparsities[layer.name]
        if least > most:
            raise ProblemError(f"Layer {layer.name!r} is to have at least {least:g} and at most {most:g} zeros.")
        # The default bound rounds down (possibly to no weight); an explicit bound rounds up.
        fewest = layer.weights * (1 - most)
        fewest = int(fewest + 1e-9) if (least, most) == usual and allocation.most is None else math.ceil(fewest - 1e-9)
        # Equal bounds may enclose no whole number; then the count just above them is meant.
        ranges[layer] = fewest, max(math.floor(layer.weights * (1 - least) + 1e-9), fewest)
    return ranges


def measured_densities(sparsity: float) -> list[float]:
    """The densities at which each layer is measured for a sparsity of the whole model, ascending."""
    return sorted({min(level * (1 - sparsity), _DENSEST) for level in LEVELS})


def global_sparsity(pattern: Pattern) -> float | None:
    """The sparsity of the whole model if the pattern leaves the counts of layers open, otherwise None."""
    entries = entries_of(pattern)
    if isinstance(pattern, (Grid, Rate)) or not isinstance(entries, Unstructured) or entries.per != "layer":
        return None
    return entries.sparsity


def within_support(
    curves: dict[Layer, Curve], ranges: dict[Layer, tuple[int, int]], total: int
) -> dict[Layer, tuple[int, int]]:
    """Limit the ranges to the nonzero entries of each layer; no limit if there are fewer than `total` nonzero entries.

    Args:
        curves: curve of each layer; its last count is the number of nonzero entries.
        ranges: least and greatest count of each layer.
        total: number of entries to keep in all layers.
    """
    narrowed = {
        layer: (fewest, max(fewest, min(most, curves[layer].keeps[-1]))) for layer, (fewest, most) in ranges.items()
    }
    return narrowed if sum(most for _, most in narrowed.values()) >= total else ranges


def optimal_counts(effects: dict[Layer, Curve], total: int, ranges: dict[Layer, tuple[int, int]]) -> dict[Layer, int]:
    """Counts that minimise sum_l u_l(k_l) with sum_l k_l = total; exact for the lower convex envelopes of the curves.

    On convex curves it is optimal to take pieces in the order of their slopes, the steepest first. The last piece is
    taken in part, which gives the exact total.

    Args:
        effects: u_l of every layer.
        total: number of kept entries in all layers.
        ranges: the least and the most count of every layer.

    Raises:
        PatternError: the bounds do not allow the total.
    """
    _require_within(ranges, total)
    counts = {layer: ends[0] for layer, ends in ranges.items()}
    remaining = total - sum(counts.values())
    pieces: list[tuple[float, int, int, Layer, list[tuple[int, float]]]] = []
    for order, layer in enumerate(effects):
        _push(pieces, order, 0, layer, _lower_envelope(effects[layer], ranges[layer]))
    while remaining > 0:
        _, order, position, layer, hull = heapq.heappop(pieces)
        taken = min(remaining, hull[position + 1][0] - hull[position][0])
        counts[layer] += taken
        remaining -= taken
        _push(pieces, order, position + 1, layer, hull)
    assert sum(counts.values()) == total
    return counts


def total_kept(layers: Sequence[Layer], sparsity: float) -> int:
    """The number of entries that the layers keep together at a global sparsity."""
    return keep_count(sum(layer.weights for layer in layers), sparsity)


def require_room(allocation: Allocation, pattern: Pattern, layers: Sequence[Layer]) -> None:
    """Raise unless the bounds of an allocation allow the sparsity of the pattern.

    Raises:
        PatternError: the bounds keep too many or too few entries.
        LayerSelectionError, ProblemError: bounds match no layer, or contradict each other.
    """
    sparsity = global_sparsity(pattern)
    if sparsity is not None and allocation.criterion != "uniform":
        _require_within(keep_ranges(allocation, layers, sparsity), total_kept(layers, sparsity))


def _require_within(ranges: dict[Layer, tuple[int, int]], total: int) -> None:
    fewest, most = (sum(ends[side] for ends in ranges.values()) for side in (0, 1))
    if not fewest <= total <= most:
        raise PatternError(f"The bounds of the layers keep {fewest} to {most} entries, {total} were asked; widen them.")


def _push(
    pieces: list[tuple[float, int, int, Layer, list[tuple[int, float]]]],
    order: int,
    position: int,
    layer: Layer,
    hull: list[tuple[int, float]],
) -> None:
    """Add the piece of an envelope that starts at `position` to the heap, by its slope; `order` breaks ties."""
    if position + 1 < len(hull):
        (low, above), (high, below) = hull[position], hull[position + 1]
        heapq.heappush(pieces, (-(above - below) / (high - low), order, position, layer, hull))


def _lower_envelope(curve: Curve, ends: tuple[int, int]) -> list[tuple[int, float]]:
    """Corners (count, error) of the lower convex envelope of a curve within its range."""
    low, high = ends
    counts = sorted({low + round((high - low) * step / _STEPS) for step in range(_STEPS + 1)})
    hull: list[tuple[int, float]] = []
    for point in ((count, curve.at(count)) for count in counts):
        while len(hull) > 1 and _above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _above(first: tuple[int, float], middle: tuple[int, float], last: tuple[int, float]) -> bool:
    """True if the middle point lies on or above the line between the others."""
    return (middle[1] - first[1]) * (last[0] - first[0]) >= (last[1] - first[1]) * (middle[0] - first[0])
