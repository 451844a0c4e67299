"""Curvatures: the matrices H that a method may use in its quadratic model of f."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np

from iobs.errors import ProblemError
from iobs.optimize.curvature.models import ProductModel, QuadraticObjective
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.design import Array
from iobs.optimize.objectives.linear import LinearModel
from iobs.optimize.problem import DENSE_LIMIT, Problem, require_storable

Model: TypeAlias = QuadraticObjective | ProductModel

# Relative to mean diag(H): default damping of the Fisher matrix, which is singular for few samples.
_FISHER_DAMPING = 1e-3
_LANCZOS_STEPS = 200  # most products for the largest eigenvalue
_SINGULAR_DAMPING = 1e-2  # relative to the largest eigenvalue: default damping of a singular Hessian


class Curvature(Protocol):
    """Builder of the model m(v) = g^T (v - theta) + 1/2 (v - theta)^T H (v - theta)."""

    def model(self, problem: Problem, theta: Array, gradient: Array) -> Model:
        """The model at theta; methods that assume a stationary point pass a zero gradient."""
        ...


@dataclass(frozen=True)
class FullHessian:
    """H = the Hessian of f, damped (I-OBS).

    Attributes:
        damping: relative to mean diag(H). None: that of the problem, else 0 where H is definite and 1e-2 of its largest
            eigenvalue where it is singular (fewer samples than variables). The damping is a proximal term towards
            theta, so fixed points do not change.
    """

    damping: float | None = None

    def model(self, problem: Problem, theta: Array, gradient: Array) -> Model:
        """The model; H is stored up to `DENSE_LIMIT` coordinates and only multiplied with beyond."""
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

    def products(self, problem: Problem, theta: Array, gradient: Array, *, accuracy: float = 1e-3) -> ProductModel:
        """The model that only multiplies with H, at any size.

        Args:
            problem: f and the damping.
            theta: point (d,).
            gradient: of f at the point (d,).
            accuracy: relative, of the largest eigenvalue to which the damping of a singular H is proportional.
        """
        damping = problem.damping_or(self.damping)
        return ProductModel(problem.objective, theta, gradient, _amount(problem.objective, theta, damping, accuracy))


@dataclass(frozen=True)
class SampledHessian:
    """H = n / m times the Hessian of m samples, drawn anew for every model: minibatch curvature for many samples.

    The gradient is that of all samples, so fixed points do not change.

    Attributes:
        samples: m; all samples are used if there are fewer.
        damping: see `FullHessian`.
    """

    samples: int = 8192
    damping: float | None = None

    def model(self, problem: Problem, theta: Array, gradient: Array) -> Model:
        """The model at theta; H is stored.

        Raises:
            ProblemError: there are more than `DENSE_LIMIT` coordinates.
        """
        objective, exact = problem.objective, FullHessian(self.damping)
        if not isinstance(objective, LinearModel) or objective.design.shape[0] <= self.samples:
            return exact.model(problem, theta, gradient)
        require_storable("A sampled Hessian is stored", problem.dimension)
        count = objective.design.shape[0]
        part = objective.minibatch(np.sort(problem.rng.choice(count, self.samples, replace=False)))
        inner = Problem(part, problem.k, problem.damping, problem.rng)
        shrunk = exact.model(inner, theta, gradient * (self.samples / count))
        assert isinstance(shrunk, QuadraticObjective)
        factor = count / self.samples
        return QuadraticObjective(shrunk.matrix * factor, shrunk.linear * factor, forced=problem.forced)


@dataclass(frozen=True)
class DiagonalHessian:
    """H = the diagonal of the Hessian (Optimal Brain Damage)."""

    def model(self, problem: Problem, theta: Array, gradient: Array) -> QuadraticObjective:
        """The model; the diagonal is stored as a (d, d) matrix."""
        require_storable("This curvature is stored", problem.dimension)
        matrix = np.diag(problem.objective.hessian_diagonal(theta))
        return QuadraticObjective(matrix, matrix.diagonal() * theta - gradient, forced=problem.forced)


@dataclass(frozen=True)
class EmpiricalFisher:
    """H = sum_i w_i g_i g_i^T over the gradients g_i of the samples (WoodFisher, WoodTaylor).

    Attributes:
        damping: relative to mean diag(H). None: that of the problem, else 1e-3, because H is singular for few samples.
    """

    damping: float | None = None

    def model(self, problem: Problem, theta: Array, gradient: Array) -> QuadraticObjective:
        """The model with H = J^T J + damping; row i of J is the gradient of sample i times sqrt(w_i).

        Raises:
            ProblemError: the objective is not a sum over samples (a torch function of theta alone).
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


def largest_eigenvalue(objective: Objective, theta: Array, *, tolerance: float = 1e-10) -> float:
    """The largest eigenvalue of the Hessian; see `largest_of_products`."""
    product = partial(objective.hessian_product, theta)
    return largest_of_products(product, objective.dimension, tolerance=tolerance)


def gradient_step(problem: Problem, theta: Array, length: float | None = None) -> float:
    """The step length of iterative hard thresholding, whose H is I / length; 1 / lambda_max(H(theta)) if not given."""
    return 1.0 / largest_eigenvalue(problem.objective, theta) if length is None else length


def largest_of_products(multiply: Callable[[Array], Array], d: int, *, tolerance: float = 1e-10) -> float:
    """The largest eigenvalue of a symmetric (d, d) matrix, positive at least by rounding, from its products.

    Lanczos iterations with full re-orthogonalisation, from a fixed start. The estimate approaches from below; its error
    is about the square of the residual, which is at most `tolerance` times the estimate.
    """
    start = np.random.default_rng(0).standard_normal(d)
    basis = [start / np.linalg.norm(start)]
    diagonal: list[float] = []
    beside: list[float] = []
    estimate = 0.0
    for count in range(min(d, _LANCZOS_STEPS)):
        product = multiply(basis[-1])
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


def _amount(objective: Objective, theta: Array, damping: float | None, accuracy: float = 1e-3) -> float:
    if damping is not None:
        return 0.0 if damping == 0 else damping * float(objective.hessian_diagonal(theta).mean())
    if objective.rank < objective.dimension:
        return _SINGULAR_DAMPING * largest_eigenvalue(objective, theta, tolerance=accuracy)
    return 0.0


def _definite(matrix: Array) -> bool:
    try:
        factor = np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:
        return False
    return bool((factor.diagonal() ** 2 > 1e-13 * matrix.diagonal()).all())
