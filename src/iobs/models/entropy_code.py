"""Bytes of a matrix of whole numbers times steps: an entropy code of its integers, and what it needs beside them.

The integers are coded by asymmetric numeral systems (Duda, 2013) with states of 32 bits, words of 16 bits and tables of
14 bits. Each class of integers has a table that two numbers make: a normal distribution whose spread is itself spread
log-normally. Where it is far from that, as beside the zeros of a mask, a byte for each integer says its frequency.
Several interleaved states share one stream of words, so that a processor decodes them at once.

    head     rows, columns, states, bytes of scales and of classes, words      6 uint32, little-endian like all numbers
    scales   compressed by zlib: steps and factors as bfloat16
    classes  compressed by zlib: classes of columns and rows as int8, tables of classes each with its bytes
    words    uint16, the states first
    sums     CRC-32 of the tables as they were made, and of all before it

Matrices of one tensor follow each other.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from iobs.core.exponents import inflated
from iobs.core.integers import MOST_STATES, TABLE, Classes, Integers, raw_bits, sides, states_of
from iobs.errors import ModelError

PRECISION = 14  # bits of the frequencies of a table, whose sum is 2^14
_HEAD, _SUM = struct.Struct("<6I"), struct.Struct("<I")
_ENTRY = np.dtype([("number", "u1"), ("spread", "i1"), ("tail", "u1"), ("low", "<i2"), ("high", "<i2")])
assert _ENTRY.itemsize == TABLE.size
_MOST_DESCRIBED = 256 * (_ENTRY.itemsize + 2**16)  # bytes of all tables
_OCTAVE = 8  # spreads of tables for each octave
_TAILS = 0.15  # deviation of the logarithm of the spread, for each unit of `tail`
_TAIL_UNITS = 8
_LISTED = 255  # in place of a tail: a table has a byte for each integer, its length in eighths of a bit
_UNITS_OF_LENGTH = 8
_BITS_OF_LENGTH = 7  # of such a byte, compressed
_CHANGES = ((0, 1), (0, -1), (1, 0), (-1, 0), (-1, 1), (1, -1))
_NODES, _SHARES = np.polynomial.hermite_e.hermegauss(7)


@dataclass(frozen=True)
class Tables:
    """Tables of the classes of one matrix.

    Attributes:
        entries: (classes,) of `_ENTRY`: class, spread, tail, and the least and the greatest integer without raw bits.
        lengths: (symbols,) uint8 of each class that is `_LISTED`; empty of the others.
        starts: (symbols + classes,) uint16, cumulative frequencies of the symbols of one class after another.
        places: (classes,) int64, where the symbols of each class begin in `starts`.
    """

    entries: NDArray[np.void]
    lengths: list[NDArray[np.uint8]]
    starts: NDArray[np.uint16]
    places: NDArray[np.int64]

    @classmethod
    def of(cls, entries: NDArray[np.void], lengths: list[NDArray[np.uint8]]) -> Tables:
        """The tables that entries and lengths describe."""
        starts, places = _starts(entries, lengths)
        return cls(entries, lengths, starts, places)

    def described(self) -> bytes:
        """Entries, each with its lengths."""
        return b"".join(
            entry.tobytes() + of_it.tobytes() for entry, of_it in zip(self.entries, self.lengths, strict=True)
        )

    @classmethod
    def read(cls, described: bytes) -> Tables:
        """The tables from the result of `described`.

        Raises:
            ValueError: the bytes end within a table.
        """
        entries, lengths = [], []
        while described:
            entry = np.frombuffer(described, _ENTRY, 1)
            count = int(entry["high"][0]) - int(entry["low"][0]) + 1 if entry["tail"][0] == _LISTED else 0
            entries.append(entry)
            lengths.append(np.frombuffer(described, np.uint8, count, _ENTRY.itemsize))
            described = described[_ENTRY.itemsize + count :]
        return cls.of(np.concatenate(entries), lengths)


def encode(integers: Integers) -> bytes:
    """The bytes of a matrix."""
    from iobs.models import entropy_code_numba as kernel

    rows, columns = integers.codes.shape
    classes = Classes.of(integers.codes)
    codes = integers.codes.to(torch.int16).numpy()
    (least, counts), squares = classes.counts(integers.codes), classes.squares(integers.codes)
    numbers = counts.any(1).nonzero()[:, 0].tolist()
    fitted = [_fitted(number, least, counts[number].long().numpy(), float(squares[number])) for number in numbers]
    tables = Tables.of(np.array([entry for entry, _ in fitted], _ENTRY), [lengths for _, lengths in fitted])
    states = states_of(codes.size)
    scales = sides(integers.steps, integers.factors)
    described = classes.described(tables.described())
    coding = kernel.Coding(_small(classes.rows), _small(classes.columns), *_lookup(tables))
    words = kernel.encoded(codes, coding, states)
    head = _HEAD.pack(rows, columns, states, len(scales), len(described), len(words))
    whole = b"".join([head, scales, described, words.data, _SUM.pack(zlib.crc32(tables.starts.data))])
    return whole + _SUM.pack(zlib.crc32(whole))


def decode(data: bytes | memoryview, name: str = "the matrix") -> Iterator[Integers]:
    """The matrices whose bytes of `encode` follow each other, one at a time.

    Args:
        data: the bytes.
        name: of the tensor in errors.

    Raises:
        ModelError: the bytes are truncated or changed, or this processor makes other tables than the one that wrote.
    """
    data = memoryview(data)
    while True:
        matrix, data = _first(data, name)
        yield matrix
        if not data:
            return


def parts(data: bytes | memoryview) -> tuple[int, dict[str, int]]:
    """Entries of matrices that follow each other, and bytes of their parts, from bytes that `decode` reads."""
    entries, total = 0, dict.fromkeys(("integers", "steps and factors", "classes and tables", "heads and sums"), 0)
    while data:
        rows, columns, _, scales, classes, words = _HEAD.unpack_from(data)
        sizes = 2 * words, scales, classes, _HEAD.size + 2 * _SUM.size
        entries += rows * columns
        total = {part: before + size for (part, before), size in zip(total.items(), sizes, strict=True)}
        data = data[sum(sizes) :]
    return entries, total


def _first(data: memoryview, name: str) -> tuple[Integers, memoryview]:
    """The first matrix, and the bytes behind it."""
    from iobs.models import entropy_code_numba as kernel

    damaged = ModelError(f"The code of {name} is truncated or damaged; copy the file again.")
    try:
        rows, columns, states, scale_bytes, class_bytes, count = _HEAD.unpack_from(data)
        classes_at = _HEAD.size + scale_bytes
        words_at = classes_at + class_bytes
        end = words_at + 2 * count
        (of_tables,), (of_bytes,) = _SUM.unpack_from(data, end), _SUM.unpack_from(data, end + _SUM.size)
        if zlib.crc32(data[: end + _SUM.size]) != of_bytes:
            raise damaged
        scales = inflated(data[_HEAD.size : classes_at], 2 * (rows + columns))
        steps, scales = _from_planes(scales, columns)
        factors, _ = _from_planes(scales, rows)
        described = inflated(data[classes_at:words_at], rows + columns + _MOST_DESCRIBED)
        by_column = np.frombuffer(described, np.int8, columns)
        by_row = np.frombuffer(described, np.int8, rows, columns)
        tables = Tables.read(described[rows + columns :])
    except (struct.error, zlib.error, ValueError, IndexError) as error:
        raise damaged from error
    if not 1 <= states <= MOST_STATES or count < 2 * states:
        raise damaged
    if zlib.crc32(tables.starts.tobytes()) != of_tables:
        raise ModelError(f"This processor makes other tables for the code of {name} than the one that wrote the file.")
    words = np.frombuffer(data, np.uint16, count, words_at)
    codes = kernel.decoded(words, kernel.Coding(by_row, by_column, *_lookup(tables)), states)
    if codes is None:
        raise damaged
    return Integers(torch.from_numpy(codes), steps, factors), data[end + 2 * _SUM.size :]


def _lookup(tables: Tables) -> tuple[NDArray[np.uint16], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Starts; and by class from 0 on: place of its symbols, its least integer, and its raw bits."""
    most = int(tables.entries["number"].max()) + 1
    places, least, raw = (np.zeros(most, np.int64) for _ in range(3))
    for entry, place in zip(tables.entries, tables.places, strict=True):
        number = int(entry["number"])
        places[number], least[number], raw[number] = place, int(entry["low"]), raw_bits(number)
    return tables.starts, places, least, raw


