"""Multinomial logistic regression: a feature has one coefficient per class, which form a group of coordinates."""

from __future__ import annotations

import numpy as np
from scipy.special import logsumexp, softmax

from iobs.errors import ProblemError
from iobs.optimize.objectives import centring
from iobs.optimize.objectives.arguments import prepare, weighted_rows
from iobs.optimize.objectives.design import Array, Indices, MatrixLike, VectorLike
from iobs.optimize.objectives.tabled import Tabled


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
        design, labels, weights = prepare(X, y, sample_weight)
        if labels.min() < 0 or labels.max() >= classes or (labels != np.round(labels)).any():
            raise ProblemError(f"Multinomial needs class numbers 0 ... {classes - 1}.")
        penalty = np.broadcast_to(np.asarray(ridge, dtype=np.float64), design.shape[1:])
        if not (penalty > 0).all():
            raise ProblemError("Multinomial needs a positive ridge: without it rows of Theta can be shifted freely.")
        rows = weighted_rows(weights)
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
        self.squares = self.design.squares(self.weights)
        centring.require_finite_columns(self.squares)

    @property
    def rank(self) -> int:
        """d: the ridge makes H definite."""
        return self.dimension

    def table(self, theta: Array) -> tuple[Array, Array]:
        """The coefficients of every class (C, d) and their constants (C,), which sum to 0."""
        rows = theta.reshape(-1, self.outputs)
        constants = rows[-1] - self.mean @ rows[:-1]
        return np.ascontiguousarray(rows[:-1].T), constants - constants.mean()

    def margins(self, theta: Array) -> Array:
        """Margins (n, C)."""
        table = theta.reshape(-1, self.outputs)
        used = np.flatnonzero(table.any(axis=1)).astype(np.int64)
        return np.asarray(self.design.columns(used) @ table[used])

    def probabilities(self, theta: Array) -> Array:
        """Class probabilities (n, C)."""
        return np.asarray(softmax(self.margins(theta), axis=1))

    def value(self, theta: Array) -> float:
        """f(theta)."""
        return self._value(theta, self.margins(theta))

    def _value(self, theta: Array, margins: Array) -> float:
        losses = logsumexp(margins, axis=1) - margins[np.arange(self.labels.size), self.labels]
        return float(self.weights @ losses) + 0.5 * float(self.ridge @ theta**2)

    def value_and_gradient(self, theta: Array) -> tuple[float, Array]:
        """f and its gradient."""
        margins = self.margins(theta)
        residual = softmax(margins, axis=1)
        residual[np.arange(self.labels.size), self.labels] -= 1
        gradient = self.design.rmatmat(self.weights[:, None] * residual).reshape(-1) + self.ridge * theta
        return self._value(theta, margins), gradient

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
        left, right = (self.design.columns(index // self.outputs) for index in (rows, support))
        row_class, column_class = rows % self.outputs, support % self.outputs
        weighted = self.weights[:, None] * right * p[:, column_class]
        same = row_class[:, None] == column_class[None, :]
        block = same * (left.T @ weighted) - (left * p[:, row_class]).T @ weighted
        return np.asarray(block + np.where(rows[:, None] == support[None, :], self.ridge[support][None, :], 0.0))

    def hessian_block(self, theta: Array, support: Indices) -> Array:
        """H_QQ."""
        return self.hessian_columns(theta, support, support)

    def hessian_diagonal(self, theta: Array) -> Array:
        """diag H."""
        p = self.probabilities(theta)
        per_class = [self.design.squares(self.weights * p[:, c] * (1 - p[:, c])) for c in range(self.outputs)]
        return np.asarray(np.stack(per_class, axis=1).reshape(-1) + self.ridge)
