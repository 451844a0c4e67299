"""Objectives with a table of coefficients: multinomial logistic regression, and least squares of several responses.

A feature has one coefficient per class or response, which form a group of coordinates.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Self

import numpy as np
from scipy.special import logsumexp, softmax

from iobs.errors import NonFiniteError, ProblemError
from iobs.optimize.objectives import centring
from iobs.optimize.objectives import design as designs
from iobs.optimize.objectives.base import DesignObjective
from iobs.optimize.objectives.design import Array, Indices, MatrixLike, VectorLike


class Tabled(DesignObjective):
    """Base class of f(Theta) with Theta (d, C) stored row by row, features first, then forced coordinates.

    Attributes:
        outputs: C, the number of classes or responses.
    """

    @property
    def groups(self) -> list[Indices]:
        """The coordinates of every feature."""
        features = (self.dimension - self.forced.size) // self.outputs
        return [np.arange(j * self.outputs, (j + 1) * self.outputs) for j in range(features)]

    @abstractmethod
    def table(self, theta: Array) -> tuple[Array, Array]:
        """The coefficients of every output (C, d) and their constants (C,)."""

    def margins(self, theta: Array) -> Array:
        """X Theta, (n, C)."""
        table = theta.reshape(-1, self.outputs)
        used = np.flatnonzero(table.any(axis=1)).astype(np.int64)
        return np.asarray(self.design.columns(used) @ table[used])

    def constant_coordinates(self) -> Indices:
        """The coordinates of zero columns."""
        return np.flatnonzero(np.repeat(self.squares == 0, self.outputs)).astype(np.int64)

    def restricted(self, support: Indices) -> Self:
        """f on some features; the support must hold all coordinates of each, and the forced ones."""
        part = super().restricted(support)
        part.forced = np.flatnonzero(np.isin(support, self.forced)).astype(np.int64)
        return part


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
        design, _, weights = designs.prepare(X, target[:, 0], sample_weight)
        root = np.sqrt(weights)
        design, self.target = centring.scale_rows(design, root), root[:, None] * target
        self.mean, self.level = np.zeros(design.shape[1]), np.zeros(target.shape[1])
        if intercept:
            self.mean = centring.column_means(design, root, weights.sum())
            self.level = designs.double(root @ self.target / weights.sum())
            design, self.target = centring.centre(design, root, self.mean), self.target - np.outer(root, self.level)
        self.design, self.outputs = design, target.shape[1]
        self.dimension = design.shape[1] * self.outputs
        self.forced = np.zeros(0, np.int64)
        self.ridge = np.repeat(designs.ridge_vector(ridge, design.shape[1]), self.outputs)
        self.weights = np.ones(design.shape[0])  # they are in the design and the target
        _ = self.squares

    def table(self, theta: Array) -> tuple[Array, Array]:
        """The coefficients of every response (C, d) and their constants (C,)."""
        rows = theta.reshape(-1, self.outputs)
        return np.ascontiguousarray(rows.T), self.level - self.mean @ rows

    def residuals(self, theta: Array) -> Array:
        """Theta^T x_i - y_i, weighted and centred as the data, (n, C)."""
        return self.margins(theta) - self.target

    def value_and_gradient(self, theta: Array) -> tuple[float, Array]:
        """f and its gradient."""
        residual = self.residuals(theta)
        value = 0.5 * float((residual**2).sum()) + 0.5 * float(self.ridge @ theta**2)
        return value, np.asarray(self.design.rmatmat(residual).reshape(-1) + self.ridge * theta)

    def slope_norm(self, theta: Array) -> float:
        """The norm of the residuals."""
        return float(np.linalg.norm(self.residuals(theta)))

    def hessian_product(self, theta: Array, vector: Array) -> Array:
        """H v."""
        return np.asarray(self.design.rmatmat(self.margins(vector)).reshape(-1) + self.ridge * vector)

    def hessian_columns(self, theta: Array, support: Indices, rows: Indices | None = None) -> Array:
        """H_:Q, or only the rows in `rows`; responses do not interact."""
        rows = np.arange(self.dimension) if rows is None else rows
        row_columns, where = np.unique(rows // self.outputs, return_inverse=True)
        columns, place = np.unique(support // self.outputs, return_inverse=True)
        gram = self.design.columns(row_columns).T @ self.design.columns(columns)
        same = (rows % self.outputs)[:, None] == (support % self.outputs)[None, :]
        block = same * gram[np.ix_(where, place)]
        return self.with_ridge(block, rows, support)

    def hessian_diagonal(self, theta: Array) -> Array:
        """diag H."""
        return np.asarray(np.repeat(self.squares, self.outputs) + self.ridge)


class Multinomial(Tabled):
    """sum_i w_i [logsumexp(m_i) - m_i,y_i] + 1/2 ridge norm(theta)^2 with margins m_i = Theta^T x_i + b in R^C.

    theta is Theta (d, C) row by row, then the C intercepts, which are forced and carry no ridge.

    Args:
        X: (n, d) design.
        y: (n,) class numbers 0 ... C - 1.
        classes: C.
        ridge: weight of 1/2 norm(Theta)^2, or one weight per feature (d,); positive, because softmax is invariant to a
            shift of a row of Theta.
        sample_weight: (n,) non-negative.

    Raises:
        ProblemError: shapes do not fit, classes outside the range, or a ridge that is not positive.
        NonFiniteError: NaN or infinity in X.
    """

    quadratic = False

    def __init__(
        self,
        X: MatrixLike,
        y: VectorLike,
        classes: int,
        *,
        ridge: float | Array = 1e-3,
        sample_weight: VectorLike | None = None,
    ) -> None:
        design, labels, weights = designs.prepare(X, y, sample_weight)
        if labels.min() < 0 or labels.max() >= classes or (labels != np.round(labels)).any():
            raise ProblemError(f"Multinomial needs class numbers 0 ... {classes - 1}.")
        penalty = np.broadcast_to(np.asarray(ridge, dtype=np.float64), design.shape[1:])
        if not (penalty > 0).all():
            raise ProblemError("Multinomial needs a positive ridge: without it rows of Theta can be shifted freely.")
        rows = designs.weighted_rows(weights)
        if rows is not None:
            design, labels, weights = design.samples(rows), labels[rows], weights[rows]
        self.weights = weights
        self.design, self.mean = centring.with_intercept(design, weights)
        self.outputs = classes
        self.labels = labels.astype(np.int64)
        self.dimension = self.design.shape[1] * classes
        self.forced = np.arange(self.dimension - classes, self.dimension)
        # A tiny ridge on the intercepts only fixes their common shift.
        self.ridge = np.repeat(np.append(penalty, 1e-12 * self.weights.sum()), classes)
        _ = self.squares

    def table(self, theta: Array) -> tuple[Array, Array]:
        """The coefficients of every class (C, d) and their constants (C,), which sum to 0."""
        rows = theta.reshape(-1, self.outputs)
        constants = rows[-1] - self.mean @ rows[:-1]
        return np.ascontiguousarray(rows[:-1].T), constants - constants.mean()

    def probabilities(self, theta: Array) -> Array:
        """Class probabilities (n, C)."""
        return np.asarray(softmax(self.margins(theta), axis=1))

    def value_and_gradient(self, theta: Array) -> tuple[float, Array]:
        """f and its gradient."""
        margins = self.margins(theta)
        losses = logsumexp(margins, axis=1) - margins[np.arange(self.labels.size), self.labels]
        value = float(self.weights @ losses) + 0.5 * float(self.ridge @ theta**2)
        residual = softmax(margins, axis=1)
        residual[np.arange(self.labels.size), self.labels] -= 1
        gradient = self.design.rmatmat(self.weights[:, None] * residual).reshape(-1) + self.ridge * theta
        return value, gradient

    def hessian_product(self, theta: Array, vector: Array) -> Array:
        """H v."""
        p = self.probabilities(theta)
        moved = p * self.margins(vector)
        moved -= p * moved.sum(axis=1, keepdims=True)
        return np.asarray(self.design.rmatmat(self.weights[:, None] * moved).reshape(-1) + self.ridge * vector)

    def hessian_columns(self, theta: Array, support: Indices, rows: Indices | None = None) -> Array:
        """H_:Q, or only the rows in `rows`."""
        rows = np.arange(self.dimension) if rows is None else rows
        p = self.probabilities(theta)
        at_rows, at_support = (self.design.columns(index // self.outputs) for index in (rows, support))
        row_class, column_class = rows % self.outputs, support % self.outputs
        weighted = self.weights[:, None] * at_support * p[:, column_class]
        same = row_class[:, None] == column_class[None, :]
        block = same * (at_rows.T @ weighted) - (at_rows * p[:, row_class]).T @ weighted
        return self.with_ridge(block, rows, support)

    def hessian_diagonal(self, theta: Array) -> Array:
        """diag H."""
        p = self.probabilities(theta)
        per_class = [self.design.squares(self.weights * p[:, c] * (1 - p[:, c])) for c in range(self.outputs)]
        return np.asarray(np.stack(per_class, axis=1).reshape(-1) + self.ridge)
