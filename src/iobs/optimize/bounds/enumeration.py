"""Every support of a convex quadratic, tried one by one; the Hessian may be singular.

Supports are visited as a tree. A node has chosen coordinates Q in ascending order. For all later coordinates j it holds

    s_j = H_jj - H_jQ H_QQ^-1 H_Qj      (what Q does not explain of column j)
    g_j = c_j - H_jQ H_QQ^-1 c_Q        (so that adding j lowers f by g_j^2 / (2 s_j))

by the rows of a Cholesky factor. Choosing one more coordinate costs O(|Q| d); the last coordinate costs O(1), because
only its gain is needed. A coordinate with s_j <= 1e-13 H_jj depends on Q up to rounding and lowers nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numba import njit

from iobs.optimize.bounds.tree import QuadraticArrays
from iobs.optimize.objectives.design import Array, Indices

_DEPENDENT = 1e-13  # a column of which a smaller share is unexplained depends on the others, up to rounding
_SPEED = 2e8  # multiplications per second, for the decision whether all supports fit in the time limit


@dataclass(frozen=True)
class Enumerated:
    """All supports of a problem.

    Attributes:
        support: the best one, forced coordinates included.
        value: f of its fit.
        margin: absolute allowance for rounding.
        supports: number of supports.
        nodes: number of nodes of the tree.
    """

    support: Indices
    value: float
    margin: float
    supports: int
    nodes: int


def enumerable(quadratic: QuadraticArrays, seconds: float, max_nodes: int) -> bool:
    """Check that all supports can be tried within limits of time and nodes."""
    free, room = _free(quadratic).size, _room(quadratic)
    nodes = sum(math.comb(free, size) for size in range(room))
    return nodes <= max_nodes and nodes * (free * quadratic.count + 50) <= _SPEED * seconds


def enumerate_supports(quadratic: QuadraticArrays) -> Enumerated:
    """The best of all supports."""
    free, room = _free(quadratic), _room(quadratic)
    forced = np.setdiff1d(quadratic.usable, free)
    order = np.concatenate([forced, free])
    units = 1.0 / np.sqrt(quadratic.hessian.diagonal()[order])
    hessian = np.ascontiguousarray(quadratic.hessian[np.ix_(order, order)] * units * units[:, None])
    rows = np.zeros((quadratic.count, order.size))
    schur = np.ones((quadratic.count + 1, order.size))
    gains = np.zeros((quadratic.count + 1, order.size))
    gains[0] = quadratic.linear[order] * units
    base, depth, least = 0.0, 0, 1.0
    for j in range(forced.size):  # a forced coordinate that depends on the earlier ones adds nothing
        if schur[depth, j] > _DEPENDENT:
            base += 0.5 * gains[depth, j] ** 2 / schur[depth, j]
            least = min(least, float(schur[depth, j]))
            _choose(hessian, rows, schur, gains, depth, j)
            depth += 1
    best, chosen, nodes = base, np.zeros(0, np.int64), 1
    for first in range(forced.size, order.size if room else 0):
        best_positions, positions, smallest, visited = _below(hessian, rows, schur, gains, depth, first, room, base)
        nodes, least = nodes + visited, min(least, smallest)
        if best_positions > best:
            best, chosen = best_positions, order[positions[positions >= 0]]
    # The factor's smallest pivot is at least 1 / cond(H_QQ), and the value has a rounding error of about cond eps.
    margin = 100 * np.finfo(float).eps / least * max(abs(quadratic.start), abs(best))
    support = np.sort(np.concatenate([quadratic.problem.forced, chosen])).astype(np.int64)
    return Enumerated(support, quadratic.start - best, float(margin), math.comb(free.size, room), nodes)


def _free(quadratic: QuadraticArrays) -> Indices:
    return np.setdiff1d(quadratic.usable, quadratic.problem.forced)


def _room(quadratic: QuadraticArrays) -> int:
    free = _free(quadratic).size
    return min(quadratic.count - (quadratic.usable.size - free), free)


@njit(cache=True, nogil=True)
def _choose(hessian: Array, rows: Array, schur: Array, gains: Array, depth: int, j: int) -> None:
    """Add coordinate j as number `depth` of Q, and update s and g for all later coordinates."""
    root = math.sqrt(schur[depth, j])
    step = gains[depth, j] / root
    for i in range(j + 1, hessian.shape[0]):
        entry = hessian[j, i]
        for a in range(depth):
            entry -= rows[a, j] * rows[a, i]
        entry /= root
        rows[depth, i] = entry
        schur[depth + 1, i] = schur[depth, i] - entry * entry
        gains[depth + 1, i] = gains[depth, i] - entry * step


@njit(cache=True, nogil=True)
def _below(
    hessian: Array, rows: Array, schur: Array, gains: Array, depth: int, first: int, room: int, base: float
) -> tuple[float, Indices, float, int]:
    """The best support whose smallest free coordinate is `first`: (gain, positions, smallest pivot, nodes)."""
    d = hessian.shape[0]
    best, least, nodes = base, 1.0, 0
    best_positions = np.full(room, -1, np.int64)
    position = np.full(room, -1, np.int64)
    total = np.zeros(room + 1)
    total[0] = base
    level = 0
    position[0] = first
    while level >= 0:
        j = position[level]
        if j >= d or (level == 0 and j > first):
            position[level] = -1
            level -= 1
            if level >= 0:
                position[level] += 1
            continue
        here = depth + level
        pivot = schur[here, j]
        if pivot <= _DEPENDENT:
            position[level] += 1
            continue
        least = min(least, pivot)
        value = total[level] + 0.5 * gains[here, j] ** 2 / pivot
        if value > best:
            best = value
            best_positions[:] = -1
            best_positions[: level + 1] = position[: level + 1]
        if level + 1 == room:
            position[level] += 1
            continue
        nodes += 1
        total[level + 1] = value
        _choose(hessian, rows, schur, gains, here, j)
        level += 1
        position[level] = j + 1
    return best, best_positions, least, nodes
