"""Bytes of a matrix of whole numbers times steps: an entropy code of its integers, and what it needs beside them.

The integers are coded by asymmetric numeral systems (Duda, 2013) with states of 32 bits, words of 16 bits and tables of
14 bits. Each class of integers has a table that two numbers make: a normal distribution whose spread is itself spread
log-normally. Several interleaved states share one stream of words, so that a processor decodes them at once.

    head     rows, columns, states, bytes of the side, words      5 uint32, little-endian like all numbers
    side     compressed by zlib: steps and factors as bfloat16, classes of columns and rows as int8, tables of classes
    words    uint16, the states first
    sums     CRC-32 of the tables as they were made, and of all before it

Matrices of one tensor follow each other.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from iobs.core.integers import Classes, Integers, raw_bits
from iobs.errors import ModelError

PRECISION = 14  # bits of the frequencies of a table, whose sum is 2^14
_HEAD, _SUM = struct.Struct("<5I"), struct.Struct("<I")
_ENTRY = np.dtype([("number", "u1"), ("spread", "i1"), ("tail", "u1"), ("low", "<i2"), ("high", "<i2")])
_OCTAVE = 8  # spreads of tables for each octave
_TAILS = 0.15  # deviation of the logarithm of the spread, for each unit of `tail`
_TAIL_UNITS = 8
_NODES, _SHARES = np.polynomial.hermite_e.hermegauss(7)
_STATE_ENTRIES = 4096  # entries of a matrix for each state
_MOST_STATES = 32


@dataclass(frozen=True)
class Tables:
    """Tables of the classes of one matrix.

    Attributes:
        entries: (classes,) of `_ENTRY`: class, spread, tail, and the least and the greatest integer without raw bits.
        starts: (symbols + classes,) uint16, cumulative frequencies of the symbols of one class after another.
        places: (classes,) int64, where the symbols of each class begin in `starts`.
    """

    entries: NDArray[np.void]
    starts: NDArray[np.uint16]
    places: NDArray[np.int64]

    @classmethod
    def of(cls, entries: NDArray[np.void]) -> Tables:
        """The tables that entries describe."""
        found = [_starts(*entry) for entry in entries.tolist()]
        places = np.cumsum([0, *map(len, found)])[:-1]
        return cls(entries, np.concatenate(found), places.astype(np.int64))


def encode(integers: Integers) -> bytes:
    """The bytes of a matrix."""
    from iobs.models import entropy_code_numba as kernel

    rows, columns = integers.codes.shape
    classes = Classes.of(integers.codes)
    table, codes = classes.table().numpy(), integers.codes.numpy()
    numbers = np.unique(table)
    tables = Tables.of(np.array([_fitted(int(number), codes[table == number]) for number in numbers], _ENTRY))
    states = min(_MOST_STATES, -(-codes.size // _STATE_ENTRIES))
    side = zlib.compress(
        b"".join(
            [
                _planes(_half(integers.steps)),
                _planes(_half(integers.factors)),
                _small(classes.columns).tobytes(),
                _small(classes.rows).tobytes(),
                tables.entries.tobytes(),
            ]
        ),
        9,
    )
    coding = kernel.Coding(_small(classes.rows), _small(classes.columns), *_lookup(tables))
    words = kernel.encoded(codes, coding, states)
    head = _HEAD.pack(rows, columns, states, len(side), len(words))
    whole = head + side + words.tobytes()
    whole += _SUM.pack(zlib.crc32(tables.starts.tobytes()))
    return whole + _SUM.pack(zlib.crc32(whole))


def decode(data: bytes, name: str = "the matrix") -> list[Integers]:
    """The matrices whose bytes of `encode` follow each other.

    Args:
        data: the bytes.
        name: of the tensor in errors.

    Raises:
        ModelError: the bytes are truncated or changed, or this processor makes other tables than the one that wrote.
    """
    found: list[Integers] = []
    while not found or data:
        matrix, data = _first(data, name)
        found.append(matrix)
    return found


def _first(data: bytes, name: str) -> tuple[Integers, bytes]:
    """The first matrix, and the bytes behind it."""
    from iobs.models import entropy_code_numba as kernel

    try:
        rows, columns, states, side_bytes, count = _HEAD.unpack_from(data)
        words_at = _HEAD.size + side_bytes
        end = words_at + 2 * count
        side = zlib.decompress(data[_HEAD.size : words_at])
        steps, side = _from_planes(side, columns)
        factors, side = _from_planes(side, rows)
        by_column, side = np.frombuffer(side, np.int8, columns), side[columns:]
        by_row, side = np.frombuffer(side, np.int8, rows), side[rows:]
        tables = Tables.of(np.frombuffer(side, _ENTRY))
        (of_tables,), (of_bytes,) = _SUM.unpack_from(data, end), _SUM.unpack_from(data, end + _SUM.size)
    except (struct.error, zlib.error, ValueError, IndexError) as error:
        raise ModelError(f"The code of {name} is truncated or damaged; copy the file again.") from error
    possible = 1 <= states <= _MOST_STATES and count >= 2 * states
    if zlib.crc32(data[: end + _SUM.size]) != of_bytes or not possible:
        raise ModelError(f"The code of {name} is damaged; copy the file again.")
    if zlib.crc32(tables.starts.tobytes()) != of_tables:
        raise ModelError(f"This processor makes other tables for the code of {name} than the one that wrote the file.")
    words = np.frombuffer(data, np.uint16, count, words_at)
    codes = kernel.decoded(words, kernel.Coding(by_row, by_column, *_lookup(tables)), states)
    if codes is None:
        raise ModelError(f"The code of {name} is damaged; copy the file again.")
    return Integers(torch.from_numpy(codes), steps, factors), data[end + 2 * _SUM.size :]


def _lookup(tables: Tables) -> tuple[NDArray[np.uint16], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Starts; and by class from 0 on: place of its symbols, its least integer, and its raw bits."""
    most = int(tables.entries["number"].max()) + 1
    places, least, raw = (np.zeros(most, np.int64) for _ in range(3))
    for entry, place in zip(tables.entries, tables.places, strict=True):
        number = int(entry["number"])
        places[number], least[number], raw[number] = place, int(entry["low"]), raw_bits(number)
    return tables.starts, places, least, raw


