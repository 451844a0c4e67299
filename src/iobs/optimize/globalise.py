"""Sparse Newton methods that converge from any start: the damping is raised until f really falls.

    theta_{t+1} = argmin over the best known supports of  g^T (v - theta) + 1/2 (v - theta)^T (H + mu I) (v - theta)

With mu at least the Lipschitz constant of the gradient, the model lies above f and its minimiser is no worse than the
model's value at the (sparse) iterate, so some finite mu always gives descent: f falls monotonically and every limit
point is a fixed point of iterative hard thresholding with step 1 / (L + mu_max). sigma begins at zero and is quartered
by every success. Where undamped steps lower f, near a minimiser, the method is I-OBS itself with the theorem's
quadratic rate; where sigma stays positive, mu = sigma sqrt(norm(g)) gives order 3/2 and mu = sigma norm(step) order 2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from iobs.optimize.choices import BestSupport
from iobs.optimize.curvature import FullHessian, Model
from iobs.optimize.designs import Array
from iobs.optimize.methods import State, state_at
from iobs.optimize.models import ProductModel, QuadraticObjective
from iobs.optimize.problem import Problem
from iobs.optimize.refit import refit
from iobs.optimize.swap import Swapper

_TRIALS = 60


@dataclass(frozen=True)
class RegularisedNewton:
    """I-OBS with a damping that adapts (after Mishchenko 2023; Cartis, Gould and Toint 2011), over sparse vectors.

    Attributes:
        rule: mu = sigma sqrt(norm(g_Q)) ("gradient"), or sigma times the step it leads to ("cubic").
        choice: how a damped model is minimised; the exact swaps of `BestSupport` unless told otherwise.
        polish: once the iterates settle, look for true exchanges that lower f, so that the answer is 1-swap optimal.
    """

    rule: Literal["gradient", "cubic"] = "gradient"
    choice: BestSupport = field(default_factory=lambda: BestSupport(greedy_limit=0))
    polish: bool = True

    def begin(self, problem: Problem, theta: Array | None) -> State:
        """A dense start is truncated; memory: sigma, in units of the curvature there."""
        start = state_at(problem, None if theta is None else problem.truncate(theta))
        if not np.isfinite(start.value):
            start = _shrink_until_finite(problem, start)
        return State(start.theta, start.value, start.gradient, 0.0)

    def step(self, problem: Problem, state: State) -> State:
        """Raise sigma fourfold until f falls enough, quarter it after a success."""
        sigma = float(state.memory)
        model = FullHessian(0.0).model(problem, state.theta, state.gradient)
        unit = float(model.hessian_diagonal(state.theta).mean())
        size = self._size(state)
        for _ in range(_TRIALS):
            amount = sigma * size
            if not np.isfinite(amount):  # a size of zero: f is stationary on its support, and sigma without a unit
                break
            theta = self.choice(problem, _damped(model, state.theta, amount), problem.size, problem.candidates)
            if self.rule == "cubic":
                size = max(float(np.linalg.norm(theta - state.theta)), 1e-300)
            new = state_at(problem, theta, memory=sigma / 4)
            if _enough(state, new, amount):
                return new
            if not float(np.linalg.norm(theta - state.theta)) > 1e-15 * float(np.linalg.norm(state.theta)):
                break
            sigma = 4 * sigma if sigma > 0 else 1e-3 * unit / max(size, 1e-300)
        return self._settled(problem, state)

    def _size(self, state: State) -> float:
        inside = np.where(state.theta != 0, state.gradient, 0.0) if state.theta.any() else state.gradient
        return float(np.sqrt(np.linalg.norm(inside))) if self.rule == "gradient" else 1.0

    def _settled(self, problem: Problem, state: State) -> State:
        """No damping gives descent: the iterate is a fixed point; try true exchanges, then stop."""
        support = np.union1d(np.flatnonzero(state.theta), problem.forced).astype(np.int64)
        fit = refit(problem.objective, support, state.theta)
        if self.polish:
            fit = Swapper(problem).improve(fit)[0]
        if fit.value < state.value - 1e-12 * abs(state.value):
            return State(fit.theta, fit.value, fit.gradient, 0.0, False, True, "exchange")
        return State(state.theta, state.value, state.gradient, 0.0, True, False, "fixed point: no damped step lowers f")


def _enough(state: State, new: State, amount: float) -> bool:
    """Sufficient decrease: a share of what the proximal term alone promises."""
    moved = float(np.linalg.norm(new.theta - state.theta))
    return bool(np.isfinite(new.value)) and new.value < state.value - 1e-4 * amount * moved**2


def _damped(model: Model, anchor: Array, amount: float) -> Model:
    """The model with the proximal term 1/2 amount norm(v - anchor)^2."""
    if amount == 0:
        return model
    if isinstance(model, ProductModel):
        gradient = model.hessian_product(anchor, model.point) - model.linear
        return ProductModel(model.objective, model.point, gradient, model.damping + amount)
    matrix = model.matrix.copy()
    matrix[np.diag_indices_from(matrix)] += amount
    return QuadraticObjective(matrix, model.linear + amount * anchor, forced=model.forced)


def _shrink_until_finite(problem: Problem, state: State) -> State:
    """A start where f overflows is pulled towards zero."""
    theta = state.theta
    for _ in range(2000):
        theta = theta * 0.5
        new = state_at(problem, theta)
        if np.isfinite(new.value) and np.isfinite(new.gradient).all():
            return new
    return state_at(problem, None)
