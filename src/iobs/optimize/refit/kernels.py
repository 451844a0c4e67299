"""Newton's method for logistic and Poisson models on a few columns, and small Cholesky factors, compiled with numba.

The steps are those of `newton.minimise_on_all` with a new Hessian each time. On a small problem the calls between NumPy
functions, and of LAPACK, take longer than their work.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from iobs.optimize.objectives.design import Array

LOGISTIC, POISSON = 0, 1
# Far from a minimiser with a log link a Newton step is about as long as y / exp(m), so that few halvings are too few.
HALVINGS = 200
_SHORTEST = 0.5**HALVINGS  # share of a step


@njit(cache=True, nogil=True)
def _evaluate(family: int, margin: Array, target: Array, weights: Array, slopes: Array, curvatures: Array) -> float:
    """sum_i w_i l(m_i, y_i) without the terms that do not depend on m; writes w l' and w l''."""
    total = 0.0
    for i in range(margin.size):
        m, y, w = margin[i], target[i], weights[i]
        if family == LOGISTIC:
            small = math.exp(-abs(m))
            share = 1.0 / (1.0 + small) if m > 0 else small / (1.0 + small)
            away = (1.0 - y) * m if m > 0 else -y * m
            total += w * (math.log1p(small) + away)
            slopes[i], curvatures[i] = w * (share - y), w * small / (1.0 + small) ** 2
        else:
            mean = math.exp(m)
            total += w * (mean - y * m)
            slopes[i], curvatures[i] = w * (mean - y), w * mean
    return total


@njit(cache=True, nogil=True)
def minimise(
    family: int, rows: Array, target: Array, weights: Array, ridge: Array, offset: Array, start: Array, steps: int
) -> tuple[bool, Array]:
    """Minimise sum_i w_i l(m_i, y_i) + 1/2 ridge theta^2 over all k coordinates, m = rows^T theta + offset.

    Args:
        family: `LOGISTIC` or `POISSON`.
        rows: the transposed design (k, n), contiguous.
        target: y (n,).
        weights: w (n,).
        ridge: of every coordinate (k,).
        offset: known part of the margins (n,).
        start: first guess (k,).
        steps: largest number of Newton steps.

    Returns:
        False where a Hessian is singular or f is not finite at the start, and the minimiser.
    """
    n = target.size
    theta = start.copy()
    slopes, curvatures = np.empty(n), np.empty(n)
    other_slopes, other_curvatures = np.empty(n), np.empty(n)
    margin = offset + np.dot(theta, rows)
    loss = _evaluate(family, margin, target, weights, slopes, curvatures)
    value = float(loss + 0.5 * np.sum(ridge * theta**2))
    if not math.isfinite(value):
        return False, theta
    for _ in range(steps):
        gradient = np.dot(rows, slopes) + ridge * theta
        half = rows * np.sqrt(curvatures)
        hessian = np.dot(half, half.T)
        for j in range(theta.size):
            hessian[j, j] += ridge[j]
        if not factorise(hessian):
            return False, theta
        direction = -gradient
        solve(hessian, direction)
        decrease = -np.sum(gradient * direction)
        if not decrease > 0.0:
            break
        rounding = 1e-15 * max(abs(value), 1e-300)
        change = np.dot(direction, rows)
        lowered, length = False, 1.0
        while length * decrease > rounding or length == 1.0:
            trial = theta + length * direction
            moved = margin + length * change
            loss = _evaluate(family, moved, target, weights, other_slopes, other_curvatures)
            new = float(loss + 0.5 * np.sum(ridge * trial**2))
            if math.isfinite(new) and new <= value - 1e-4 * length * decrease + rounding:
                lowered = True
                break
            length *= 0.5
            if length < _SHORTEST:
                break
        if not lowered:
            break
        # Newton's steps converge quadratically: f after the step is off by about the square of this share.
        ended = decrease <= 1e-16 * abs(value) or decrease <= 1e-30
        theta, margin, value = trial, moved, new
        slopes, other_slopes = other_slopes, slopes
        curvatures, other_curvatures = other_curvatures, curvatures
        if ended:
            break
    return True, theta


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
    result = np.zeros((k, k))
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
                result[i, j] += half[a, i] * half[a, j]
    for i in range(k):
        for j in range(i):
            result[j, i] = result[i, j]
    return result
