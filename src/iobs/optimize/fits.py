"""A function minimised on a support, and the small solves that this takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.linalg.lapack import dposv, dpotrf, dpotri, sposv

from iobs.optimize.designs import Array, Indices

_JITTER = 1e-12  # relative to the diagonal: what makes duplicate columns harmless


@dataclass(frozen=True)
class Fit:
    """f minimised on a support.

    Attributes:
        support: sorted coordinates Q (k,), forced ones included.
        theta: (d,), zero outside Q.
        value: f(theta).
        gradient: (d,), about zero on Q.
    """

    support: Indices
    theta: Array
    value: float
    gradient: Array


def newton_direction(hessian: npt.NDArray[Any], gradient: Array) -> Array:
    """-(H + mu D)^-1 g with D = diag(H), mu the least of 0, 1e-12, 1e-10, ... that makes the matrix definite.

    In the Hessian's own precision, single or double.
    """
    if not gradient.size:
        return np.zeros(0)
    solve = sposv if hessian.dtype == np.float32 else dposv
    diagonal = np.abs(hessian.diagonal())
    floor = diagonal.max(initial=0.0) * 1e-14
    ridge = np.maximum(diagonal, floor if floor > 0 else 1.0)
    amount = 0.0
    while amount < 1e8:
        matrix = hessian + np.diag(amount * ridge) if amount else hessian
        _, direction, info = solve(matrix, -gradient, lower=1)
        if info == 0 and np.isfinite(direction).all():
            return np.asarray(direction, dtype=np.float64)
        amount = _JITTER if amount == 0 else 100 * amount
    return np.asarray(-gradient / ridge)


def inverse_block(hessian: Array) -> Array:
    """H_QQ^-1, with the diagonal raised by as little as makes it exist (duplicate columns)."""
    if not hessian.size:  # nothing for LAPACK, which would complain on the standard output
        return hessian.copy()
    amount = 0.0
    diagonal = hessian.diagonal()
    while amount < 1.0:
        matrix = hessian.copy()
        matrix[np.diag_indices_from(matrix)] += amount * diagonal + (1e-300 if amount else 0.0)
        factor, info = dpotrf(matrix, lower=1, overwrite_a=1)
        if info == 0:
            # A factor that nearly broke down would give an inverse that is mostly rounding.
            pivots = factor.diagonal() ** 2
            if amount or (pivots > 1e-13 * diagonal).all():
                lower, _ = dpotri(factor, lower=1, overwrite_c=1)
                return np.asarray(np.tril(lower) + np.tril(lower, -1).T)
        amount = _JITTER if amount == 0 else 100 * amount
    return np.asarray(np.diag(1.0 / np.maximum(diagonal, 1e-300)))
