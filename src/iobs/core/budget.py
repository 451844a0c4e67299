"""A budget of bits for a whole network."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

from iobs.core.grids import stored_bits
from iobs.core.partition import Partition
from iobs.core.patterns import Grid, Pattern, Unstructured
from iobs.errors import PatternError, is_a

BITS = (2, 3, 4, 8)
_WHOLE = 16  # bits of a weight without a grid
MOST = 0.9  # highest sparsity of a layer


@dataclass(frozen=True)
class Budget:
    """Bits of each weight, on average over the pruned layers; a run chooses sparsity and bits of every layer.

    A layer has 2, 3, 4 or 8 bits and 0 to 90 % zeros. The bits of the values, of masks (one bit for each entry of a
    layer with zeros) and of scales (16 bits each) count. `iobs.prune` takes a budget in place of a pattern.

    Args:
        bits_per_weight: bits of all pruned layers together, divided by their number of entries.
        group: neighbouring columns that share a scale.

    Raises:
        PatternError: an argument is impossible.
    """

    bits_per_weight: float
    group: int = 128

    def __post_init__(self) -> None:
        if not is_a(Real, self.bits_per_weight) or not 0 < self.bits_per_weight < math.inf:
            raise PatternError(f"bits_per_weight must be a positive number such as 3.0, got {self.bits_per_weight!r}.")
        if self.bits_per_weight > _WHOLE:
            raise PatternError(
                f"A budget of {self.bits_per_weight:g} bits a weight is more than weights of 16 bits have; a layer "
                f"takes at most {max(BITS)} bits and its scales. Give less, such as 3.0."
            )
        if not is_a(Integral, self.group) or self.group < 1:
            raise PatternError(f"group must be a whole number of at least 1, got {self.group!r}; 128 is usual.")

    def groups(self, shape: tuple[int, int]) -> Partition:
        """One group that keeps all entries: before its division a budget asks no layer for zeros."""
        return Grid(8, self.group).groups(shape)

    def choice(self, bits: int, keep: int, shape: tuple[int, int]) -> Pattern:
        """The pattern of a layer with some bits and a number of kept entries."""
        grid = Grid(bits, self.group)
        return grid if keep == shape[0] * shape[1] else Unstructured(keep=keep) & grid

    def cost(self, bits: int, keep: int, shape: tuple[int, int]) -> int:
        """Bits of a layer with this choice."""
        total = stored_bits(self.choice(bits, keep, shape), shape)
        assert total is not None
        return total

    def __str__(self) -> str:
        return f"{self.bits_per_weight:g} bits a weight"
