"""Gradient steps followed by truncation: iterative hard thresholding and stochastic I-OBS."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from iobs.optimize.curvature.kinds import ScaledIdentity, largest_eigenvalue
from iobs.optimize.methods.base import State, state_at
from iobs.optimize.objectives.design import Array, Booleans
from iobs.optimize.objectives.linear import LinearModel
from iobs.optimize.problem import Problem


@dataclass(frozen=True)
class HardThresholding:
    """theta_{t+1} = T_k(theta_t - eta g_t): k-IHT, or stochastic IHT with a batch (paper, Lemma 1).

    Attributes:
        curvature: the scaled identity that gives eta.
        batch: number of samples for a gradient estimate; None uses all samples.
    """

    curvature: ScaledIdentity = field(default_factory=ScaledIdentity)
    batch: int | None = None

    def begin(self, problem: Problem, theta: Array | None) -> State:
        """Start from zero; the step length of a quadratic is computed once."""
        state = state_at(problem, theta)
        length = self.curvature.length(problem, state.theta) if problem.objective.quadratic else None
        return State(state.theta, state.value, state.gradient, length)

    def step(self, problem: Problem, state: State) -> State:
        """Take one gradient step and truncate."""
        length = self.curvature.length(problem, state.theta) if state.memory is None else state.memory
        gradient = sampled_gradient(problem, state, self.batch)
        theta = problem.truncate(state.theta - length * gradient)
        return state_at(problem, theta, memory=state.memory, busy=self.batch is not None)


@dataclass(frozen=True)
class StochasticIOBS:
    """theta_{t+1} = T_k(theta_t - eta g_t), eta = 1 / (lambda + norm(g_Q)^2 / norm(g)), Q = supp(theta_t) (appendix).

    Attributes:
        smoothness: lambda; None is lambda_max(H(theta_t)), which suits full-batch gradients.
        batch: number of samples for a gradient estimate; None uses all samples.
    """

    smoothness: float | None = None
    batch: int | None = None

    def begin(self, problem: Problem, theta: Array | None) -> State:
        """Start from zero; lambda of a quadratic is computed once."""
        state = state_at(problem, theta)
        fixed = self.smoothness
        if fixed is None and problem.objective.quadratic:
            fixed = largest_eigenvalue(problem.objective, state.theta)
        return State(state.theta, state.value, state.gradient, fixed)

    def step(self, problem: Problem, state: State) -> State:
        """Take one step of the paper's appendix."""
        smoothness = state.memory
        if smoothness is None:
            smoothness = largest_eigenvalue(problem.objective, state.theta)
        gradient = sampled_gradient(problem, state, self.batch)
        eta = stochastic_length(state.theta, gradient, state.theta != 0, smoothness)
        theta = problem.truncate(state.theta - eta * gradient)
        return state_at(problem, theta, memory=state.memory, busy=self.batch is not None)


def sampled_gradient(problem: Problem, state: State, batch: int | None) -> Array:
    """The gradient, or an unbiased estimate of it from `batch` samples."""
    objective = problem.objective
    if batch is None or not isinstance(objective, LinearModel):
        return state.gradient
    rows = problem.rng.integers(0, objective.design.shape[0], batch)
    return objective.sampled_gradient(state.theta, rows)


def stochastic_length(theta: Array, gradient: Array, mask: Booleans, smoothness: float) -> float:
    """The step length eta of stochastic I-OBS for a mask Q with complement S (appendix).

        eta = (1 - g_S^T theta_S / norm(g)) / (lambda + norm(g_Q)^2 / norm(g))

    If supp(theta) lies inside Q the numerator is 1, as in the paper. For g = 0 the limit 1 / lambda is returned.

    Args:
        theta: (d,).
        gradient: g (d,).
        mask: boolean (d,), true on Q.
        smoothness: lambda.
    """
    norm = float(np.linalg.norm(gradient))
    if norm == 0:
        return 1.0 / smoothness
    outside = float(gradient[~mask] @ theta[~mask]) / norm
    return (1.0 - outside) / (smoothness + float(gradient[mask] @ gradient[mask]) / norm)
