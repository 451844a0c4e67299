"""A minimiser of f on a support, and small linear systems."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg.lapack import dposv, dpotrf, dpotri, sposv

from iobs.optimize.objectives.design import Array, Floats, Indices, add_to_diagonal

_JITTER = 1e-12  # relative to the diagonal: makes systems with duplicate columns solvable


@dataclass(frozen=True)
class Fit:
    """A minimiser of f on a support.

    Attributes:
        support: sorted coordinates Q (k,), forced coordinates included.
        theta: (d,), zero outside Q.
        value: f(theta).
        gradient: (d,), about zero on Q.
    """

    support: Indices
    theta: Array
    value: float
    gradient: Array


def newton_direction(hessian: Floats, gradient: Array) -> Array:
    """-(H + mu D)^-1 g with D = diag(H) and mu the smallest of 0, 1e-12, 1e-10, ... that makes the matrix definite.

    Solved in the Hessian's precision, float32 or float64.
    """
    if not gradient.size:
        return np.zeros(0)
    solve = sposv if hessian.dtype == np.float32 else dposv
    _, direction, info = solve(hessian, -gradient, lower=1)
    if info == 0 and np.isfinite(direction).all():
        return np.asarray(direction, dtype=np.float64)
    diagonal = np.abs(hessian.diagonal())
    floor = diagonal.max(initial=0.0) * 1e-14
    ridge = np.maximum(diagonal, floor if floor > 0 else 1.0)
    amount = _JITTER
    while amount < 1e8:
        _, direction, info = solve(hessian + np.diag(amount * ridge), -gradient, lower=1)
        if info == 0 and np.isfinite(direction).all():
            return np.asarray(direction, dtype=np.float64)
        amount = 100 * amount
    return np.asarray(-gradient / ridge)


def inverse_block(hessian: Array) -> Array:
    """H_QQ^-1, with the diagonal raised just enough for it to exist (duplicate columns)."""
    if not hessian.size:  # LAPACK complains on standard output about empty matrices
        return hessian.copy()
    amount = 0.0
    diagonal = hessian.diagonal()
    while amount < 1.0:
        matrix = hessian.copy()
        if amount:
            add_to_diagonal(matrix, amount * diagonal + 1e-300)
        factor, info = dpotrf(matrix, lower=1, overwrite_a=1)
        if info == 0:
            # A factor with pivots near zero would give an inverse that is mostly rounding.
            pivots = factor.diagonal() ** 2
            if amount or (pivots > 1e-13 * diagonal).all():
                lower, _ = dpotri(factor, lower=1, overwrite_c=1)  # zero above the diagonal, as the factor
                inverse = lower + lower.T
                add_to_diagonal(inverse, -lower.diagonal())
                return np.asarray(inverse)
        amount = _JITTER if amount == 0 else 100 * amount
    return np.asarray(np.diag(1.0 / np.maximum(diagonal, 1e-300)))
