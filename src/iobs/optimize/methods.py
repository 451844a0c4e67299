"""Methods: how to get from one sparse iterate to the next. The special cases are presets, not copies.

Algorithm = curvature x choice. `SparseNewton` builds a quadratic model (`curvature`), chooses a support and a point on
it (`choices`), and does so again; with the curvatures and choices at hand it is k-IHT, Top-k-I-OBS, I-OBS,
OBD, OBS, WoodFisher, WoodTaylor or OBC: `presets` names them. What is not of that form is in `baselines`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from iobs.optimize import auto, choices, proposals
from iobs.optimize.choices import Choice
from iobs.optimize.curvature import Curvature, ScaledIdentity, largest_eigenvalue
from iobs.optimize.designs import Array
from iobs.optimize.objectives import LinearModel
from iobs.optimize.problem import Problem, require_storable
from iobs.optimize.refit import minimise_on_all


@dataclass(frozen=True)
class State:
    """An iterate.

    Attributes:
        theta: (d,).
        value: f(theta).
        gradient: of f at theta (d,).
        memory: whatever the method wants to see again.
        done: the method has finished.
        busy: the method has more to do even if theta did not change.
        message: what it says about this step.
    """

    theta: Array
    value: float
    gradient: Array
    memory: Any = None
    done: bool = False
    busy: bool = False
    message: str = ""


class Method(Protocol):
    """An algorithm: settings in its fields, everything that evolves in the `State`."""

    def begin(self, problem: Problem, theta: Array | None) -> State:
        """The start, given or chosen."""
        ...

    def step(self, problem: Problem, state: State) -> State:
        """The next iterate."""
        ...


def state_at(problem: Problem, theta: Array | None, **rest: Any) -> State:
    """The state at theta, or at zero."""
    theta = np.zeros(problem.dimension) if theta is None else theta
    return State(theta, *problem.objective.value_and_gradient(theta), **rest)


@dataclass(frozen=True)
class SparseNewton:
    """theta_{t+1} = a sparse (near-)minimiser of the quadratic model at theta_t (paper, eq. WT-iter).

    Attributes:
        curvature: which H.
        choice: how the model is minimised over sparse vectors.
        stationary: take the gradient as zero, as Optimal Brain Damage and Surgeon do.
        nested: how many coordinates go a step, none coming back: k_t = nnz(theta_t) - nested; 0 asks for k at once.
    """

    curvature: Curvature
    choice: Choice
    stationary: bool = False
    nested: int = 0

    def begin(self, problem: Problem, theta: Array | None) -> State:
        """Pruning (nested or stationary) starts from the dense minimiser unless told otherwise, the rest from zero."""
        if theta is None and (self.nested or self.stationary):
            require_storable("Pruning a dense minimiser stores H", problem.dimension)
            theta = minimise_on_all(problem.objective, np.zeros(problem.dimension))
        return state_at(problem, theta)

    def step(self, problem: Problem, state: State) -> State:
        """Model, choice, new state."""
        gradient = np.zeros_like(state.gradient) if self.stationary else state.gradient
        model = self.curvature.model(problem, state.theta, gradient)
        count = problem.size
        allowed = problem.candidates
        if self.nested:
            allowed = allowed & (state.theta != 0)
            count = max(problem.size, int(allowed.sum()) - self.nested)
        theta = self.choice(problem, model, count, allowed)
        finished = self.nested > 0 and count == problem.size
        if self.stationary and not self.nested:
            finished = True
        return state_at(problem, theta, done=finished, message="pruned to k" if finished else "")


@dataclass(frozen=True)
class HardThresholding:
    """theta_{t+1} = T_k(theta_t - eta g_t): k-IHT, stochastic with a batch (paper, Lemma 1).

    Attributes:
        curvature: the scaled identity that gives eta.
        batch: samples a gradient is estimated from; None uses all.
    """

    curvature: ScaledIdentity = field(default_factory=ScaledIdentity)
    batch: int | None = None

    def begin(self, problem: Problem, theta: Array | None) -> State:
        """From zero, with the step length of a quadratic computed once."""
        state = state_at(problem, theta)
        length = self.curvature.length(problem, state.theta) if problem.objective.quadratic else None
        return State(state.theta, state.value, state.gradient, length)

    def step(self, problem: Problem, state: State) -> State:
        """One gradient step and a truncation."""
        length = self.curvature.length(problem, state.theta) if state.memory is None else state.memory
        gradient = sampled_gradient(problem, state, self.batch)
        theta = problem.truncate(state.theta - length * gradient)
        return state_at(problem, theta, memory=state.memory, busy=self.batch is not None)


@dataclass(frozen=True)
class StochasticIOBS:
    """theta_{t+1} = T_k(theta_t - eta g_t), eta = 1 / (lambda + norm(g_Q)^2 / norm(g)), Q = supp(theta_t) (appendix).

    Attributes:
        smoothness: lambda; None is lambda_max(H(theta_t)), right for gradients of the full batch.
        batch: samples a gradient is estimated from; None uses all.
    """

    smoothness: float | None = None
    batch: int | None = None

    def begin(self, problem: Problem, theta: Array | None) -> State:
        """From zero, with lambda of a quadratic computed once."""
        state = state_at(problem, theta)
        fixed = self.smoothness
        if fixed is None and problem.objective.quadratic:
            fixed = largest_eigenvalue(problem.objective, state.theta)
        return State(state.theta, state.value, state.gradient, fixed)

    def step(self, problem: Problem, state: State) -> State:
        """One step of the appendix."""
        smoothness = state.memory
        if smoothness is None:
            smoothness = largest_eigenvalue(problem.objective, state.theta)
        gradient = sampled_gradient(problem, state, self.batch)
        eta = choices.stochastic_length(state.theta, gradient, state.theta != 0, smoothness)
        theta = problem.truncate(state.theta - eta * gradient)
        return state_at(problem, theta, memory=state.memory, busy=self.batch is not None)


@dataclass(frozen=True)
class BestKnown:
    """method="auto": the stages of `auto`, one a step.

    Attributes:
        kicks: random restarts around the best support.
    """

    kicks: int = 18

    def begin(self, problem: Problem, theta: Array | None) -> State:
        """The forced coordinates alone; nothing else is computed yet."""
        empty = proposals.start(problem)
        stages: Iterator[auto.Stage] = auto.stages(problem, theta, kicks=self.kicks, empty=empty)
        return State(empty.theta, empty.value, empty.gradient, stages, busy=True)

    def step(self, problem: Problem, state: State) -> State:
        """The next stage; done when there is none."""
        stage = next(state.memory, None)
        if stage is None:
            text = auto.LOCAL if problem.objective.quadratic else auto.LOCAL_MODEL
            if not proposals.settled(problem, state.theta, state.gradient):
                text = auto.RUNAWAY
            return State(state.theta, state.value, state.gradient, state.memory, True, False, text)
        fit = stage.fit
        message = auto.GLOBAL if stage.optimal and problem.size else stage.name
        return State(fit.theta, fit.value, fit.gradient, state.memory, stage.optimal, True, message)


def sampled_gradient(problem: Problem, state: State, batch: int | None) -> Array:
    """The gradient, or an unbiased estimate of it from `batch` samples."""
    objective = problem.objective
    if batch is None or not isinstance(objective, LinearModel):
        return state.gradient
    rows = problem.rng.integers(0, objective.design.shape[0], batch)
    return objective.sampled_gradient(state.theta, rows)
