"""Shared parts of all commands: console output, one-line errors, common options."""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, wraps
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, TextIO, get_type_hints

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup
from typer.models import OptionInfo

from iobs.cli import completion
from iobs.core.files import expanded
from iobs.errors import IOBSError, UnusableOutputError, first_line, is_out_of_memory

# Width of output to a file or pipe: names are not cut, so they can be searched.
_WIDE = 1000


def at_home(path: Path | None) -> Path | None:
    """Expand "~" in a path option, as in MODEL: shells do not expand it in --output=~/x."""
    return None if path is None else expanded(path)


def check_files(files: Iterable[Path | None], read: Iterable[Path]) -> None:
    """Check, before any work, that a command can write its files; None stands for a file that was not asked for.

    Args:
        files: to write.
        read: files that the command reads, and would destroy.

    Raises:
        UnusableOutputError: the folder of a file is missing or not writable, the command reads the file, or two outputs
            are one file.
    """
    given = [file for file in files if file is not None]
    for number, file in enumerate(given):
        if file.resolve() in {one.resolve() for one in given[:number]}:
            raise UnusableOutputError(f"Two outputs have the name {file}; give each its own.")
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise UnusableOutputError(
                f"Cannot write {file}: give a file in a folder that exists and can be written to."
            )
        if file.exists() and any(one.exists() and file.samefile(one) for one in read):
            raise UnusableOutputError(f"{file} is read by this command, and would be replaced; give another file.")


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
    """Check that this process prints progress: not with --quiet, and of several ranks only the first does."""
    return not _quiet.get() and _is_first()


def _is_first() -> bool:
    from iobs.pruning.runtime.ranks import current

    return current().first


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
    from iobs.report.numbers import to_json

    (_results.get() or sys.stdout).write(to_json(value) + "\n")


class Terminated(KeyboardInterrupt):
    """The system asked this process to end (SIGTERM); handled as Ctrl-C, with an exit code of its own."""


class ErrorsAsLines(TyperGroup):
    """Command group that prints errors of iobs as one line without a traceback.

    The exit code is 2 for wrong input, 1 for any other failure, 130 after Ctrl-C and 143 after SIGTERM.
    """

    def invoke(self, ctx: Any) -> object:
        """Run the chosen command."""
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
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


# Panels of the help pages.
DATA_PANEL, MACHINE_PANEL, TALK_PANEL = "Data", "Machine and files", "Messages"

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Hugging Face directory or name, timm:NAME, or FILE.py:function; by default the embedded model.",
        show_default=False,
    ),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SOURCE",
        help="Text files (.txt, .jsonl, .gz; repeat the option), an .npz, a folder or zip of images, "
        "FILE.py:function that returns batches, or wikitext2, c4, redpajama. Default: the embedded model uses "
        "its own text, other language models use C4 for calibration and WikiText-2 for evaluation.",
        autocompletion=completion.words(completion.CORPORA),
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
        help="Tokens per window; at most the model's context.",
        rich_help_panel=DATA_PANEL,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="cpu, cuda, ...; by default the first GPU, else the CPU.",
        autocompletion=completion.words(completion.DEVICES),
        show_default=False,
        rich_help_panel=MACHINE_PANEL,
    ),
]
OnlyCPU = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="cpu: this command runs on the CPU only.",
        autocompletion=completion.words(("cpu",)),
        show_default=False,
        rich_help_panel=MACHINE_PANEL,
    ),
]
DType = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="float32, bfloat16 or float16; by default as stored.",
        autocompletion=completion.words(completion.DTYPES),
        show_default=False,
        rich_help_panel=MACHINE_PANEL,
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the result as one JSON object, and no tables.", rich_help_panel=TALK_PANEL)
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier output of iobs.")]
AllowPickle = Annotated[
    bool,
    typer.Option(
        "--allow-pickle",
        help="Also read pickled weights; loading them can run any code.",
        rich_help_panel=MACHINE_PANEL,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Also run model code that comes with the weights.", rich_help_panel=MACHINE_PANEL
    ),
]
Shape = Annotated[
    str | None,
    typer.Option(
        "--shape", metavar="C,H,W", help="Shape of an image, if the model does not say it.", show_default=False
    ),
]


def precision(*more: str) -> OptionInfo:
    """The option --precision of commands that run a model.

    Args:
        *more: values besides those of `iobs.accelerate`, such as "dense".
    """
    dense = "; dense: the model as it is" if "dense" in more else ""
    return typer.Option(  # type: ignore[no-any-return]
        metavar="|".join(("bf16", "int8", "int4", *more)),
        help=f"Fewest bits of a weight{dense}. A packed file keeps its own.",
        show_default="int8",
    )


def shape_of(text: str | None) -> tuple[int, ...] | None:
    """The sizes that --shape gives.

    Raises:
        typer.BadParameter: it is no list of positive whole numbers.
    """
    if text is None:
        return None
    sizes = text.split(",")
    if not all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
        raise typer.BadParameter(f"{text!r} does not read C,H,W", param_hint="--shape")
    return tuple(int(size) for size in sizes)


@dataclass(frozen=True)
class Talk:
    """Options of every command for what it prints. `with_groups` applies them."""

    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print results, warnings and errors only.", rich_help_panel=TALK_PANEL)
    ] = False
    as_json: AsJson = False


@dataclass(frozen=True)
class Loading:
    """Options for loading MODEL, shared by the commands that run it."""

    dtype: DType = None
    device: Device = None
    allow_pickle: AllowPickle = False
    trust_remote_code: TrustRemoteCode = False


@dataclass(frozen=True)
class LoadingOnCPU(Loading):
    """Options for loading MODEL, of commands that run on the CPU only."""

    device: OnlyCPU = None

    def require_cpu(self, why: str) -> None:
        """Check --device.

        Args:
            why: the reason why no other device does, for the message.

        Raises:
            typer.BadParameter: it names another device.
        """
        if self.device not in (None, "cpu"):
            raise typer.BadParameter(why, param_hint="--device")


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Turn each parameter of a command that is a dataclass of options into one option per field; apply `Talk`.

    The order of the options is that of the parameters, a dataclass being replaced by its fields.

    Args:
        command: a function whose parameters are options of typer and dataclasses of such options.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    options: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name not in groups:
            options.append(parameter.replace(annotation=hints[parameter.name]))
            continue
        group = groups[parameter.name]
        of_group = get_type_hints(group, include_extras=True)
        for field in fields(group):
            annotation, kind = of_group[field.name], inspect.Parameter.POSITIONAL_OR_KEYWORD
            options.append(inspect.Parameter(field.name, kind, default=field.default, annotation=annotation))

    @wraps(command)
    def run(**given: object) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        talk = next((value for value in given.values() if isinstance(value, Talk)), Talk())
        with talking(talk.quiet, talk.as_json):
            command(**given)

    # Typer reads the options from here.
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run
