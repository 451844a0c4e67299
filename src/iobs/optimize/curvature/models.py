"""Quadratic models of f at a point theta, as objectives themselves.

    m(v) = f(theta) + g^T (v - theta) + 1/2 (v - theta)^T H (v - theta)

H names the algorithm. I / step is iterative hard thresholding, and the Hessian is I-OBS. The diagonal of the Hessian is
Optimal Brain Damage, and the empirical Fisher matrix is WoodFisher.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import numpy as np
from scipy.linalg.lapack import dposv

from iobs.errors import NotPositiveDefiniteError, ProblemError
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.design import Array, Indices

if TYPE_CHECKING:
    from iobs.core.quadratic import Quadratic

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
