"""Progress of a long task: a bar with the time left and the memory used; plain lines in a log."""

from __future__ import annotations

import sys
import threading
import time
from html import escape
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from iobs.core.memory import resident

_PLAIN_INTERVAL = 10.0  # seconds between plain lines, at first
_LONGEST_INTERVAL = 60.0  # the same in a long task
_SHARE = 1 / 6  # of the time so far, between those
_NOTEBOOK_INTERVAL = 0.25  # seconds between updates of a notebook's cell
_MEMORY_INTERVAL = 1.0  # seconds between measurements of memory


class Steps:
    """Progress towards a total: a bar on a terminal or in a notebook, elsewhere plain lines.

    Used as a context manager; `update` may be called often. A log gets a line every ten seconds, later every minute,
    also during a long step: a thread writes it.

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
        self._cell: Any = None  # the output of a notebook's cell
        self._started = self._printed = time.monotonic()
        self._share = ""  # of the work that was done at the last update
        self._end: float | None = None  # expected time of the end, by the clock of `time.monotonic`
        self._memory = _Memory()
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        """Show the bar."""
        if self._shown and self._console.is_jupyter:
            self._cell = _notebook_cell(_as_html(self._description, 0.0, "", ""))
        elif self._shown and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=3)),
                BarColumn(bar_width=None, table_column=Column(ratio=2)),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}", markup=False),
                TextColumn("{task.fields[memory]}", markup=False),
                console=self._console,
                transient=True,
                expand=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._description, total=None, left="", memory="")
        elif self._shown:
            threading.Thread(target=self._keep_talking, name="iobs progress", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the bar."""
        self._ended.set()
        if self._bar is not None:
            self._bar.stop()
        if self._cell is not None:
            took = f"{'stopped' if kind else 'done'} after {in_words(time.monotonic() - self._started)}"
            self._cell.update(_html(f"<small>{escape(took)}, memory {self._memory.text()}</small>"))

    def update(self, done: float, total: float, description: str | None = None, left: float | None = None) -> None:
        """Show that `done` of `total` steps are done.

        Args:
            done: number of steps that are done.
            total: number of all steps; 0 if unknown.
            description: replaces the present one.
            left: seconds that are left; None: estimated from the steps, all alike.
        """
        self._description = description or self._description
        now = time.monotonic()
        self._share = f"{100 * done / total:.0f} %, " if total else ""
        if left is None and done and total:
            left = (now - self._started) * (total - done) / done
        self._end = None if left is None else now + left
        if self._bar is not None:
            shown = "" if left is None else f"{in_words(left)} left"
            fields: dict[str, Any] = {"left": shown, "memory": self._memory.text()}
            self._bar.update(self._task, completed=done, total=total or None, description=self._description, **fields)
        elif self._cell is not None and now - self._printed >= _NOTEBOOK_INTERVAL:
            self._printed = now
            shown = "" if left is None else f"about {in_words(left)} left"
            self._cell.update(_as_html(self._description, done / total if total else 0.0, shown, self._memory.text()))
        elif self._cell is None and self._shown and now - self._printed >= self._interval(now) and left is not None:
            self._printed = now
            self._say(now)

    def _keep_talking(self) -> None:
        """Write a line to a log whenever no other was written for the time of `_interval`."""
        while not self._ended.wait(max(0.1, self._printed + self._interval(self._printed) - time.monotonic())):
            if (now := time.monotonic()) - self._printed >= self._interval(now):
                self._printed = now
                self._say(now)

    def _interval(self, now: float) -> float:
        """Seconds between two plain lines: a log of hours has a line a minute."""
        return max(_PLAIN_INTERVAL, min(_LONGEST_INTERVAL, _SHARE * (now - self._started)))

    def _say(self, now: float) -> None:
        left = None if self._end is None else self._end - now
        over = f"{in_words(now - self._started)} so far"  # where no time is known, or the known time is over
        fact = over if left is None or left < -0.5 else f"about {in_words(max(0.0, left))} left"
        self._console.print(f"{self._description}: {self._share}{fact}, memory {self._memory.text()}")


class _Memory:
    """Memory of this process now and its peak since the beginning, on its GPUs if one is used."""

    def __init__(self) -> None:
        self._peak = 0
        self._measured = -_MEMORY_INTERVAL
        self._text = ""

    def text(self) -> str:
        """Both in words, measured at most once in `_MEMORY_INTERVAL`."""
        if (now := time.perf_counter()) - self._measured >= _MEMORY_INTERVAL:
            self._measured = now
            present, self._peak = _memory(self._peak)
            self._text = f"{_size(present)} (peak {_size(self._peak)})"
        return self._text


def _memory(peak: int) -> tuple[int, int]:
    """Bytes in use now, and their peak."""
    torch = sys.modules.get("torch")  # where it is not loaded, no GPU is used
    if torch is not None and torch.cuda.is_available():
        gpus = range(torch.cuda.device_count())  # a thread does not know which is used
        if there := sum(map(torch.cuda.memory_allocated, gpus)):
            return there, sum(map(torch.cuda.max_memory_allocated, gpus))
    present = resident()
    return present, max(peak, present)


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def in_words(seconds: float) -> str:
    """A time for a progress line: 12 s, 4 min 05 s or 2 h 10 min."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _html(text: str) -> Any:
    from IPython.display import HTML

    return HTML(text)


def _as_html(description: str, share: float, left: str, memory: str) -> Any:
    """The progress as a cell of a notebook shows it, without any widget."""
    facts = ", ".join(fact for fact in (f"{share:.0%}", left, memory) if fact)
    bar = f'<progress value="{share:.4f}" max="1" style="width:16em"></progress>'
    return _html(f"{bar} <code>{escape(description)}</code> <small>{escape(facts)}</small>")


def _notebook_cell(first: object) -> Any:
    """A part of the output of the running cell, with an `update`."""
    from IPython.display import display

    return display(first, display_id=True)
