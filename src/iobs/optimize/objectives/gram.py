"""Least squares by its Gram matrix: what a search over supports needs, without further passes over the data.

    f(theta) = 1/2 norm(y)^2 - c^T theta + 1/2 theta^T H theta,     H = X^T X + ridge,     c = X^T y

A support of k coordinates then costs O(k d + k^3), whatever the number of samples. Values are exact up to rounding
relative to f(0), not relative to f. So this form only searches; the result is fitted on the data.
"""

from __future__ import annotations

from copy import copy

import numpy as np

from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.design import Array, Booleans, DenseDesign, Indices
from iobs.optimize.objectives.linear import LeastSquares

GRAM_LIMIT = 1536  # most coordinates of a quadratic whose whole Hessian is stored
_WHOLE_WORK = 1e10  # most multiplications for which all rows of H are computed at once
_AHEAD = 16  # number of rows of H that are computed with a missing one; one product of matrices is faster than many


class GramLeastSquares(Objective):
    """A `LeastSquares` through H and c; rows of H are computed once they are needed.

    Attributes:
        source: the objective on the data.
        linear: c (d,).
        constant: f(0).
        rows: H (d, d); a row that is not known holds only its diagonal entry.
        known: (d,) true where a row of H is computed.
    """

    quadratic = True
    convex = True

    def __init__(self, source: LeastSquares) -> None:
        self.source = copy(source)  # `source` itself refers to this object, and a cycle would keep both in memory
        self.dimension, self.forced = source.dimension, source.forced
        self.linear = source.design.rmatvec(source.target)
        self.constant = 0.5 * float(source.target @ source.target)
        self._diagonal = source.hessian_diagonal(self.linear)
        samples, d = source.design.shape
        if samples * d * d <= _WHOLE_WORK:
            self.rows = source.hessian_block(self.linear, np.arange(d))
            self.known: Booleans = np.ones(d, dtype=np.bool_)
        else:
            self.rows = np.zeros((d, d))
            np.fill_diagonal(self.rows, self._diagonal)
            self.known = np.zeros(d, dtype=np.bool_)
            # The rows that are computed ahead, best first.
            self._order = np.argsort(-np.abs(self.linear) / np.sqrt(np.maximum(self._diagonal, 1e-300)), kind="stable")
        self.complete = bool(self.known.all())

    @property
    def rank(self) -> int:
        """An upper bound on the rank of H."""
        return self.source.rank

    def know(self, support: Indices) -> None:
        """Compute the rows of H in `support` that are not known, and some of the next most promising."""
        if self.complete:
            return
        missing = support[~self.known[support]]
        if not missing.size:
            return
        likely = self._order[~self.known[self._order]][: max(0, _AHEAD - missing.size)]
        new = np.union1d(missing, likely).astype(np.int64)
        self.rows[new] = self.source.hessian_columns(self.linear, new).T
        self.known[new] = True
        self.complete = bool(self.known.all())

    def value_and_gradient(self, theta: Array) -> tuple[float, Array]:
        """f and H theta - c."""
        support = theta.nonzero()[0]
        if not support.size:
            return self.constant, -self.linear
        self.know(support)
        values = theta[support]
        gradient = values @ self.rows[support] - self.linear
        value = self.constant + 0.5 * float(values @ (gradient[support] - self.linear[support]))
        return max(value, 0.0), gradient

    def hessian_product(self, theta: Array, vector: Array) -> Array:
        """H v."""
        return np.asarray(self.rows @ vector) if self.complete else self.source.hessian_product(theta, vector)

    def hessian_block(self, theta: Array, support: Indices) -> Array:
        """H_QQ."""
        self.know(support)
        return self.rows[support[:, None], support]

    def hessian_columns(self, theta: Array, support: Indices, rows: Indices | None = None) -> Array:
        """H_:Q, or only the rows in `rows`."""
        self.know(support)
        return np.asarray(self.rows[support].T if rows is None else self.rows[support[:, None], rows].T)

    def hessian_diagonal(self, theta: Array) -> Array:
        """diag H."""
        return self._diagonal

    def restricted(self, support: Indices) -> Objective:
        """The objective on the columns in `support`, on the data."""
        return self.source.restricted(support)

    def constant_coordinates(self) -> Indices:
        """Zero columns without ridge."""
        return self.source.constant_coordinates()

    def copied_coordinates(self, *, penalised: bool = True, limits: tuple[Array, Array] | None = None) -> Indices:
        """Coordinates of columns that are multiples of others."""
        return self.source.copied_coordinates(penalised=penalised, limits=limits)

    def split(self, theta: Array) -> tuple[Array, float]:
        """The coefficients of the features, and the intercept."""
        return self.source.split(theta)


def by_gram(objective: Objective) -> GramLeastSquares | None:
    """The Gram form of a least-squares objective; None where it would not be exact or not pay.

    It needs a float64 NumPy design of at most `GRAM_LIMIT` columns.
    """
    if not isinstance(objective, LeastSquares) or objective.dimension > GRAM_LIMIT:
        return None
    design = objective.design
    if not isinstance(design, DenseDesign) or design.matrix.dtype != np.float64:
        return None
    if not isinstance(objective.by_gram, GramLeastSquares):
        objective.by_gram = GramLeastSquares(objective)
    return objective.by_gram
