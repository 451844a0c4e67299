"""Least squares with several responses that share one support."""

from __future__ import annotations

import numpy as np

from iobs.errors import NonFiniteError, ProblemError
from iobs.optimize.objectives import centring
from iobs.optimize.objectives.arguments import prepare, ridge_vector
from iobs.optimize.objectives.design import Array, Indices, MatrixLike, VectorLike, double
from iobs.optimize.objectives.tabled import Tabled


class MultiResponse(Tabled):
    """1/2 sum_i w_i norm(y_i - Theta^T x_i - b)^2 + 1/2 ridge norm(Theta)^2 for responses y_i in R^C.

    theta is Theta (d, C) row by row. The responses count as they are: divide each by its standard deviation if their
    units differ. Search it by groups, the coefficients of one feature each: `SparseMultiTaskRegressor` does.

    Args:
        X: (n, d) design.
        Y: (n, C) responses.
        ridge: weight of 1/2 norm(Theta)^2, or one weight per feature (d,).
        intercept: solve for free constants b (C,).
        sample_weight: (n,) non-negative.

    Raises:
        ProblemError: shapes do not fit.
        NonFiniteError: NaN or infinity.
    """

    quadratic = True

    def __init__(
        self,
        X: MatrixLike,
        Y: Array,
        *,
        ridge: float | VectorLike = 0.0,
        intercept: bool = False,
        sample_weight: VectorLike | None = None,
    ) -> None:
        target = np.asarray(Y, dtype=np.float64)
        if target.ndim != 2 or target.shape[1] == 0:
            raise ProblemError(f"MultiResponse needs (n, C) responses, got shape {target.shape}; one is Y[:, None].")
        if not np.isfinite(target).all():
            raise NonFiniteError("The responses hold NaN or infinity; remove or impute those rows first.")
        design, _, weights = prepare(X, target[:, 0], sample_weight)
        root = np.sqrt(weights)
        design, self.target = centring.scale_rows(design, root), root[:, None] * target
        self.mean, self.level = np.zeros(design.shape[1]), np.zeros(target.shape[1])
        if intercept:
            self.mean = centring.column_means(design, root, weights.sum())
            self.level = double(root @ self.target / weights.sum())
            design, self.target = centring.centre(design, root, self.mean), self.target - np.outer(root, self.level)
        self.design, self.outputs = design, target.shape[1]
        self.dimension = design.shape[1] * self.outputs
        self.forced = np.zeros(0, np.int64)
        self.ridge = np.repeat(ridge_vector(ridge, design.shape[1]), self.outputs)
        self.squares = self.design.squares(np.ones(design.shape[0]))
        centring.require_finite_columns(self.squares)

    @property
    def rank(self) -> int:
        """An upper bound on the rank of the Hessian."""
        return self.dimension if self.ridge.any() else min(self.design.shape) * self.outputs

    def table(self, theta: Array) -> tuple[Array, Array]:
        """The coefficients of every response (C, d) and their constants (C,)."""
        rows = theta.reshape(-1, self.outputs)
        return np.ascontiguousarray(rows.T), self.level - self.mean @ rows

    def residuals(self, theta: Array) -> Array:
        """Theta^T x_i - y_i, weighted and centred as the data, (n, C)."""
        table = theta.reshape(-1, self.outputs)
        used = np.flatnonzero(table.any(axis=1)).astype(np.int64)
        return np.asarray(self.design.columns(used) @ table[used] - self.target)

    def value(self, theta: Array) -> float:
        """f(theta)."""
        return 0.5 * float((self.residuals(theta) ** 2).sum()) + 0.5 * float(self.ridge @ theta**2)

    def value_and_gradient(self, theta: Array) -> tuple[float, Array]:
        """f and its gradient."""
        residual = self.residuals(theta)
        value = 0.5 * float((residual**2).sum()) + 0.5 * float(self.ridge @ theta**2)
        return value, np.asarray(self.design.rmatmat(residual).reshape(-1) + self.ridge * theta)

    def hessian_product(self, theta: Array, vector: Array) -> Array:
        """H v."""
        table = vector.reshape(-1, self.outputs)
        used = np.flatnonzero(table.any(axis=1)).astype(np.int64)
        moved = self.design.columns(used) @ table[used]
        return np.asarray(self.design.rmatmat(moved).reshape(-1) + self.ridge * vector)

    def hessian_columns(self, theta: Array, support: Indices, rows: Indices | None = None) -> Array:
        """H_:Q, or only the rows in `rows`; responses do not interact."""
        rows = np.arange(self.dimension) if rows is None else rows
        left, where = np.unique(rows // self.outputs, return_inverse=True)
        right, place = np.unique(support // self.outputs, return_inverse=True)
        gram = self.design.columns(left).T @ self.design.columns(right)
        same = (rows % self.outputs)[:, None] == (support % self.outputs)[None, :]
        block = same * gram[np.ix_(where, place)]
        return np.asarray(block + np.where(rows[:, None] == support[None, :], self.ridge[support][None, :], 0.0))

    def hessian_block(self, theta: Array, support: Indices) -> Array:
        """H_QQ."""
        return self.hessian_columns(theta, support, support)

    def hessian_diagonal(self, theta: Array) -> Array:
        """diag H."""
        return np.asarray(np.repeat(self.squares, self.outputs) + self.ridge)
