"""Callbacks: what a run tells whoever watches it."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from iobs.core.steps import Steps
from iobs.errors import CoverageWarning
from iobs.pruning.forecast import Forecast, Remaining
from iobs.pruning.report import LayerRecord, Report, RoundRecord
from iobs.pruning.structured_report import StructuredReport

logger = logging.getLogger("iobs")


class Callback:
    """Watch a run of `iobs.prune`. Override what you need: every method does nothing by default.

    An exception raised in a callback ends the run; the model then has its original weights again. On several ranks only
    the first one calls callbacks.
    """

    def on_start(self, model: nn.Module, layers: Sequence[str], rounds: int) -> None:
        """The run starts: a number of rounds over the named layers of the model."""

    def on_note(self, text: str) -> None:
        """The run has decided or estimated something, in one sentence."""

    def on_forecast(self, forecast: Forecast) -> None:
        """The run expects this work; the forecast is made again when a decision changes it."""

    def on_measure(self, task: str, done: int, total: int) -> None:
        """Part of a measurement that a decision rests on is done: layers, samples or steps."""

    def on_rounds(self, count: int) -> None:
        """The run has decided on another number of rounds than it started with."""

    def on_layer(self, record: LayerRecord, round_index: int) -> None:
        """A layer has been pruned."""

    def on_step(self, round_index: int, done: int, total: int, loss: float) -> None:
        """A gradient step has been taken; `round_index` is that of the record that the steps lead from or belong to."""

    def on_round(self, record: RoundRecord) -> None:
        """A projection, or the fine-tuning after the last one, has been measured. The model holds its weights.

        The gradient steps from this projection to the next come later: `step_losses` is still empty.
        """

    def on_end(self, report: Report) -> None:
        """The run is over; the model holds the best weights."""


class LoggingCallback(Callback):
    """Writes what is decided and done to the logger "iobs", at level INFO; single layers at level DEBUG."""

    def on_start(self, model: nn.Module, layers: Sequence[str], rounds: int) -> None:
        """Log the size of the run."""
        logger.info("Pruning %d layers of %s, %d round(s).", len(layers), type(model).__name__, rounds)

    def on_note(self, text: str) -> None:
        """Log the note."""
        logger.info(text)

    def on_layer(self, record: LayerRecord, round_index: int) -> None:
        """Log the layer."""
        logger.debug(
            "Round %d, %s: sparsity %.4f, relative error %.3g, %.2f s.",
            round_index + 1,
            record.name,
            record.sparsity,
            record.error_calibration,
            record.seconds,
        )

    def on_round(self, record: RoundRecord) -> None:
        """Log the losses."""
        logger.info(
            "Record %d (%s): sparsity %.4f, loss %s (calibration) and %s (held-out).",
            record.index + 1,
            record.kind,
            record.sparsity,
            record.loss_calibration,
            record.loss_heldout,
        )

    def on_end(self, report: Report) -> None:
        """Log the result."""
        if isinstance(report, StructuredReport):
            logger.info("Done in %.1f s: %s", report.seconds, " ".join(report.counts()))
            return
        logger.info("Done in %.1f s: %d of %d weights are zero.", report.seconds, report.zeros, report.weights)


def _to_all(name: str) -> Callable[..., None]:
    def call(self: Callbacks, *arguments: object) -> None:
        for callback in self.callbacks:
            getattr(callback, name)(*arguments)

    return call


class Callbacks(Callback):
    """Several callbacks as one; keeps the notes for the report.

    Attributes:
        notes: all notes, in order.
        cautions: what the user should know before the result is used.
        warned: True after `warn`.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = [*callbacks]
        self.notes: list[str] = []
        self.cautions: list[str] = []
        self.warned = False

    def on_note(self, text: str) -> None:
        """Keep the note and pass it on."""
        self.notes.append(text)
        for callback in self.callbacks:
            callback.on_note(text)

    def caution(self, text: str) -> None:
        """Keep a text for the report, and show it now; nothing for "".

        It goes to the callbacks that show notes. Without one it is a warning of the logger, which Python prints.
        """
        if not text:
            return
        self.cautions.append(text)
        silent = Callback.on_note, LoggingCallback.on_note
        shown = [callback for callback in self.callbacks if type(callback).on_note not in silent]
        for callback in shown:
            callback.on_note(text)
        if not shown:
            logger.warning(text)

    def warn(self, text: str) -> None:
        """Keep a note on the coverage of the model that is also a warning."""
        self.notes.append(text)
        self.warned = True
        logger.info(text)
        warnings.warn(text, CoverageWarning, stacklevel=6)  # the caller of iobs.prune

    @property
    def wants_forecast(self) -> bool:
        """True if a callback listens to forecasts, which take a few forward passes."""
        return any(type(callback).on_forecast is not Callback.on_forecast for callback in self.callbacks)

    on_start = _to_all("on_start")
    on_forecast = _to_all("on_forecast")
    on_measure = _to_all("on_measure")
    on_rounds = _to_all("on_rounds")
    on_layer = _to_all("on_layer")
    on_step = _to_all("on_step")
    on_round = _to_all("on_round")
    on_end = _to_all("on_end")


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
    def shown(cls, visible: bool) -> Iterator[list[ProgressBar]]:
        """A bar while the context lasts, or none."""
        if not visible:
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
        self._steps.update(self.remaining.share, 1.0, text, self.remaining.seconds_left)
