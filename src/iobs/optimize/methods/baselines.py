"""Published baselines, as in their papers, on the same objectives and in the same loop."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from iobs.errors import ProblemError
from iobs.optimize.curvature import FullHessian, gradient_step
from iobs.optimize.methods.base import Method, State, state_at
from iobs.optimize.objectives.design import Array, Indices
from iobs.optimize.problem import Problem
from iobs.optimize.refit.newton import Fit, newton_direction, refit


@dataclass(frozen=True)
class AcceleratedIHT(Method):
    """IHT with Nesterov's momentum, restarted whenever f rises (after Blumensath 2012)."""

    def begin(self, problem: Problem, theta: Array | None) -> State:
        """The memory is the previous iterate and the age of the momentum."""
        state = state_at(problem, theta)
        return State(state.theta, state.value, state.gradient, (state.theta, 0))

    def step(self, problem: Problem, state: State) -> State:
        """Extrapolate, take a gradient step, truncate; restart without momentum if f rises."""
        previous, age = state.memory
        ahead = state.theta + age / (age + 3) * (state.theta - previous)
        length = gradient_step(problem, state.theta)
        _, gradient = problem.objective.value_and_gradient(ahead)
        new = state_at(problem, problem.truncate(ahead - length * gradient), memory=(state.theta, age + 1))
        if age and new.value > state.value:
            theta = problem.truncate(state.theta - length * state.gradient)
            return state_at(problem, theta, memory=(state.theta, 1), message="momentum restarted")
        return new


@dataclass(frozen=True)
class NewtonIHT(Method):
    """Newton-step-based IHT (Meng and Zhao 2020): T_k(theta - length (H + damping)^-1 g); length 1 is Top-k-I-OBS.

    Attributes:
        length: of the step.
        damping: relative to mean diag(H). None: that of the problem, else 1e-2.
    """

    length: float = 1.0
    damping: float | None = None

    def step(self, problem: Problem, state: State) -> State:
        """Take a damped Newton step and truncate."""
        damping = problem.damping_or(self.damping)
        centre = FullHessian(1e-2 if damping is None else damping).model(problem, state.theta, state.gradient).centre()
        return state_at(problem, problem.truncate(state.theta + self.length * (centre - state.theta)))


@dataclass(frozen=True)
class HTP(Method):
    """Hard thresholding pursuit (Foucart 2011): the support of an IHT step, then a full refit."""

    def step(self, problem: Problem, state: State) -> State:
        """Refit on the support of a truncated gradient step; done when the support repeats."""
        length = gradient_step(problem, state.theta)
        support = problem.top(np.abs(state.theta - length * state.gradient))
        return _fitted(problem, support, state)


@dataclass(frozen=True)
class FNHTP(Method):
    """Fast Newton hard thresholding pursuit (Chen and Gu 2017): HTP with a Newton step in place of the refit."""

    def step(self, problem: Problem, state: State) -> State:
        """Take a truncated gradient step, then a Newton step on its support."""
        length = gradient_step(problem, state.theta)
        moved = state.theta - length * state.gradient
        theta = problem.truncate(moved)
        support = np.flatnonzero(theta)
        _, gradient = problem.objective.value_and_gradient(theta)
        theta[support] += newton_direction(problem.objective.hessian_block(theta, support), gradient[support])
        return state_at(problem, theta)


@dataclass(frozen=True)
class NHTP(Method):
    """Newton hard thresholding pursuit (Zhou, Xiu and Qi 2021): one Newton step on the stationarity equations.

    On T = the k largest of |theta - eta g|, d_T solves H_TT d_T = H_T,rest theta_rest - g_T, and d_rest = -theta_rest.
    A line search on f keeps the support in T. It takes the gradient direction where Newton's is not a descent
    direction.

    Attributes:
        length: eta; None is 1 / median diag(H).
    """

    length: float | None = None

    def step(self, problem: Problem, state: State) -> State:
        """Take a Newton step on T, halved until f falls."""
        objective, theta = problem.objective, state.theta
        diagonal = objective.hessian_diagonal(theta)
        curved = diagonal[diagonal > 0]
        length = (1.0 / float(np.median(curved)) if curved.size else 1.0) if self.length is None else self.length
        support = problem.top(np.abs(theta - length * state.gradient))
        rest = theta.copy()
        rest[support] = 0.0
        right = state.gradient - objective.hessian_product(theta, rest)
        newton = newton_direction(objective.hessian_block(theta, support), right[support])
        steepest = -length * state.gradient[support]
        for direction in (newton, steepest):
            for halving in range(12):
                trial = np.zeros_like(theta)
                trial[support] = theta[support] + 0.5**halving * direction
                new = state_at(problem, trial)
                if np.isfinite(new.value) and (new.value < state.value or not problem.feasible(theta)):
                    return new
        return State(state.theta, state.value, state.gradient, done=True, message="no descent on the support")


