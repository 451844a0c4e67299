"""Matrices of whole numbers times steps: the form of weights that an entropy code stores.

    weight[i, j] = codes[i, j] * steps[j] * factors[i]

Steps have 8 significant bits and factors 3, so a product in float32 is exact for codes of 13 bits. In a dtype of 16
bits both are powers of two, and codes have no more significant bits than the dtype. So all of them can be read back
from the weights alone: a model needs no further tensors.

Entries are coded by classes of like spread, which a number of the row and one of the column give together.
"""

from __future__ import annotations

import functools
import math
import struct
import zlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from iobs.core.slices import slices

STEP_BITS, FACTOR_BITS = 8, 3  # significant bits in float32
LEAST_CLASS = -127  # of rows and columns; of columns and rows of zeros, too
_LEVELS = 4  # classes for each octave of the spread
_RAW = 3  # of an integer of spread 2^(_RAW + n) the last n bits are coded as they are: they are nearly uniform
_ABSENT = 2**14  # in place of the power of two of a zero, larger than those of other numbers
_UNKNOWN = 2**20  # in place of a difference of two powers
_SEEN = 32  # columns that tell whether a matrix may have integers
_RICH = 24  # nonzero entries of a column from which their common divisor is surely that of its step
_LEAST_RICH = 16  # columns, the fullest ones, that count as such in matrices of few entries
_TOLD = 128  # columns that tell the factors of rows
_SURE = 12  # entries of a row in them from which one is odd
_WIDEST = 62 - 24  # octaves between whole numbers of 24 bits
_OFFSET = 4 * _LEVELS  # class 0 holds spreads up to 1/16
_SMALL = 2**17  # entries of a matrix below which fewer classes are tried
# Bits of a file beside the entropy: of a table and of an integer in it, which do not meet the frequencies exactly, and
# of each of the states of the code, fitted to 80 matrices of a convolutional network and of random numbers; of the head
# and the sums.
_TABLE_BITS, _MISFIT_BITS, _STATE_BITS, _HEAD_BITS = 16, 0.9, 25, 256
_STEP_BITS, _ONCE_BITS = 11, 1524  # at most: of a step; of the head, the tables and the classes of a small matrix
TABLE = struct.Struct("<BbB2h")  # of a class in a file: its number, two numbers of its form, its ends without raw bits
MOST_STATES, _STATE_ENTRIES = 32, 4096  # of the code of a matrix; entries for each


