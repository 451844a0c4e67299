"""The command line: this file only assembles the commands, each of which lives in its own module."""

from __future__ import annotations

import importlib
import os
import signal
from typing import Annotated

import typer

import iobs
from iobs.cli.console import ErrorsAsLines, Terminated, output_console

app = typer.Typer(
    cls=ErrorsAsLines,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
# In the order of the help page. Each module defines a function of its own name.
COMMANDS = (
    *("demo", "prune", "compare", "evaluate", "inspect", "pack", "export", "run", "bench"),
    *("solve", "predict"),
)
for _name in COMMANDS:
    _command = getattr(importlib.import_module(f"iobs.cli.{_name}"), _name)
    app.command(_name, epilog=_command.epilog)(_command)


def _print_version(version: bool) -> None:
    if version:
        output_console().print(f"iobs {iobs.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Prune networks and solve sparse problems with second-order information, and prove the zeros.

    Start with `iobs demo`.
    """
    # torchrun may have started prune several times over; without it torch is loaded later, after the arguments are read
    if context.invoked_subcommand == "prune" and os.environ.get("WORLD_SIZE", "1") != "1":
        from iobs.pruning.runtime.ranks import joined

        context.with_resource(joined())


def _end(number: int, frame: object) -> None:
    """A request to end is handled as Ctrl-C: what was half-written is removed, and what is saved is said."""
    raise Terminated


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGTERM, _end)
    app()
