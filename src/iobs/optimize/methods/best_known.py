"""method="auto": the stages of `search.auto`, one per step; within bounds those of `search.bounded`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from iobs.optimize.methods.base import Method, State
from iobs.optimize.objectives.design import Array
from iobs.optimize.problem import Problem
from iobs.optimize.refit.newton import refit
from iobs.optimize.refit.within import Bounds
from iobs.optimize.search import auto, pursuits
from iobs.optimize.search.bounded import ALL_TRIED, SOME_TRIED, BoundedSearch, stages


@dataclass(frozen=True)
class BestKnown(Method):
    """method="auto": the stages of `search.auto`, one per step.

    Attributes:
        kicks: largest number of random restarts around the best support.
    """

    kicks: int = 18

    def begin(self, problem: Problem, theta: Array | None) -> State:
        """Start from the fit of the forced coordinates; `search.auto` takes the given theta as its first stage."""
        empty = pursuits.start(problem)
        stages: Iterator[auto.Stage] = auto.stages(problem, theta, kicks=self.kicks, empty=empty)
        return State(empty.theta, empty.value, empty.gradient, stages, busy=True)

    def step(self, problem: Problem, state: State) -> State:
        """Run the next stage; done when there is none."""
        stage = next(state.memory, None)
        if stage is None:
            text = auto.LOCAL if problem.objective.quadratic else auto.LOCAL_MODEL
            if not pursuits.settled(problem, state.theta, state.gradient):
                text = auto.RUNAWAY
            return State(state.theta, state.value, state.gradient, state.memory, True, False, text)
        fit = stage.fit
        message = auto.GLOBAL if stage.optimal and problem.size else stage.name
        return State(fit.theta, fit.value, fit.gradient, state.memory, stage.optimal, True, message)


@dataclass(frozen=True)
class WithinBounds(Method):
    """The search within bounds.

    Attributes:
        bounds: of all coordinates.
    """

    bounds: Bounds

    def begin(self, problem: Problem, theta: Array | None) -> State:
        """Start from the fit of the forced coordinates; the given theta is the first stage."""
        empty = refit(problem.objective, problem.forced, bounds=self.bounds)
        return State(empty.theta, empty.value, empty.gradient, stages(problem, self.bounds, theta), busy=True)

    def step(self, problem: Problem, state: State) -> State:
        """Run the next stage; done when there is none."""
        stage = next(state.memory, None)
        if stage is None:
            text = ALL_TRIED if BoundedSearch(problem, self.bounds).tries_all else SOME_TRIED
            return State(state.theta, state.value, state.gradient, state.memory, True, False, text)
        fit = stage.fit
        return State(fit.theta, fit.value, fit.gradient, state.memory, stage.optimal, True, stage.name)
