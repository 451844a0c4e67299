"""The division of sparsity among the layers of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Literal, get_args

from iobs.errors import ProblemError, is_a

Criterion = Literal["auto", "uniform", "error", "fisher", "block", "kl", "evolve"]
CRITERIA: tuple[Criterion, ...] = get_args(Criterion)


@dataclass(frozen=True)
class Allocation:
    """Sparsity per layer under one global count.

    Args:
        criterion: "uniform": every layer has the same sparsity. The others weigh every layer's error curve. "error": by
            the inverse of its output's energy. "fisher": by the mean squared gradient of the log-likelihood with
            respect to its output. "block": by the error of its block's output when the layer alone is pruned, with one
            block in memory at a time. "kl": by the divergences measured when the layer alone is pruned. "evolve":
            starts from "kl" and moves weights between layers while the divergence of the whole network falls. "auto":
            "evolve" where all Grams fit into memory, enough samples can judge, and no steps of the whole network
            follow, block by block. Otherwise it is "kl". It is "uniform" where the pattern fixes the count of every
            layer, and "block" where one block is in memory at a time.
        least: lowest sparsity of any layer.
        most: highest sparsity of any layer; None lets a layer keep an eighth of what the mean layer keeps.
        bounds: (least, most) sparsity by name pattern of layers, shell style or "re:..."; the last match wins.
        generations: number of trials of "evolve"; with 0 "auto" does not search.

    Raises:
        ProblemError: an unknown criterion, or bounds outside [0, 1).
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
        if not isinstance(self.bounds, Mapping) or not all(_is_pair(ends) for ends in self.bounds.values()):
            raise ProblemError(f"bounds must map names of layers to (least, most), got {self.bounds!r}.")
        object.__setattr__(self, "bounds", {name: tuple(ends) for name, ends in self.bounds.items()})
        ranges = [(self.least, 0.0 if self.most is None else self.most), *self.bounds.values()]
        if not all(is_a(Real, end) and 0 <= end < 1 for ends in ranges for end in ends):
            raise ProblemError(f"Bounds of an allocation are sparsities in [0, 1), got {ranges}.")
        if not is_a(Integral, self.generations) or self.generations < 0:
            raise ProblemError(f"generations must be a whole number, not negative; got {self.generations!r}.")

    @property
    def by_damage(self) -> bool:
        """Check that layers are weighed by the loss of the network when each layer alone is pruned."""
        return self.criterion in ("kl", "evolve")

    @property
    def by_block(self) -> bool:
        """Check that one block in memory at a time is enough."""
        return self.criterion in ("uniform", "error", "block", "auto")


def _is_pair(ends: object) -> bool:
    return isinstance(ends, (tuple, list)) and len(ends) == 2


def as_allocation(choice: str | Allocation) -> Allocation:
    """The allocation with that criterion; an `Allocation` is returned unchanged.

    Raises:
        ProblemError: there is no such criterion.
    """
    return choice if isinstance(choice, Allocation) else Allocation(choice)  # type: ignore[arg-type]
