"""What all commands share: the terminal, errors as one clear line, common options."""

from __future__ import annotations

import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from iobs.errors import IOBSError, first_line, is_out_of_memory

# Columns of a file or a pipe: names stay whole, so that they can be searched for.
_WIDE = 1000


def at_home(path: Path | None) -> Path | None:
    """What a path option names, "~" being the home folder as in MODEL: a shell leaves that of --output=~/x as it is."""
    return None if path is None else path.expanduser()


def output_console() -> Console:
    """Where results go."""
    return _console(False, _is_terminal(sys.stdout))


def error_console() -> Console:
    """Where progress, warnings and errors go, so that results can be piped."""
    return _console(True, _is_terminal(sys.stderr))


def _is_terminal(stream: Any) -> bool:
    # While a bar is shown rich stands in for the stream, and before version 14 does not pass this question on.
    return bool(getattr(stream, "rich_proxied_file", stream).isatty())


@cache  # what is said while a bar is shown must go through the console that shows it, or it lands in the bar
def _console(stderr: bool, terminal: bool) -> Console:
    # Names of files, layers and columns are printed as they are: brackets and colons in them are no commands.
    return Console(
        stderr=stderr,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=not terminal,
        width=None if terminal else _WIDE,
    )


def talks_for_all() -> bool:
    """Whether this process shows progress: of several ranks only the first."""
    from iobs.prune.distributed import current

    return current().first


def say(text: str) -> None:
    """One line about what is being done."""
    if talks_for_all():
        error_console().print(text)


def print_json(value: Any) -> None:
    """A result for other programs."""
    from iobs.report.numbers import to_json

    sys.stdout.write(to_json(value) + "\n")


class ErrorsAsLines(TyperGroup):
    """A group of commands that shows the errors of iobs as one line, without a traceback, and exits with 1."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except IOBSError as error:
                _show_error(str(error))
                raise typer.Exit(1) from error
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                _show_error(_OUT_OF_MEMORY.format(first_line(error)))
                raise typer.Exit(1) from error
            except BrokenPipeError:  # whoever read the output has enough
                raise
            except OSError as error:  # a full disk or a lost mount where no one knows what it means for the work
                _show_error(f"{error.filename or 'The output'}: {error.strerror or error}.")
                raise typer.Exit(1) from error
            except KeyboardInterrupt:
                error_console().print("Stopped. Nothing half-written was left behind.")
                raise typer.Exit(130) from None


_OUT_OF_MEMORY = (
    "The memory is not enough ({}). Lower --batch-size, --samples or --seq-len, take --budget fast, or prune a "
    "directory with --low-memory; nothing was left behind."
)


def _show_error(text: str) -> None:
    error_console().print(Text.assemble(("Error:", "bold red"), " ", text))


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    if not issubclass(category, DeprecationWarning | FutureWarning):
        error_console().print(Text.assemble(("Warning:", "yellow"), " ", str(message)))


# Panels of the help pages.
DATA_PANEL, MACHINE_PANEL = "Data", "Machine and files"

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="Hugging Face directory or name, timm:NAME, FILE.py:function, or nothing for the embedded model.",
        show_default=False,
    ),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SOURCE",
        help="Text files (.txt, .jsonl, .gz; repeat the option), an .npz, a folder or zip of pictures, "
        "FILE.py:function that returns batches, or wikitext2, c4, redpajama. Left out: the "
        "embedded model takes its own text, other language models take C4, or WikiText-2 to be scored on.",
        show_default=False,
        rich_help_panel=DATA_PANEL,
    ),
]
SequenceLength = Annotated[
    int,
    typer.Option(
        "--seq-len",
        min=2,
        metavar="N",
        help="Tokens in a window; never more than the model's context.",
        rich_help_panel=DATA_PANEL,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="cpu, cuda, ...; the first GPU if there is one.",
        show_default=False,
        rich_help_panel=MACHINE_PANEL,
    ),
]
DType = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="float32, bfloat16 or float16; as stored if not given.",
        show_default=False,
        rich_help_panel=MACHINE_PANEL,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
AllowPickle = Annotated[
    bool,
    typer.Option(
        "--allow-pickle", help="Also read pickled weights, which can run any code.", rich_help_panel=MACHINE_PANEL
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Also run model code that comes with the weights.", rich_help_panel=MACHINE_PANEL
    ),
]
