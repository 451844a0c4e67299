"""Groups of entries that compete with each other under a pattern."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Peers(Protocol):
    """Processes that hold consecutive rows of one matrix, in the order of their numbers."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of processes."""
        ...

    def sum(self, tensor: Tensor) -> None:
        """Add up a tensor over all processes, in place."""
        ...


@dataclass(frozen=True)
class Partition:
    """Partition of a (rows, columns) matrix, read row by row, into equal groups.

    With `peers` the matrix has further rows in other processes; a group may then reach over several of them.

    Attributes:
        count: number of groups.
        size: entries in each group.
        keep: entries kept in each group.
        peers: processes that hold the rows; None: all rows are here.
        rows: number of rows in all processes; 0 without `peers`.
        kept: number of kept entries in all processes; 0 without `peers`.
    """

    count: int
    size: int
    keep: int
    peers: Peers | None = None
    rows: int = 0
    kept: int = 0

    def all_rows(self, here: int) -> int:
        """Number of rows in all processes; `here` are in this process."""
        return here if self.peers is None else self.rows

    def in_columns(self, block: slice, columns: int) -> Partition:
        """Partition of some neighbouring columns, for groups of whole rows.

        The counts of the blocks of a matrix add up to its count.

        Args:
            block: the columns.
            columns: number of columns of the matrix.
        """
        for_each = self.keep / columns
        keep = round(block.stop * for_each) - round(block.start * for_each)
        return replace(self, size=self.size // columns * (block.stop - block.start), keep=keep)

    @property
    def all_kept(self) -> int:
        """Number of kept entries in all processes."""
        return self.count * self.keep if self.peers is None else self.kept

    def total(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over all processes, in place."""
        if self.peers is not None:
            self.peers.sum(tensor)
        return tensor
