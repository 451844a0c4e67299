"""Numba loops of `swap.py`, whose text has the formulas."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Integers = NDArray[np.int64]


class RowArrays(NamedTuple):
    """The attributes of `swap.RowState` as arrays that share their memory."""

    support: Integers
    rest: Integers
    inverse: Floats
    spread: Floats
    schur: Floats
    gradient: Floats
    weight: Floats


@njit(nogil=True, cache=True)
def best_swap(state: RowArrays, hessian: Floats, inside: int, outside: int) -> tuple[float, int, int]:
    """Twice the gain of the best swap within a group, the slot of S to remove and the slot of P to admit.

    By falling gain of admission: stop once that gain alone is not above the best swap.
    """
    _, rest, inverse, spread, schur, gradient, weight = state
    admission = np.zeros_like(schur)
    least_schur = 4 * np.finfo(schur.dtype).eps  # relative, as `swap.independent`
    for q in range(rest.size):
        if schur[q] > least_schur * hessian[rest[q], rest[q]]:
            admission[q] = gradient[q] * gradient[q] / schur[q]
    best, leave, enter = 0.0, 0, 0
    variance = np.diag(inverse).copy()
    for q in np.argsort(-admission, kind="mergesort"):
        if admission[q] <= best:
            break
        step = gradient[q] / schur[q]
        first = q // outside * inside
        least = np.inf
        cheapest = 0
        for i in range(first, first + inside):
            value = weight[i] - spread[q, i] * step
            cost = value * value / (variance[i] + spread[q, i] * spread[q, i] / schur[q])
            if cost < least:
                least, cheapest = cost, i
        if admission[q] - least > best:
            best, leave, enter = admission[q] - least, cheapest, q
    return best, leave, enter


@njit(nogil=True, cache=True, fastmath={"contract", "reassoc", "nsz"})
def _admit(state: RowArrays, row: Floats, enter: int, sigma: Floats) -> None:
    """Admit a variable; its row of the Schur complement, sigma, is its coupling to P."""
    support, rest, inverse, spread, schur, gradient, weight = state
    x, s = spread[enter].copy(), schur[enter]
    step = gradient[enter] / s
    inner = row[support]
    for q in range(rest.size):
        total = row[rest[q]]
        for i in range(support.size):
            total -= spread[q, i] * inner[i]
        sigma[q] = total
        for i in range(support.size):
            spread[q, i] -= total / s * x[i]
        schur[q] -= total * total / s
        gradient[q] -= total * step
    for i in range(support.size):
        weight[i] -= x[i] * step
        scaled = x[i] / s
        for j in range(support.size):
            inverse[i, j] += scaled * x[j]


@njit(nogil=True, cache=True, fastmath={"contract"})
def make_swap(state: RowArrays, hessian: Floats, leave: int, enter: int) -> None:
    """Exchange the variable in slot `enter` of P and the variable in slot `leave` of S, in place."""
    support, rest, inverse, spread, schur, gradient, weight = state
    entering = rest[enter]
    x, s = spread[enter].copy(), schur[enter]
    step = gradient[enter] / s
    sigma = np.empty_like(schur)
    _admit(state, hessian[entering], enter, sigma)
    # Remove: v is the removed variable's column of the enlarged inverse, with the admitted variable in its slot.
    variance, value = inverse[leave, leave], weight[leave]
    v = inverse[:, leave].copy()
    v[leave] = -x[leave] / s
    inverse[leave] = -x / s
    inverse[:, leave] = -x / s
    inverse[leave, leave] = 1 / s
    weight[leave] = step
    for i in range(support.size):
        weight[i] -= v[i] * (value / variance)
        scaled = v[i] / variance
        for j in range(support.size):
            inverse[i, j] -= scaled * v[j]
    for q in range(rest.size):
        towards = spread[q, leave]
        spread[q, leave] = sigma[q] / s
        scaled = towards / variance
        for i in range(support.size):
            spread[q, i] -= scaled * v[i]
        schur[q] += towards * scaled
        gradient[q] += towards * (value / variance)
    spread[enter] = -v / variance
    schur[enter] = 1 / variance
    gradient[enter] = value / variance
    rest[enter] = support[leave]
    support[leave] = entering


@njit(nogil=True, cache=True)
def swap_until_optimal(
    state: RowArrays, hessian: Floats, inside: int, outside: int, tolerance: float, limit: int
) -> int:
    """`swap.swap_until_optimal` on one row, in place."""
    made = 0
    while made < limit:
        gain, leave, enter = best_swap(state, hessian, inside, outside)
        if not gain > tolerance:
            break
        make_swap(state, hessian, leave, enter)
        made += 1
    return made