def _starts(
    entries: NDArray[np.void], lengths: list[NDArray[np.uint8]]
) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """Cumulative frequencies of the symbols of classes, each from 0 to 2^14, and where each class begins."""
    counts = entries["high"].astype(np.int64) - entries["low"] + 1
    places = np.concatenate([[0], np.cumsum(counts + 1)[:-1]])
    cumulative = _cumulative(entries)
    starts = np.zeros(len(cumulative), np.uint16)
    for place, count, listed in zip(places.tolist(), counts.tolist(), lengths, strict=True):
        shares = np.diff(cumulative[place : place + count + 1])
        if listed.size:
            shares = 2.0 ** -(listed / _UNITS_OF_LENGTH)
        frequencies = 1 + (shares * (((1 << PRECISION) - count) / shares.sum())).astype(np.int64)
        frequencies[shares.argmax()] += (1 << PRECISION) - frequencies.sum()
        starts[place + 1 : place + count + 1] = np.cumsum(frequencies)
    return starts, places


def _cumulative(entries: NDArray[np.void]) -> NDArray[np.float64]:
    """The distribution function of classes at the lower ends of the integers `low` to `high + 1`, without raw bits."""
    low, counts = entries["low"].astype(np.int64), entries["high"].astype(np.int64) - entries["low"] + 2
    owners = np.repeat(np.arange(len(entries)), counts)
    symbols = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts) + low[owners]
    units = np.array([2.0 ** raw_bits(number) for number in entries["number"].tolist()])
    sizes = 2.0 ** (entries["spread"] / _OCTAVE)[:, None] * np.exp(_TAILS * entries["tail"][:, None] * _NODES)
    ends: NDArray[np.float64] = symbols * units[owners] - 0.5
    shares: NDArray[np.float64] = _normal(ends[:, None] / sizes[owners]) @ (_SHARES / _SHARES.sum())
    return shares


