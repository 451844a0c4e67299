"""How a network's sparsity is spread over its layers: error curves, weighed by their effect, solved to a global count.

Every layer l has a curve E_l(k), its output error when k weights are kept, and from it an effect u_l(k), what that does
to the network. The allocation minimises sum_l u_l(k_l) subject to sum_l k_l = K, exactly K, within bounds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from iobs.core.patterns import Pattern, Unstructured, keep_count
from iobs.errors import PatternError, ProblemError
from iobs.prune.layers import Layer, matching

Criterion = Literal["auto", "uniform", "error", "fisher", "kl", "evolve"]
CRITERIA: tuple[Criterion, ...] = get_args(Criterion)

_STEPS = 400  # points that a curve is read off at; between them the layers trade single weights


@dataclass(frozen=True)
class Allocation:
    """How sparsity is spread over layers.

    Args:
        criterion: "uniform": every layer the same. Others weigh every layer's error curve: "error" by the inverse of
            its output's energy; "fisher" by the mean squared gradient of the log-likelihood with respect to its output;
            "kl" by the divergences measured when the layer alone is pruned; "evolve" starts from that and moves weights
            between layers as long as the divergence of the whole network falls. "auto": "evolve" where the Grams of
            all layers are small enough to keep and there are samples enough to judge by, else "kl"; "uniform" where
            the pattern leaves nothing to allocate.
        least: lowest sparsity of any layer.
        most: highest sparsity of any layer; None lets a layer keep an eighth of what the mean layer keeps.
        bounds: (least, most) sparsity by name pattern of layers, shell style or "re:..."; later ones win.
        generations: trials of "evolve"; with 0 of them "auto" does not search.

    Raises:
        ProblemError: an unknown criterion or bounds outside [0, 1).
    """

    criterion: Criterion = "kl"
    least: float = 0.0
    most: float | None = None
    bounds: dict[str, tuple[float, float]] = field(default_factory=dict)
    generations: int = 100

    def __post_init__(self) -> None:
        if self.criterion not in CRITERIA:
            choices = ", ".join(f'"{name}"' for name in CRITERIA)
            raise ProblemError(f"There is no allocation {self.criterion!r}; choose one of {choices}.")
        ranges = [(self.least, 0.0 if self.most is None else self.most), *self.bounds.values()]
        if not all(0 <= end < 1 for ends in ranges for end in ends):
            raise ProblemError(f"Bounds of an allocation are sparsities in [0, 1), got {ranges}.")

    @property
    def by_damage(self) -> bool:
        """Whether layers are weighed by what the network loses when each alone is pruned."""
        return self.criterion in ("kl", "evolve")

    def under(self, pattern: Pattern) -> Allocation:
        """What it is under a pattern: "auto" is "uniform" where that fixes the count of every layer.

        Raises:
            PatternError: another criterion where every count is fixed.
            ProblemError: bounds, `least` or `most` where every layer gets the same.
        """
        fixed = global_sparsity(pattern) is None
        if fixed and self.criterion not in ("auto", "uniform"):
            raise PatternError(
                f'The pattern {pattern} fixes the count in every layer, so there is nothing to allocate; use "uniform" '
                "or Unstructured(sparsity)."
            )
        bounded = bool(self.bounds) or self.least > 0 or self.most is not None
        if bounded and (fixed or self.criterion == "uniform"):
            raise ProblemError(
                "Bounds of an allocation say nothing where every layer gets the same: choose another criterion, and a "
                "pattern that leaves the counts of layers open."
            )
        return replace(self, criterion="uniform") if fixed else self

    def ranges(self, layers: Sequence[Layer], sparsity: float) -> dict[Layer, tuple[int, int]]:
        """Fewest and most entries that each layer may keep, when the network is to have a sparsity.

        Raises:
            LayerSelectionError: a name pattern of `bounds` matches no layer.
            ProblemError: a layer's least sparsity is above its most.
        """
        usual = self.least, 1 - (1 - sparsity) / 8 if self.most is None else self.most
        sparsities = {layer.name: usual for layer in layers}
        for pattern, ends in self.bounds.items():
            sparsities |= dict.fromkeys(matching(layers, pattern, "allocation bounds"), ends)
        found = {}
        for layer in layers:
            least, most = sparsities[layer.name]
            if least > most:
                raise ProblemError(f"Layer {layer.name!r} is to have at least {least:g} and at most {most:g} zeros.")
            # An eighth of hardly any weight may be none; what was asked for is kept to.
            fewest = layer.weights * (1 - most)
            fewest = int(fewest + 1e-9) if (least, most) == usual and self.most is None else math.ceil(fewest - 1e-9)
            # Equal ends may hold no whole count: the nearest is meant.
            found[layer] = fewest, max(math.floor(layer.weights * (1 - least) + 1e-9), fewest)
        return found


@dataclass(frozen=True)
class Curve:
    """Output error of one layer, or its effect on the network, at a few counts of kept entries.

    Args:
        keeps: ascending counts; the last is all entries that are not zero, where the error is 0.
        errors: squared output error per input row, or effect; float, falling.
        energy: the same where the whole output is lost: squared output per input row of the dense layer.
    """

    keeps: list[int]
    errors: list[float]
    energy: float

    def at(self, keep: float) -> float:
        """The error in between: its logarithm is interpolated; in the last piece it falls on, or straight to zero."""
        keeps, errors = self.keeps, self.errors
        if keep >= keeps[-1]:
            return errors[-1]
        if len(keeps) == 1:
            return self.energy + keep / keeps[0] * (errors[0] - self.energy)
        index = next((i for i in range(1, len(keeps)) if keep <= keeps[i]), len(keeps) - 1)
        share = (keep - keeps[index - 1]) / (keeps[index] - keeps[index - 1])
        low, high = errors[index - 1], errors[index]
        if min(low, high) <= 0:
            straight = max(0.0, low + share * (high - low))
            if index < 2 or not 0 < low < errors[index - 2]:
                return straight
            # The fall of the piece before goes on: a layer that is small is cheap to keep, and should be seen to be.
            fall = (math.log(low) - math.log(errors[index - 2])) / (keeps[index - 1] - keeps[index - 2])
            return min(straight, low * math.exp(fall * (keep - keeps[index - 1])))
        return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))

    def times(self, weight: float) -> Curve:
        """Effects in proportion to the errors."""
        return Curve(self.keeps, [weight * error for error in self.errors], weight * self.energy)


def as_allocation(choice: str | Allocation) -> Allocation:
    """An allocation from its criterion's name."""
    return choice if isinstance(choice, Allocation) else Allocation(choice)  # type: ignore[arg-type]


