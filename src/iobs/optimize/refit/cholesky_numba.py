"""Cholesky factors of small definite matrices, and what they solve, compiled with numba.

For a few columns a call of LAPACK takes longer than its work.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from iobs.optimize.objectives.design import Array

_ROUNDING = 1e-13  # a pivot below this share of its diagonal entry is mostly rounding


@njit(cache=True, nogil=True)
def factorise(matrix: Array) -> bool:
    """Overwrite the lower triangle of a matrix (k, k) by its Cholesky factor; False if a pivot is mostly rounding."""
    for i in range(matrix.shape[0]):
        floor = _ROUNDING * matrix[i, i]
        for j in range(i):
            total = matrix[i, j]
            for a in range(j):
                total -= matrix[i, a] * matrix[j, a]
            matrix[i, j] = total / matrix[j, j]
        total = matrix[i, i]
        for a in range(i):
            total -= matrix[i, a] * matrix[i, a]
        if not total > floor:
            return False
        matrix[i, i] = math.sqrt(total)
    return True


@njit(cache=True, nogil=True)
def solve(factor: Array, right: Array) -> None:
    """Overwrite `right` (k,) by the solution of the system whose factor (k, k) is given."""
    k = right.size
    for i in range(k):
        for a in range(i):
            right[i] -= factor[i, a] * right[a]
        right[i] /= factor[i, i]
    for i in range(k - 1, -1, -1):
        right[i] /= factor[i, i]
        for a in range(i):
            right[a] -= factor[i, a] * right[i]


@njit(cache=True, nogil=True)
def inverse(factor: Array) -> Array:
    """Inverse (k, k) of the matrix whose factor is given."""
    k = factor.shape[0]
    half = np.zeros((k, k))  # the inverse of the factor
    found = np.zeros((k, k))
    for j in range(k):
        half[j, j] = 1.0 / factor[j, j]
        for i in range(j + 1, k):
            total = 0.0
            for a in range(j, i):
                total -= factor[i, a] * half[a, j]
            half[i, j] = total / factor[i, i]
    for a in range(k):
        for i in range(a + 1):
            for j in range(i + 1):
                found[i, j] += half[a, i] * half[a, j]
    for i in range(k):
        for j in range(i):
            found[j, i] = found[i, j]
    return found
