"""Several equations with exactly k terms, and linear equations between their coefficients: systems identification.

Without constraints each equation is a problem of its own. With a total number of terms, or with constraints C w = d,
all coefficients w are one least squares problem. The constraints are added to its quadratic,

    f(w) + nu^T (C w - d) + rho / 2 |C w - d|^2,

which for any nu and rho bounds f from below where C w = d. Two rounds: the first with nu = 0, the second with the
multipliers of the fit that the first has found, with which the bound is exact there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Self

import numpy as np
import numpy.typing as npt
from scipy.linalg import block_diag
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted

from iobs.errors import ProblemError, is_a
from iobs.optimize.bounds.branch_and_bound import certify
from iobs.optimize.bounds.certificate import relative_gap
from iobs.optimize.curvature import QuadraticObjective
from iobs.optimize.objectives.design import Array, Indices
from iobs.optimize.objectives.linear import LeastSquares

_STIFF = 1e5  # rho, relative to the mean diagonal of the Hessian
_FEASIBLE = 1e-8  # largest |C w - d|, relative to |C| |w| + |d|


@dataclass(eq=False, repr=False, kw_only=True)
class SparseEquations(MultiOutputMixin, RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Least squares for several equations with exactly k terms each, proved; an optimizer for pysindy.

    It takes the place of pysindy's `MIOSR` (Bertsimas and Gurnee 2022), without a solver of integer programs:
    `pysindy.SINDy(optimizer=iobs.SparseEquations(3))`. There is no intercept: a constant is a term of the library.

    Args:
        k: terms of each equation, or one number for each equation (C,). None with `total`.
        total: terms of all equations together; needed with constraints.
        ridge: weight of 1/2 norm(coefficients)^2.
        constraint_lhs: C (constraints, C d), the coefficients of one equation after the other.
        constraint_rhs: d (constraints,).
        gap: relative gap at which a proof ends.
        seconds: time limit of one proof.

    Attributes:
        coef_: (C, d).
        support_: boolean (C, d), true where a coefficient is not zero.
        gap_: the largest proved relative gap of an equation, or that of all together.
        messages_: of the proofs.
    """

    k: int | Sequence[int] | None = field(default=None, kw_only=False)
    total: int | None = None
    ridge: float = 0.0
    constraint_lhs: npt.ArrayLike | None = None
    constraint_rhs: npt.ArrayLike | None = None
    gap: float = 1e-6
    seconds: float = 60.0

    def fit(self, X: npt.ArrayLike, y: npt.ArrayLike) -> Self:
        """Fit the equations.

        Args:
            X: terms (n, d); rows with NaN in X or y are left out.
            y: left-hand sides (n, C), or (n,) of one equation.

        Raises:
            ProblemError: invalid settings, or constraints that no such coefficients satisfy.
        """
        terms, sides = np.asarray(X, dtype=np.float64), np.asarray(y, dtype=np.float64)
        sides = sides.reshape(len(sides), -1)
        known = ~(np.isnan(terms).any(axis=1) | np.isnan(sides).any(axis=1))
        terms, sides = np.ascontiguousarray(terms[known]), np.ascontiguousarray(sides[known])
        if not (is_a(Real, self.ridge) and self.ridge >= 0):
            raise ProblemError(f"ridge must not be negative, got {self.ridge!r}.")
        if (self.k is None) == (self.total is None):
            raise ProblemError("Give either k, the terms of each equation, or total, those of all equations.")
        if self.constraint_lhs is not None and self.total is None:
            raise ProblemError("Constraints join the equations; give total, the terms of all equations, in place of k.")
        self.n_features_in_ = terms.shape[1]
        if self.total is None:
            self._fit_each(terms, sides)
        else:
            self._fit_together(terms, sides)
        self.support_ = self.coef_ != 0
        return self

    def _fit_each(self, X: Array, sides: Array) -> None:
        given = np.atleast_1d(np.asarray(self.k))
        sizes = (np.repeat(given, sides.shape[1]) if given.size == 1 else given).tolist()
        if len(sizes) != sides.shape[1]:
            raise ProblemError(f"k has {len(sizes)} numbers for {sides.shape[1]} equations.")
        proofs = [
            certify(LeastSquares(X, side, ridge=self.ridge), size, gap=self.gap, seconds=self.seconds)
            for side, size in zip(sides.T, sizes, strict=True)
        ]
        self.coef_: Array = np.stack([proof.fit.theta for proof in proofs])
        self.gap_ = max(proof.gap for proof in proofs)
        self.messages_ = [proof.message for proof in proofs]

    def _fit_together(self, X: Array, sides: Array) -> None:
        gram = X.T @ X + self.ridge * np.eye(X.shape[1])
        hessian = block_diag(*[gram] * sides.shape[1])
        linear, constant = (X.T @ sides).T.ravel(), 0.5 * float((sides**2).sum())
        left, right = self._constraints(linear.size)
        nu, lower, stiff = np.zeros(right.size), -np.inf, _STIFF * float(gram.diagonal().mean())
        self.messages_ = []
        for _ in range(2 if right.size else 1):
            objective = QuadraticObjective(
                hessian + stiff * left.T @ left,
                linear - left.T @ nu + stiff * left.T @ right,
                constant=constant - float(nu @ right) + 0.5 * stiff * float(right @ right),
            )
            proof = certify(objective, int(self.total or 0), gap=self.gap, seconds=self.seconds)
            lower = max(lower, proof.lower - proof.margin)
            theta, nu = _constrained(hessian, linear, left, right, np.flatnonzero(proof.fit.theta).astype(np.int64))
            self.messages_.append(proof.message)
        value = constant + float(theta @ (0.5 * hessian @ theta - linear))
        self.coef_ = theta.reshape(sides.shape[1], -1)
        self.gap_ = relative_gap(lower, value)

    def _constraints(self, size: int) -> tuple[Array, Array]:
        if self.constraint_lhs is None or self.constraint_rhs is None:
            if self.constraint_lhs is not None or self.constraint_rhs is not None:
                raise ProblemError("Give both sides of the constraints, or none.")
            return np.zeros((0, size)), np.zeros(0)
        left = np.atleast_2d(np.asarray(self.constraint_lhs, dtype=np.float64))
        right = np.atleast_1d(np.asarray(self.constraint_rhs, dtype=np.float64))
        if left.shape != (right.size, size):
            raise ProblemError(f"The constraints must have the shape ({right.size}, {size}), got {left.shape}.")
        return left, right

    def predict(self, X: npt.ArrayLike) -> Array:
        """The left-hand sides (n, C)."""
        check_is_fitted(self)
        return np.asarray(np.asarray(X) @ self.coef_.T)

    @property
    def complexity(self) -> int:
        """The number of terms of all equations, which pysindy asks for."""
        return int(np.count_nonzero(self.coef_))


def _constrained(hessian: Array, linear: Array, left: Array, right: Array, support: Indices) -> tuple[Array, Array]:
    """The minimiser (d,) on a support where C w = d, and the multipliers of the constraints.

    Raises:
        ProblemError: no vector on the support satisfies the constraints.
    """
    part, count = left[:, support], right.size
    system = np.block([[hessian[np.ix_(support, support)], part.T], [part, np.zeros((count, count))]])
    solution = np.linalg.lstsq(system, np.concatenate([linear[support], right]), rcond=None)[0]
    theta = np.zeros(linear.size)
    theta[support] = solution[: support.size]
    off = np.abs(left @ theta - right)
    if (off > _FEASIBLE * (np.abs(left) @ np.abs(theta) + np.abs(right))).any():
        raise ProblemError("No coefficients with so few terms satisfy the constraints; raise total.")
    return theta, solution[support.size :]
