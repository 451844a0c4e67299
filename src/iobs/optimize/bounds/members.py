"""The result of `rashomon_set`: the models, and how important each variable is over all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from iobs.errors import ProblemError
from iobs.optimize.objectives.design import Array, Indices


@dataclass(frozen=True)
class Member:
    """A model of a Rashomon set.

    Attributes:
        support: sorted coordinates (k,), forced ones included.
        coefficients: of the support (k,).
        intercept: the constant; 0 if the objective has none.
        loss: f of the fit on the support.
        increases: rise of f if one coordinate of the support is left out and the others are fitted again (k,).
    """

    support: Indices
    coefficients: Array
    intercept: float
    loss: float
    increases: Array


@dataclass(frozen=True)
class Importance:
    """The importance of one variable over a Rashomon set; all rises are relative to the best loss.

    Attributes:
        feature: index of the variable.
        presence: whether "all", "some" or "none" of the members use the variable.
        share: share of the members that use it.
        least: smallest rise of a member's loss if the variable is left out and the others are fitted again. It is 0 if
            a member does without the variable.
        most: largest such rise; 0 if no member uses it.
        without: rise from the best loss to the best member without the variable. It is infinite if there is no such
            member. In a complete set the rise is then above the gap.
    """

    feature: int
    presence: Literal["all", "some", "none"]
    share: float
    least: float
    most: float
    without: float


@dataclass(frozen=True)
class RashomonSet:
    """The result of `iobs.rashomon_set`; iterates over its members, and prints as a table.

    Attributes:
        members: the models, best first; equal losses by ascending indices.
        dimension: number of variables to choose from.
        best: the lowest loss f*; proved to be the lowest possible if the set is complete.
        gap: the relative gap that was asked for.
        complete: whether every support within the gap is a member, by proof.
        complete_below: every support with a loss below this value is a member, whether the set is complete or not.
        nodes: number of nodes of the search tree that were visited.
        seconds: wall time.
        reason: why the set may be incomplete, in words; empty if it is complete.
    """

    members: tuple[Member, ...] = field(repr=False)
    dimension: int
    best: float
    gap: float
    complete: bool
    complete_below: float
    nodes: int
    seconds: float
    reason: str

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members)

    @property
    def message(self) -> str:
        """The result in one sentence."""
        count = f"{len(self):,} model{'' if len(self) == 1 else 's'} within {self.gap:.4g} of the best loss"
        if self.complete:
            return f"{count}; proved complete ({self.nodes:,} nodes, {self.seconds:.2f} s)"
        proved = self._relative(self.complete_below)
        known = f"complete up to {proved:.3g} of the best known loss" if proved > 0 else "nothing is proved"
        return f"{count} found; NOT complete, {self.reason}: {known} ({self.nodes:,} nodes, {self.seconds:.2f} s)"

    def importance(self) -> list[Importance]:
        """The importance of every variable, those that most members use first."""
        count = len(self)
        uses, most = np.zeros(self.dimension, np.int64), np.zeros(self.dimension)
        least, without = np.full(self.dimension, np.inf), np.full(self.dimension, np.inf)
        for member in self.members:
            used = member.support[member.support < self.dimension]
            rises = member.increases[: used.size] / self._scale
            uses[used] += 1
            most[used] = np.maximum(most[used], rises)
            least[used] = np.minimum(least[used], rises)
            absent = np.ones(self.dimension, dtype=np.bool_)
            absent[used] = False
            without[absent] = np.minimum(without[absent], max(0.0, self._relative(member.loss)))
        least[uses < count] = 0.0
        order = np.lexsort((np.arange(self.dimension), -most, -uses))
        return [
            Importance(
                int(j),
                "all" if uses[j] == count else "some" if uses[j] else "none",
                float(uses[j] / max(count, 1)),
                float(least[j]),
                float(most[j]),
                float(without[j]),
            )
            for j in order
        ]

    def table(self, names: Sequence[str] | None = None) -> str:
        """The members' variables and their importance, as text.

        Args:
            names: of the variables (dimension,); x0, x1, ... if not given.

        Raises:
            ProblemError: the number of names is not the number of variables.
        """
        names = [f"x{j}" for j in range(self.dimension)] if names is None else list(names)
        if len(names) != self.dimension:
            raise ProblemError(f"Give {self.dimension} names, one per variable, got {len(names)}.")
        shown = [row for row in self.importance() if row.presence != "none"]
        width = max([len(names[row.feature]) for row in shown] + [8])
        lines = [self.message, f"{'variable':<{width}}  {'models':>7}  {'loss if left out':>19}  {'best without':>12}"]
        for row in shown:
            interval = f"+{row.least:.2%} to +{row.most:.2%}"
            other = f"+{row.without:.2%}" if math.isfinite(row.without) else f"> {self.gap:.2%}"
            other = other if self.complete or math.isfinite(row.without) else "not found"
            lines.append(f"{names[row.feature]:<{width}}  {row.share:>7.1%}  {interval:>19}  {other:>12}")
        unused = self.dimension - len(shown)
        return "\n".join([*lines, f"{unused} of {self.dimension} variables are in no model"])

    def __str__(self) -> str:
        return self.table()

    @property
    def _scale(self) -> float:
        return max(abs(self.best), 1e-300)

    def _relative(self, loss: float) -> float:
        return (loss - self.best) / self._scale