def _starts(number: int, spread: int, tail: int, low: int, high: int) -> NDArray[np.uint16]:
    """Cumulative frequencies of the integers `low` to `high` without raw bits, from 0 to 2^14."""
    count = high - low + 1
    shares = np.diff(_cumulative(number, spread, tail, low, high))
    frequencies = 1 + np.floor(shares / shares.sum() * ((1 << PRECISION) - count)).astype(np.int64)
    frequencies[np.argmax(frequencies)] += (1 << PRECISION) - frequencies.sum()
    return np.concatenate([[0], np.cumsum(frequencies)]).astype(np.uint16)


def _cumulative(number: int, spread: int, tail: int, low: int, high: int) -> NDArray[np.float64]:
    """The distribution function at the lower ends of the integers `low` to `high + 1`, without raw bits."""
    ends = np.arange(low, high + 2, dtype=np.float64) * 2.0 ** raw_bits(number) - 0.5
    sizes = 2.0 ** (spread / _OCTAVE) * np.exp(_TAILS * tail * _NODES)
    shares: NDArray[np.float64] = _normal(ends[:, None] / sizes) @ (_SHARES / _SHARES.sum())
    return shares


def _normal(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The standard normal distribution function."""
    result: NDArray[np.float64] = torch.special.ndtr(torch.from_numpy(values)).numpy()
    return result


def _fitted(number: int, codes: NDArray[np.int32]) -> tuple[int, int, int, int, int]:
    """The table of a class with the shortest code."""
    high = codes >> raw_bits(number)
    low, top = int(high.min()), int(high.max())
    counts = np.bincount(high - low)
    middle = round(math.log2(max(float(np.sqrt(np.mean(np.square(codes, dtype=np.float64)))), 2.0**-10)) * _OCTAVE)

    def length(spread: int, tail: int) -> float:
        shares = np.diff(_cumulative(number, spread, tail, low, top))
        return float(-counts @ np.log2(shares / shares.sum() * (1 - len(counts) / (1 << PRECISION)) + 2.0**-PRECISION))

    best, shortest = (middle, 0), length(middle, 0)
    moved = low < top
    while moved:  # one number after the other, downhill
        moved = False
        for change in ((0, 1), (0, -1), (1, 0), (-1, 0), (-1, 1), (1, -1)):
            spread, tail = best[0] + change[0], best[1] + change[1]
            if 0 <= tail <= _TAIL_UNITS and -128 <= spread <= 127 and (found := length(spread, tail)) < shortest:
                best, shortest, moved = (spread, tail), found, True
    return number, *best, low, top


def _half(values: Tensor) -> NDArray[np.uint16]:
    """Numbers of at most 8 significant bits as the bits of bfloat16."""
    return values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def _planes(values: NDArray[np.uint16]) -> bytes:
    """The high bytes, then the low bytes: they compress better apart."""
    return (values >> 8).astype(np.uint8).tobytes() + (values & 0xFF).astype(np.uint8).tobytes()


def _from_planes(data: bytes, count: int) -> tuple[Tensor, bytes]:
    """Numbers that `_planes` wrote, as float32, and the bytes behind them."""
    high, low = (np.frombuffer(data, np.uint8, count, place).astype(np.uint16) for place in (0, count))
    values = torch.from_numpy(((high << 8) | low).view(np.int16)).view(torch.bfloat16).float()
    return values, data[2 * count :]


def _small(classes: Tensor) -> NDArray[np.int8]:
    return classes.to(torch.int8).numpy()
