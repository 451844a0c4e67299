"""Loops for `eliminate.py`. Contracted multiply-adds only: sums keep their order, so threads do not change bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[Any]


@njit(nogil=True, cache=True, fastmath={"contract"})
def _remove(row: Floats, factor_row: Floats, i: int) -> None:
    error = row[i] / factor_row[i]
    for j in range(i + 1, row.size):
        row[j] -= error * factor_row[j]
    row[i] = 0


@njit(nogil=True, cache=True)
def eliminate(start: int, stop: int, current: Floats, factor: Floats, mask: NDArray[np.bool_]) -> None:
    """Rows start to stop of `eliminate.eliminate`."""
    for r in range(start, stop):
        row = current[r]
        for i in range(row.size):
            if not mask[r, i]:
                _remove(row, factor[i], i)


@njit(nogil=True, cache=True)
def eliminate_groups(
    start: int, stop: int, current: Floats, factor: Floats, mask: NDArray[np.bool_], keep: int, of: int
) -> None:
    """Rows start to stop of `eliminate.eliminate_groups`."""
    saliency = np.empty(of, current.dtype)
    for r in range(start, stop):
        row = current[r]
        for first in range(0, row.size, of):
            for i in range(of):
                saliency[i] = abs(row[first + i] / factor[first + i, first + i])
            for i in range(of):
                better = 0
                for j in range(of):
                    if saliency[j] > saliency[i] or (saliency[j] == saliency[i] and j < i):
                        better += 1
                mask[r, first + i] = better < keep
            for i in range(first, first + of):
                if not mask[r, i]:
                    _remove(row, factor[i], i)
