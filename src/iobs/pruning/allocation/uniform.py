"""Uniform plans under a budget of bits: the same bits, and the same share of zeros, in every layer."""

from __future__ import annotations

import math
from collections.abc import Mapping

from iobs.core.grids import BITS, Budget
from iobs.pruning.network.layers import Layer

Choice = tuple[int, int]  # bits, and number of kept entries


def uniform_plans(
    budget: Budget, shapes: Mapping[Layer, tuple[int, int]], most: Mapping[int, float]
) -> dict[str, dict[Layer, Choice]]:
    """Plans by their text form: the largest bits without zeros, and for all bits the fewest zeros, within the budget.

    Args:
        budget: the bits.
        shapes: of the layers.
        most: largest sparsity by bits.
    """
    sizes = {layer: math.prod(shape) for layer, shape in shapes.items()}
    total = budget.bits_per_weight * sum(sizes.values()) + 1e-6
    plans: dict[str, dict[Layer, Choice]] = {}
    for bits in sorted(BITS):
        dense = sum(budget.cost(bits, sizes[layer], shape) for layer, shape in shapes.items())
        if dense <= total:
            plans = {f"{bits} bits": {layer: (bits, size) for layer, size in sizes.items()}}
            continue
        empty = sum(budget.cost(bits, 0, shape) for shape in shapes.values())
        kept = (total - empty) / (bits * sum(sizes.values()))
        if 1 - most[bits] <= kept < 1:
            keeps = {layer: max(1, math.floor(kept * size)) for layer, size in sizes.items()}
            name = f"{1 - kept:.0%} zeros and {bits} bits"
            plans[name] = {layer: (bits, keep) for layer, keep in keeps.items()}
    return plans