@dataclass(frozen=True)
class CoSaMP(Method):
    """Compressive sampling matching pursuit (Needell and Tropp 2009): merge 2k, refit, keep k largest, refit again."""

    def step(self, problem: Problem, state: State) -> State:
        """Merge supports, refit, keep the k largest, refit; done when f stops falling."""
        slope = np.where(state.theta != 0, 0.0, np.abs(state.gradient))
        wide = _merged(problem, state, slope)
        return _fitted(problem, problem.top(np.abs(wide.theta)), state, wide.theta)


@dataclass(frozen=True)
class GraSP(Method):
    """Gradient support pursuit (Bahmani, Raj and Boufounos 2013): CoSaMP for any f, without the debiasing refit."""

    def step(self, problem: Problem, state: State) -> State:
        """Merge supports, minimise on the merged support, truncate."""
        wide = _merged(problem, state, np.abs(state.gradient))
        return state_at(problem, problem.truncate(wide.theta))


@dataclass(frozen=True)
class OMP(Method):
    """Orthogonal matching pursuit (Pati et al. 1993): add the steepest coordinate in units of its column, refit."""

    def begin(self, problem: Problem, theta: Array | None) -> State:
        """Start from zero; a start with k non-zeros ends the method at once.

        Raises:
            ProblemError: a start with more than k non-zeros.
        """
        if theta is not None and not problem.feasible(theta):
            raise ProblemError("OMP only adds coordinates: start it from a vector with fewer than k non-zeros.")
        return state_at(problem, theta)

    def step(self, problem: Problem, state: State) -> State:
        """Add one coordinate; done at k."""
        chosen = np.union1d(np.flatnonzero(state.theta), problem.forced)
        free = np.setdiff1d(chosen, problem.forced).size
        if free >= problem.size:
            if chosen.size and not state.theta.any():  # k is 0: the forced coordinates alone, such as the intercept
                state = _fitted(problem, chosen.astype(np.int64), state)
            return State(state.theta, state.value, state.gradient, done=True, message="k coordinates chosen")
        score = np.abs(state.gradient) / problem.scale
        score[chosen] = -1.0
        score[~problem.candidates] = -1.0
        support = np.sort(np.append(chosen, np.argmax(score))).astype(np.int64)
        fit = refit(problem.objective, support, state.theta)
        done = free + 1 == problem.size
        return State(fit.theta, fit.value, fit.gradient, None, done, True, "k coordinates chosen" if done else "")


def _fitted(problem: Problem, support: Indices, state: State, start: Array | None = None) -> State:
    fit = refit(problem.objective, support, state.theta if start is None else start)
    repeated = np.array_equal(support, np.flatnonzero(state.theta))
    worse = problem.feasible(state.theta) and bool(state.theta.any()) and fit.value > state.value
    message = "the support repeats" if repeated else "f no longer falls" if worse else ""
    return State(fit.theta, fit.value, fit.gradient, None, repeated or worse, False, message)


def _merged(problem: Problem, state: State, slope: Array) -> Fit:
    """The refit on the support and the 2 k steepest coordinates, no more than the rank of H allows."""
    objective = problem.objective
    spare = max(1, objective.rank - int(np.count_nonzero(state.theta)) - problem.forced.size)
    steep = problem.top(slope, min(2 * problem.size, spare))
    return refit(objective, np.union1d(np.flatnonzero(state.theta), steep).astype(np.int64), state.theta)
