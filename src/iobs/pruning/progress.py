"""Progress of a run, a callback: layers, measurements and gradient steps as one bar."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from iobs.core.steps import Steps
from iobs.pruning.callbacks import Callback
from iobs.pruning.forecast import Forecast, Remaining
from iobs.pruning.report import LayerRecord


class ProgressBar(Callback):
    """Shows layers, measurements and gradient steps of a run as one bar.

    Args:
        steps: the bar, already shown.
        prefix: put before every description, such as the name of a method.
        clock: () -> seconds, for the time left.
    """

    def __init__(self, steps: Steps, prefix: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._prefix, self._clock = steps, prefix, clock
        self._rounds = self._layers = 0
        self._stepped: set[tuple[bool, int]] = set()  # records whose gradient steps have begun
        self.remaining = Remaining(clock)

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
        """Expect the layers of all rounds."""
        self._rounds, self._layers = rounds, len(layers)
        self.remaining, self._stepped = Remaining(self._clock), set()
        self.remaining.expect_part("layers", rounds * len(layers))
        self._show("starting")

    def on_forecast(self, forecast: Forecast) -> None:
        """Expect other work, with its time."""
        self.remaining.expect(forecast)
        self._show(None)

    def on_measure(self, task: str, done: int, total: int) -> None:
        """Advance by one unit of a measurement."""
        part = self.remaining.part_of(task)
        self.remaining.expect_part(part, total)
        self._advance(part, f"{task}: {done} of {total}")

    def on_rounds(self, count: int) -> None:
        """Expect the layers of another number of rounds."""
        self._rounds = count
        self.remaining.expect_part("layers", count * self._layers)

    def on_layer(self, record: LayerRecord, round_index: int) -> None:
        """Advance by one layer."""
        self.remaining.expect_part("layers", self._rounds * self._layers)
        units = self.remaining.weight(record.name)
        self._advance("layers", f"{self._round(round_index)}{record.name}", units)

    def on_step(self, round_index: int, done: int, total: int, loss: float) -> None:
        """Advance by one gradient step."""
        last = round_index >= self._rounds
        part, name = ("fine-tuning", "fine-tuning: ") if last else ("steps", self._round(round_index))
        self.remaining.expect_part(part, total if last else total * max(1, self._rounds - 1))
        if (last, round_index) not in self._stepped:  # a resumed run has some steps behind it
            self._stepped.add((last, round_index))
            self.remaining.skip(part, done - 1)
        shown = f"{loss:#.3g}".rstrip(".")  # 0.500, so that the line keeps its width
        self._advance(part, f"{name}step {done} of {total}, loss {shown}")

    def _round(self, index: int) -> str:
        return f"round {index + 1} of {self._rounds}, " if self._rounds > 1 else ""

    def _advance(self, part: str, description: str, units: float = 1.0) -> None:
        self.remaining.advance(part, units)
        self._show(description)

    def _show(self, description: str | None) -> None:
        text = None if description is None else self._prefix + description
        self._steps.update(self.remaining.share, 1.0, text, self.remaining.left)
