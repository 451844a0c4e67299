"""Numba loops of `screened_swap.py`, whose text has the formulas."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from iobs.solvers.kernels.swaps_numba import RowArrays, swap_until_optimal

Floats = NDArray[np.floating]
Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]


class SearchArrays(NamedTuple):
    """The attributes of `screened_swap.Rows` as arrays that share their memory."""

    mask: Bools
    weight: Floats
    prices: Floats
    names: Integers
    swaps: Integers


class SwapSettings(NamedTuple):
    """Kept columns and all columns of a group, the least relative gain of a swap, and the most swaps of a row."""

    keep: int
    size: int
    tolerance: float
    limit: int


@njit(nogil=True, cache=True, fastmath={"contract", "reassoc", "nsz"})
def _eliminate(
    hessian: Floats, linear: Floats, others: Integers, lower: Floats, half: Floats, columns: Integers
) -> bool:
    """Compute L of H_FF = L L^T and L^-1 [H_FQ, b_F] in place; False if a pivot is not positive."""
    q = columns.size
    for i in range(others.size):
        row = hessian[others[i]]
        for j in range(q):
            half[i, j] = row[columns[j]]
        half[i, q] = linear[others[i]]
        for j in range(i + 1):
            total = row[others[j]]
            for t in range(j):
                total -= lower[i, t] * lower[j, t]
            if j < i:
                lower[i, j] = total * lower[j, j]
            elif total > 0:
                lower[i, i] = 1 / np.sqrt(total)  # stored inverted, as all later uses divide by it
            else:
                return False
        for j in range(i):
            share = lower[i, j]
            for t in range(q + 1):
                half[i, t] -= share * half[j, t]
        for t in range(q + 1):
            half[i, t] *= lower[i, i]
    return True


@njit(nogil=True, cache=True, fastmath={"contract", "reassoc", "nsz"})
def _reduce(hessian: Floats, linear: Floats, half: Floats, columns: Integers, small: Floats, right: Floats) -> None:
    """Write the Schur complement and the linear term of the candidate columns."""
    q = columns.size
    for a in range(q):
        right[a] = linear[columns[a]]
        for b in range(q):
            small[a, b] = hessian[columns[a], columns[b]]
    for i in range(len(half)):
        for a in range(q):
            share = half[i, a]
            right[a] -= share * half[i, q]
            for b in range(q):
                small[a, b] -= share * half[i, b]


@njit(nogil=True, cache=True, fastmath={"contract", "reassoc", "nsz"})
def _invert(matrix: Floats) -> bool:
    """Invert by Gauss-Jordan elimination in place; False if a pivot is not positive."""
    n = len(matrix)
    for p in range(n):
        pivot = matrix[p, p]
        if not pivot > 0:
            return False
        matrix[p, p] = 1
        for b in range(n):
            matrix[p, b] /= pivot
        for a in range(n):
            if a != p:
                share = matrix[a, p]
                matrix[a, p] = 0
                for b in range(n):
                    matrix[a, b] -= share * matrix[p, b]
    return True


@njit(nogil=True, cache=True, fastmath={"contract", "reassoc", "nsz"})
def swap_row(
    rows: SearchArrays, r: int, hessian: Floats, linear: Floats, columns: Integers, settings: SwapSettings
) -> None:
    """Search row r in place."""
    mask, weight, prices, names = rows.mask[r], rows.weight[r], rows.prices[r], rows.names[r]
    prices[0], prices[1] = np.inf, 0
    q, members = columns.size, 0
    is_candidate = np.zeros(mask.size, np.bool_)
    for t in range(q):
        is_candidate[columns[t]] = True
        members += mask[columns[t]]
    others = np.flatnonzero(mask & ~is_candidate)
    lower = np.empty((others.size, others.size), hessian.dtype)
    half = np.empty((others.size, q + 1), hessian.dtype)
    small, right = np.empty((q, q), hessian.dtype), np.empty(q, hessian.dtype)
    if not _eliminate(hessian, linear, others, lower, half, columns):
        return
    _reduce(hessian, linear, half, columns, small, right)
    inverse = small[:members, :members].copy()
    if not _invert(inverse):
        return
    crossed = small[members:, :members]
    spread = np.zeros((q - members, members), hessian.dtype)
    value = np.zeros(members, hessian.dtype)
    for a in range(members):
        for b in range(members):
            value[b] += inverse[a, b] * right[a]
    schur, gradient = np.empty(q - members, hessian.dtype), right[members:].copy()
    for p in range(q - members):
        schur[p] = small[members + p, members + p]
        for a in range(members):
            for b in range(members):
                spread[p, b] += crossed[p, a] * inverse[a, b]
        for a in range(members):
            schur[p] -= spread[p, a] * crossed[p, a]
            gradient[p] -= crossed[p, a] * value[a]
        schur[p] = max(schur[p], hessian[columns[members + p], columns[members + p]] * np.float32(1.2e-7))
    total = (value * right[:members]).sum() + (half[:, q] * half[:, q]).sum()
    prices[2] = total
    state = RowArrays(np.arange(members), np.arange(members, q), inverse, spread, schur, gradient, value)
    if members and q > members:
        inside, outside = settings.keep, settings.size - settings.keep
        if settings.size >= mask.size:
            inside, outside = members, q - members
        rows.swaps[r] += swap_until_optimal(state, small, inside, outside, settings.tolerance * total, settings.limit)
    _write(mask, weight, columns, state, others, lower, half)
    for i in range(members):
        price = value[i] * value[i] / inverse[i, i]
        if price < prices[0]:
            prices[0], names[0] = price, columns[state.support[i]]
    for p in range(q - members):
        price = gradient[p] * gradient[p] / schur[p]
        if price > prices[1]:
            prices[1], names[1] = price, columns[state.rest[p]]


@njit(nogil=True, cache=True, fastmath={"contract", "reassoc", "nsz"})
def _write(
    mask: Bools, weight: Floats, columns: Integers, state: RowArrays, others: Integers, lower: Floats, half: Floats
) -> None:
    """Write the new mask and weights; weights of members outside the candidates come from back substitution."""
    q, support, value = columns.size, state.support, state.weight
    weight[:] = 0
    mask[columns[state.rest]] = False
    mask[columns[support]] = True
    for i in range(support.size):
        weight[columns[support[i]]] = value[i]
    follow = half[:, q].copy()
    for i in range(others.size):
        for t in range(support.size):
            follow[i] -= half[i, support[t]] * value[t]
    for i in range(others.size - 1, -1, -1):
        follow[i] *= lower[i, i]
        for j in range(i):
            follow[j] -= lower[i, j] * follow[i]
        weight[others[i]] = follow[i]


@njit(nogil=True, cache=True)
def swap_rows(
    start: int, stop: int, rows: SearchArrays, hessian: Floats, linear: Floats, slots: Integers, settings: SwapSettings
) -> None:
    """Rows `start` to `stop` of `screened_swap.swap_rows`."""
    for r in range(start, stop):
        columns = slots[r][slots[r] >= 0]
        if columns.size:
            swap_row(rows, r, hessian, linear[r], columns, settings)
