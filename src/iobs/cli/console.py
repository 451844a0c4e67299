"""Output of the commands: results, progress, warnings, and errors as one line."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from contextvars import ContextVar
from functools import cache
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from iobs.core.steps import Steps
from iobs.errors import IOBSError, UnusableOutputError, first_line, is_out_of_memory

# Width of output to a file or pipe: names are not cut, so they can be searched.
_WIDE = 1000


def check_files(files: Iterable[Path | None], read: Iterable[Path]) -> None:
    """Raise, before any work, unless a command can write its files; None stands for a file that is not written.

    Args:
        files: to write.
        read: files that the command reads, and would destroy.

    Raises:
        UnusableOutputError: the folder of a file is missing or not writable, the command reads the file, or two outputs
            are one file.
    """
    checked: set[Path] = set()
    for file in files:
        if file is None:
            continue
        if file.resolve() in checked:
            raise UnusableOutputError(f"Two outputs have the name {file}; give each its own.")
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise UnusableOutputError(
                f"Cannot write {file}: give a file in a folder that exists and can be written to."
            )
        if file.exists() and any(source.exists() and file.samefile(source) for source in read):
            raise UnusableOutputError(f"{file} is read by this command, and would be replaced; give another file.")
        checked.add(file.resolve())


def output_console() -> Console:
    """Console for results (stdout)."""
    if isinstance(sys.stdout, TextIOWrapper):  # signs that its encoding lacks are escaped, as Python does on stderr
        sys.stdout.reconfigure(errors="backslashreplace")
    return _console(False, _is_terminal(sys.stdout))


def error_console() -> Console:
    """Console for progress, warnings and errors (stderr), so that results can be piped."""
    return _console(True, _is_terminal(sys.stderr))


def _is_terminal(stream: TextIO) -> bool:
    # While rich shows a progress bar it replaces the stream; before version 14 its replacement has no isatty.
    return bool(getattr(stream, "rich_proxied_file", stream).isatty())


@cache  # output must use the console of the progress bar, or it garbles the bar
def _console(stderr: bool, terminal: bool) -> Console:
    # Names of files, layers and columns are printed literally: brackets and colons are not markup.
    return Console(
        stderr=stderr,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=not terminal,
        width=None if terminal else _WIDE,
    )


_quiet: ContextVar[bool] = ContextVar("quiet", default=False)
_results: ContextVar[TextIO | None] = ContextVar("results", default=None)  # None: sys.stdout


@contextmanager
def talking(quiet: bool, as_json: bool) -> Iterator[None]:
    """Apply --quiet and --json for the time of a command.

    With --json only `print_json` writes to stdout. Everything else that is printed there goes to stderr, also what a
    library or the user's own file prints.
    """
    with ExitStack() as stack:
        stack.callback(_quiet.reset, _quiet.set(quiet))
        if as_json:
            stack.callback(_results.reset, _results.set(sys.stdout))
            stack.enter_context(redirect_stdout(sys.stderr))
        yield


def shows_progress() -> bool:
    """True if this process prints progress: not with --quiet, and of several ranks only the first does."""
    return not _quiet.get() and _is_first()


def _is_first() -> bool:
    ranks = sys.modules.get("iobs.pruning.runtime.ranks")  # not loaded: this is the only process
    return ranks is None or bool(ranks.current().first)


class ConsoleSteps(Steps):
    """Progress on the commands' console, shown by the first of several ranks only."""

    def __init__(self, description: str) -> None:
        super().__init__(description, error_console(), shows_progress())


def say(text: str) -> None:
    """Print one line of progress to stderr, unless --quiet is given."""
    if shows_progress():
        error_console().print(text)


def warn(text: str) -> None:
    """Print one line to stderr that --quiet does not hide."""
    if _is_first():
        error_console().print(text)


def print_json(value: object) -> None:
    """Print the result of a command as JSON to stdout."""
    from iobs.core.formats import to_json

    (_results.get() or sys.stdout).write(to_json(value) + "\n")


class Terminated(KeyboardInterrupt):
    """The system asked this process to end (SIGTERM); handled as Ctrl-C, with an exit code of its own."""


class ErrorsAsLines(TyperGroup):
    """Command group whose commands run under `errors_as_lines`."""

    def invoke(self, ctx: Any) -> object:
        """Run the chosen command."""
        with errors_as_lines():
            return super().invoke(ctx)


@contextmanager
def errors_as_lines() -> Iterator[None]:
    """Print errors of iobs as one line without a traceback, and end the program.

    The exit code is 2 for wrong input, 1 for any other failure, 130 after Ctrl-C and 143 after SIGTERM.

    Raises:
        typer.Exit: an error was printed.
    """
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            yield
        except IOBSError as error:
            _show_error(str(error))
            raise typer.Exit(2 if isinstance(error, ValueError) else 1) from error
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            _show_error(_OUT_OF_MEMORY.format(first_line(error)))
            raise typer.Exit(1) from error
        except BrokenPipeError:  # the reader of the output has closed the pipe
            raise
        except OSError as error:  # such as a full disk or a lost mount
            _show_error(f"{error.filename or 'The output'}: {error.strerror or error}.")
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            error_console().print("Stopped. Nothing half-written was left behind.")
            raise typer.Exit(143 if isinstance(error, Terminated) else 130) from None


_OUT_OF_MEMORY = (
    "The memory is not enough ({}). Lower --batch-size, --samples or --seq-len, or prune a "
    "directory with --low-memory; nothing was left behind."
)


def _show_error(text: str) -> None:
    error_console().print(Text.assemble(("Error:", "bold red"), " ", text))


def _show_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    if not issubclass(category, DeprecationWarning | FutureWarning):
        error_console().print(Text.assemble(("Warning:", "yellow"), " ", str(message)))
