"""Repeated projections, and the checks that settings of recipes share."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Literal

from iobs.errors import ProblemError, is_a
from iobs.pruning.recipe.finetune import FineTune

Schedule = Literal["constant", "cubic", "auto"]


@dataclass(frozen=True)
class Rounds:
    """Repeated projections (Algorithm 2); one round is one-shot pruning.

    Args:
        count: number of projections. The best one on held-out samples is the result.
        schedule: sparsity of the rounds. "constant": the requested sparsity in every round. "cubic": the first round
            prunes to the requested sparsity, to measure the damage. Then the dense weights are restored, and the
            sparsity grows to the requested sparsity by a cubic curve. "auto": "cubic" if the first projection does
            damage, otherwise no further rounds.
        finetune: gradient steps between two projections; None: no steps.
        data: "fixed": every round uses all samples. "fresh": each round uses a disjoint part of the samples.

    Raises:
        ProblemError: a setting is outside its range.
    """

    count: int = 1
    schedule: Schedule = "constant"
    finetune: FineTune | None = None
    data: Literal["fixed", "fresh"] = "fixed"

    def __post_init__(self) -> None:
        if not is_a(Integral, self.count) or self.count < 1:
            raise ProblemError(f"rounds must be a whole number of at least 1, got {self.count!r}.")
        require_choice("schedule", self.schedule, ("constant", "cubic", "auto"))
        require_choice("data", self.data, ("fixed", "fresh"))
        require_finetune("rounds.finetune", self.finetune)
        if self.count == 1 and self.finetune is not None:
            raise ProblemError(
                "rounds.finetune lies between two rounds: give rounds.count=2 or more, or finetune= for steps after "
                "the projection."
            )
        if self.schedule == "cubic" and self.count < 3:
            raise ProblemError('schedule="cubic" needs three rounds or more: the first only measures the damage.')


def require_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Check a setting against its allowed values.

    Raises:
        ProblemError: the value is not allowed.
    """
    if value not in allowed:
        choices = ", ".join(f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in allowed)
        raise ProblemError(f"{name} must be one of {choices}; got {value!r}.")


def require_finetune(name: str, value: object) -> None:
    """Check that a setting is a `FineTune` or None.

    Raises:
        ProblemError: the value is neither.
    """
    if value is not None and not isinstance(value, FineTune):
        raise ProblemError(f"{name} must be a FineTune, or None for no steps; got {value!r}.")
