"""Refits and exact swaps of a least-squares problem on its Gram matrix, compiled with numba.

`gram_search` builds whole searches of them. The arrays are those of `kernels.SwapState` for all d coordinates:

    f(theta) = constant - c^T theta + 1/2 theta^T H theta

Forced coordinates are in every support. A support whose columns are linearly dependent is not fitted here; the caller
then runs the general search, which damps such systems.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from iobs.optimize.objectives.design import Array, Booleans, Indices
from iobs.optimize.refit.cholesky_numba import factorise, solve
from iobs.optimize.refit.cholesky_numba import inverse as inverse_of
from iobs.optimize.search.kernels import SwapState, swap_until_optimal

_SHRUNK, _VANISHED = 1e-3, 1e-12  # bounds of a vanishing gradient, as in `pursuits.solved`
_LIMIT = 1000  # most exchanges and refits from one start


class GramProblem(NamedTuple):
    """A least-squares problem by its Gram matrix.

    Attributes:
        hessian: H (d, d).
        linear: c (d,).
        constant: f(0).
        scale: square roots of the diagonal of H, 1 where it is zero (d,).
        candidates: (d,) true where a coordinate may enter the support; false on forced coordinates.
        forced: coordinates of every support, ascending.
        tolerance: least decrease of f by a swap, relative to the larger of f and its decrease from f(0).
    """

    hessian: Array
    linear: Array
    constant: float
    scale: Array
    candidates: Booleans
    forced: Indices
    tolerance: float


@njit(cache=True, nogil=True)
def _refit(problem: GramProblem, support: Indices) -> tuple[bool, Array, Array]:
    """The refit on a support: whether it exists, the Cholesky factor of H_QQ (k, k), and theta_Q (k,)."""
    k = support.size
    block = np.empty((k, k))
    for i in range(k):
        for j in range(k):
            block[i, j] = problem.hessian[support[i], support[j]]
    factor, theta = block.copy(), np.zeros(k)
    if not factorise(factor):
        return False, factor, theta
    change = np.empty(k)
    for _ in range(2):  # the second round is iterative refinement
        for i in range(k):
            change[i] = problem.linear[support[i]]
            for j in range(k):
                change[i] -= block[i, j] * theta[j]
        solve(factor, change)
        theta += change
    return True, factor, theta


@njit(cache=True, nogil=True)
def _gradient(problem: GramProblem, support: Indices, theta: Array) -> Array:
    """The gradient (d,) at theta_Q."""
    gradient = -problem.linear
    for i in range(support.size):
        value = theta[i]
        row = problem.hessian[support[i]]
        for j in range(gradient.size):
            gradient[j] += value * row[j]
    return gradient


@njit(cache=True, nogil=True)
def fitted(problem: GramProblem, support: Indices) -> tuple[bool, Array, Array]:
    """The refit on a support: whether it exists, theta_Q (k,), and the gradient (d,)."""
    fine, _, theta = _refit(problem, support)
    return fine, theta, _gradient(problem, support, theta)


@njit(cache=True, nogil=True)
def value_at(problem: GramProblem, support: Indices, theta: Array, gradient: Array) -> float:
    """f at a refit."""
    total = problem.constant
    for i in range(support.size):
        total += 0.5 * theta[i] * (gradient[support[i]] - problem.linear[support[i]])
    return max(total, 0.0)


@njit(cache=True, nogil=True)
def is_solved(problem: GramProblem, support: Indices, theta: Array, gradient: Array) -> bool:
    """Check that the whole gradient vanishes, as `pursuits.solved`."""
    if support.size == problem.forced.size:
        return False
    size, slope, first = 0.0, 0.0, 0.0
    for i in range(support.size):
        size = max(size, abs(theta[i] * problem.scale[support[i]]))
    for j in range(gradient.size):
        slope = max(slope, abs(gradient[j] / problem.scale[j]))
        first = max(first, abs(problem.linear[j] / problem.scale[j]))
    return slope <= _VANISHED * size and slope <= _SHRUNK * first


@njit(cache=True, nogil=True)
def state_at(problem: GramProblem, support: Indices) -> tuple[bool, SwapState]:
    """The state of the swaps at the refit on a support; False if the refit does not exist."""
    k, d = support.size, problem.linear.size
    fine, factor, theta = _refit(problem, support)
    gradient = _gradient(problem, support, theta)
    inverse = inverse_of(factor) if fine else factor
    projection = np.zeros((k, d))
    schur = np.empty(d)
    allowed = np.zeros(d)
    locked = np.zeros(k, dtype=np.bool_)
    for j in range(d):
        schur[j] = problem.hessian[j, j]
        if problem.candidates[j]:
            allowed[j] = 1.0
    for i in range(k):
        allowed[support[i]] = 0.0
        for j in problem.forced:
            locked[i] = locked[i] or support[i] == j
    if fine:
        for a in range(k):
            row = problem.hessian[support[a]]
            for i in range(k):
                share = inverse[i, a]
                for j in range(d):
                    projection[i, j] += share * row[j]
        for i in range(k):
            row = problem.hessian[support[i]]
            for j in range(d):
                schur[j] -= row[j] * projection[i, j]
    members = np.arange(d)
    state = SwapState(
        members, problem.hessian, support.copy(), inverse, projection, schur, gradient, theta, allowed, locked
    )
    return fine, state


@njit(cache=True, nogil=True)
def _ascending(support: Indices) -> Indices:
    """The sorted support; compiles faster than `np.sort`, and supports are short."""
    found = support.copy()
    for i in range(1, found.size):
        value, j = found[i], i
        while j > 0 and found[j - 1] > value:
            found[j] = found[j - 1]
            j -= 1
        found[j] = value
    return found


@njit(cache=True, nogil=True)
def improved(problem: GramProblem, support: Indices) -> tuple[bool, Indices, float, bool]:
    """Exchange until no swap lowers f: whether all supports had a refit, the support, f, and whether f is minimal."""
    best, value, last = support, np.inf, 0.0
    for _ in range(_LIMIT):
        fine, state = state_at(problem, _ascending(support))
        if not fine:
            return value < np.inf, best, value, False
        new = value_at(problem, state.support, state.theta, state.gradient)
        if not new < value - 0.5 * last:  # as far as rounding tells
            break
        best, value = state.support.copy(), new
        if is_solved(problem, best, state.theta, state.gradient):
            return True, best, value, True
        last = problem.tolerance * max(value, problem.constant - value, 1e-300)
        if swap_until_optimal(state, last, _LIMIT) == 0:
            break
        support = state.support
    return True, best, value, False


@njit(cache=True, nogil=True)
def grown(state: SwapState, entering: int) -> SwapState:
    """The state of a support with one more coordinate."""
    k, d = state.projection.shape
    pivot = state.schur[entering]
    inverse, projection = np.zeros((k + 1, k + 1)), np.zeros((k + 1, d))
    support, theta = np.empty(k + 1, dtype=np.int64), np.empty(k + 1)
    locked = np.zeros(k + 1, dtype=np.bool_)
    v = state.hessian[entering].copy()
    for i in range(k):
        weight = state.hessian[entering, state.support[i]]
        for j in range(d):
            v[j] -= weight * state.projection[i, j]
    value = -state.gradient[entering] / pivot
    for j in range(d):
        state.schur[j] -= v[j] * v[j] / pivot
        state.gradient[j] += v[j] * value
    for i in range(k):
        u = state.projection[i, entering]
        share = u / pivot
        support[i], theta[i], locked[i] = state.support[i], state.theta[i] - u * value, state.locked[i]
        for a in range(k):
            inverse[i, a] = state.inverse[i, a] + share * state.projection[a, entering]
        inverse[i, k] = inverse[k, i] = -share
        for j in range(d):
            projection[i, j] = state.projection[i, j] - share * v[j]
    inverse[k, k] = 1.0 / pivot
    for j in range(d):
        projection[k, j] = v[j] / pivot
    support[k], theta[k] = entering, value
    state.allowed[entering] = 0.0
    return SwapState(
        state.members,
        state.hessian,
        support,
        inverse,
        projection,
        state.schur,
        state.gradient,
        theta,
        state.allowed,
        locked,
    )
