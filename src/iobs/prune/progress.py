"""Who is told how a run is getting on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from iobs.prune.record import LayerRecord, RoundRecord


class Progress(Protocol):
    """Is told how a run is getting on; `iobs.prune(progress=...)`."""

    def begin(self, rounds: int, layers: Sequence[str]) -> None:
        """The run starts: so many rounds over these layers."""
        ...

    def note(self, text: str) -> None:
        """Something has been chosen or estimated, in one sentence."""
        ...

    def choosing(self, what: str, done: int, total: int) -> None:
        """So much of a measurement that a choice rests on has been done: layers, samples or steps."""
        ...

    def expect_rounds(self, count: int) -> None:
        """So many rounds it will be after all."""
        ...

    def layer(self, round_index: int, record: LayerRecord) -> None:
        """A layer has been pruned."""
        ...

    def step(self, round_index: int, done: int, total: int, loss: float) -> None:
        """A gradient step has been taken."""
        ...

    def round(self, record: RoundRecord) -> None:
        """A round has been measured."""
        ...


class Quiet:
    """Progress that nobody watches."""

    def begin(self, rounds: int, layers: Sequence[str]) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def choosing(self, what: str, done: int, total: int) -> None:
        """Nothing."""

    def expect_rounds(self, count: int) -> None:
        """Nothing."""

    def layer(self, round_index: int, record: LayerRecord) -> None:
        """Nothing."""

    def step(self, round_index: int, done: int, total: int, loss: float) -> None:
        """Nothing."""

    def round(self, record: RoundRecord) -> None:
        """Nothing."""
