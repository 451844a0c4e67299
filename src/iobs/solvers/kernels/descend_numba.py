"""Numba loops for weights on a grid: of `descend.py`, and of the roundings in `gridded/feedback.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from iobs.solvers.kernels.project_numba import kth_smallest

Floats = NDArray[np.floating]
Bools = NDArray[np.bool_]
Indices = NDArray[np.int64]


class GridArrays(NamedTuple):
    """The attributes of `descend.GridRows`, with tensors as arrays that share their memory."""

    weight: Floats
    gradient: Floats
    mask: Bools
    scales: Floats
    hessian: Floats
    group: int
    levels: int


@njit(nogil=True, cache=True)
def _point(value: Any, scale: Any, top: Any) -> Any:
    """Nearest point of the grid, in the dtype of the arguments."""
    return min(max(np.rint(value / scale), -top), top) * scale


@njit(nogil=True, cache=True, fastmath={"contract"})
def _shift(gradient: Floats, row: Floats, step: float) -> None:
    for m in range(gradient.size):
        gradient[m] += step * row[m]


@njit(nogil=True, cache=True)
def _improve(
    w: Floats,
    g: Floats,
    hessian: Floats,
    curvature: np.floating,
    j: int,
    scale: np.floating,
    top: np.floating,
    first: int,
) -> bool:
    """Set entry j to its best value on the grid, and shift the gradient from column `first` on."""
    x = _point(w[j] - g[j] / curvature, scale, top)
    if x == w[j]:
        return False
    _shift(g[first:], hessian[j, first:], x - w[j])
    w[j] = x
    return True


@njit(nogil=True, cache=True)
def _diagonal(hessian: Floats) -> Floats:
    """A copy of the diagonal: its entries lie far apart in the matrix, and each would be read from far memory."""
    diagonal = np.empty(len(hessian), hessian.dtype)
    for j in range(diagonal.size):
        diagonal[j] = hessian[j, j]
    return diagonal


@njit(nogil=True, cache=True)
def _least(weight: Floats, hessian: Floats) -> float:
    """Least decrease of the loss that counts: the rest is rounding."""
    size = 0.0
    for j in range(weight.size):
        size += hessian[j, j] * weight[j] * weight[j]
    return 64 * np.finfo(weight.dtype).eps * size  # type: ignore[return-value]


@njit(nogil=True, cache=True)
def smallest(values: Floats, count: int, indices: Indices) -> int:
    """Write the indices of the `count` smallest finite values to `indices`, ascending; return their number."""
    bound = kth_smallest(values, count - 1) if count < values.size else values.max()
    ties = count
    for j in range(values.size):
        ties -= values[j] < bound
    made = 0
    for j in range(values.size):
        tied = values[j] == bound and ties > 0
        if (values[j] < bound or tied) and values[j] < np.inf:
            indices[made] = j
            made += 1
            ties -= tied
    return made


@njit(nogil=True, cache=True)
def values(start: int, stop: int, rows: GridArrays, sweeps: int) -> None:
    """Rows `start` to `stop` of `descend.descend_values`."""
    weight, gradient, mask, scales, hessian, group, levels = rows
    top = weight.dtype.type(levels)  # in the dtype of the weights: a wider product would never equal a stored weight
    curvature = _diagonal(hessian)
    for r in range(start, stop):
        w, g, kept = weight[r], gradient[r], mask[r]
        for _ in range(sweeps):
            changed = False
            for j in range(w.size):
                if kept[j] and _improve(w, g, hessian, curvature[j], j, scales[r, j // group], top, 0):
                    changed = True
            if not changed:
                break


@njit(nogil=True, cache=True)
def improvable(start: int, stop: int, rows: GridArrays, counts: Indices) -> None:
    """Write the number of values of rows `start` to `stop` that would change if all others stayed."""
    weight, gradient, mask, scales, hessian, group, levels = rows
    top = weight.dtype.type(levels)
    curvature = _diagonal(hessian)
    for r in range(start, stop):
        w, g, kept, count = weight[r], gradient[r], mask[r], 0
        for j in range(w.size):
            if kept[j]:
                count += _point(w[j] - g[j] / curvature[j], scales[r, j // group], top) != w[j]
        counts[r] = count


@njit(nogil=True, cache=True)
def block_values(start: int, stop: int, rows: GridArrays, first: int, step: Floats) -> None:
    """Rows `start` to `stop` of one sweep over columns `first` to `first + len(hessian)`.

    `rows.hessian` is that of these columns. The gradient stays as it is; changes of the weights are written to `step`.
    """
    weight, gradient, mask, scales, hessian, group, levels = rows
    width = len(hessian)
    top = weight.dtype.type(levels)
    g, curvature = np.empty(width, weight.dtype), _diagonal(hessian)
    for r in range(start, stop):
        w, kept, moved = weight[r, first : first + width], mask[r, first : first + width], step[r]
        g[:] = gradient[r, first : first + width]
        for j in range(width):
            old = w[j]
            if kept[j]:
                _improve(w, g, hessian, curvature[j], j, scales[r, (first + j) // group], top, j + 1)
            moved[j] = w[j] - old


@njit(nogil=True, cache=True)
def exchanges(start: int, stop: int, rows: GridArrays, of: int, candidates: int, limit: int) -> None:
    """Rows `start` to `stop` of `descend.exchange_entries`."""
    weight, gradient, mask, scales, hessian, group, levels = rows
    top = weight.dtype.type(levels)
    d = weight.shape[1]
    leaving, entering = np.empty(d, weight.dtype), np.empty(d, weight.dtype)
    leavers, enterers = np.empty(d, np.int64), np.empty(d, np.int64)
    for r in range(start, stop):
        w, g, kept = weight[r], gradient[r], mask[r]
        for _ in range(limit):
            for j in range(d):
                leaving[j] = (0.5 * hessian[j, j] * w[j] - g[j]) * w[j] if kept[j] else np.inf
                entering[j] = np.inf if kept[j] else -0.5 * g[j] * g[j] / hessian[j, j]
            best, leave, enter, value = -_least(w, hessian), -1, -1, 0.0
            outs = smallest(leaving, min(candidates, d), leavers) if of >= d else d
            ins = smallest(entering, min(candidates, d), enterers) if of >= d else of
            for a in range(outs):
                i = leavers[a] if of >= d else a
                if not kept[i]:
                    continue
                for b in range(ins):
                    j = enterers[b] if of >= d else i // of * of + b
                    if kept[j]:
                        continue
                    slope = g[j] - hessian[i, j] * w[i]
                    x = _point(-slope / hessian[j, j], scales[r, j // group], top)
                    change = leaving[i] + (slope + 0.5 * hessian[j, j] * x) * x
                    if change < best:
                        best, leave, enter, value = change, i, j, x
            if leave < 0:
                break
            _shift(g, hessian[enter], value)
            _shift(g, hessian[leave], -w[leave])
            w[leave] = 0
            w[enter] = value
            kept[leave] = False
            kept[enter] = True


@njit(nogil=True, cache=True)
def pairs(start: int, stop: int, rows: GridArrays, candidates: int, limit: int) -> None:
    """Rows `start` to `stop` of `descend.step_pairs`."""
    weight, gradient, mask, scales, hessian, group, levels = rows
    d = weight.shape[1]
    ratio = np.empty(2 * d, weight.dtype)
    indices = np.empty(2 * d, np.int64)
    at, move, alone = np.empty(2 * d, np.int64), np.empty(2 * d, weight.dtype), np.empty(2 * d, weight.dtype)
    for r in range(start, stop):
        w, g, kept = weight[r], gradient[r], mask[r]
        for _ in range(limit):
            for j in range(d):
                scale = scales[r, j // group]
                size = hessian[j, j] * scale
                top = (levels + 0.5) * scale
                ratio[j] = g[j] / size + 0.5 if kept[j] and w[j] + scale < top else np.inf
                ratio[d + j] = 0.5 - g[j] / size if kept[j] and w[j] - scale > -top else np.inf
            count = smallest(ratio, min(candidates, 2 * d), indices)
            for a in range(count):
                j = indices[a] % d
                scale = scales[r, j // group]
                at[a] = j
                move[a] = scale if indices[a] < d else -scale
                alone[a] = ratio[indices[a]] * hessian[j, j] * scale * scale
            best, first, second = -_least(w, hessian), -1, -1
            for a in range(count):
                for b in range(a):
                    if at[a] != at[b]:
                        change = alone[a] + alone[b] + hessian[at[a], at[b]] * move[a] * move[b]
                        if change < best:
                            best, first, second = change, a, b
            if first < 0:
                break
            for a in (first, second):
                j = at[a]
                scale = scales[r, j // group]
                _shift(g, hessian[j], move[a])
                w[j] = (np.rint(w[j] / scale) + np.sign(move[a])) * scale


# ---- Rounding along several paths

_UNSET = -1


class LatticeArrays(NamedTuple):
    """The attributes of `feedback.Lattice`, with tensors as arrays that share their memory."""

    centre: Floats
    lower: Floats
    scales: Floats
    counts: Indices
    levels: int


@njit(nogil=True, cache=True, fastmath={"contract", "reassoc"})
def _dot(first: Floats, second: Floats, count: int) -> float:
    total = first.dtype.type(0)
    for m in range(count):
        total += first[m] * second[m]
    return total  # type: ignore[return-value]


@njit(nogil=True, cache=True)
def rounded(start: int, stop: int, lattice: LatticeArrays, most: int, result: Floats) -> None:
    """Rows `start` to `stop` of `feedback.round_along_paths`, with at most `most` paths."""
    centre, lower, scales, counts, levels = lattice
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
