"""A run that removes whole units: its request, and its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from iobs.core.structured import Structured
from iobs.pruning.recipe import Recipe


@dataclass(frozen=True)
class StructuredRequest:
    """Arguments of `iobs.prune` for a run that removes units; `iobs.prune` describes them."""

    pattern: Structured
    recipe: Recipe
    include: str | Sequence[str] | None = None
    ignore: str | Sequence[str] | None = None
    holdout: float = 0.1
    seed: int = 0
    checkpoint: str | Path | None = None


@dataclass(frozen=True)
class PlannedUnits:
    """Units of one site, or blocks or experts of one list.

    Attributes:
        name: of the site, as in the report.
        kind: "channels", "neurons", "heads", "blocks" or "experts".
        layers: paths of the layers that read the units; none of blocks and experts.
        count: number of units.
        kept: number that stays; None: the run chooses it.
        least: fewest that the run may keep.
    """

    name: str
    kind: str
    layers: tuple[str, ...]
    count: int
    kept: int | None
    least: int


@dataclass(frozen=True)
class PlannedCost:
    """One cost of the dense model, and what is left of it.

    Attributes:
        name: "macs" or "parameters".
        before: of the dense model.
        most: upper bound of what is left; None: known after the run.
        where: of which layers.
    """

    name: str
    before: float
    most: float | None
    where: str


@dataclass(frozen=True)
class UnitsPlan:
    """Plan of a run that removes units.

    A run chooses most widths by measurements. What is known before: the units, the cost of the dense model, and the
    share of the cost that is asked. With equal shares of all sites (`allocation="uniform"`) the widths are known too.

    Attributes:
        units: in the order of the forward pass.
        costs: of the dense model.
        notes: what the run would note, such as sites that keep all units.
    """

    units: tuple[PlannedUnits, ...]
    costs: tuple[PlannedCost, ...]
    notes: tuple[str, ...]
