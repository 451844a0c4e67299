"""Sparse Newton methods: each step minimises a quadratic model of f over sparse vectors.

Algorithm = curvature x solver of the subproblem. The curvatures and solvers of this package make `SparseNewton` equal
to Top-k-I-OBS, I-OBS, OBD, OBS, WoodFisher, WoodTaylor or OBC; `registry` lists the combinations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from iobs.optimize.curvature.kinds import Curvature
from iobs.optimize.methods.base import State, state_at
from iobs.optimize.methods.subproblem import SubproblemSolver
from iobs.optimize.objectives.design import Array
from iobs.optimize.problem import Problem, require_storable
from iobs.optimize.refit.newton import minimise_on_all


@dataclass(frozen=True)
class SparseNewton:
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
