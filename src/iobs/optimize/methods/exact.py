"""method="exact": the best known search, then branch and bound until the best support is proved."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from iobs.optimize.bounds.branch_and_bound import certify
from iobs.optimize.methods.base import Method, State
from iobs.optimize.methods.best_known import BestKnown
from iobs.optimize.objectives.design import Array
from iobs.optimize.problem import Problem
from iobs.optimize.refit.newton import Fit
from iobs.optimize.refit.within import Bounds
from iobs.optimize.search.auto import GLOBAL
from iobs.optimize.search.pursuits import support_of


@dataclass(frozen=True)
class Exact(Method):
    """The stages of the best known search, one per step, and a proof as the last step.

    An interruption (Ctrl+C) during the proof ends it; the message then has the gap.

    Attributes:
        gap: relative gap at which the proof ends.
        seconds: time limit of the proof.
        bounds: of all coordinates; None for none.
    """

    gap: float = 0.0
    seconds: float = math.inf
    bounds: Bounds | None = None

    @property
    def _search(self) -> BestKnown:
        return BestKnown(bounds=self.bounds)

    def begin(self, problem: Problem, theta: Array | None) -> State:
        """Start of the best known search."""
        return self._search.begin(problem, theta)

    def step(self, problem: Problem, state: State) -> State:
        """Run the next stage, or the proof if there is none."""
        new = self._search.step(problem, state)
        if not new.done or new.message == GLOBAL:
            return new
        fit = Fit(support_of(problem, new.theta), new.theta, new.value, new.gradient)
        features = problem.objective.split(new.theta)[0].size
        lower = None if self.bounds is None else self.bounds.lower[:features]
        upper = None if self.bounds is None else self.bounds.upper[:features]
        proof = certify(
            problem.objective, problem.k, fit=fit, gap=self.gap, seconds=self.seconds, lower=lower, upper=upper
        )
        best = proof.fit
        return replace(new, theta=best.theta, value=best.value, gradient=best.gradient, message=proof.message)
