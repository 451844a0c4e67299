"""Gradient steps followed by truncation: iterative hard thresholding and stochastic I-OBS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from iobs.optimize.curvature import gradient_step, largest_eigenvalue, largest_of_products
from iobs.optimize.methods.base import Method, State, state_at
from iobs.optimize.objectives.design import Array, Booleans
from iobs.optimize.objectives.linear import LinearModel
from iobs.optimize.problem import Problem

_AUTO_BATCH, _MANY = 1024, 16_384  # samples of a minibatch, and samples above which minibatches are used
_MINIBATCHES = 8  # that estimate lambda
_LEAST_SHARE = 0.1  # least lambda, relative to the largest eigenvalue of H: the estimate may be negative
_TOLERANCE = 1e-3  # of eigenvalues of sampled matrices


@dataclass(frozen=True)
class HardThresholding(Method):
    """theta_{t+1} = T_k(theta_t - eta g_t): k-IHT, or stochastic IHT with a batch (paper, Lemma 1).

    Attributes:
        length: eta; None is 1 / lambda_max(H(theta_t)).
        batch: number of samples for a gradient estimate; None uses all samples.
    """

    length: float | None = None
    batch: int | None = None

    def begin(self, problem: Problem, theta: Array | None) -> State:
        """Start from zero; the step length of a quadratic is computed once."""
        state = state_at(problem, theta)
        length = gradient_step(problem, state.theta, self.length) if problem.objective.quadratic else None
        return State(state.theta, state.value, state.gradient, length)

    def step(self, problem: Problem, state: State) -> State:
        """Take one gradient step and truncate."""
        length = gradient_step(problem, state.theta, self.length) if state.memory is None else state.memory
        gradient = sampled_gradient(problem, state, self.batch)
        theta = problem.truncate(state.theta - length * gradient)
        return state_at(problem, theta, memory=state.memory, busy=self.batch is not None)


@dataclass(frozen=True)
class StochasticIOBS(Method):
    """theta_{t+1} = T_k(theta_t - eta g_t), eta = 1 / (lambda + norm(g_Q)^2 / norm(g)), Q = supp(theta_t) (appendix).

    Attributes:
        smoothness: lambda. None: lambda_max(H(theta_t)) for gradients of all samples, and `estimated_smoothness` for
            gradient estimates, which allow a smaller lambda.
        batch: number of samples for a gradient estimate; None uses all samples; "auto" uses 1,024 if there are more
            than 16,384 samples, and all otherwise.
        updates: number of updates in a step; f is evaluated, and lambda estimated, once for each step. None: as many as
            draw n samples together.
        mask: "support" is the paper's mask. "top" takes the k largest entries of theta - g / lambda as Q. It minimises
            the model on Q exactly, also where theta is not zero outside Q.
    """

    smoothness: float | None = None
    batch: int | Literal["auto"] | None = None
    updates: int | None = 1
    mask: Literal["support", "top"] = "support"

    def begin(self, problem: Problem, theta: Array | None) -> State:
        """Start from zero; lambda of a quadratic is computed once if gradients use all samples."""
        state = state_at(problem, theta)
        fixed = self.smoothness
        if fixed is None and problem.objective.quadratic and self._batch(problem) is None:
            fixed = largest_eigenvalue(problem.objective, state.theta)
        return State(state.theta, state.value, state.gradient, fixed)

    def step(self, problem: Problem, state: State) -> State:
        """Make the updates of the paper's appendix, then evaluate f."""
        batch, smoothness, theta = self._batch(problem), state.memory, state.theta
        if smoothness is None:
            if batch is None:
                smoothness = largest_eigenvalue(problem.objective, theta)
            else:
                smoothness = estimated_smoothness(problem, theta, batch)
        for count in range(self._updates(problem, batch)):
            if batch is not None:
                gradient = sampled_gradient(problem, state, batch, theta)
            else:
                gradient = state.gradient if count == 0 else problem.objective.value_and_gradient(theta)[1]
            theta = self._update(problem, theta, gradient, smoothness)
        return state_at(problem, theta, memory=state.memory, busy=batch is not None)

    def _batch(self, problem: Problem) -> int | None:
        if self.batch != "auto":
            return self.batch
        objective = problem.objective
        return _AUTO_BATCH if isinstance(objective, LinearModel) and objective.design.shape[0] > _MANY else None

    def _updates(self, problem: Problem, batch: int | None) -> int:
        if self.updates is not None:
            return self.updates
        objective = problem.objective
        return -(-objective.design.shape[0] // batch) if batch and isinstance(objective, LinearModel) else 1

    def _update(self, problem: Problem, theta: Array, gradient: Array, smoothness: float) -> Array:
        if self.mask == "support":
            eta = stochastic_length(theta, gradient, theta != 0, smoothness)
            return problem.truncate(theta - eta * gradient)
        mask = np.isin(np.arange(problem.dimension), problem.top(np.abs(theta - gradient / smoothness)))
        eta = stochastic_length(theta, gradient, mask, smoothness)
        return np.where(mask, theta - eta * gradient, 0.0)


def sampled_gradient(problem: Problem, state: State, batch: int | None, theta: Array | None = None) -> Array:
    """The gradient at the state, or an unbiased estimate of it at theta from `batch` samples.

    Args:
        problem: the objective and the random numbers.
        state: holds the gradient of all samples.
        batch: number of samples drawn; None takes the gradient of all samples.
        theta: (d,), the state's if not given.
    """
    objective = problem.objective
    if batch is None or not isinstance(objective, LinearModel):
        return state.gradient
    rows = problem.rng.integers(0, objective.design.shape[0], batch)
    return objective.sampled_gradient(state.theta if theta is None else theta, rows)


def estimated_smoothness(problem: Problem, theta: Array, batch: int) -> float:
    """The least lambda with H <= lambda I + E[g g^T / norm(g)], estimated from eight minibatches (appendix).

    H is estimated from all samples of the minibatches, and the expectation by their mean. lambda is the largest
    eigenvalue of the difference, and at least a tenth of the largest eigenvalue of H.

    Args:
        problem: the objective, a sum over samples, and the random numbers.
        theta: (d,).
        batch: number of samples in a minibatch.
    """
    objective = problem.objective
    if not isinstance(objective, LinearModel):
        return largest_eigenvalue(objective, theta)
    rows = problem.rng.integers(0, objective.design.shape[0], (_MINIBATCHES, batch))
    gradients = np.stack([objective.sampled_gradient(theta, chosen) for chosen in rows])
    sizes = np.linalg.norm(gradients, axis=1)
    gradients = gradients[sizes > 0] / np.sqrt(sizes[sizes > 0])[:, None]
    part, factor = objective.minibatch(rows.ravel()), objective.design.shape[0] / rows.size

    def difference(vector: Array) -> Array:
        outer = gradients.T @ (gradients @ vector) / _MINIBATCHES
        return np.asarray(factor * part.hessian_product(theta, vector) - outer)

    floor = _LEAST_SHARE * factor * largest_eigenvalue(part, theta, tolerance=_TOLERANCE)
    return max(floor, largest_of_products(difference, objective.dimension, tolerance=_TOLERANCE))


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
