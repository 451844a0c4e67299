"""All that can be chosen about a run, and the recipes: named sets of choices."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from types import NoneType
from typing import Any, Literal

from iobs.errors import ProblemError
from iobs.prune.allocation import Allocation, as_allocation
from iobs.prune.steps import GradientStep
from iobs.solvers import Budget, Refinement, Solver, require_known


@dataclass(frozen=True)
class Settings:
    """How a network is pruned; `iobs.prune` documents every field."""

    solver: str | Solver = "admm"
    budget: Budget = "default"
    refine: str | Refinement | None = None
    damping: float = 0.01
    rounds: int = 1
    schedule: Literal["constant", "cubic", "auto"] = "constant"
    step: GradientStep | None = None
    polish: GradientStep | None = None
    allocation: str | Allocation = "uniform"
    target: Literal["current", "dense", "network"] = "current"
    inputs: Literal["pruned", "dense"] = "pruned"
    data: Literal["fixed", "fresh"] = "fixed"
    batch_norm: Literal["keep", "update"] = "keep"
    holdout: float = 0.1
    depthwise: bool = False
    keep_zeros: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, kind, what in _NUMBERS:
            if not isinstance(getattr(self, name), kind):
                raise ProblemError(f"{name} must be a {what}, got {getattr(self, name)!r}.")
        if self.rounds < 1:
            raise ProblemError(f"rounds must be a whole number of at least 1, got {self.rounds}.")
        if self.schedule == "cubic" and self.rounds == 2:
            raise ProblemError('schedule="cubic" needs three rounds or more: the first is a look ahead.')
        for name in ("step", "polish"):
            if not isinstance(getattr(self, name), (GradientStep, NoneType)):
                raise ProblemError(f"{name} must be a GradientStep, or False for none; got {getattr(self, name)!r}.")
        if not 0 <= self.damping < math.inf:
            raise ProblemError(f"damping must not be negative or infinite, got {self.damping}; 0.01 is usual.")
        if not 0 <= self.holdout < 1:
            raise ProblemError(
                f"holdout must lie in [0, 1), got {self.holdout}; 0.1 keeps a tenth of the samples aside."
            )
        if self.target == "network" and self.inputs == "dense":
            raise ProblemError(
                'target="network" imitates outputs on the pruned network\'s inputs; with inputs="dense" use "current".'
            )
        require_known(self.solver, self.refine, self.budget)
        as_allocation(self.allocation)
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                choices = ", ".join(f'"{choice}"' for choice in allowed)
                raise ProblemError(f"{name} must be one of {choices}; got {value!r}.")

    def summary(self, describe: Callable[[Any], str] = repr) -> dict[str, Any]:
        """The settings as plain values, for reports; what is none is described."""

        def plain(value: Any) -> Any:
            return value if isinstance(value, (str, int, float, bool, NoneType)) else describe(value)

        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if isinstance(value, Allocation) and value == Allocation(value.criterion):
                values[name] = value.criterion
            elif isinstance(value, (GradientStep, Allocation)):
                values[name] = {key: plain(entry) for key, entry in vars(value).items()}
            else:
                values[name] = plain(value)
        return values


_NUMBERS = (
    ("rounds", Integral, "whole number"),
    ("seed", Integral, "whole number"),
    ("damping", Real, "number"),
    ("holdout", Real, "number"),
)
_CHOICES: dict[str, tuple[str, ...]] = {
    "schedule": ("constant", "cubic", "auto"),
    "target": ("current", "dense", "network"),
    "inputs": ("pruned", "dense"),
    "data": ("fixed", "fresh"),
    "batch_norm": ("keep", "update"),
}

# "paper" is Algorithm 2 to the letter. "fast" is the best single projection. "best" grows the sparsity over rounds of
# steps on the KL divergence to the dense model and polishes on the final support, where the first projection does
# damage; what is "auto" it takes from the calibration data (LOG.md has the measurements).
_TEACHER = GradientStep(lr="auto", optimizer="auto", steps=25, loss="kl", batch_size="auto", augment="auto")
RECIPES: dict[str, dict[str, Any]] = {
    "fast": {"solver": "admm", "rounds": 1, "target": "dense", "allocation": Allocation("auto", generations=0)},
    "paper": {
        "solver": "sparsegpt",
        "rounds": 10,
        "step": GradientStep(lr=0.01, optimizer="sgd", steps=1, loss="task"),
    },
    "best": {
        "solver": "admm",
        "rounds": 5,
        "schedule": "auto",
        "target": "network",
        "allocation": "auto",
        "step": replace(_TEACHER, support="fixed", decay=True),
        "polish": replace(_TEACHER, steps=600, most_steps=4800, parameters="all", decay=True),
    },
}


def resolve(recipe: str | None, given: dict[str, Any]) -> Settings:
    """Settings from a recipe and the arguments given explicitly, which override it; False is no step, or no polish.

    Raises:
        ProblemError: an unknown recipe or an impossible setting.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if recipe is None and given.get("rounds", 1) > 1 and "step" not in given:
        recipe = "best"
    if recipe is not None and recipe not in RECIPES:
        raise ProblemError(f"There is no recipe {recipe!r}; choose one of {', '.join(sorted(RECIPES))}.")
    settings = replace(Settings(), **({} if recipe is None else RECIPES[recipe]))
    taken_away: dict[str, Any] = {name: None for name in ("step", "polish") if given.get(name) is False}
    settings = replace(settings, **{**given, **taken_away})
    if given.get("schedule") == "cubic" and settings.rounds == 1:
        raise ProblemError('schedule="cubic" grows over rounds, and there is one; give three or more.')
    if isinstance(given.get("step"), GradientStep) and settings.rounds == 1:
        raise ProblemError("A step lies between two rounds: give rounds=, or polish= for steps after the projection.")
    return settings
