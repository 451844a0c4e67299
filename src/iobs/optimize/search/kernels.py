"""Exact swaps on a quadratic, and refits of least squares on its Gram matrix, compiled with numba.

State of a support Q, on m candidate coordinates of a quadratic with Hessian H:

    P = H_QQ^-1 (k, k)      U = P H_Q: (k, m)      s = diag(H) - sum_Q H_Q: U (m,)      g = gradient at the refit (m,)

Exchanging the i-th member of Q for coordinate j changes the refitted objective by exactly

    Delta_ij = 1/2 [ theta_i^2 / P_ii  -  (g_j - theta_i U_ij / P_ii)^2 / (s_j + U_ij^2 / P_ii) ]

so scoring all k (m - k) exchanges costs O(k m). Making one is two rank-one updates, O(k m) again.

`swaps` uses these on the candidates of any f, `gram_search` on all d coordinates of least squares by its Gram matrix:

    f(theta) = constant - c^T theta + 1/2 theta^T H theta

There forced coordinates are in every support. A support whose columns are linearly dependent is not fitted; the caller
then runs the general search, which damps such systems.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from iobs.optimize.objectives.design import Array, Booleans, Indices
from iobs.optimize.refit.kernels import factorise, solve
from iobs.optimize.refit.kernels import inverse as inverse_of

_SHRUNK, _VANISHED = 1e-3, 1e-12  # bounds of a vanishing gradient, as in `pursuits.solved`
_NOTHING = 1e-290  # curvatures up to this one have underflowed: coefficients without bound
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
def improved(problem: GramProblem, support: Indices) -> tuple[bool, Indices, float, bool]:
    """Exchange until no swap lowers f: whether all supports had a refit, the support, f, and whether f is minimal."""
    best, value, last = support, np.inf, 0.0
    for _ in range(_LIMIT):
        fine, state = state_at(problem, support[np.argsort(support)])
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


class SwapState(NamedTuple):
    """The quadratic model around a fitted support Q, restricted to m coordinates. The kernels update it in place.

    Attributes:
        members: the m coordinates, ascending.
        hessian: H (m, m).
        support: positions of Q in `members` (k,).
        inverse: P (k, k).
        projection: U (k, m).
        schur: s (m,).
        gradient: g (m,).
        theta: refitted values on Q (k,).
        allowed: (m,) 1.0 where a coordinate may enter the support, 0.0 elsewhere and on Q.
        locked: (k,) true where a member of Q must stay.
    """

    members: Indices
    hessian: Array
    support: Indices
    inverse: Array
    projection: Array
    schur: Array
    gradient: Array
    theta: Array
    allowed: Array
    locked: Booleans


@njit(cache=True, nogil=True)
def best_swap(state: SwapState, diagonal: Array) -> tuple[int, int, float]:
    """The exchange with the smallest change of the objective: (position in Q, coordinate, change).

    Args:
        state: the support; its Hessian is not read.
        diagonal: diag H (m,); a curvature far below it is rounding and is ignored.
    """
    inverse, projection, schur, gradient = state.inverse, state.projection, state.schur, state.gradient
    theta, allowed, locked = state.theta, state.allowed, state.locked
    k, m = projection.shape
    leaving, entering, least = -1, -1, 0.0
    for i in range(k):
        if locked[i] or inverse[i, i] == 0.0:
            continue
        cost = theta[i] * theta[i] / inverse[i, i]
        ratio = theta[i] / inverse[i, i]
        share = 1.0 / inverse[i, i]
        # Multiplying by allowed[j] instead of testing it lets the loop over j vectorise.
        low, at = 0.0, -1
        for j in range(m):
            u = projection[i, j]
            slope = gradient[j] - ratio * u
            curvature = schur[j] + share * u * u
            gain = slope * slope / curvature if curvature > max(1e-9 * diagonal[j], _NOTHING) else 0.0
            change = cost - gain * allowed[j]
            if change < low:
                low, at = change, j
        if low < least:
            leaving, entering, least = i, at, low
    return leaving, entering, 0.5 * least


@njit(cache=True, nogil=True)
def exchange(state: SwapState, leaving: int, entering: int) -> None:
    """Replace the member of Q at position `leaving` by coordinate `entering`."""
    state.allowed[state.support[leaving]], state.allowed[entering] = 1.0, 0.0
    hessian, support, inverse, projection = state.hessian, state.support, state.inverse, state.projection
    schur, gradient, theta = state.schur, state.gradient, state.theta
    k, m = projection.shape
    pivot = inverse[leaving, leaving]
    column = inverse[:, leaving] / pivot
    row = projection[leaving].copy()
    ratio = theta[leaving] / pivot
    for j in range(m):
        schur[j] += row[j] * row[j] / pivot
        gradient[j] -= ratio * row[j]
    removed = inverse[leaving].copy()
    removed_value = theta[leaving]
    for i in range(k):
        theta[i] -= column[i] * removed_value
        for a in range(k):
            inverse[i, a] -= column[i] * removed[a]
        for j in range(m):
            projection[i, j] -= column[i] * row[j]
    inverse[leaving, :] = 0.0
    inverse[:, leaving] = 0.0
    projection[leaving, :] = 0.0

    u = projection[:, entering].copy()
    u[leaving] = 0.0
    pivot = schur[entering]
    v = hessian[entering].copy()
    for i in range(k):
        if i != leaving:
            weight = hessian[entering, support[i]]
            for j in range(m):
                v[j] -= weight * projection[i, j]
    value = -gradient[entering] / pivot
    for j in range(m):
        schur[j] -= v[j] * v[j] / pivot
        gradient[j] += v[j] * value
    for i in range(k):
        theta[i] -= u[i] * value
        share = u[i] / pivot
        for a in range(k):
            inverse[i, a] += share * u[a]
        inverse[i, leaving] -= share
        for j in range(m):
            projection[i, j] -= share * v[j]
    inverse[leaving, :] = -u / pivot
    inverse[leaving, leaving] = 1.0 / pivot
    projection[leaving] = v / pivot
    theta[leaving] = value
    support[leaving] = entering


@njit(cache=True, nogil=True)
def swap_until_optimal(state: SwapState, tolerance: float, limit: int) -> int:
    """Make the best exchange until none lowers the objective by more than `tolerance`; return the number made.

    Args:
        state: updated in place.
        tolerance: least decrease of the objective, absolute.
        limit: largest number of exchanges.
    """
    diagonal = np.empty(state.hessian.shape[0])
    for j in range(diagonal.size):
        diagonal[j] = state.hessian[j, j]
    for count in range(limit):
        leaving, entering, change = best_swap(state, diagonal)
        if leaving < 0 or not change < -tolerance or not math.isfinite(change):
            return count
        exchange(state, leaving, entering)
    return limit


@njit(cache=True, nogil=True)
def remove_greedily(inverse: Array, centre: Array, locked: Booleans, kept: Booleans, count: int) -> None:
    """Remove `count` coordinates one by one, each the cheapest by c_i^2 / [H^-1]_ii, and re-optimise the rest.

    This is the update of Optimal Brain Surgeon and OBC's downdate of the inverse, in place; O(d^2) per removal.

    Args:
        inverse: H^-1 (d, d), overwritten.
        centre: minimiser (d,), overwritten; zero where removed.
        locked: (d,) true where a coordinate must stay.
        kept: (d,) all true at first; set to false where removed.
        count: number of coordinates to remove.
    """
    d = centre.size
    for _ in range(count):
        chosen, least = -1, np.inf
        for i in range(d):
            if kept[i] and not locked[i] and inverse[i, i] != 0.0:
                cost = centre[i] * centre[i] / inverse[i, i]
                if cost < least:
                    chosen, least = i, cost
        if chosen < 0:
            return
        row = inverse[chosen].copy()
        pivot = row[chosen]
        value = centre[chosen] / pivot
        for i in range(d):
            if kept[i]:
                centre[i] -= row[i] * value
                share = row[i] / pivot
                for j in range(d):
                    inverse[i, j] -= share * row[j]
        kept[chosen] = False
        centre[chosen] = 0.0
        for i in range(d):
            inverse[i, chosen] = 0.0
            inverse[chosen, i] = 0.0
