"""Progress of the commands: a bar with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from iobs.cli.console import ConsoleSteps, say
from iobs.core.formats import duration, percent, significant
from iobs.pruning.progress import ProgressBar
from iobs.pruning.report import RoundRecord
from iobs.report.tables import round_name


class Watch(ProgressBar):
    """A bar of layers and gradient steps, and a line after every round and every fine-tuning.

    A projection that is the only round gets a line only if fine-tuning follows. Otherwise it is the result of the
    command, which needs no line.

    Args:
        steps: the bar, already shown.
        prefix: put before every description, such as the name of the method.
        quiet: leave out notes and lines.
        clock: () -> seconds, for the time left.
    """

    def __init__(
        self, steps: ConsoleSteps, prefix: str = "", quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(steps, prefix, clock)
        self._quiet = quiet
        self._pending: RoundRecord | None = None

    def on_note(self, text: str) -> None:
        """Show the note."""
        if not self._quiet:
            say(f"{self._prefix}{text}")

    def on_step(self, round_index: int, done: int, total: int, loss: float) -> None:
        """Advance the bar; before the first step of fine-tuning, show the line of the projection."""
        if round_index >= self._rounds:
            self._show_pending()
        super().on_step(round_index, done, total, loss)

    def on_round(self, record: RoundRecord) -> None:
        """Show the line of the record, or store it if it is the only projection."""
        if self._quiet:
            return
        if record.kind == "finetune":
            self._show_pending()
            self._line(round_name(record), record)
        elif self._rounds < 2:
            self._pending = record
        else:
            self._line(f"round {record.index + 1} of {self._rounds}", record)

    def _show_pending(self) -> None:
        if self._pending is not None:
            self._line("projection", self._pending)
            self._pending = None

    def _line(self, name: str, record: RoundRecord) -> None:
        loss = record.loss_heldout if record.loss_heldout is not None else record.loss_calibration
        say(
            f"{self._prefix}{name}: {percent(record.sparsity)} zeros, loss {significant(loss, 4)}, "
            f"{duration(record.seconds)}"
        )
