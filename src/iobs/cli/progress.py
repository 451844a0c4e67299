"""Progress of the commands: a bar with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

from iobs.cli.console import error_console, shows_progress
from iobs.pruning import progress


class Steps(progress.Steps):
    """Progress on the commands' console, shown by the first of several ranks only."""

    def __init__(self, description: str) -> None:
        super().__init__(description, error_console(), shows_progress())
