"""Numba loops of `project.py`, and the selection that other loops use."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_SHIFT = 16  # a bucket is 15 bits, exponent and 7 bits of mantissa: two histograms fit into the cache
_BUCKETS = 1 << 15


@njit(nogil=True, cache=True, fastmath={"contract"})
def move(start: int, stop: int, dense: Floats, target: Floats, mask: Bools, relaxation: float) -> NDArray[np.int32]:
    """Update the target, and count its magnitudes by their leading bits."""
    a, rest = np.float32(relaxation), np.float32(1 - relaxation)
    unit = np.float32(1)
    shift = np.uint32(_SHIFT)
    histogram = np.zeros((2, _BUCKETS), np.int32)
    for r in range(start, stop):
        row, x, kept = target[r], dense[r], mask[r]
        for j in range(row.size):
            row[j] = a * x[j] + (rest if kept[j] else unit) * row[j]
        bits = row.view(np.uint32)
        for j in range(row.size):
            histogram[j & 1, (bits[j] & _MAGNITUDE) >> shift] += 1
    total: NDArray[np.int32] = histogram[0] + histogram[1]
    return total


@njit(cache=True)
def level(histogram: NDArray[np.int32], keep: int) -> float:
    """Magnitude that about `keep` entries reach, interpolated inside its bucket of the histogram."""
    above = 0
    bucket = _BUCKETS - 1
    while bucket > 0 and above + histogram[bucket] < keep:
        above += histogram[bucket]
        bucket -= 1
    edges = np.array([bucket << _SHIFT, (bucket + 1) << _SHIFT], np.uint32).view(np.float32)
    inside = max(1, histogram[bucket])
    bound: float = edges[1] - (edges[1] - edges[0]) * np.float32((keep - above) / inside)
    return bound


@njit(nogil=True, cache=True, fastmath={"contract"})
def pull(
    start: int, stop: int, dense: Floats, target: Floats, mask: Bools, linear: Floats, least: float, penalty: float
) -> None:
    """Keep entries of magnitude at least `least`; write the next right-hand side over the dense solution."""
    up, down, bound = np.float32(penalty), np.float32(-penalty), np.float32(least)
    for r in range(start, stop):
        x, row, kept, b = dense[r], target[r], mask[r], linear[r]
        for j in range(row.size):
            stays = abs(row[j]) >= bound
            kept[j] = stays
            x[j] = b[j] + (up if stays else down) * row[j]


@njit(nogil=True, cache=True, fastmath={"contract"})
def restart(
    start: int,
    stop: int,
    right: Floats,
    target: Floats,
    mask: Bools,
    linear: Floats,
    shrink: float,
    penalty: float,
) -> None:
    """Rescale the multiplier to a new penalty; write the next right-hand side."""
    up, down, factor, unit = np.float32(penalty), np.float32(-penalty), np.float32(shrink), np.float32(1)
    for r in range(start, stop):
        x, row, kept, b = right[r], target[r], mask[r], linear[r]
        for j in range(row.size):
            row[j] = row[j] * (unit if kept[j] else factor)
            x[j] = b[j] + (up if kept[j] else down) * row[j]


@njit(nogil=True, cache=True, fastmath={"contract"})
def local(
    start: int,
    stop: int,
    dense: Floats,
    target: Floats,
    mask: Bools,
    linear: Floats,
    size: int,
    keep: int,
    penalty: float,
    relaxation: float,
) -> None:
    """Target, projection and next right-hand side in one pass, for groups within rows."""
    a, rest = np.float32(relaxation), np.float32(1 - relaxation)
    unit = np.float32(1)
    up, down = np.float32(penalty), np.float32(-penalty)
    for r in range(start, stop):
        x, row, kept, b = dense[r], target[r], mask[r], linear[r]
        for j in range(row.size):
            row[j] = a * x[j] + (rest if kept[j] else unit) * row[j]
        if size == 4:
            _rank_fours(row, kept, keep)
        elif size <= 16:
            _rank_groups(row, kept, size, keep)
        else:
            for first in range(0, row.size, size):
                _select(row[first : first + size], kept[first : first + size], keep)
        for j in range(row.size):
            x[j] = b[j] + (up if kept[j] else down) * row[j]


@njit(nogil=True, cache=True)
def _rank_fours(row: Floats, kept: Bools, keep: int) -> None:
    """`_rank_groups` for groups of 4, in six comparisons that the compiler vectorises."""
    count = np.int32(keep)
    for i in range(row.size // 4):
        a, b, c, d = abs(row[4 * i]), abs(row[4 * i + 1]), abs(row[4 * i + 2]), abs(row[4 * i + 3])
        ab, ac, ad = np.int32(a < b), np.int32(a < c), np.int32(a < d)
        bc, bd, cd = np.int32(b < c), np.int32(b < d), np.int32(c < d)
        kept[4 * i] = ab + ac + ad < count
        kept[4 * i + 1] = 1 - ab + bc + bd < count
        kept[4 * i + 2] = 2 - ac - bc + cd < count
        kept[4 * i + 3] = 3 - ad - bd - cd < count


@njit(nogil=True, cache=True)
def _rank_groups(row: Floats, kept: Bools, size: int, keep: int) -> None:
    for first in range(0, row.size, size):
        for i in range(first, first + size):
            value = abs(row[i])
            better = 0
            for j in range(first, i):
                better += abs(row[j]) >= value
            for j in range(i + 1, first + size):
                better += abs(row[j]) > value
            kept[i] = better < keep


@njit(nogil=True, cache=True)
def _select(values: Floats, kept: Bools, keep: int) -> None:
    if keep == 0:
        kept[:] = False
        return
    magnitudes = np.abs(values)
    bound = kth_smallest(magnitudes, values.size - keep)
    missing = keep
    for j in range(values.size):
        kept[j] = magnitudes[j] > bound
        missing -= kept[j]
    for j in range(values.size):
        if missing > 0 and magnitudes[j] == bound:
            kept[j] = True
            missing -= 1


# ---- Selection: radix select of `project.py`, and quickselect for the loops of other kernels

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
