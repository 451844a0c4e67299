"""The row loop of `greedy.py`: a left-looking pivoted Cholesky factorisation that shrinks as variables leave."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[Any]
Integers = NDArray[np.int64]


@njit(nogil=True, cache=True, fastmath={"contract", "reassoc", "nsz", "arcp"})
def _dot(a: Floats, b: Floats, length: int) -> Any:
    total = a[0] * 0
    for i in range(length):
        total += a[i] * b[i]
    return total


@njit(nogil=True, cache=True)
def _cheapest(weight: Floats, diagonal: Floats, index: Integers, active: int) -> int:
    """Position of the least w^2 / M_pp, compared as products; the lower variable wins a tie."""
    best = 0
    for a in range(1, active):
        left, right = weight[a] * weight[a] * diagonal[best], weight[best] * weight[best] * diagonal[a]
        if left < right or (left == right and index[a] < index[best]):
            best = a
    return best


@njit(nogil=True, cache=True)
def _drop(position: int, active: int, steps: int, state: tuple[Floats, Floats, Floats, Integers]) -> None:
    """The last active variable takes the place of one that is no longer needed."""
    weight, diagonal, factor, index = state
    last = active - 1
    if position != last:
        weight[position], diagonal[position], index[position] = weight[last], diagonal[last], index[last]
        factor[position, :steps] = factor[last, :steps]


@njit(nogil=True, cache=True)
def _row(
    inverse: Floats, centre: Floats, steps: int, order: Integers, cost: Floats, of: int, quota: int, factor: Floats
) -> None:
    d = centre.size
    weight, diagonal, index = centre.copy(), np.diag(inverse).copy(), np.arange(d)
    state = (weight, diagonal, factor, index)
    removed = np.zeros(d // of, np.int64)
    pivot_row = np.empty(factor.shape[1], factor.dtype)
    active = d
    floor = np.finfo(factor.dtype).eps  # rounding must not turn a conditional variance negative
    for t in range(steps):
        p = _cheapest(weight, diagonal, index, active)
        variable, scale, value = index[p], np.sqrt(diagonal[p]), weight[p]
        order[t] = variable
        cost[t] = value / scale * (value / scale) / 2
        pivot_row[:t] = factor[p, :t]
        _drop(p, active, t, state)
        active -= 1
        group = variable // of
        removed[group] += 1
        if removed[group] == quota and quota < of:  # the rest of the group stays for good: it needs no more updates
            a = 0
            while a < active:
                if index[a] // of == group:
                    _drop(a, active, t, state)
                    active -= 1
                else:
                    a += 1
        column = inverse[variable]
        for a in range(active):
            entry = (column[index[a]] - _dot(pivot_row, factor[a], t)) / scale
            factor[a, t] = entry
            weight[a] -= entry * (value / scale)
            diagonal[a] = max(diagonal[a] - entry * entry, floor * diagonal[a])


@njit(nogil=True, cache=True)
def greedy(
    start: int,
    stop: int,
    inverse: Floats,
    centre: Floats,
    steps: Integers,
    order: Integers,
    cost: Floats,
    of: int,
    quota: int,
) -> None:
    """Rows start to stop of `greedy.greedy_removals`."""
    factor = np.empty((centre.shape[1], max(1, order.shape[1])), centre.dtype)
    for r in range(start, stop):
        _row(inverse, centre[r], steps[r], order[r], cost[r], of, quota, factor)
