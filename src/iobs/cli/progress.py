"""Progress on a terminal as a bar with the time left; elsewhere as plain lines, not too many of them."""

from __future__ import annotations

import time
from types import TracebackType

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from iobs.cli.console import error_console, talks_for_all

# Seconds between plain lines.
_PLAIN_INTERVAL = 15.0


class Steps:
    """A count of steps towards a total, which only the first of several ranks shows.

    Used as a context manager; `update(done, total)` may be called as often as it pleases the caller.
    """

    def __init__(self, description: str) -> None:
        self._description = description
        self._console = error_console()
        self._shown = talks_for_all()
        self._bar: Progress | None = None
        self._started = self._spoken = time.monotonic()

    def __enter__(self) -> Steps:
        """Show the bar."""
        if self._shown and self._console.is_terminal:
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
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: float, total: float, description: str | None = None) -> None:
        """`done` of `total` steps are done; the description replaces the present one."""
        self._description = description or self._description
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total or None, description=self._description)
            return
        now = time.monotonic()
        if self._shown and now - self._spoken >= _PLAIN_INTERVAL and done and total:
            self._spoken = now
            left = (now - self._started) * (total - done) / done
            self._console.print(f"{self._description}: {100 * done / total:.0f} %, about {left:.0f} s left")
