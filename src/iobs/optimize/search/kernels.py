"""Inner loops of the search, compiled with numba: the exact best swap and its rank-one updates.

State of a support Q, on m candidate coordinates of a quadratic with Hessian H:

    P = H_QQ^-1 (k, k)      U = P H_Q: (k, m)      s = diag(H) - sum_Q H_Q: U (m,)      g = gradient at the refit (m,)

Exchanging the i-th member of Q for coordinate j changes the refitted objective by exactly

    Delta_ij = 1/2 [ theta_i^2 / P_ii  -  (g_j - theta_i U_ij / P_ii)^2 / (s_j + U_ij^2 / P_ii) ]

so scoring all k (m - k) exchanges costs O(k m). Making one is two rank-one updates, O(k m) again.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from iobs.optimize.objectives.design import Array, Booleans, Indices


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
def best_swap(
    inverse: Array,
    projection: Array,
    schur: Array,
    diagonal: Array,
    gradient: Array,
    theta: Array,
    allowed: Array,
    locked: Booleans,
) -> tuple[int, int, float]:
    """The exchange with the smallest change of the objective: (position in Q, coordinate, change).

    Args:
        inverse: P (k, k).
        projection: U (k, m).
        schur: s (m,).
        diagonal: diag H (m,); a curvature far below it is rounding and is ignored.
        gradient: g (m,).
        theta: refitted values on Q (k,).
        allowed: (m,) 1.0 where a coordinate may enter the support, 0.0 elsewhere and on Q.
        locked: (k,) true where a member of Q must stay.
    """
    k, m = projection.shape
    leaving, entering, least = -1, -1, 0.0
    for i in range(k):
        if locked[i]:
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
            gain = slope * slope / curvature if curvature > 1e-9 * diagonal[j] else 0.0
            change = cost - gain * allowed[j]
            if change < low:
                low, at = change, j
        if low < least:
            leaving, entering, least = i, at, low
    return leaving, entering, 0.5 * least


@njit(cache=True, nogil=True)
def exchange(state: SwapState, leaving: int, entering: int) -> None:
    """Replace the member of Q at position `leaving` by coordinate `entering`; all arrays but `allowed` are updated."""
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
        leaving, entering, change = best_swap(
            state.inverse,
            state.projection,
            state.schur,
            diagonal,
            state.gradient,
            state.theta,
            state.allowed,
            state.locked,
        )
        if leaving < 0 or not change < -tolerance or not math.isfinite(change):
            return count
        state.allowed[state.support[leaving]] = 1.0
        state.allowed[entering] = 0.0
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
            if kept[i] and not locked[i]:
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
