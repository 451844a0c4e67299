"""Quadratic models of f at a point theta, as objectives themselves; curvatures, the matrices H that they may have.

    m(v) = f(theta) + g^T (v - theta) + 1/2 (v - theta)^T H (v - theta)

H names the algorithm. I / step is iterative hard thresholding, and the Hessian is I-OBS. The diagonal of the Hessian is
Optimal Brain Damage, and the empirical Fisher matrix is WoodFisher.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

import numpy as np
from scipy.linalg.lapack import dposv

from iobs.errors import NotPositiveDefiniteError, ProblemError
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.design import Array, Indices
from iobs.optimize.objectives.linear import LinearModel

if TYPE_CHECKING:
    from iobs.core.quadratic import Quadratic


from iobs.optimize.problem import DENSE_LIMIT, Problem, require_storable

NO_INDICES = np.zeros(0, np.int64)


def as_objective(objective: Objective | Quadratic) -> Objective:
    """An `iobs.Quadratic` of one row as an objective; other objectives unchanged.

    Raises:
        ProblemError: another type.
        ProblemError, NotPositiveDefiniteError: as `QuadraticObjective.of`.
    """
    home = sys.modules.get("iobs.core.quadratic")  # it loads torch; before that nothing is a Quadratic
    if home is not None and isinstance(objective, home.Quadratic):
        return QuadraticObjective.of(cast("Quadratic", objective))
    if not hasattr(objective, "value_and_gradient"):
        raise ProblemError(
            f"An objective is needed, such as iobs.objectives.LeastSquares(X, y), got {type(objective).__name__}; "
            "iobs.objectives.from_torch(f, d) makes one of a torch function."
        )
    return cast("Objective", objective)


class QuadraticObjective(Objective):
    """1/2 v H v^T - b v^T + c with a stored (d, d) Hessian: one row of an `iobs.Quadratic`.

    Raises:
        ProblemError: shapes do not fit.
    """

    quadratic = True

    def __init__(self, hessian: Array, linear: Array, *, constant: float = 0.0, forced: Indices = NO_INDICES) -> None:
        if hessian.shape != (linear.size, linear.size):
            raise ProblemError(
                f"A Hessian of shape {hessian.shape} does not fit a linear term of {linear.size} entries."
            )
        self.matrix = hessian
        self.linear = linear
        self.constant = constant
        self.forced = forced
        self.dimension = linear.size

    @classmethod
    def of(cls, quadratic: Quadratic) -> QuadraticObjective:
        """The objective of the single row of an `iobs.Quadratic`.

        Raises:
            ProblemError: more than one row.
            NotPositiveDefiniteError: a diagonal entry of the Hessian shows that f is unbounded below.
        """
        if quadratic.shape[0] != 1:
            raise ProblemError(f"iobs.minimize takes one row, this quadratic has {quadratic.shape[0]}; use iobs.solve.")
        matrix, linear = quadratic.matrix.double().cpu().numpy(), quadratic.linear[0].double().cpu().numpy()
        diagonal = matrix.diagonal()
        falling = np.flatnonzero((diagonal < 0) | ((diagonal == 0) & (linear != 0)))
        if falling.size:
            raise NotPositiveDefiniteError(
                f"f is unbounded below along coordinate {falling[0]}: its diagonal entry of the Hessian is "
                f"{diagonal[falling[0]]:.3g}; give a positive semi-definite Hessian."
            )
        return cls(np.ascontiguousarray(matrix), np.ascontiguousarray(linear))

    def value_and_gradient(self, theta: Array) -> tuple[float, Array]:
        """m and H theta - b."""
        product = self.matrix @ theta
        return self.constant + float(theta @ (0.5 * product - self.linear)), product - self.linear

    def slope_norm(self, theta: Array) -> float:
        """At least |H_j theta| / sqrt(H_jj) and |b_j| / sqrt(H_jj) for all j together: the slope by unit columns."""
        units = np.sqrt(np.maximum(self.matrix.diagonal(), 1e-300))
        return float(units @ np.abs(theta)) + float((np.abs(self.linear) / units).max(initial=0.0))

    def hessian_product(self, theta: Array, vector: Array) -> Array:
        """H v."""
        return np.asarray(self.matrix @ vector)

    def hessian_block(self, theta: Array, support: Indices) -> Array:
        """H_QQ."""
        return np.asarray(self.matrix[np.ix_(support, support)])

    def hessian_columns(self, theta: Array, support: Indices, rows: Indices | None = None) -> Array:
        """H_:Q."""
        return np.asarray(self.matrix[:, support] if rows is None else self.matrix[np.ix_(rows, support)])

    def hessian_diagonal(self, theta: Array) -> Array:
        """diag H."""
        return np.asarray(self.matrix.diagonal())

    def restricted(self, support: Indices) -> Objective:
        """The quadratic on the coordinates in `support`, all others zero."""
        block = self.matrix[np.ix_(support, support)]
        return QuadraticObjective(block, self.linear[support], constant=self.constant)

    def constant_coordinates(self) -> Indices:
        """Coordinates without curvature."""
        return np.flatnonzero(self.matrix.diagonal() <= 0).astype(np.int64)

    def centre(self) -> Array:
        """H^-1 b, the dense Newton point; the least-norm solution where H is singular."""
        _, centre, info = dposv(self.matrix, self.linear, lower=1)
        if info == 0 and np.isfinite(centre).all():
            return np.asarray(centre)
        return np.asarray(np.linalg.lstsq(self.matrix, self.linear, rcond=None)[0])


class ProductModel(Objective):
    """The model of a function of many variables: H is only multiplied with, never stored.

    Args:
        objective: f.
        point: theta (d,).
        gradient: of f at theta (d,).
        damping: weight mu of the proximal term 1/2 mu norm(v - theta)^2.
    """

    quadratic = True

    def __init__(self, objective: Objective, point: Array, gradient: Array, damping: float) -> None:
        self.objective = objective
        self.point = point
        self.damping = damping
        self.dimension = objective.dimension
        self.forced = objective.forced
        self.linear = self.hessian_product(point, point) - gradient

    @property
    def rank(self) -> int:
        """The rank of f's Hessian, or d if damped."""
        return self.dimension if self.damping else self.objective.rank

    def value_and_gradient(self, theta: Array) -> tuple[float, Array]:
        """m up to a constant, and its gradient."""
        product = self.hessian_product(theta, theta)
        return float(theta @ (0.5 * product - self.linear)), product - self.linear

    def hessian_product(self, theta: Array, vector: Array) -> Array:
        """H v with the Hessian at the model's own point; `theta` is ignored."""
        return self.objective.hessian_product(self.point, vector) + self.damping * vector

    def hessian_block(self, theta: Array, support: Indices) -> Array:
        """H_QQ."""
        block = self.objective.hessian_block(self.point, support)
        block[np.diag_indices_from(block)] += self.damping
        return block

    def hessian_columns(self, theta: Array, support: Indices, rows: Indices | None = None) -> Array:
        """H_:Q."""
        block = self.objective.hessian_columns(self.point, support, rows)
        names = np.arange(self.dimension) if rows is None else rows
        return np.asarray(block + self.damping * (names[:, None] == support[None, :]))

    def hessian_diagonal(self, theta: Array) -> Array:
        """diag H."""
        return self.objective.hessian_diagonal(self.point) + self.damping

    def restricted(self, support: Indices) -> Objective:
        """The quadratic on the coordinates in `support`, with a stored Hessian."""
        return QuadraticObjective(self.hessian_block(self.point, support), self.linear[support])

    def constant_coordinates(self) -> Indices:
        """The constant coordinates of f."""
        return self.objective.constant_coordinates()

    def centre(self, *, tolerance: float = 1e-12, steps: int = 2000) -> Array:
        """H^-1 b by conjugate gradients from the point; the last iterate where the curvature is not positive.

        Args:
            tolerance: residual, relative to b, at which to stop.
            steps: largest number of products with H.
        """
        return self.point + conjugate_gradients(
            lambda direction: self.hessian_product(self.point, direction),
            self.linear - self.hessian_product(self.point, self.point),
            goal=tolerance**2 * float(self.linear @ self.linear),
            steps=min(self.dimension, steps),
        )


