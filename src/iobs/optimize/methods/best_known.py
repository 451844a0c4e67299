"""method="auto": the stages of `search.auto` or, within bounds, of `search.bounded`, one per step; method="exact"."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from iobs.optimize.bounds.branch_and_bound import certify
from iobs.optimize.methods.base import Method, State
from iobs.optimize.objectives.design import Array
from iobs.optimize.problem import Problem
from iobs.optimize.refit.newton import Fit, refit
from iobs.optimize.refit.within import Bounds
from iobs.optimize.search import auto, bounded, pursuits
from iobs.optimize.search.saddles import is_convex


@dataclass(frozen=True)
class BestKnown(Method):
    """The stages of the best known search, one per step.

    Attributes:
        kicks: largest number of random restarts around the best support, without bounds.
        bounds: of all coordinates; None for the search without any.
    """

    kicks: int = 18
    bounds: Bounds | None = None

    def begin(self, problem: Problem, theta: Array | None) -> State:
        """Start from the fit of the forced coordinates; the given theta is the first stage of the search."""
        if self.bounds is None:
            empty = pursuits.start(problem)
            stages = auto.stages(problem, theta, kicks=self.kicks, empty=empty)
        else:
            empty = refit(problem.objective, problem.forced, bounds=self.bounds)
            stages = bounded.stages(problem, self.bounds, theta)
        return State(empty.theta, empty.value, empty.gradient, stages, busy=True)

    def step(self, problem: Problem, state: State) -> State:
        """Run the next stage; done when there is none."""
        stage = next(state.memory, None)
        if stage is None:
            text = self._optimality(problem, state)
            return State(state.theta, state.value, state.gradient, state.memory, True, False, text)
        fit = stage.fit
        vanishes = self.bounds is None and stage.optimal and problem.size
        message = (auto.GLOBAL if is_convex(problem) else auto.FLAT) if vanishes else stage.name
        return State(fit.theta, fit.value, fit.gradient, state.memory, stage.optimal, True, message)

    def _optimality(self, problem: Problem, state: State) -> str:
        """Sentence on what is known of the best fit once no stage is left."""
        if self.bounds is not None:
            tries_all = bounded.BoundedSearch(problem, self.bounds).tries_all
            return bounded.ALL_TRIED if tries_all else bounded.SOME_TRIED
        if not pursuits.settled(problem, state.theta, state.gradient):
            return auto.RUNAWAY
        return auto.LOCAL if problem.objective.quadratic else auto.LOCAL_MODEL


@dataclass(frozen=True)
class Exact(BestKnown):
    """The stages of the best known search, one per step, and a proof as the last step.

    An interruption (Ctrl+C) during the proof ends it; the message then has the gap.

    Attributes:
        checkpoint: file from which the proof goes on; as `iobs.certify`.
    """

    checkpoint: str | Path | None = None

    def step(self, problem: Problem, state: State) -> State:
        """Run the next stage, or the proof if there is none."""
        new = super().step(problem, state)
        if not new.done or new.message == auto.GLOBAL:
            return new
        fit = Fit(pursuits.support_of(problem, new.theta), new.theta, new.value, new.gradient)
        features = problem.objective.split(new.theta)[0].size
        lower = None if self.bounds is None else self.bounds.lower[:features]
        upper = None if self.bounds is None else self.bounds.upper[:features]
        proof = certify(
            problem.objective, problem.k, fit=fit, gap=0.0, seconds=math.inf, lower=lower, upper=upper,
            checkpoint=self.checkpoint,
        )  # fmt: skip
        best = proof.fit
        return replace(new, theta=best.theta, value=best.value, gradient=best.gradient, message=proof.message)
