"""Numba loops of `paths.py`."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from iobs.solvers.kernels.descend_numba import Floats, Indices, smallest

_UNSET = -1


@njit(nogil=True, cache=True, fastmath={"contract", "reassoc"})
def _dot(first: Floats, second: Floats, count: int) -> float:
    total = first.dtype.type(0)
    for m in range(count):
        total += first[m] * second[m]
    return total  # type: ignore[return-value]


@njit(nogil=True, cache=True)
def rounded(
    start: int,
    stop: int,
    centre: Floats,
    lower: NDArray[np.floating],
    scales: Floats,
    counts: Indices,
    result: Floats,
    levels: int,
    most: int,
) -> None:
    """Rows `start` to `stop` of `paths.round_along_paths`."""
    n = centre.shape[1]
    error = np.empty((most, n), centre.dtype)
    cost = np.zeros(most, centre.dtype)
    points, costs = np.empty(2 * most, centre.dtype), np.empty(2 * most, centre.dtype)
    kept, slot = np.empty(2 * most, np.int64), np.empty(2 * most, np.int64)
    for r in range(start, stop):
        factor = lower[r if lower.shape[0] > 1 else 0]
        c, paths = centre[r], 1
        cost[0] = 0
        for j in range(counts[r]):
            pivot, scale = factor[j, j], scales[r, j]
            for k in range(paths):
                value = c[j] - _dot(error[k], factor[j], j) / pivot
                below = np.floor(value / scale)
                below = min(max(below, below * 0 - levels), below * 0 + levels - 1)
                for up in range(2):
                    points[2 * k + up] = (below + up) * scale
                    distance = (points[2 * k + up] - value) * pivot
                    costs[2 * k + up] = cost[k] + distance * distance
            count = smallest(costs[: 2 * paths], min(most, 2 * paths), kept)
            _assign(kept, count, slot)
            for a in range(count):  # copies first: a path's own continuation overwrites nothing of its prefix
                if slot[a] != kept[a] // 2:
                    error[slot[a], :j] = error[kept[a] // 2, :j]
            for a in range(count):
                error[slot[a], j] = points[kept[a]] - c[j]
                cost[slot[a]] = costs[kept[a]]
            paths = count
        best = 0
        for k in range(1, paths):
            if cost[k] < cost[best]:
                best = k
        for j in range(counts[r]):
            result[r, j] = c[j] + error[best, j]


@njit(nogil=True, cache=True)
def _assign(kept: Indices, count: int, slot: Indices) -> None:
    """Place of each continuation: that of its path for the first one, a free place for the second."""
    for a in range(count):
        first = a == 0 or kept[a - 1] // 2 != kept[a] // 2
        slot[a] = kept[a] // 2 if first else _UNSET
    free = 0
    for a in range(count):
        if slot[a] == _UNSET:
            taken = True
            while taken:
                taken = False
                for b in range(count):
                    if slot[b] == free:
                        taken = True
                free += taken
            slot[a] = free