def conjugate_gradients(
    product: Callable[[Array], Array],
    right: Array,
    *,
    goal: float,
    steps: int,
    seen: Callable[[Array, Array], None] = lambda direction, product: None,
) -> Array:
    """Solve H x = right approximately, from zero; the last iterate is returned where the curvature is not positive.

    Args:
        product: v -> H v, (d,).
        right: (d,).
        goal: squared norm of the residual at which to stop.
        steps: largest number of products.
        seen: called with each direction and its product, if its curvature is positive.
    """
    residual, solution = right.copy(), np.zeros_like(right)
    direction = right.copy()
    size = float(residual @ residual)
    for _ in range(steps):
        if size <= goal or size == 0:
            break
        image = product(direction)
        curvature = float(direction @ image)
        if not curvature > 0:
            break
        seen(direction, image)
        length = size / curvature
        solution += length * direction
        residual -= length * image
        following = float(residual @ residual)
        direction = residual + following / size * direction
        size = following
    return solution


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
        if damping is None and amount == 0.0 and not is_definite(matrix):
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


def is_definite(matrix: Array, least: float = 1e-13) -> bool:
    """Check that a matrix has a Cholesky factor, and every pivot more than a share `least` of its diagonal entry."""
    try:
        factor = np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:
        return False
    return bool((factor.diagonal() ** 2 > least * matrix.diagonal()).all())
