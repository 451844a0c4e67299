"""A progress bar with the time left; plain lines in a log."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn

from iobs.pruning.callbacks import Callback
from iobs.pruning.report import LayerRecord

_PLAIN_INTERVAL = 15.0  # seconds between plain lines


class Steps:
    """Progress towards a total, on a terminal or in a notebook as a bar, elsewhere as plain lines.

    Used as a context manager; `update` may be called often.

    Args:
        description: shown before the bar.
        console: where to show; standard error by default.
        shown: False shows nothing, as on all ranks but the first.
    """

    def __init__(self, description: str, console: Console | None = None, shown: bool = True) -> None:
        self._description = description
        self._console = console or Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._shown = shown
        self._bar: Progress | None = None
        self._started = self._printed = time.monotonic()

    def __enter__(self) -> Self:
        """Show the bar."""
        if self._shown and (self._console.is_terminal or self._console.is_jupyter):
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                TextColumn("left:"),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._description, total=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: float, total: float, description: str | None = None) -> None:
        """Show that `done` of `total` steps are done; a description replaces the present one."""
        self._description = description or self._description
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total or None, description=self._description)
            return
        now = time.monotonic()
        if self._shown and now - self._printed >= _PLAIN_INTERVAL and done and total:
            self._printed = now
            left = (now - self._started) * (total - done) / done
            self._console.print(f"{self._description}: {100 * done / total:.0f} %, about {left:.0f} s left")


class ProgressBar(Callback):
    """Shows layers, measurements and gradient steps of a run as one bar.

    Args:
        steps: the bar, already shown.
        prefix: put before every description, such as the name of a method.
    """

    def __init__(self, steps: Steps, prefix: str = "") -> None:
        self._steps, self._prefix = steps, prefix
        self._rounds = self._layers = self._done = self._total = 0
        self._step_rounds = 0

    @classmethod
    @contextmanager
    def shown(cls, wanted: bool) -> Iterator[list[ProgressBar]]:
        """A bar while the context lasts, or none."""
        if not wanted:
            yield []
            return
        with Steps("pruning") as steps:
            yield [cls(steps)]

    def on_start(self, model: nn.Module, layers: Sequence[str], rounds: int) -> None:
        """Count the layers of all rounds."""
        self._rounds, self._layers, self._total, self._done = rounds, len(layers), rounds * len(layers), 0
        self._show("starting")

    def on_measure(self, task: str, done: int, total: int) -> None:
        """Advance; the first call of a task adds its total."""
        if done == 1:
            self._total += total
        self._advance(f"{task}: {done} of {total}")

    def on_rounds(self, count: int) -> None:
        """Change the total."""
        self._total += (count - self._rounds) * self._layers
        self._rounds = count

    def on_layer(self, record: LayerRecord, round_index: int) -> None:
        """Advance by one layer."""
        self._advance(f"{self._round(round_index)}{record.name}")

    def on_step(self, round_index: int, done: int, total: int, loss: float) -> None:
        """Advance by one gradient step; the first step of a round tells how many there are."""
        last = round_index >= self._rounds
        if round_index >= self._step_rounds:
            # Later rounds are expected to have as many steps; a resumed round has some behind it.
            expected = 1 if last else max(1, self._rounds - 1 - round_index)
            self._total += expected * total - (done - 1)
            self._step_rounds = round_index + expected
        name = "fine-tuning: " if last else self._round(round_index)
        shown = f"{loss:#.3g}".rstrip(".")  # 0.500, so that the line keeps its width
        self._advance(f"{name}step {done} of {total}, loss {shown}")

    def _round(self, index: int) -> str:
        return f"round {index + 1} of {self._rounds}, " if self._rounds > 1 else ""

    def _advance(self, description: str) -> None:
        self._done += 1
        self._show(description)

    def _show(self, description: str) -> None:
        self._steps.update(self._done, self._total, self._prefix + description)
