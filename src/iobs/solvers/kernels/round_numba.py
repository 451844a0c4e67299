"""Numba loop of `successive_rounding.py`: one column is rounded from its last row to its first."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@njit(nogil=True, cache=True, fastmath={"contract", "reassoc", "nsz"})
def round_column(
    value: Floats, lower: Floats, kept: Floats, largest: int, exact: int, code: Floats, image: Floats
) -> None:
    """Find whole numbers z for which K^T z is near a column, the nearest for each row given those of later rows.

    Args:
        value: (rows,) the column.
        lower: (rows, rows) K, lower triangular with a diagonal of 1.
        kept: (rows,) 1, or 0 where z is 0.
        largest: absolute value of a whole number.
        exact: every whole number up to here is taken, and above it those with as many significant bits.
        code: (rows,) z; overwritten.
        image: (rows,) K^T z; overwritten.
    """
    image[:] = 0
    code[:] = 0
    for i in range(len(value) - 1, -1, -1):
        if kept[i] == 0:
            continue
        wanted = value[i] - image[i]
        unit = np.float32(1)
        while abs(wanted) > exact * unit:
            unit *= 2
        z = min(max(np.rint(wanted / unit) * unit, -np.float32(largest)), np.float32(largest))
        if z != 0:
            code[i] = z
            image[i] += z
            row = lower[i]
            for k in range(i):
                image[k] += row[k] * z
