"""Numba loops of `entropy_code.py`: integers of a matrix, row by row, to words and back.

Entry n belongs to state n mod `states`. States lie in [2^16, 2^32). To code a symbol of frequency f that starts at s of
2^14, a state x becomes (x // f) 2^14 + x % f + s, after its last 16 bits were written if it would become too large.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Words = NDArray[np.uint16]
Small = NDArray[np.int8]
Codes = NDArray[np.int16]
Places = NDArray[np.int64]

_BITS = 14  # precision of tables
_WHOLE = 1 << _BITS
_LEAST = 1 << 16  # least state


class Coding(NamedTuple):
    """The classes of the entries of a matrix, and the tables of the classes.

    Attributes:
        rows: (rows,), part of the class of an entry.
        columns: (columns,), the other part.
        starts: cumulative frequencies of the symbols, a class after another.
        places: (classes,), where those of a class begin.
        least: (classes,), integer of the first symbol, without raw bits.
        raw: (classes,), raw bits of an integer.
    """

    rows: Small
    columns: Small
    starts: Words
    places: Places
    least: Places
    raw: Places


@njit(nogil=True, cache=True)
def _written(
    codes: Codes,
    coding: Coding,
    states: Places,
    words: Words,
) -> int:
    """Write the words from the end of an array on, and return where they begin."""
    rows, columns, starts, places, least, raw = coding
    end, width = len(words), codes.shape[1]
    for n in range(codes.size - 1, -1, -1):
        i, j = n // width, n % width
        number = int(rows[i]) + int(columns[j])
        number = max(number, 0)
        code, bits, lane = np.int64(codes[i, j]), raw[number], n % len(states)
        x = states[lane]
        symbol = places[number] + (code >> bits) - least[number]
        start = np.int64(starts[symbol])
        stop = np.int64(starts[symbol + 1])
        frequency = stop - start
        if bits:
            if x >= 1 << (32 - bits):
                end -= 1
                words[end] = x & 0xFFFF
                x >>= 16
            x = (x << bits) | (code & ((1 << bits) - 1))
        if x >= frequency << (32 - _BITS):
            end -= 1
            words[end] = x & 0xFFFF
            x >>= 16
        states[lane] = ((x // frequency) << _BITS) + x % frequency + start
    return end


@njit(nogil=True, cache=True)
def _slots(starts: Words, places: Places, ends: Places) -> NDArray[np.uint16]:
    """The symbol of each of the 2^14 slots of the tables, (classes, 2^14); places[c] to ends[c] are the starts of c."""
    slots = np.zeros((len(places), _WHOLE), np.uint16)
    for number in range(len(places)):
        for symbol in range(ends[number] - places[number]):
            start = np.int64(starts[places[number] + symbol])
            stop = np.int64(starts[places[number] + symbol + 1])
            for slot in range(start, stop):
                slots[number, slot] = symbol
    return slots


@njit(nogil=True, cache=True)
def _read(
    codes: Codes,
    coding: Coding,
    slots: NDArray[np.uint16],
    states: Places,
    words: Words,
) -> bool:
    """Read the integers of a matrix; False if they need more words or other classes than there are."""
    rows, columns, starts, places, least, raw = coding
    at, lane, width, last = 0, 0, codes.shape[1], len(words) - 2
    for i in range(codes.shape[0]):
        for j in range(width):
            number = max(int(rows[i]) + int(columns[j]), 0)
            if number >= len(places) or at > last:
                return False
            x = states[lane]
            slot = x & (_WHOLE - 1)
            symbol = np.int64(slots[number, slot])
            place = places[number] + symbol
            start = np.int64(starts[place])
            frequency = np.int64(starts[place + 1]) - start
            x = frequency * (x >> _BITS) + slot - start
            few = np.int64(x < _LEAST)  # no branch: a processor would foretell it badly
            x = (x << (few << 4)) | (np.int64(words[at]) & -few)
            at += int(few)
            code, bits = symbol + least[number], raw[number]
            if bits:
                code = (code << bits) | (x & ((1 << bits) - 1))
                x >>= bits
                few = np.int64(x < _LEAST)
                x = (x << (few << 4)) | (np.int64(words[at]) & -few)
                at += int(few)
            codes[i, j] = code
            states[lane] = x
            lane += 1
            if lane == len(states):
                lane = 0
    return True


def encoded(
    codes: Codes,
    coding: Coding,
    count: int,
) -> Words:
    """The words of a matrix: first the last states, high word before low, then those of its integers.

    Args:
        codes: (rows, columns).
        coding: classes and tables.
        count: number of states.
    """
    states = np.full(count, _LEAST, np.int64)
    words = np.empty(2 * codes.size + 2, np.uint16)  # no symbol needs more than two words
    begin = _written(codes, coding, states, words)
    last = np.stack([states >> 16, states & 0xFFFF], 1).astype(np.uint16).ravel()
    return np.concatenate([last, words[begin:]])


def decoded(
    words: Words,
    coding: Coding,
    count: int,
) -> Codes | None:
    """The integers of `encoded`, (rows, columns); None if the words are not theirs."""
    last = words[: 2 * count].astype(np.int64)
    states = (last[::2] << 16) | last[1::2]
    # A class ends where the next cumulative frequencies begin, with 0 again: at the first fall after its place.
    starts, places = coding.starts, coding.places
    falls = np.append(np.flatnonzero(np.diff(starts.astype(np.int64)) < 0), len(starts) - 1)
    ends = falls[np.searchsorted(falls, places + 1)]
    codes = np.empty((len(coding.rows), len(coding.columns)), np.int16)
    padded = np.append(words[2 * count :], np.zeros(2, np.uint16))
    read = _read(codes, coding, _slots(starts, places, ends), states, padded)
    return codes if read else None
