"""Groups of entries that compete with each other under a pattern."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Partition:
    """Partition of a (rows, columns) matrix, read row by row, into equal groups.

    Attributes:
        count: number of groups.
        size: entries in each group.
        keep: entries kept in each group.
    """

    count: int
    size: int
    keep: int
