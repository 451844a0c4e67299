"""Shows how a pruning run is getting on."""

from __future__ import annotations

from collections.abc import Sequence

from iobs.cli.console import say
from iobs.cli.progress import Steps
from iobs.prune.record import LayerRecord, RoundRecord
from iobs.report.numbers import duration, percent, significant
from iobs.report.tables import round_name


class Watch:
    """Progress of `iobs.prune` as a bar of layers and gradient steps, and a line after every round and polish.

    The line of a projection that is the only round comes when a polish follows it: alone it is the result itself.

    Args:
        steps: the bar, already shown.
        prefix: put before every description, such as the name of the method.
        quiet: leave out the lines after the rounds.
    """

    def __init__(self, steps: Steps, prefix: str = "", quiet: bool = False) -> None:
        self._steps = steps
        self._prefix = prefix
        self._quiet = quiet
        self._rounds = self._layers = self._done = self._total = 0
        self._step_rounds = 0
        self._untold: RoundRecord | None = None

    def begin(self, rounds: int, layers: Sequence[str]) -> None:
        """The run starts."""
        self._rounds, self._layers, self._total, self._done = rounds, len(layers), rounds * len(layers), 0
        self._show("starting")

    def note(self, text: str) -> None:
        """Something has been chosen or estimated."""
        if not self._quiet:
            say(f"{self._prefix}{text}")

    def choosing(self, what: str, done: int, total: int) -> None:
        """Part of a measurement that a choice rests on has been done."""
        if done == 1:
            self._total += total
        self._advance(f"{what}: {done} of {total}")

    def expect_rounds(self, count: int) -> None:
        """So many rounds it will be after all."""
        self._total += (count - self._rounds) * self._layers
        self._rounds = count

    def layer(self, round_index: int, record: LayerRecord) -> None:
        """A layer has been pruned."""
        self._advance(f"{self._round(round_index)}{record.name}")

    def step(self, round_index: int, done: int, total: int, loss: float) -> None:
        """A gradient step has been taken. How many there will be becomes known with the first that a round tells."""
        polishing = round_index >= self._rounds
        if polishing:
            self._tell_projection()
        if round_index >= self._step_rounds:
            # The rounds left but the last are taken to have as many; a resumed one has some behind it.
            expected = 1 if polishing else max(1, self._rounds - 1 - round_index)
            self._total += expected * total - (done - 1)
            self._step_rounds = round_index + expected
        name = "polish: " if polishing else self._round(round_index)
        self._advance(f"{name}step {done} of {total}, loss {significant(loss)}")

    def round(self, record: RoundRecord) -> None:
        """A round has been measured."""
        if self._quiet:
            return
        if record.kind == "polish":
            self._tell_projection()
            self._tell(round_name(record), record)
        elif self._rounds < 2:
            self._untold = record
        else:
            self._tell(f"round {record.index + 1} of {self._rounds}", record)

    def _tell_projection(self) -> None:
        if self._untold is not None:
            self._tell("projection", self._untold)
            self._untold = None

    def _tell(self, name: str, record: RoundRecord) -> None:
        loss = record.loss_heldout if record.loss_heldout is not None else record.loss_calibration
        say(
            f"{self._prefix}{name}: {percent(record.sparsity)} zeros, loss {significant(loss, 4)}, "
            f"{duration(record.seconds)}"
        )

    def _round(self, index: int) -> str:
        return f"round {index + 1} of {self._rounds}, " if self._rounds > 1 else ""

    def _advance(self, description: str) -> None:
        self._done += 1
        self._show(description)

    def _show(self, description: str) -> None:
        self._steps.update(self._done, self._total, self._prefix + description)
