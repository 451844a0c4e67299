"""Curvatures: which quadratic model of f a method steps on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from iobs.errors import ProblemError
from iobs.optimize.designs import Array
from iobs.optimize.models import ProductModel, QuadraticObjective
from iobs.optimize.objective import Objective
from iobs.optimize.objectives import LinearModel
from iobs.optimize.problem import DENSE_LIMIT, Problem, require_storable

Model: TypeAlias = QuadraticObjective | ProductModel

_FISHER_DAMPING = 1e-3  # relative to mean diag(H): what a Fisher, singular for few samples, gets unless told otherwise
_SINGULAR_DAMPING = 1e-2  # relative to the largest eigenvalue: what a singular Hessian gets unless told otherwise


class Curvature(Protocol):
    """Builds the model m(v) = g^T (v - theta) + 1/2 (v - theta)^T H (v - theta)."""

    def model(self, problem: Problem, theta: Array, gradient: Array) -> Model:
        """The model at theta; a zero gradient may be passed where a method assumes a stationary point."""
        ...


@dataclass(frozen=True)
class FullHessian:
    """H = the Hessian of f, damped: I-OBS.

    Attributes:
        damping: relative to mean diag(H); None is zero where H is definite, and 1e-2 of its largest eigenvalue where
            it is singular (fewer samples than variables). The damping pulls towards theta, so fixed points stay.
    """

    damping: float | None = None

    def model(self, problem: Problem, theta: Array, gradient: Array) -> Model:
        """Stored up to `DENSE_LIMIT` coordinates, by products beyond."""
        objective = problem.objective
        damping = problem.damping_or(self.damping)
        if objective.dimension > DENSE_LIMIT:
            return self.products(problem, theta, gradient)
        amount = _amount(objective, theta, damping)
        matrix = objective.hessian_block(theta, np.arange(objective.dimension))
        if damping is None and amount == 0.0 and not _definite(matrix):
            amount = _SINGULAR_DAMPING * largest_eigenvalue(objective, theta)
        matrix[np.diag_indices_from(matrix)] += amount
        return QuadraticObjective(matrix, matrix @ theta - gradient, forced=problem.forced)

    def products(self, problem: Problem, theta: Array, gradient: Array) -> ProductModel:
        """The model that only multiplies with H, at any size."""
        damping = problem.damping_or(self.damping)
        return ProductModel(problem.objective, theta, gradient, _amount(problem.objective, theta, damping))


@dataclass(frozen=True)
class ScaledIdentity:
    """H = I / step: iterative hard thresholding.

    Attributes:
        step: the step length; None is 1 / lambda_max(H(theta)) of that same f.
    """

    step: float | None = None

    def length(self, problem: Problem, theta: Array) -> float:
        """The step length used at theta."""
        return 1.0 / largest_eigenvalue(problem.objective, theta) if self.step is None else self.step

    def model(self, problem: Problem, theta: Array, gradient: Array) -> QuadraticObjective:
        """I / step, stored (for comparisons; the methods use `length`)."""
        curvature = 1.0 / self.length(problem, theta)
        matrix = curvature * np.eye(problem.dimension)
        return QuadraticObjective(matrix, curvature * theta - gradient, forced=problem.forced)


@dataclass(frozen=True)
class DiagonalHessian:
    """H = diag of the Hessian: Optimal Brain Damage."""

    def model(self, problem: Problem, theta: Array, gradient: Array) -> QuadraticObjective:
        """The diagonal, stored as a matrix."""
        require_storable("This curvature is stored", problem.dimension)
        matrix = np.diag(problem.objective.hessian_diagonal(theta))
        return QuadraticObjective(matrix, matrix.diagonal() * theta - gradient, forced=problem.forced)


@dataclass(frozen=True)
class EmpiricalFisher:
    """H = sum_i w_i g_i g_i^T over the samples' own gradients: WoodFisher and WoodTaylor.

    Attributes:
        damping: relative to mean diag(H); None is that of the problem, or 1e-3, since the matrix is singular for few
            samples.
    """

    damping: float | None = None

    def model(self, problem: Problem, theta: Array, gradient: Array) -> QuadraticObjective:
        """J^T J + damping, the rows of J the per-sample gradients, each times the root of its weight.

        Raises:
            ProblemError: the objective has no samples (a torch function of theta alone).
        """
        objective = problem.objective
        if not isinstance(objective, LinearModel):
            raise ProblemError(
                "The empirical Fisher needs a loss that sums over samples; use the curvature FullHessian."
            )
        require_storable("This curvature is stored", problem.dimension)
        jacobian = objective.fisher_slopes(theta)[:, None] * objective.design.columns(np.arange(objective.dimension))
        matrix = jacobian.T @ jacobian
        mean = float(matrix.diagonal().mean())
        damping = problem.damping_or(self.damping)
        damping = _FISHER_DAMPING if damping is None else damping
        matrix[np.diag_indices_from(matrix)] += damping * (mean if mean > 0 else 1.0)
        return QuadraticObjective(matrix, matrix @ theta - gradient, forced=problem.forced)


def largest_eigenvalue(objective: Objective, theta: Array, *, steps: int = 200, tolerance: float = 1e-10) -> float:
    """lambda_max of the Hessian by Lanczos iterations (with full re-orthogonalisation), from a fixed start.

    Lanczos approaches from below; its error is about the square of the residual that is made small.
    """
    d = objective.dimension
    start = np.random.default_rng(0).standard_normal(d)
    basis = [start / np.linalg.norm(start)]
    diagonal: list[float] = []
    beside: list[float] = []
    estimate = 0.0
    for count in range(min(d, steps)):
        product = objective.hessian_product(theta, basis[-1])
        diagonal.append(float(basis[-1] @ product))
        stack = np.array(basis)
        for _ in range(2):
            product = product - stack.T @ (stack @ product)
        size = float(np.linalg.norm(product))
        values, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1))
        estimate = float(values[-1])
        if size * abs(float(vectors[-1, -1])) <= tolerance * max(estimate, 1e-300) or count == d - 1:
            break
        beside.append(size)
        basis.append(product / size)
    return max(estimate, float(np.finfo(float).tiny))


def _amount(objective: Objective, theta: Array, damping: float | None) -> float:
    if damping is not None:
        return 0.0 if damping == 0 else damping * float(objective.hessian_diagonal(theta).mean())
    if objective.rank < objective.dimension:
        return _SINGULAR_DAMPING * largest_eigenvalue(objective, theta, tolerance=1e-3)
    return 0.0


def _definite(matrix: Array) -> bool:
    try:
        factor = np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:
        return False
    return bool((factor.diagonal() ** 2 > 1e-13 * matrix.diagonal()).all())