def global_sparsity(pattern: Pattern) -> float | None:
    """The sparsity that a pattern asks of the network, where it leaves the count of every layer open; else None."""
    return pattern.sparsity if isinstance(pattern, Unstructured) and pattern.per == "layer" else None


def uniform(pattern: Pattern, layers: tuple[Layer, ...]) -> dict[Layer, Pattern]:
    """The same pattern everywhere."""
    return dict.fromkeys(layers, pattern)


def optimal_counts(effects: dict[Layer, Curve], total: int, ranges: dict[Layer, tuple[int, int]]) -> dict[Layer, int]:
    """Counts that minimise sum_l u_l(k_l) with sum_l k_l = total: exact for the curves' lower convex envelopes.

    On convex curves the steepest piece always comes first, so taking pieces in the order of their slopes is optimal;
    the last piece is taken in part, which gives the exact total.

    Args:
        effects: every layer's u_l.
        total: how many entries are kept in all.
        ranges: fewest and most for every layer.

    Raises:
        PatternError: the bounds do not allow the total.
    """
    _require_within(ranges, total)
    counts = {layer: ends[0] for layer, ends in ranges.items()}
    left = total - sum(counts.values())
    pieces: list[tuple[float, int, int, Layer, list[tuple[int, float]]]] = []
    for order, layer in enumerate(effects):
        _push(pieces, order, 0, layer, _lower_envelope(effects[layer], ranges[layer]))
    while left > 0:
        _, order, position, layer, hull = heapq.heappop(pieces)
        taken = min(left, hull[position + 1][0] - hull[position][0])
        counts[layer] += taken
        left -= taken
        _push(pieces, order, position + 1, layer, hull)
    assert sum(counts.values()) == total
    return counts


def total_kept(layers: Sequence[Layer], sparsity: float) -> int:
    """How many entries a network keeps at a global sparsity."""
    return keep_count(sum(layer.weights for layer in layers), sparsity)


def require_room(allocation: Allocation, pattern: Pattern, layers: Sequence[Layer]) -> None:
    """The bounds allow the pattern's sparsity, or there are none.

    Raises:
        PatternError: they keep too many or too few.
        LayerSelectionError, ProblemError: bounds that match no layer, or cannot be met.
    """
    sparsity = global_sparsity(pattern)
    if sparsity is not None and allocation.criterion != "uniform":
        _require_within(allocation.ranges(layers, sparsity), total_kept(layers, sparsity))


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
    """Whether the middle point does not lie below the line between the others."""
    return (middle[1] - first[1]) * (last[0] - first[0]) >= (last[1] - first[1]) * (middle[0] - first[0])
