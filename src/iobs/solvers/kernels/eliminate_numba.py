"""Numba loops of `sparsegpt.py`.

Rows are processed in strips of 64, stored side by side. Each lane of a strip is one row with a fixed order of
arithmetic, so the result does not depend on strips or threads.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Bools = NDArray[np.bool_]

_LANES = 64  # fills the vector registers, and a strip of 128 columns fits into the first-level cache


@njit(nogil=True, cache=True, fastmath={"contract"})
def _remove(strip: Floats, factor: Floats, kept: Bools, error: Floats, i: int) -> None:
    """Remove entry i in the lanes that do not keep it."""
    pivot = factor[i, i]
    for k in range(_LANES):
        value = strip[i, k]
        error[k] = value * 0 if kept[i, k] else value / pivot
        strip[i, k] = value if kept[i, k] else value * 0
    for j in range(i + 1, factor.shape[0]):
        scale = factor[i, j]
        for k in range(_LANES):
            strip[j, k] -= error[k] * scale


@njit(nogil=True, cache=True)
def eliminate(start: int, stop: int, current: Floats, factor: Floats, mask: Bools) -> None:
    """Rows `start` to `stop` of `sparsegpt.eliminate`."""
    n = factor.shape[0]
    strip = np.zeros((n, _LANES), current.dtype)
    kept = np.ones((n, _LANES), np.bool_)
    error = np.zeros(_LANES, current.dtype)
    for first in range(start, stop, _LANES):
        lanes = min(_LANES, stop - first)
        for k in range(lanes):
            for j in range(n):
                strip[j, k] = current[first + k, j]
                kept[j, k] = mask[first + k, j]
        for i in range(n):
            _remove(strip, factor, kept, error, i)
        for k in range(lanes):
            for j in range(n):
                current[first + k, j] = strip[j, k]


@njit(nogil=True, cache=True)
def eliminate_groups(start: int, stop: int, current: Floats, factor: Floats, mask: Bools, keep: int, of: int) -> None:
    """Rows `start` to `stop` of `sparsegpt.eliminate_groups`."""
    n = factor.shape[0]
    strip = np.zeros((n, _LANES), current.dtype)
    kept = np.ones((n, _LANES), np.bool_)
    error = np.zeros(_LANES, current.dtype)
    saliency = np.zeros((of, _LANES), current.dtype)
    for first in range(start, stop, _LANES):
        lanes = min(_LANES, stop - first)
        for k in range(lanes):
            for j in range(n):
                strip[j, k] = current[first + k, j]
        for group in range(0, n, of):
            for i in range(of):
                for k in range(_LANES):
                    saliency[i, k] = abs(strip[group + i, k] / factor[group + i, group + i])
            for i in range(of):
                for k in range(_LANES):
                    better = 0
                    for j in range(of):
                        better += (saliency[j, k] > saliency[i, k]) | ((saliency[j, k] == saliency[i, k]) & (j < i))
                    kept[group + i, k] = better < keep
            for i in range(group, group + of):
                _remove(strip, factor, kept, error, i)
        for k in range(lanes):
            for j in range(n):
                current[first + k, j] = strip[j, k]
                mask[first + k, j] = kept[j, k]
