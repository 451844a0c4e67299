"""Pattern of whole groups of columns under one mask for all rows: channels, neurons and heads of the layer that reads
them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from iobs.core.partition import Partition
from iobs.core.patterns import keep_count
from iobs.errors import PatternError, is_a


@dataclass(frozen=True)
class Groups:
    """Whole groups of columns: a group is kept in all rows or removed from all rows.

    A group holds the columns of one unit. A channel that a 3 x 3 convolution reads has 9 columns, a neuron has 1, and
    an attention head has head_dim.

    Args:
        index: number of columns in each group of neighbouring columns. Or a sequence or a tensor (columns,) with the
            group of every column, in whole numbers from 0 without gaps.
        keep: exact number of groups to keep.
        sparsity: share of groups to remove in [0, 1), read as a decimal; alternative to `keep`.
        multiple_of: the number of kept groups is a multiple of this, such as 8 or 16. With `sparsity` it is the nearest
            multiple, at least one of them; a sparsity of 0 keeps all groups.

    Raises:
        PatternError: an argument is impossible. `labels` and `kept` raise it if the pattern does not fit the columns.
    """

    index: int | tuple[int, ...]
    keep: int | None = None
    sparsity: float | None = None
    multiple_of: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", _as_index(self.index))
        if (self.keep is None) == (self.sparsity is None):
            raise PatternError("Give exactly one of keep= and sparsity= to Groups.")
        if not is_a(Integral, self.multiple_of) or self.multiple_of < 1:
            raise PatternError(f"multiple_of must be a whole number of at least 1, got {self.multiple_of!r}.")
        if self.sparsity is not None and not (is_a(Real, self.sparsity) and 0 <= self.sparsity < 1):
            raise PatternError(
                f"Sparsity must be a number in [0, 1), got {self.sparsity!r}: 0.5 removes half the groups."
            )
        if self.keep is not None and not (is_a(Integral, self.keep) and self.keep >= 0):
            raise PatternError(f"keep must be a whole number and not negative, got {self.keep!r}.")
        if self.keep is not None and self.keep % self.multiple_of:
            raise PatternError(f"keep={self.keep} is no multiple of multiple_of={self.multiple_of}.")

    @classmethod
    def sizes(cls, sizes: Iterable[int], keep: int | None = None, **options: float) -> Groups:
        """Groups of neighbouring columns with the given numbers of columns, for example `Groups.sizes((3, 5), 1)`."""
        labels = [group for group, size in enumerate(sizes) for _ in range(size)]
        return cls(tuple(labels), keep, **options)  # type: ignore[arg-type]

    def labels(self, columns: int) -> Tensor:
        """Group of every column, int64 (columns,).

        Raises:
            PatternError: the groups do not divide the columns.
        """
        if isinstance(self.index, tuple):
            if len(self.index) != columns:
                raise PatternError(f"The index of Groups names {len(self.index)} columns, the matrix has {columns}.")
            return torch.tensor(self.index)
        if not columns or columns % self.index:
            raise PatternError(
                f"Groups of {self.index} columns do not divide {columns} columns; give the group of every column."
            )
        return torch.arange(columns) // self.index

    def count(self, columns: int) -> int:
        """Number of groups of a matrix.

        Raises:
            PatternError: see `labels`.
        """
        return int(self.labels(columns).max()) + 1

    def kept(self, columns: int) -> int:
        """Number of groups that a matrix keeps.

        Raises:
            PatternError: `keep` is larger than the number of groups, or there are fewer groups than `multiple_of`.
        """
        count = self.count(columns)
        if self.keep is not None:
            if self.keep > count:
                raise PatternError(f"Cannot keep {self.keep} of {count} groups; keep must be at most {count}.")
            return self.keep
        assert self.sparsity is not None
        if self.sparsity == 0:
            return count
        target, unit = keep_count(count, self.sparsity), self.multiple_of
        if count < unit:
            raise PatternError(f"There are {count} groups, fewer than multiple_of={unit}.")
        return min(max((2 * target + unit) // (2 * unit), 1 if target and unit > 1 else 0), count // unit) * unit

    def zeros(self, shape: tuple[int, int]) -> int:
        """Least number of zeros that a (rows, columns) matrix has with the removed groups.

        Raises:
            PatternError: as `kept`.
        """
        sizes = torch.bincount(self.labels(shape[1])).sort().values
        return shape[0] * int(sizes[: len(sizes) - self.kept(shape[1])].sum())

    def groups(self, shape: tuple[int, int]) -> Partition:
        """Raise an error: groups compete, entries do not.

        Raises:
            PatternError: always.
        """
        raise PatternError(
            f"The pattern {self} removes whole columns from one layer, by iobs.solve and its solvers for groups. "
            "For a whole network use iobs.Structured."
        )

    def __str__(self) -> str:
        amount = f"keep {self.keep}" if self.sparsity is None else f"{self.sparsity:.4g}"
        size = f"{self.index} columns" if isinstance(self.index, int) else f"{len(set(self.index))} labels"
        aligned = f", a multiple of {self.multiple_of}" if self.multiple_of > 1 else ""
        return f"groups of {size}, {amount}{aligned}"


def _as_index(index: object) -> int | tuple[int, ...]:
    """A size, or the group of every column as a tuple.

    Raises:
        PatternError: the index is neither.
    """
    if is_a(Integral, index):
        if index < 1:  # type: ignore[operator]
            raise PatternError(f"A group needs at least one column, got {index}.")
        return int(index)  # type: ignore[call-overload, no-any-return]
    try:
        labels = tuple(int(label) for label in torch.as_tensor(index).flatten().tolist())
        exact = torch.as_tensor(index).ndim == 1 and list(labels) == torch.as_tensor(index).tolist()
    except (TypeError, ValueError, RuntimeError):
        exact = False
    if not exact or not labels:
        raise PatternError(f"The index of Groups is a size, or the group of every column; got {index!r}.")
    missing = sorted(set(range(max(labels) + 1)) - set(labels))
    if min(labels) < 0 or missing:
        raise PatternError(
            f"The groups of columns are numbered from 0 without gaps; got numbers from {min(labels)} to {max(labels)}"
            + (f" without {missing[0]}." if missing else ".")
        )
    return labels
