"""Matrices of whole numbers times steps: the form of weights that an entropy code stores.

    weight[i, j] = codes[i, j] * steps[j] * factors[i]

Steps have 8 significant bits and factors 3, so a product in float32 is exact for codes of 13 bits. In a dtype of 16
bits both are powers of two, and codes have no more significant bits than the dtype. So all of them can be read back
from the weights alone: a model needs no further tensors.

Entries are coded by classes of like spread, which a number of the row and one of the column give together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

STEP_BITS, FACTOR_BITS = 8, 3  # significant bits in float32
LEAST_CLASS = -127  # of rows and columns; of columns and rows of zeros, too
_LEVELS = 4  # classes for each octave of the spread
_RAW = 3  # of an integer of spread 2^(_RAW + n) the last n bits are coded as they are: they are nearly uniform
_SEEN = 32  # columns that tell whether a matrix may have integers
_RICH = 24  # nonzero entries of a column from which their common divisor is that of its steps
_TOLD = 128  # columns that tell the factors of rows
_SURE = 12  # entries of a row in them from which one is odd
_WIDEST = 62 - 24  # octaves between whole numbers of 24 bits
_OFFSET = 4 * _LEVELS  # class 0 holds spreads up to 1/16
_SMALL = 2**17  # entries of a matrix below which fewer classes are tried
# Bits of a file beside the entropy, measured: of a class, of an integer in it that a table of two numbers does not meet
# exactly, of a step, of what rows and columns have, and once.
_TABLE_BITS, _MISFIT_BITS, _STEP_BITS, _SIDE, _HEAD_BITS = 48, 0.72, 13, 1.6, 600


@dataclass(frozen=True)
class Integers:
    """A matrix as whole numbers times steps.

    Attributes:
        codes: (rows, columns) int32.
        steps: (columns,) float32, positive.
        factors: (rows,) float32, positive.
    """

    codes: Tensor
    steps: Tensor
    factors: Tensor

    def weight(self, dtype: torch.dtype) -> Tensor:
        """The matrix (rows, columns): each entry is one product in float32 or wider."""
        wide = torch.promote_types(dtype, torch.float32)
        return (self.codes.to(wide) * (self.factors[:, None] * self.steps).to(wide)).to(dtype)

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
        """Bits of the matrix in a file, within half a percent for 100,000 entries, and 2 percent for 2,000."""
        return Classes.of(self.codes).bits(self.codes) + side_bits(self.steps) + side_bits(self.factors)

    @classmethod
    def of(cls, weight: Tensor) -> Integers | None:
        """The integers, steps and factors whose products are exactly a matrix; None if there are none.

        A step is the greatest common divisor of its column, and a factor that of its row.

        Args:
            weight: (rows, columns), floating.
        """
        if weight.dtype.itemsize < 2:
            return None
        single = weight.float()
        if not weight.numel() or not bool(torch.isfinite(single).all()) or not torch.equal(single.to(weight), weight):
            return None
        mantissa, exponent = torch.frexp(single)
        whole = (mantissa * 2.0**24).to(torch.int64)
        last = _powers(whole) + exponent - 24  # each entry is an odd number times 2^last
        alone = torch.zeros(len(weight), dtype=torch.int64, device=weight.device)
        candidates = [
            cls._of(weight, whole, exponent - 24, rows, columns)
            for rows, columns in (_common(last, whole != 0), (alone, _lowest(last, whole != 0)))
        ]
        exact = [integers for integers in candidates if integers is not None]
        return min(exact, key=lambda integers: integers.bits(), default=None)

    @classmethod
    def _of(cls, weight: Tensor, whole: Tensor, exponent: Tensor, by_row: Tensor, by_column: Tensor) -> Integers | None:
        """The integers with given powers of two in factors (rows,) and steps (columns,); None if there are none.

        The matrix (rows, columns) is `whole` times 2^exponent.
        """
        shift = torch.where(whole == 0, 0, exponent - by_row[:, None] - by_column)
        if int(shift.max()) > _WIDEST:
            return None
        numbers = torch.where(shift >= 0, whole << shift.clamp(min=0), whole >> (-shift).clamp(min=0))
        odd = torch.ones_like(by_row)[:, None]
        if bool(by_row.any()):
            count = (numbers != 0).sum(0)
            rich = (count >= _RICH) & (count >= count.topk(min(_TOLD, len(count))).values[-1])
            odd = _divisors(numbers[:, rich] // _divisors(numbers[:, rich], 0), 1)
            # A row of few entries there may have more in common by chance.
            odd = _short_divisors(torch.gcd(odd, _divisors(numbers, 1)))
        numbers = numbers // odd
        steps = _short_divisors(_divisors(numbers, 0))
        codes = numbers // steps
        integers = cls(
            codes.to(torch.int32),
            torch.ldexp(steps[0].float(), by_column),
            torch.ldexp(odd[:, 0].float(), by_row),
        )
        held = bool((codes.abs() < 2**15).all()) and all(
            torch.equal(values, values.bfloat16().float())
            for values in (integers.steps, integers.factors)  # as in files
        )
        return integers if held and torch.equal(integers.weight(weight.dtype), weight) else None


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
        values = codes.to(torch.float32)
        spread = values.square().mean(0).sqrt()
        beside = (values / spread.clamp_min(1e-9)).square().mean(1).sqrt()

        def level(spreads: Tensor) -> Tensor:
            return (torch.log2(spreads.clamp_min(2.0**-99)) * _LEVELS).round().long()

        rows, columns = level(beside), level(spread) + _OFFSET
        grains = (1, 2, 4, 8, 16) if codes.numel() < _SMALL else (1,)
        found = [
            cls(*(((part / grain).round().long() * grain).clamp_(min=LEAST_CLASS) for part in (rows, columns)))
            for grain in grains
        ]
        return found[0] if len(found) == 1 else min(found, key=lambda classes: classes.bits(codes))

    def table(self) -> Tensor:
        """The class of every entry, (rows, columns) int64, at least 0."""
        return (self.rows[:, None] + self.columns).clamp_(min=0)

    def bits(self, codes: Tensor) -> float:
        """Bits of the integers of a matrix, their tables and their classes."""
        table = self.table()
        total = _HEAD_BITS + _SIDE * (
            _entropy(self.rows - self.rows.min()) + _entropy(self.columns - self.columns.min())
        )
        raw = torch.tensor([raw_bits(number) for number in range(int(table.max()) + 1)], device=codes.device)
        values = codes >> raw[table]
        least, width = values.min(), int(values.max() - values.min()) + 1
        counts = torch.bincount((table * width + (values - least)).flatten(), minlength=len(raw) * width)
        counts = counts.reshape(len(raw), width).double()
        whole = counts.sum(1)
        entropy = (whole * whole.clamp_min(1).log2()).sum() - (counts * counts.clamp_min(1).log2()).sum()
        total += _TABLE_BITS * int((whole > 0).sum()) + _MISFIT_BITS * int((counts > 0).sum())
        return total + float(entropy + whole @ raw.double())


def looks_coded(tensor: Tensor) -> bool:
    """True if the first columns of a tensor of two or more dimensions are integers times steps: a quick question."""
    if tensor.ndim < 2 or not tensor.is_floating_point() or not tensor.numel():
        return False
    return any(Integers.of(first[:, :_SEEN]) is not None for first, *_ in matrices_of(tensor))


def least_bits(shape: tuple[int, int]) -> float:
    """Bits a weight that steps, classes and tables of a matrix may need, without its integers."""
    rows, columns = shape
    return ((_STEP_BITS + 6) * columns + 10 * rows + 16 * _TABLE_BITS + _HEAD_BITS) / (rows * columns)


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


def side_bits(values: Tensor) -> float:
    """Bits of what each row or column has of its own, such as factors (rows,)."""
    kinds, places = torch.unique(values, return_inverse=True)
    return min(_STEP_BITS * len(values), _SIDE * _entropy(places) + _STEP_BITS * (len(kinds) - 1))


def step_bits(dtype: torch.dtype) -> int:
    """Significant bits of the steps of columns, for weights that are stored in a dtype."""
    return STEP_BITS if dtype.itemsize > 2 else 1


def factor_bits(dtype: torch.dtype) -> int:
    """Significant bits of the factors of rows, for weights that are stored in a dtype."""
    return FACTOR_BITS if dtype.itemsize > 2 else 1


def raw_bits(number: int) -> int:
    """Last bits of an integer that are coded as they are, in a class."""
    return max(0, (number - _OFFSET) // _LEVELS - _RAW)


def _entropy(values: Tensor) -> float:
    """Bits of whole numbers, which are not negative, by their empirical entropy."""
    counts = torch.bincount(values)
    counts = counts[counts > 0].double()
    return float((counts * (counts.sum() / counts).log2()).sum())


def _powers(numbers: Tensor) -> Tensor:
    """The power of two in each of some whole numbers, as its exponent, int64; 0 for 0."""
    return torch.log2((numbers & -numbers).clamp(min=1).double()).long()


def _common(powers: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Exponents (rows,) and (columns,) whose sums are at most those of the entries, and of half of them equal.

    Half of all integers are odd, so the most frequent difference of two columns is that of their steps.

    Args:
        powers: (rows, columns) int64.
        present: boolean (rows, columns), entries that are not zero.
    """
    absent = 2**20

    def most_frequent(differences: Tensor, known: Tensor, dim: int) -> Tensor:
        """The mode along a dimension, of known differences alone."""
        # Each unknown one differs from all others, so that none of them is frequent.
        places = torch.arange(differences.numel(), device=differences.device).reshape(differences.shape)
        return torch.where(known, differences, absent + places).mode(dim).values

    dense = present.sum(0).topk(min(_TOLD, present.shape[1])).indices  # the columns that tell the exponents of rows
    told, known = powers[:, dense], present[:, dense]
    rows, first = told[:, 0], known[:, 0]
    columns = most_frequent(told - rows[:, None], known & first[:, None], 0)
    rows = most_frequent(told - columns, known & (columns < absent // 2), 1)
    # Half of the entries of a column are at its exponent, and below it only those of wrong rows.
    sorted_by_column = torch.where(known, told - rows[:, None], absent).sort(0).values
    columns = sorted_by_column.gather(0, (known.sum(0) // 8)[None])[0]
    rich = known.sum(0) >= _RICH
    rows = torch.where(known & rich, told - columns, absent).amin(1) if bool(rich.any()) else rows
    rows = torch.where(rows > absent // 2, 0, rows)
    sure = known.sum(1) >= _SURE
    if bool(sure.any()):  # other rows are told by all columns
        columns = _lowest(powers[sure] - rows[sure][:, None], present[sure])
        all_of_row = torch.where(present[~sure], powers[~sure] - columns, absent).amin(1)
        rows[~sure] = torch.where(all_of_row > absent // 2, 0, all_of_row)
    return rows, _lowest(powers - rows[:, None], present)


def _lowest(powers: Tensor, present: Tensor) -> Tensor:
    """The least exponent of each column, (columns,); 0 for a column of zeros."""
    lowest = torch.where(present, powers, 2**20).amin(0)
    return torch.where(present.any(0), lowest, 0)


def _divisors(numbers: Tensor, dim: int) -> Tensor:
    """Greatest common divisors along a dimension, which stays; 1 where all numbers are zero."""
    while numbers.shape[dim] > 1:
        half = numbers.shape[dim] // 2
        first, second = numbers.narrow(dim, 0, half), numbers.narrow(dim, half, half)
        rest = numbers.narrow(dim, 2 * half, numbers.shape[dim] - 2 * half)
        numbers = torch.cat([torch.gcd(first, second), rest], dim)
    if numbers.shape[dim] == 0:
        return numbers.new_ones([1 if place == dim else size for place, size in enumerate(numbers.shape)])
    return numbers.abs().clamp(min=1)


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
