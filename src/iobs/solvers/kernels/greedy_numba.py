"""Numba loop of `obc.py`: left-looking pivoted Cholesky factorisation that shrinks with each removal.

Row s of the factor holds the entries of step s for the active variables side by side, so that inner loops run along
them. Lengths are padded to whole groups of vector registers; the padding holds old, finite numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Integers = NDArray[np.int64]

_PAD = 64  # entries that lengths are a multiple of
_TOGETHER = 4  # steps subtracted in one pass over the variables


class ActiveVariables(NamedTuple):
    """The active variables of a row, side by side, and room for one column of the factor and its coefficients."""

    weight: Floats
    diagonal: Floats
    factor: Floats
    names: Integers
    column: Floats
    coefficients: Floats


@njit(nogil=True, cache=True)
def _cheapest(weight: Floats, diagonal: Floats, index: Integers, active: int) -> int:
    """Position of the least w^2 / M_pp, compared as products; of equal values the lower variable is taken."""
    best = 0
    square, variance = weight[0] * weight[0], diagonal[0]
    for a in range(1, active):
        candidate = weight[a] * weight[a]
        score, least = candidate * variance, square * diagonal[a]
        if score < least or (score == least and index[a] < index[best]):
            best, square, variance = a, candidate, diagonal[a]
    return best


@njit(nogil=True, cache=True)
def _drop(position: int, active: int, steps: int, state: ActiveVariables) -> None:
    """Remove a position by moving the last active variable there."""
    weight, diagonal, factor, index = state.weight, state.diagonal, state.factor, state.names
    last = active - 1
    if position != last:
        weight[position], diagonal[position], index[position] = weight[last], diagonal[last], index[last]
        for s in range(steps):
            factor[s, position] = factor[s, last]


@njit(nogil=True, cache=True, fastmath={"contract"})
def _subtract(column: Floats, factor: Floats, coefficients: Floats, steps: int, length: int) -> None:
    """column -= coefficients @ factor, over the first steps and variables."""
    for s in range(0, steps, _TOGETHER):
        c0, c1, c2, c3 = coefficients[s], coefficients[s + 1], coefficients[s + 2], coefficients[s + 3]
        for a in range(length):
            column[a] -= (c0 * factor[s, a] + c1 * factor[s + 1, a]) + (c2 * factor[s + 2, a] + c3 * factor[s + 3, a])


@njit(nogil=True, cache=True)
def _close_group(group: int, of: int, active: int, steps: int, state: ActiveVariables) -> int:
    """Drop the remaining variables of a group that has reached its quota; return the new number of active ones."""
    index = state.names
    a = 0
    while a < active:
        if index[a] // of == group:
            _drop(a, active, steps, state)
            active -= 1
        else:
            a += 1
    return active


@njit(nogil=True, cache=True, fastmath={"contract"})
def _row(
    inverse: Floats, centre: Floats, order: Integers, cost: Floats, of: int, quota: int, state: ActiveVariables
) -> None:
    """Remove one variable for each entry of `order` and `cost`, which are written."""
    weight, diagonal, factor, index, column, coefficients = state
    d = centre.size
    for a in range(d):
        weight[a], diagonal[a], index[a] = centre[a], inverse[a, a], a
    removed = np.zeros(d // of, np.int64)
    active = d
    smallest = np.finfo(factor.dtype).eps  # rounding must not make a conditional variance negative
    for t in range(order.size):
        p = _cheapest(weight, diagonal, index, active)
        variable, scale = index[p], np.sqrt(diagonal[p])
        value = weight[p] / scale
        order[t] = variable
        cost[t] = value * value / 2
        for s in range(t):
            coefficients[s] = factor[s, p]
        coefficients[t : t + _TOGETHER] = 0
        _drop(p, active, t, state)
        active -= 1
        removed[variable // of] += 1
        if removed[variable // of] == quota and quota < of:
            active = _close_group(variable // of, of, active, t, state)
        length = (active + _PAD - 1) // _PAD * _PAD
        for a in range(length):
            column[a] = inverse[variable, index[a]]
        _subtract(column, factor, coefficients, t, length)
        for a in range(length):
            entry = column[a] / scale
            factor[t, a] = entry
            weight[a] -= entry * value
            diagonal[a] = max(diagonal[a] - entry * entry, smallest * diagonal[a])


@njit(nogil=True, cache=True)
def greedy(
    start: int, stop: int, inverse: Floats, centre: Floats, steps: Integers, order: Integers, cost: Floats, of: int,
    quota: int,
) -> None:  # fmt: skip
    """Rows `start` to `stop` of `obc.greedy_removals`."""
    padded = centre.shape[1] + _PAD
    ones = np.ones(padded, centre.dtype)
    factor = np.zeros((order.shape[1] + _TOGETHER, padded), centre.dtype)
    coefficients = np.zeros(order.shape[1] + _TOGETHER, centre.dtype)
    state = ActiveVariables(ones, ones.copy(), factor, np.zeros(padded, np.int64), ones.copy(), coefficients)
    for r in range(start, stop):
        _row(inverse, centre[r], order[r, : steps[r]], cost[r, : steps[r]], of, quota, state)
