"""Sparse Newton methods: each step minimises a quadratic model of f over sparse vectors.

Algorithm = curvature x solver of the subproblem. The curvatures and solvers of this package make `SparseNewton` equal
to Top-k-I-OBS, I-OBS, OBD, OBS, WoodFisher, WoodTaylor or OBC; `METHODS` lists the combinations.

`RegularisedNewton` converges from any start: it raises the damping until f falls.

    theta_{t+1} = argmin over the best known supports of  g^T (v - theta) + 1/2 (v - theta)^T (H + mu I) (v - theta)

If mu is at least the Lipschitz constant L of the gradient, the model lies above f. So f at the minimiser of the model
is at most f at the (sparse) iterate. A finite mu therefore always gives descent, and f falls monotonically. Every limit
point is a fixed point of iterative hard thresholding with step 1 / (L + mu_max). sigma starts at zero and is divided by
4 after every success. Where undamped steps lower f, near a minimiser, the method is I-OBS with the theorem's quadratic
rate. Where sigma stays positive, mu = sigma sqrt(norm(g)) gives order 3/2 and mu = sigma norm(step) order 2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from iobs.optimize.curvature import Curvature, FullHessian, Model, ProductModel, QuadraticObjective
from iobs.optimize.methods.base import Method, State, state_at
from iobs.optimize.methods.subproblem import BestSupport, SubproblemSolver
from iobs.optimize.objectives.design import Array
from iobs.optimize.problem import Problem, require_storable
from iobs.optimize.refit.newton import minimise_on_all, refit
from iobs.optimize.search.swaps import Swapper


@dataclass(frozen=True)
class SparseNewton(Method):
    """theta_{t+1} = a sparse (near-)minimiser of the quadratic model at theta_t (paper, eq. WT-iter).

    Attributes:
        curvature: builds the model.
        solver: minimises the model over sparse vectors.
        stationary: take the gradient as zero, as Optimal Brain Damage and Surgeon do.
        nested: number of coordinates removed per step and never added again: k_t = nnz(theta_t) - nested. 0 removes all
            surplus coordinates in one step.
    """

    curvature: Curvature
    solver: SubproblemSolver
    stationary: bool = False
    nested: int = 0

    def begin(self, problem: Problem, theta: Array | None) -> State:
        """Start from theta; else from the dense minimiser if nested or stationary (pruning), from zero otherwise."""
        if theta is None and (self.nested or self.stationary):
            require_storable("Pruning a dense minimiser stores H", problem.dimension)
            theta = minimise_on_all(problem.objective, np.zeros(problem.dimension))
        return state_at(problem, theta)

    def step(self, problem: Problem, state: State) -> State:
        """Build the model, minimise it over sparse vectors, evaluate f there."""
        gradient = np.zeros_like(state.gradient) if self.stationary else state.gradient
        model = self.curvature.model(problem, state.theta, gradient)
        count = problem.size
        allowed = problem.candidates
        if self.nested:
            allowed = allowed & (state.theta != 0)
            count = max(problem.size, int(allowed.sum()) - self.nested)
        theta = self.solver(problem, model, count, allowed)
        finished = self.nested > 0 and count == problem.size
        if self.stationary and not self.nested:
            finished = True
        return state_at(problem, theta, done=finished, message="pruned to k" if finished else "")


_TRIALS = 60


@dataclass(frozen=True)
class RegularisedNewton(Method):
    """I-OBS with adaptive damping over sparse vectors (after Mishchenko 2023; Cartis, Gould and Toint 2011).

    Attributes:
        rule: mu = sigma sqrt(norm(g_Q)) for "gradient", mu = sigma norm(step) for "cubic".
        solver: minimises a damped model; by default `BestSupport` with exact swaps.
    """

    rule: Literal["gradient", "cubic"] = "gradient"
    solver: BestSupport = field(default_factory=lambda: BestSupport(greedy_limit=0))

    def begin(self, problem: Problem, theta: Array | None) -> State:
        """Truncate a dense start; pull it towards zero where f overflows. The memory is sigma."""
        start = state_at(problem, None if theta is None else problem.truncate(theta))
        if not np.isfinite(start.value):
            start = _shrink_until_finite(problem, start)
        return State(start.theta, start.value, start.gradient, 0.0)

    def step(self, problem: Problem, state: State) -> State:
        """Raise sigma fourfold until f falls enough; divide it by 4 after a success."""
        sigma = float(state.memory)
        model = FullHessian(0.0).model(problem, state.theta, state.gradient)
        unit = float(model.hessian_diagonal(state.theta).mean())
        size = self._size(state)
        for _ in range(_TRIALS):
            amount = sigma * size
            if not np.isfinite(amount):  # size is 0 (f is stationary on its support), so the first sigma has no unit
                break
            theta = self.solver(problem, _damped(model, state.theta, amount), problem.size, problem.candidates)
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
        """The state once no damping gives descent: exchange coordinates if that lowers f, else stop.

        So the solution is 1-swap optimal.
        """
        support = np.union1d(np.flatnonzero(state.theta), problem.forced).astype(np.int64)
        fit = Swapper(problem).improve(refit(problem.objective, support, state.theta))
        if fit.value < state.value - 1e-12 * abs(state.value):
            return State(fit.theta, fit.value, fit.gradient, 0.0, False, True, "exchange")
        return State(state.theta, state.value, state.gradient, 0.0, True, False, "fixed point: no damped step lowers f")


def _enough(state: State, new: State, amount: float) -> bool:
    """Test for sufficient decrease: a share of the decrease that the proximal term alone promises."""
    moved = float(np.linalg.norm(new.theta - state.theta))
    return bool(np.isfinite(new.value)) and new.value < state.value - 1e-4 * amount * moved**2


def _damped(model: Model, anchor: Array, amount: float) -> Model:
    """The model plus the proximal term 1/2 amount norm(v - anchor)^2."""
    if amount == 0:
        return model
    if isinstance(model, ProductModel):
        gradient = model.hessian_product(anchor, model.point) - model.linear
        return ProductModel(model.objective, model.point, gradient, model.damping + amount)
    matrix = model.matrix.copy()
    matrix[np.diag_indices_from(matrix)] += amount
    return QuadraticObjective(matrix, model.linear + amount * anchor, forced=model.forced)


def _shrink_until_finite(problem: Problem, state: State) -> State:
    """Halve a start until f and its gradient are finite; zero if they never are."""
    theta = state.theta
    for _ in range(2000):
        theta = theta * 0.5
        new = state_at(problem, theta)
        if np.isfinite(new.value) and np.isfinite(new.gradient).all():
            return new
    return state_at(problem, None)
