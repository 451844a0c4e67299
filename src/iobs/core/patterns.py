"""Sparsity patterns, and their text form.

Every pattern divides the matrix, read row by row, into consecutive groups of equal size and keeps the same number of
entries in each group. A group is the whole layer or one row for unstructured sparsity, and `of` neighbouring columns
for N:M.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from numbers import Integral, Real
from typing import Literal, NoReturn, Protocol

from iobs.core.partition import Partition
from iobs.core.structured import Structured
from iobs.errors import PatternError, is_a, shown


class Pattern(Protocol):
    """Number of entries that a matrix keeps, and the groups within which entries compete."""

    def groups(self, shape: tuple[int, int]) -> Partition:
        """Partition of a matrix of the given shape: a group lies within one row, or is the whole matrix.

        Raises:
            PatternError: the pattern does not fit the shape.
        """
        ...


@dataclass(frozen=True)
class Unstructured:
    """Unstructured sparsity: the whole layer (`per="layer"`) or each row (`per="row"`) keeps an exact count.

    Args:
        sparsity: share of zeros in [0, 1), read as a decimal; of n entries floor(n (1 - sparsity) + 1/2) are kept.
        keep: exact count to keep, for the layer or for each row; alternative to `sparsity`.
        per: "layer" or "row", where entries compete.

    Raises:
        PatternError: `sparsity` is not a number in [0, 1), `keep` is not a non-negative whole number, or both or
            neither of them are given.
    """

    sparsity: float | None = None
    per: Literal["layer", "row"] = "layer"
    keep: int | None = None

    def __post_init__(self) -> None:
        if (self.sparsity is None) == (self.keep is None):
            raise PatternError("Give exactly one of sparsity= and keep= to Unstructured.")
        if self.sparsity is not None and not is_a(Real, self.sparsity):
            raise PatternError(f"Sparsity must be a number, got {self.sparsity!r}.")
        if self.keep is not None and not is_a(Integral, self.keep):
            raise PatternError(f"keep must be a whole number, got {self.keep!r}.")
        if self.sparsity is not None and not 0 <= self.sparsity < 1:
            raise PatternError(f"Sparsity must lie in [0, 1), got {self.sparsity}: 0.5 makes half of the weights zero.")
        if self.keep is not None and self.keep < 0:
            raise PatternError(f"keep must not be negative, got {self.keep}.")
        if self.per not in ("layer", "row"):
            raise PatternError(f'per must be "layer" or "row", got {self.per!r}.')

    def groups(self, shape: tuple[int, int]) -> Partition:
        """One group for the layer, or one group for each row."""
        rows, columns = shape
        count, size = (1, rows * columns) if self.per == "layer" else (rows, columns)
        keep = self.keep if self.sparsity is None else keep_count(size, self.sparsity)
        assert keep is not None
        if keep > size:
            raise PatternError(f"Cannot keep {keep} of {size} entries per {self.per}; keep must be at most {size}.")
        return Partition(count, size, keep)

    def __str__(self) -> str:
        amount = f"{self.sparsity:.4g}" if self.sparsity is not None else f"keep {self.keep}"
        return f"unstructured {amount} per {self.per}"


@dataclass(frozen=True)
class NM:
    """N:M sparsity: keep `keep` of every `of` neighbouring columns in each row; NM(2, 4) is the 2:4 pattern of GPUs.

    In a convolution neighbours are input channels at one position of the kernel, as sparse tensor cores read them,
    where `of` divides their number.

    Raises:
        PatternError: not 0 < keep <= of. `groups` raises it if `of` does not divide the number of columns.
    """

    keep: int
    of: int

    def __post_init__(self) -> None:
        if not is_a(Integral, self.keep, self.of) or not 0 < self.keep <= self.of:
            shown = f"keep={self.keep!r} of={self.of!r}"
            raise PatternError(f"N:M needs whole 0 < keep <= of, got {shown}; 2:4 is NM(keep=2, of=4).")

    def groups(self, shape: tuple[int, int]) -> Partition:
        """One group for every `of` neighbouring columns of each row."""
        rows, columns = shape
        if columns % self.of:
            raise PatternError(
                f"The pattern {self} needs a number of columns divisible by {self.of}, got {columns}; "
                "ignore this layer or choose another pattern."
            )
        return Partition(rows * columns // self.of, self.of, self.keep)

    @property
    def sparsity(self) -> float:
        """Share of zeros."""
        return 1 - self.keep / self.of

    def __str__(self) -> str:
        return f"{self.keep}:{self.of}"


@dataclass(frozen=True)
class Grid:
    """Weights on a symmetric grid: whole multiples of a scale, from -(2^(bits-1) - 1) to 2^(bits-1) - 1 times it.

    Each row has one scale for every `group` neighbouring columns. Zero lies on the grid, so it has no offset.
    `pattern & grid` keeps as many entries as the pattern and puts their values on the grid: `Unstructured(0.5) &
    Grid(4)`, in either order.

    Args:
        bits: of each value, 2 to 8.
        group: neighbouring columns that share a scale; the last group may be shorter.

    Raises:
        PatternError: an argument is impossible.
    """

    bits: int = 4
    group: int = 128

    def __post_init__(self) -> None:
        if not is_a(Integral, self.bits) or not 2 <= self.bits <= 8:
            raise PatternError(f"A grid has 2 to 8 bits, got {self.bits!r}.")
        if not is_a(Integral, self.group) or self.group < 1:
            raise PatternError(f"group must be a whole number of at least 1, got {self.group!r}; 128 is usual.")

    @property
    def levels(self) -> int:
        """Largest multiple of the scale, 2^(bits-1) - 1."""
        return int(2 ** (self.bits - 1) - 1)

    def scales(self, columns: int) -> int:
        """Number of scales of each row."""
        return -(-columns // self.group)

    def width(self, columns: int) -> int:
        """Columns that share a scale in a matrix of `columns` columns: a group may be far wider than the matrix."""
        return min(self.group, columns)

    def groups(self, shape: tuple[int, int]) -> Partition:
        """One group that keeps all entries."""
        return Partition(1, shape[0] * shape[1], shape[0] * shape[1])

    def __and__(self, pattern: Pattern) -> SparseGrid:
        return SparseGrid(pattern, self)

    __rand__ = __and__

    def __str__(self) -> str:
        return f"int{self.bits}/{self.group}"


@dataclass(frozen=True)
class SparseGrid:
    """Kept entries of a pattern with values on a grid, made by `pattern & grid`.

    Attributes:
        pattern: number of kept entries and the groups in which they compete.
        grid: values of the kept entries; a kept entry may be zero, which lies on the grid.

    Raises:
        PatternError: `pattern` is not `Unstructured` or `NM`.
    """

    pattern: Pattern
    grid: Grid

    def __post_init__(self) -> None:
        _require_entries(self.pattern, self.grid, "A grid")

    def groups(self, shape: tuple[int, int]) -> Partition:
        """Partition of the pattern."""
        return self.pattern.groups(shape)

    def __str__(self) -> str:
        return f"{self.pattern} on {self.grid}"


@dataclass(frozen=True)
class Rate:
    """Weights as whole numbers times a step for each column, whose entropy code has a number of bits a weight.

    Zero is a whole number like others, the one with the shortest code. Tables, steps and classes of the code count.
    `pattern & rate` has the zeros of the pattern besides: `NM(2, 4) & Rate(2.5)`, in either order.

    Args:
        bits: of a weight, on average; zeros are weights too.
        zeros: entries that are kept, and those that are zero; None: any entry may be zero.

    Raises:
        PatternError: `bits` is not a number above 0 and at most 12, or `zeros` is not `Unstructured` or `NM`.
    """

    bits: float
    zeros: Unstructured | NM | None = None

    def __post_init__(self) -> None:
        if not is_a(Real, self.bits) or not 0 < self.bits <= _MOST_BITS:
            raise PatternError(f"A rate has more than 0 and at most {_MOST_BITS} bits a weight, got {self.bits!r}.")
        if self.zeros is not None:
            _require_entries(self.zeros, Rate(self.bits), "A rate")

    def groups(self, shape: tuple[int, int]) -> Partition:
        """Partition of the zeros; one group that keeps all entries without them."""
        return Unstructured(0.0).groups(shape) if self.zeros is None else self.zeros.groups(shape)

    def __and__(self, pattern: Unstructured | NM) -> Rate:
        if self.zeros is not None:
            raise PatternError(f"{self} has zeros already, so {pattern} cannot be added.")
        return Rate(self.bits, pattern)

    __rand__ = __and__

    def __str__(self) -> str:
        rate = f"rate:{self.bits:.12g}"
        return rate if self.zeros is None else f"{self.zeros} at {rate}"


_MOST_BITS = 12


@dataclass(frozen=True)
class Budget:
    """Bytes of a network in its file: everything that is stored, without tokenizer files.

    `iobs.prune` makes it a `Rate` of all weight matrices, embeddings and heads among them, or of those that `include`
    names; what stays dense is stored in bfloat16 and counts too. One number divides the bits among matrices and rows,
    by what their errors cost the network's loss. `iobs.save_packed(..., dtype=torch.bfloat16)` writes the file.

    Args:
        bits_per_weight: bits of the file, divided by the number of parameters.
        megabytes: of the file, in 1e6 bytes; one of the two is given.

    Raises:
        PatternError: none or both are given, or not a positive number.
    """

    bits_per_weight: float | None = None
    megabytes: float | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.bits_per_weight, self.megabytes) if value is not None]
        if len(given) != 1 or not is_a(Real, given[0]) or not 0 < given[0] < math.inf:
            raise PatternError(
                "A budget is one positive number: iobs.Budget(megabytes=60), or iobs.Budget(bits_per_weight=3.0); got "
                f"bits_per_weight={self.bits_per_weight!r} and megabytes={self.megabytes!r}."
            )

    def __and__(self, pattern: object) -> NoReturn:
        raise PatternError(
            f"{self} divides bits and takes no zeros besides: give {pattern} & iobs.Rate(3.0), as text "
            "rate:3.0, or a rule for layers."
        )

    __rand__ = __and__

    def bits(self, parameters: int) -> float:
        """Bits of the file of a network with this number of parameters."""
        return 8e6 * self.megabytes if self.bits_per_weight is None else self.bits_per_weight * parameters  # type: ignore[operator]

    def groups(self, shape: tuple[int, int]) -> Partition:
        """One group that keeps all entries."""
        return Partition(1, shape[0] * shape[1], shape[0] * shape[1])

    def __str__(self) -> str:
        return f"{self.megabytes:.12g}MB" if self.bits_per_weight is None else f"budget:{self.bits_per_weight:.12g}"


def _require_entries(pattern: object, values: Grid | Rate, kind: str) -> None:
    """Raise PatternError unless a pattern is one whose entries may have these values; `kind` begins the message."""
    if isinstance(pattern, Structured):
        raise pattern.alone(values)
    if not isinstance(pattern, (Unstructured, NM)):
        raise PatternError(f"{kind} combines with one Unstructured or NM, got {pattern!r}.")


def require_pattern(pattern: object) -> None:
    """Raise unless an object is a pattern: a number or a string is none.

    Raises:
        PatternError: the object has no `groups` method.
    """
    if not hasattr(pattern, "groups"):
        raise PatternError(f"{shown(pattern)} is no pattern: give a pattern such as Unstructured(0.5) or NM(2, 4).")


def keep_count(size: int, sparsity: float) -> int:
    """Number of entries to keep, floor(size (1 - sparsity) + 1/2), with the sparsity read as a decimal: 0.3 is 3/10."""
    kept = Decimal(size) * (1 - Decimal(str(float(sparsity))))
    return int(kept.quantize(Decimal(1), rounding=ROUND_HALF_UP))


def parse(text: str) -> Pattern:
    """Read a pattern from text: "2:4", "0.5", "50%", "int4", "int3/64" (64 columns share a scale) or "50%+int4".

    "rate:3.0" makes weights integers whose code has 3 bits a weight, and "2:4+rate:2.5" has zeros besides. "60MB" is
    the size of the network's file, and "budget:3.0" that of 3 bits for each of its parameters.

    "structured:30%" removes units of a network; its options follow, as in "structured:30%,of=latency,runtime=onnx".

    Raises:
        PatternError: the text is not a pattern.
    """
    first, *others = text.split("+")
    if others:
        pattern = parse(first)
        for other in map(parse, others):
            try:
                pattern = pattern & other  # type: ignore[operator]
            except TypeError:  # both say which entries are zero
                raise PatternError(f"{text!r} joins {pattern} and {other}, which do not combine.") from None
        return pattern
    if text.startswith("rate:"):
        return Rate(_number(text.removeprefix("rate:"), text))
    if text.startswith("budget:"):
        return Budget(bits_per_weight=_number(text.removeprefix("budget:"), text))
    if text.upper().endswith("MB"):
        return Budget(megabytes=_number(text[:-2], text))
    if text.startswith("structured"):
        amount, _, options = text.removeprefix("structured").lstrip(":").partition(",")
        if not amount:
            raise PatternError(f"{text!r} says no share; structured:30% removes 30 % of the cost.")
        return Structured.read(options, share(amount))
    try:
        if text.startswith("int"):
            bits, divided, group = text.removeprefix("int").partition("/")
            return Grid(int(bits), int(group)) if divided else Grid(int(bits))
        if ":" in text:
            keep, of = map(int, text.split(":"))
            return NM(keep, of)
    except PatternError:  # it says what is wrong with these numbers
        raise
    except ValueError:
        raise _unreadable(text) from None
    return Unstructured(share(text))


def share(text: str) -> float:
    """Read a share from text: "0.5" or "50%".

    Raises:
        PatternError: the text is neither.
    """
    try:
        return float(Decimal(text.removesuffix("%")) / (100 if text.endswith("%") else 1))
    except (ArithmeticError, ValueError):
        raise _unreadable(text) from None


def _number(number: str, text: str) -> float:
    try:
        return float(number)
    except ValueError:
        raise _unreadable(text) from None


def _unreadable(text: str) -> PatternError:
    return PatternError(
        f"Cannot read the pattern {text!r}: "
        "give a sparsity such as 0.5 or 50%, N:M such as 2:4, a grid such as int4, a rate such as rate:3.0, a "
        "size such as 60MB, or structured:30%."
    )


def as_pattern(value: Pattern | float | str) -> Pattern:
    """A pattern from a Pattern, a sparsity such as 0.5, or text such as "2:4", "0.5" or "50%".

    Raises:
        PatternError: the value is none of these, or the sparsity is not in [0, 1).
    """
    if isinstance(value, str):
        return parse(value)
    if is_a(Real, value):
        return Unstructured(float(value))  # type: ignore[arg-type]
    require_pattern(value)
    return value  # type: ignore[return-value]