def _normal(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The standard normal distribution function."""
    result: NDArray[np.float64] = torch.special.ndtr(torch.from_numpy(values)).numpy()
    return result


def _fitted(
    number: int, least: int, counts: NDArray[np.int64], squares: float
) -> tuple[tuple[int, int, int, int, int], NDArray[np.uint8]]:
    """The table of a class with the shortest code, and the lengths of its integers if it lists them.

    Args:
        number: of the class.
        least: an integer without raw bits.
        counts: how often the class has this integer and each one behind it.
        squares: sum of the squares of its integers, with raw bits.
    """
    places = np.flatnonzero(counts)
    low, top = least + int(places[0]), least + int(places[-1])
    counts = counts[places[0] : places[-1] + 1]
    middle = round(math.log2(max(math.sqrt(squares / int(counts.sum())), 2.0**-10)) * _OCTAVE)

    def lengths(places: list[tuple[int, int]]) -> list[float]:
        cumulative = _cumulative(np.array([(number, *place, low, top) for place in places], _ENTRY))
        shares = np.diff(cumulative.reshape(len(places), -1))
        shares *= (1 - len(counts) / (1 << PRECISION)) / shares.sum(1, keepdims=True)
        bits: list[float] = (-np.log2(shares + 2.0**-PRECISION) @ counts).tolist()
        return bits

    lengths_of: dict[tuple[int, int], float] = {}
    best, coming = (middle, 0), [(middle, 0)]
    while coming:  # downhill, one or both numbers at a time
        lengths_of |= zip(coming, lengths(coming), strict=True)
        best = min(lengths_of, key=lambda place: lengths_of[place])
        around = [(best[0] + spread, best[1] + tail) for spread, tail in _CHANGES]
        coming = [
            place
            for place in around
            if place not in lengths_of and abs(place[0]) <= 127 and 0 <= place[1] <= _TAIL_UNITS
        ]
    used = counts[counts > 0]
    entropy = float(used @ np.log2(counts.sum() / used))
    if entropy + _BITS_OF_LENGTH * len(counts) < lengths_of[best]:
        lengths_listed = -_UNITS_OF_LENGTH * np.log2(np.maximum(counts, 2.0**-31) / counts.sum())
        return (number, 0, _LISTED, low, top), np.clip(lengths_listed.round(), 0, 255).astype(np.uint8)
    return (number, *best, low, top), np.empty(0, np.uint8)


def _from_planes(data: bytes, count: int) -> tuple[Tensor, bytes]:
    """Numbers that `sides` wrote, as float32, and the bytes behind them."""
    high, low = (np.frombuffer(data, np.uint8, count, place).astype(np.uint16) for place in (0, count))
    values = torch.from_numpy(((high << 8) | low).view(np.int16)).view(torch.bfloat16).float()
    return values, data[2 * count :]


def _small(classes: Tensor) -> NDArray[np.int8]:
    return classes.to(torch.int8).numpy()
