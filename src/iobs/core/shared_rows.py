"""Rows of a matrix that is divided among processes, with the pattern of the whole matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from iobs.core.partition import Partition, Peers
from iobs.core.patterns import Pattern


@dataclass(frozen=True)
class RowsOf:
    """The pattern of a whole matrix, as the process sees it that has some of the rows.

    Args:
        pattern: of the whole matrix, a `Pattern` of entries.
        rows: number of rows of the whole matrix.
        peers: processes that have the rows, each a consecutive part.
    """

    pattern: Pattern
    rows: int
    peers: Peers

    def groups(self, shape: tuple[int, int]) -> Partition:
        """Partition of the rows in this process; a group of the whole matrix reaches over all processes.

        Raises:
            PatternError: the pattern does not fit the matrix.
        """
        whole = self.pattern.groups((self.rows, shape[1]))
        count = 1 if whole.size > shape[1] else shape[0] * shape[1] // whole.size
        return Partition(count, whole.size, whole.keep, self.peers, self.rows, whole.count * whole.keep)

    def __str__(self) -> str:
        return str(self.pattern)

    def most(self, value: float) -> float:
        """The largest of the values that the processes give."""
        values = torch.zeros(self.peers.size, dtype=torch.float64)
        values[self.peers.rank] = value
        self.peers.sum(values)
        return float(values.max())