@dataclass(frozen=True)
class Integers:
    """A matrix as whole numbers times steps.

    Attributes:
        codes: (rows, columns) int16.
        steps: (columns,) float32, positive.
        factors: (rows,) float32, positive.
    """

    codes: Tensor
    steps: Tensor
    factors: Tensor

    def weight(self, dtype: torch.dtype) -> Tensor:
        """The matrix (rows, columns): each entry is one product in float32 or wider."""
        dense = torch.empty(self.codes.shape, dtype=dtype, device=self.codes.device)
        self.write(dense)
        return dense

    def write(self, dense: Tensor) -> None:
        """Write the matrix into a tensor (rows, columns), in its dtype."""
        wide = torch.promote_types(dense.dtype, torch.float32)
        for part in slices(self.codes.shape):
            dense[part] = self.codes[part].to(wide) * (self.factors[part, None] * self.steps).to(wide)

    def to(self, device: torch.device) -> Integers:
        """The same on a device."""
        return Integers(self.codes.to(device), self.steps.to(device), self.factors.to(device))

    def towards(self, weight: Tensor, dtype: torch.dtype) -> Integers:
        """The same integers with the steps that are nearest to a matrix (rows, columns) of least squares.

        Args:
            weight: the matrix.
            dtype: in which the products must be exact: steps are powers of two in 16 bits.
        """
        basis = self.codes.to(weight) * self.factors.to(weight)[:, None]
        fitted = (basis * weight).sum(0) / basis.square().sum(0).clamp_min(torch.finfo(weight.dtype).tiny)
        fitted = short(torch.where(fitted > 0, fitted, self.steps.to(weight)), step_bits(dtype))
        return replace(self, steps=fitted.float())

    def bits(self) -> float:
        """Bits of the matrix in a file, within a tenth of a percent for 100,000 entries, and 1 percent for 2,000."""
        # Where all integers are zero nothing tells a step or a factor: `of` reads 1 back.
        steps, factors = (
            torch.where(self.codes.any(dim), each, 1) for dim, each in ((0, self.steps), (1, self.factors))
        )
        return Classes.of(self.codes).bits(self.codes) + 8 * len(sides(steps, factors))

    @classmethod
    def of(cls, weight: Tensor) -> Integers | None:
        """The integers, steps and factors whose products are exactly a matrix; None if there are none.

        A step is the greatest common divisor of its column, and a factor that of its row.

        Args:
            weight: (rows, columns), floating.
        """
        if weight.dtype.itemsize < 2 or not weight.numel():
            return None
        # Each entry is an odd number times 2^last. Rows come in parts: whole numbers of 64 bits would take much memory.
        last = torch.empty(weight.shape, dtype=torch.int16, device=weight.device)
        for part in slices(weight.shape):
            single = weight[part].float()
            if not bool(torch.isfinite(single).all()) or not torch.equal(single.to(weight.dtype), weight[part]):
                return None
            last[part] = _last(single)
        alone, count = torch.zeros(len(weight), dtype=torch.int64, device=weight.device), _present(last)
        ways = [_common(last), (alone, _lowest(last, alone))]
        del last
        best, least = None, math.inf
        for rows, columns in ways if bool(ways[0][0].any()) else ways[1:]:
            integers = cls._of(weight, count, rows, columns)
            bits = math.inf if integers is None else integers.bits()
            if bits < least:
                best, least = integers, bits
        return best

    @classmethod
    def _of(cls, weight: Tensor, count: Tensor, by_row: Tensor, by_column: Tensor) -> Integers | None:
        """The integers with given powers of two in factors (rows,) and steps (columns,); None if there are none.

        Args:
            weight: the matrix (rows, columns).
            count: of the entries of each column that are not zero, (columns,).
            by_row: exponents.
            by_column: exponents.
        """
        if any(int(_shifts(weight[part], by_row[part], by_column)[1].max()) > _WIDEST for part in slices(weight.shape)):
            return None

        def numbers(part: slice) -> Tensor:
            whole, shift = _shifts(weight[part], by_row[part], by_column)
            return torch.where(shift >= 0, whole << shift.clamp(min=0), whole >> (-shift).clamp(min=0))

        def common(columns: Tensor | slice, odd: Tensor | None = None) -> Tensor:
            """Greatest common divisors of columns, (columns,), after a division of the rows."""
            divided = (numbers(part)[:, columns] // (1 if odd is None else odd[part]) for part in slices(weight.shape))
            return functools.reduce(torch.gcd, (_divisors(part, 0)[0] for part in divided)).clamp(min=1)

        odd = torch.ones_like(by_row)[:, None]
        if bool(by_row.any()):
            rich = _rich(count) & (count >= count.topk(min(_TOLD, len(count))).values[-1])
            of_rich = common(rich)
            # A row of few entries there may have more in common by chance.
            for part in slices(weight.shape):
                whole = numbers(part)
                in_rich = _divisors(whole[:, rich] // of_rich, 1).clamp(min=1)
                odd[part] = torch.gcd(in_rich, _divisors(whole, 1))
            odd = _short_divisors(odd)
        steps = _short_divisors(common(slice(None), odd))
        codes = torch.empty(weight.shape, dtype=torch.int16, device=weight.device)
        for part in slices(weight.shape):
            whole = numbers(part) // odd[part] // steps
            if not bool((whole.abs() < 2**15).all()):
                return None
            codes[part] = whole
        integers = cls(codes, torch.ldexp(steps.float(), by_column), torch.ldexp(odd[:, 0].float(), by_row))
        held = all(
            torch.equal(values, values.bfloat16().float())
            for values in (integers.steps, integers.factors)  # as in files
        )
        exact = all(
            torch.equal(integers.rows(part).weight(weight.dtype), weight[part]) for part in slices(weight.shape)
        )
        return integers if held and exact else None

    def rows(self, part: slice) -> Integers:
        """Some rows of the matrix."""
        return replace(self, codes=self.codes[part], factors=self.factors[part])


@dataclass(frozen=True)
class Classes:
    """Classes of the entries of a matrix by the spread of their codes: that of an entry is `rows[i] + columns[j]`.

    Attributes:
        rows: (rows,) int64, not below `LEAST_CLASS`.
        columns: (columns,) int64, not below `LEAST_CLASS`.
    """

    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, codes: Tensor) -> Classes:
        """Classes of quarter octaves of the spread of columns, and of rows beside it; few for small matrices."""
        parts = slices(codes.shape)
        squares = functools.reduce(torch.add, (codes[part].float().square().sum(0) for part in parts))
        spread = (squares / len(codes)).sqrt()
        beside = torch.cat([(codes[part] / spread.clamp_min(1e-9)).square().mean(1).sqrt() for part in parts])

        def level(spreads: Tensor) -> Tensor:
            return (torch.log2(spreads.clamp_min(2.0**-99)) * _LEVELS).round().long()

        rows, columns = level(beside), level(spread) + _OFFSET
        grains = (1, 2, 4, 8, 16) if codes.numel() < _SMALL else (1,)
        candidates = [
            cls(*(((part / grain).round().long() * grain).clamp_(min=LEAST_CLASS) for part in (rows, columns)))
            for grain in grains
        ]
        return candidates[0] if len(candidates) == 1 else min(candidates, key=lambda classes: classes.bits(codes))

    def bits(self, codes: Tensor) -> float:
        """Bits of the integers of a matrix, their tables and their classes."""
        least, counts = self.counts(codes)
        raw = torch.tensor([raw_bits(number) for number in range(len(counts))], device=codes.device)
        whole = counts.sum(1)
        entropy = (whole * whole.clamp_min(1).log2()).sum() - (counts * counts.clamp_min(1).log2()).sum()
        # Spreads and tails of tables are not known yet; they change the length of what is compressed by few bytes.
        tables = [(number, number % 128, 0, *ends) for number, ends in enumerate(_ends(least, counts)) if ends]
        total: float = _HEAD_BITS + _STATE_BITS * states_of(codes.numel())
        total += _TABLE_BITS * len(tables) + _MISFIT_BITS * int((counts > 0).sum())
        total += 8 * len(self.described(b"".join(TABLE.pack(*numbers) for numbers in tables)))
        return total + float(entropy + whole @ raw.double())

    def described(self, tables: bytes) -> bytes:
        """The bytes in a file of the classes and of their tables, each of which begins as `TABLE` says."""
        columns, rows = (each.to(torch.int8).cpu().numpy().tobytes() for each in (self.columns, self.rows))
        return zlib.compress(columns + rows + tables, 9)

    def counts(self, codes: Tensor) -> tuple[int, Tensor]:
        """The least integer, without raw bits, and how often each class has it and those behind it.

        Returns:
            The integer, and counts (classes, integers) float64.
        """
        numbers = range(self._count())
        raw = torch.tensor([raw_bits(number) for number in numbers], dtype=torch.int32, device=codes.device)
        ends = [torch.stack(self._shifted(codes, part, raw)[1].aminmax()) for part in slices(codes.shape)]
        least, greatest = int(torch.stack(ends)[:, 0].min()), int(torch.stack(ends)[:, 1].max())
        width = greatest - least + 1
        counts = torch.zeros(len(raw) * width, dtype=torch.float64, device=codes.device)
        for part in slices(codes.shape):
            table, values = self._shifted(codes, part, raw)
            counts += torch.bincount((table * width + (values - least)).flatten(), minlength=len(counts))
        return least, counts.reshape(len(raw), width)

    def squares(self, codes: Tensor) -> Tensor:
        """Sums of the squares of the integers of each class, (classes,) float64."""
        sums = torch.zeros(self._count(), dtype=torch.float64)
        for part in slices(codes.shape):
            sums += torch.bincount(self._table(part).flatten(), codes[part].double().square().flatten(), len(sums))
        return sums

    def _shifted(self, codes: Tensor, part: slice, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Classes of the entries of some rows, and their integers without raw bits."""
        table = self._table(part)
        return table, codes[part] >> raw[table]

    def _table(self, part: slice) -> Tensor:
        """Classes of the entries of some rows (rows, columns), int64, at least 0."""
        return (self.rows[part, None] + self.columns).clamp_(min=0)

    def _count(self) -> int:
        """One more than the greatest class of an entry."""
        return max(0, int(self.rows.max() + self.columns.max())) + 1


def looks_coded(tensor: Tensor) -> bool:
    """True if the first columns of a tensor of two or more dimensions are integers times steps: a quick question."""
    if tensor.ndim < 2 or not tensor.is_floating_point() or not tensor.numel():
        return False
    return any(Integers.of(first[:, :_SEEN]) is not None for first, *_ in matrices_of(tensor))


def least_bits(shape: tuple[int, int]) -> float:
    """Bits a weight that steps, classes and tables of a matrix may need, without its integers."""
    rows, columns = shape
    once = _ONCE_BITS + _STATE_BITS * states_of(rows * columns)
    return ((_STEP_BITS + 6) * columns + 10 * rows + once) / (rows * columns)


def states_of(entries: int) -> int:
    """States of the code of a matrix."""
    return min(MOST_STATES, -(-entries // _STATE_ENTRIES))


def matrices_of(tensor: Tensor) -> list[list[Tensor]]:
    """Ways to read a tensor of two or more dimensions as matrices that each may have steps of their own.

    As one matrix; of a stack of experts as one for each; of a projection to queries, keys and values as three.
    """
    ways = [[tensor.flatten(1)]]
    if tensor.ndim == 3:
        ways.append(list(tensor))
    elif tensor.ndim == 2 and len(tensor) % 3 == 0:
        ways.append(list(tensor.chunk(3)))
    return ways


def sides(*values: Tensor) -> bytes:
    """The bytes in a file of what columns and rows have of their own, such as steps (columns,) and factors (rows,).

    Args:
        values: numbers of at most 8 significant bits.
    """
    planes = b""
    for each in values:
        half = each.to(torch.bfloat16).cpu().view(torch.uint8).reshape(-1, 2)
        planes += half[:, 1].numpy().tobytes() + half[:, 0].numpy().tobytes()  # bytes of like kind compress better
    return zlib.compress(planes, 9)


def step_bits(dtype: torch.dtype) -> int:
    """Significant bits of the steps of columns, for weights that are stored in a dtype."""
    return STEP_BITS if dtype.itemsize > 2 else 1


def factor_bits(dtype: torch.dtype) -> int:
    """Significant bits of the factors of rows, for weights that are stored in a dtype."""
    return FACTOR_BITS if dtype.itemsize > 2 else 1


def raw_bits(number: int) -> int:
    """Last bits of an integer that are coded as they are, in a class."""
    return max(0, (number - _OFFSET) // _LEVELS - _RAW)


def _ends(least: int, counts: Tensor) -> list[tuple[int, int] | None]:
    """The least and the greatest integer of each class, without raw bits; None for a class without entries.

    Args:
        least: the integer of the first column of the counts.
        counts: (classes, integers).
    """
    places = [row.nonzero()[:, 0] for row in counts]
    return [(least + int(row[0]), least + int(row[-1])) if len(row) else None for row in places]


def _whole(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers (int64) and exponents: a matrix is these numbers times 2^exponent."""
    mantissa, exponent = torch.frexp(weight.float())
    return (mantissa * 2.0**24).to(torch.int64), exponent - 24


def _last(weight: Tensor) -> Tensor:
    """The power of two in each entry of a matrix, as its exponent, int32; `_ABSENT` for 0."""
    whole, exponent = _whole(weight)
    return torch.where(whole == 0, _ABSENT, torch.frexp((whole & -whole).float()).exponent - 1 + exponent)


def _present(powers: Tensor) -> Tensor:
    """Numbers of entries of the columns of `_last` that are not zero, (columns,)."""
    return functools.reduce(torch.add, ((powers[part] != _ABSENT).sum(0) for part in slices(powers.shape)))


def _shifts(weight: Tensor, by_row: Tensor, by_column: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers of a matrix, and the powers of two by which they are larger, without those of rows and columns."""
    whole, exponent = _whole(weight)
    return whole, torch.where(whole == 0, 0, exponent - by_row[:, None] - by_column)


def _common(powers: Tensor) -> tuple[Tensor, Tensor]:
    """Exponents (rows,) and (columns,) whose sums are at most those of the entries, and of half of them equal.

    Half of all integers are odd, so the most frequent difference of two columns is that of their steps.

    Args:
        powers: (rows, columns) int16 of `_last`.
    """
    count = _present(powers)
    dense = count.topk(min(_TOLD, len(count))).indices  # the columns that tell the exponents of rows
    by_row, count = powers[:, dense], count[dense]
    by_column, first = by_row.T, by_row[:, 0].long()
    columns = _most_frequent(by_column, first, first != _ABSENT)
    rows = _most_frequent(by_row, columns, columns < _UNKNOWN // 2)
    # Half of the entries of a column are at its exponent, and below it only those of wrong rows.
    columns = torch.cat(
        [
            _beside(by_column[part], rows).sort(1).values.gather(1, (count[part] // 8)[:, None])[:, 0]
            for part in slices(by_column.shape)
        ]
    )
    rich = _rich(count)
    rows = _lowest(by_column[rich], columns[rich])
    unsure = (by_row != _ABSENT).sum(1) < _SURE
    if bool(unsure.any()) and not bool(unsure.all()):  # these rows are told by all columns
        rows[unsure] = _lowest(powers[unsure].T, _lowest(powers[~unsure], rows[~unsure]))
    return rows, _lowest(powers, rows)


def _beside(powers: Tensor, others: Tensor, counted: Tensor | None = None) -> Tensor:
    """Powers of two (rows, columns) without those of columns (columns,), int64; `_UNKNOWN` where one is not known."""
    present = powers != _ABSENT
    return torch.where(present if counted is None else present & counted, powers - others, _UNKNOWN)


def _most_frequent(powers: Tensor, others: Tensor, counted: Tensor) -> Tensor:
    """The most frequent difference of each row of powers of two and those of columns, of known ones alone, (rows,)."""
    # Each unknown one differs from all others, so that none of them is frequent.
    apart = torch.arange(len(others), device=others.device)
    differences = (_beside(powers[part], others, counted) for part in slices(powers.shape))
    return torch.cat([torch.where(each == _UNKNOWN, each + apart, each).mode(1).values for each in differences])


def _rich(count: Tensor) -> Tensor:
    """Columns (boolean) that tell the factors of rows, by their numbers of entries that are not zero."""
    fewest = count.topk(min(_LEAST_RICH, len(count))).values[-1].clamp(1, _RICH)
    return count >= fewest


def _lowest(powers: Tensor, rows: Tensor) -> Tensor:
    """The least exponent of each column beside those of rows (rows,), (columns,); 0 for a column of zeros."""
    lowest = torch.full((powers.shape[1],), _UNKNOWN, device=powers.device)
    for part in slices(powers.shape):
        lowest = torch.minimum(lowest, _beside(powers[part], rows[part, None]).amin(0))
    return torch.where(lowest > _UNKNOWN // 2, 0, lowest)


def _divisors(numbers: Tensor, dim: int) -> Tensor:
    """Greatest common divisors along a dimension, which stays; 0 where all numbers are zero."""
    while numbers.shape[dim] > 1:
        half = numbers.shape[dim] // 2
        first, second = numbers.narrow(dim, 0, half), numbers.narrow(dim, half, half)
        rest = numbers.narrow(dim, 2 * half, numbers.shape[dim] - 2 * half)
        numbers = torch.cat([torch.gcd(first, second), rest], dim)
    if numbers.shape[dim] == 0:
        return numbers.new_zeros([1 if place == dim else size for place, size in enumerate(numbers.shape)])
    return numbers.abs()


def _short_divisors(numbers: Tensor) -> Tensor:
    """The greatest divisors of whole numbers, int64, that have no more significant bits than steps."""
    powers = numbers & -numbers
    odd, best = numbers // powers, torch.ones_like(numbers)
    for divisor in range(3, 2**STEP_BITS, 2):
        best = torch.where(odd % divisor == 0, divisor, best)
    return best * powers


def short(values: Tensor, bits: int) -> Tensor:
    """Positive numbers rounded to some significant bits; with 1 bit, to the power of two of nearest logarithm."""
    if bits == 1:
        return torch.exp2(torch.log2(values).round())
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp((mantissa * 2.0**bits).round() / 2.0**bits, exponent)
