"""`minimize(..., lower=, upper=)`: the stages of `search.bounded`, one per step."""

from __future__ import annotations

from dataclasses import dataclass

from iobs.optimize.methods.base import State
from iobs.optimize.objectives.design import Array
from iobs.optimize.problem import Problem
from iobs.optimize.refit.within import Bounds, refit_within
from iobs.optimize.search.bounded import ALL_TRIED, SOME_TRIED, BoundedSearch, stages


@dataclass(frozen=True)
class WithinBounds:
    """The search within bounds.

    Attributes:
        bounds: of all coordinates.
    """

    bounds: Bounds

    def begin(self, problem: Problem, theta: Array | None) -> State:
        """Start from the fit of the forced coordinates; the given theta is the first stage."""
        empty = refit_within(problem.objective, problem.forced, self.bounds)
        return State(empty.theta, empty.value, empty.gradient, stages(problem, self.bounds, theta), busy=True)

    def step(self, problem: Problem, state: State) -> State:
        """Run the next stage; done when there is none."""
        stage = next(state.memory, None)
        if stage is None:
            text = ALL_TRIED if BoundedSearch(problem, self.bounds).tries_all else SOME_TRIED
            return State(state.theta, state.value, state.gradient, state.memory, True, False, text)
        fit = stage.fit
        return State(fit.theta, fit.value, fit.gradient, state.memory, stage.optimal, True, stage.name)
