"""Numba loops that select: radix select of `select.py`, and quickselect for the loops of other kernels."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_HALF = np.uint32(16)
_LOW = np.uint32(0xFFFF)


@njit(nogil=True, cache=True)
def kth_largest(bits: NDArray[np.uint32], keep: int) -> tuple[int, int, int]:
    """Bits of the keep-th largest magnitude, the number of entries above it, and the number equal to it.

    Two passes of 16 bits. Each bucket has four interleaved counters, so that runs of similar values do not stall.
    """
    high = np.zeros((4, 1 << 15), np.int64)
    for i in range(bits.size):
        high[i & 3, (bits[i] & _MAGNITUDE) >> _HALF] += 1
    above = 0
    bucket = (1 << 15) - 1
    while True:
        count = high[0, bucket] + high[1, bucket] + high[2, bucket] + high[3, bucket]
        if above + count >= keep:
            break
        above += count
        bucket -= 1
    low = np.zeros(1 << 16, np.int64)
    for i in range(bits.size):
        magnitude = bits[i] & _MAGNITUDE
        if magnitude >> _HALF == bucket:
            low[magnitude & _LOW] += 1
    rest = (1 << 16) - 1
    while above + low[rest] < keep:
        above += low[rest]
        rest -= 1
    return (bucket << 16) | rest, above, low[rest]


@njit(nogil=True, cache=True)
def kth_smallest(values: NDArray[np.floating], k: int) -> float:
    """The value that would stand at index k if `values` (n,) were sorted.

    Hoare's quickselect on a copy. `np.partition` gives the same value, but takes 6 to 12 s to compile where this takes
    half a second.
    """
    rest = values.copy()
    first, last = 0, values.size - 1
    while first < last:
        pivot = rest[(first + last) // 2]
        i, j = first, last
        while i <= j:
            while rest[i] < pivot:
                i += 1
            while rest[j] > pivot:
                j -= 1
            if i <= j:
                rest[i], rest[j] = rest[j], rest[i]
                i += 1
                j -= 1
        if k <= j:
            last = j
        elif k >= i:
            first = i
        else:
            break
    return rest[k]  # type: ignore[no-any-return]
