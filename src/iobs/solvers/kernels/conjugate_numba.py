"""Numba loops of `conjugate.py`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Bools = NDArray[np.bool_]


class Iteration(NamedTuple):
    """State of the iteration: a row for each problem; the product is that of the direction with H."""

    solution: Floats
    product: Floats
    mask: Bools
    scale: Floats
    residual: Floats
    direction: Floats
    slope: Floats


@njit(nogil=True, cache=True, fastmath={"contract", "reassoc", "nsz"})
def begin(start: int, stop: int, linear: Floats, state: Iteration) -> None:
    """First residual and direction, from the product of the initial guess with H."""
    _, product, mask, scale, residual, direction, slope = state
    for r in range(start, stop):
        total = scale[0] * 0
        for j in range(scale.size):
            value = linear[r, j] - product[r, j] if mask[r, j] else scale[0] * 0
            residual[r, j] = value
            direction[r, j] = value * scale[j]
            total += value * value * scale[j]
        slope[r] = total


@njit(nogil=True, cache=True, fastmath={"contract", "reassoc", "nsz"})
def step(start: int, stop: int, state: Iteration) -> None:
    """One iteration, from the product of the direction with H; converged rows are not changed."""
    solution, product, mask, scale, residual, direction, slope = state
    zero = scale[0] * 0
    for r in range(start, stop):
        curvature = zero
        for j in range(scale.size):
            curvature += direction[r, j] * product[r, j]  # the direction is zero outside the mask
        if curvature <= zero or slope[r] <= zero:
            continue
        length = slope[r] / curvature
        total = zero
        for j in range(scale.size):
            solution[r, j] += length * direction[r, j]
            value = residual[r, j] - length * product[r, j] if mask[r, j] else zero
            residual[r, j] = value
            total += value * value * scale[j]
        ratio = total / slope[r]
        slope[r] = total
        for j in range(scale.size):
            direction[r, j] = residual[r, j] * scale[j] + ratio * direction[r, j]
