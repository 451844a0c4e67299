"""Activations in the layout that the kernels read: filled up with zeros, in another order, or in 8 bits."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

Reals = NDArray[np.float32]
_LIMIT = 127.0
_INFINITE = 0x7F800000  # bits of infinity; those of NaN are larger


@njit(cache=True, nogil=True)
def filled(vectors: Reals, layout: Reals) -> None:
    """Copy (tokens, columns) to (tokens, filled columns)."""
    for token in range(vectors.shape[0]):
        layout[token, : vectors.shape[1]] = vectors[token]
        layout[token, vectors.shape[1] :] = 0


@njit(cache=True, nogil=True)
def even_then_odd(vectors: Reals, layout: Reals) -> None:
    """Copy (tokens, columns) to (tokens, filled columns): of each 32 columns the even ones first, then the odd ones."""
    columns = vectors.shape[1]
    whole = columns // 32 * 32
    for token in range(vectors.shape[0]):
        source, goal = vectors[token], layout[token]
        for start in range(0, whole, 32):
            for pair in range(16):
                goal[start + pair] = source[start + 2 * pair]
                goal[start + 16 + pair] = source[start + 2 * pair + 1]
        goal[whole:] = 0
        for column in range(whole, columns):
            place = column - whole
            goal[whole + place // 2 + 16 * (place % 2)] = source[column]


@njit(cache=True, nogil=True)
def rounded(vectors: Reals, layout: NDArray[np.uint8], scales: Reals, offset: int = 128) -> None:
    """Round each token to 8 bits: round(x / scale) + offset, with scale = max |x| / 127.

    The scale of a token with NaN or infinite entries is NaN, and so are its products.

    Args:
        vectors: (tokens, columns).
        layout: (tokens, filled columns), written.
        scales: (tokens), written.
        offset: 128, or 0 for the bytes of int8.
    """
    bits, bounds = vectors.view(np.int32), scales.view(np.int32)
    for token in range(vectors.shape[0]):
        source, goal, row = vectors[token], layout[token], bits[token]
        largest = np.int32(0)  # of the bits without sign: they have the order of the numbers, NaN last
        for column in range(row.size):
            bare = row[column] & np.int32(0x7FFFFFFF)
            largest = bare if bare > largest else largest
        bounds[token] = largest
        bound = scales[token]
        bad = largest >= _INFINITE
        scales[token] = np.float32(np.nan) if bad else bound / np.float32(_LIMIT)
        factor = np.float32(_LIMIT) / bound if bound > 0 and not bad else np.float32(0)
        for column in range(source.size):
            # Adding this number rounds to the nearest whole number: its last bit stands for one.
            shifted = source[column] * factor + np.float32(12582912.0)
            goal[column] = np.uint8(np.int32(shifted - np.float32(12582912.0)) + offset)
        goal[source.size :] = 0


@njit(cache=True, nogil=True)
def scaled(sums: Reals, scales: Reals, corrections: Reals, signed: bool = False) -> None:
    """Turn sums into products, in place: scale * (sum - correction); sums over signed activations need none."""
    for token in range(sums.shape[0]):
        for row in range(sums.shape[1]):
            sums[token, row] = scales[token] * (sums[token, row] - (np.float32(0) if signed else corrections[row]))
