"""Options of the commands, derived from signatures, dataclasses and docstrings.

`command` makes a command of a function: each parameter is an option, or an argument where it has no default. A
parameter that is a frozen dataclass stands for one option per field, so that commands share groups of options. The help
of an option is its entry in the docstring, as `name (METAVAR): text` under "Args" or "Attributes"; command lines under
"Examples" end the help page. What neither a type nor a docstring can say (a least number, other names, words to
complete) is a `typer.Option` in `Annotated`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo, ParameterInfo

from iobs.cli import console
from iobs.core.files import expanded
from iobs.core.specs import (
    require_data,
    require_model,
    require_questions,
    require_recipe,
    require_table,
    require_written,
)

if TYPE_CHECKING:
    from iobs.data.encoding import Missing

# Words that the shell completes. They are written out here, because completion must be quick and their own modules
# import torch; a test compares them with the registries.
RECIPES = ("fast", "best", "one-shot", "paper")
SOLVERS = ("admm", "sparsegpt", "obc", "lobs", "nettrim", "wanda", "magnitude", "exact")
VALUE_SOLVERS = ("gptq", "obr", "rounding")  # of grids and rates alone
NETWORK_SOLVERS = ("chita", "cbs", "woodfisher", "global-magnitude")
UNIT_SOLVERS = ("flap", "greedy", "osscar", "random", "search")
SHARES = ("50%", "60%", "70%", "80%", "90%")
PATTERNS = ("2:4", "4:8", "1:4")
DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "npu", "xla")
CORPORA = ("wikitext2", "c4", "redpajama")
PRECISIONS: tuple[Literal["bf16", "int8", "int4"], ...] = ("bf16", "int8", "int4")


def complete(words: Sequence[str]) -> Callable[[str], list[str]]:
    """Completion of the last of several words with commas between them, or of one word; no word is repeated."""

    def completions(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        used = before.split(",")
        return [f"{before}{comma}{word}" for word in words if word.startswith(last) and word not in used]

    return completions


def completed(words: Sequence[str]) -> Any:
    """An option whose value the shell completes from known words; see `complete`."""
    return typer.Option(autocompletion=complete(words))


def checked(require: Callable[[Any], None]) -> Callable[[Any], Any]:
    """A callback that checks the value of an option before anything is imported, and expands "~" in a path."""

    def check(value: Any) -> Any:
        value = expanded(value) if isinstance(value, Path) else value
        if value is not None:
            require(value)
        return value

    return check


existing_model = checked(require_model)
existing_data = checked(lambda specs: require_data(specs, CORPORA))
existing_recipe = checked(lambda name: require_recipe(name, RECIPES))
existing_table = checked(require_table)
written_directory = checked(require_written)


def one_of(words: Sequence[str]) -> Callable[[str | None], str | None]:
    """A callback that refuses a value that is none of some words, before anything is imported."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in words:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(words)}")
        return value

    return check


def known_device(value: str | None) -> str | None:
    """A callback that refuses a name that no device of torch has, before anything is imported."""
    name, colon, number = (value or DEVICES[0]).partition(":")
    if name not in DEVICES or (colon and not number.isdecimal()):
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(DEVICES)}, or one with a number, as cuda:1")
    return value


# An entry of a section of a docstring: a name, perhaps a metavar in brackets, and the text up to the next entry.
_ENTRY = re.compile(r"^    (\w+)(?: \((.+?)\))?: (.+(?:\n      .+)*)", re.MULTILINE)
_SECTION = re.compile(r"^(Args|Attributes|Examples):\n", re.MULTILINE)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command for typer of a function; the module says how. The options of `Talk` are applied during the call.

    Args:
        function: its parameters are arguments, options, and groups of options. The order of the options is that of the
            parameters, a group being replaced by its fields.
    """
    hints = get_type_hints(function, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    summary, sections = _sections(function)
    entries = _entries(sections)
    options: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        group = groups.get(parameter.name)
        if group is None:
            options.append(_option(parameter.name, hints[parameter.name], parameter.default, entries))
            continue
        of_group = get_type_hints(group, include_extras=True)
        documented: dict[str, tuple[str, str]] = {}
        for base in reversed(group.__mro__[:-1]):
            documented |= _entries(_sections(base)[1])
        panel = getattr(group, "panel", None)
        options += [
            _option(field.name, of_group[field.name], field.default, documented, panel) for field in fields(group)
        ]

    @wraps(function)
    def run(**values: object) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        talk = next((value for value in values.values() if isinstance(value, Talk)), Talk())
        with console.talking(talk.quiet, talk.as_json):
            function(**values)

    # Typer reads the options and the help from here; `epilog` is for the call that adds the command to a group.
    run.__doc__, run.epilog = summary, _epilog(sections)  # type: ignore[attr-defined]
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def _sections(documented: object) -> tuple[str, dict[str, str]]:
    """The part of a docstring before its sections, and the text of each section by name."""
    summary, *parts = _SECTION.split(inspect.getdoc(documented) or "")
    return summary.rstrip(), dict(zip(parts[::2], parts[1::2], strict=True))


def _entries(sections: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Metavar ("" for none) and text of each parameter or attribute."""
    matches = _ENTRY.findall(sections.get("Args", "") + sections.get("Attributes", ""))
    return {name: (metavar, " ".join(text.split())) for name, metavar, text in matches}


def _epilog(sections: dict[str, str]) -> str | None:
    """The command lines under "Examples", each perhaps with a comment, as Markdown; None without any."""
    examples = [line.strip().partition("  # ") for line in sections.get("Examples", "").splitlines() if line.strip()]
    lines = [f"- `{line}`{f': {text}' if text else ''}" for line, _, text in examples]
    return "\n\n".join(["Examples:", *lines]) if lines else None


def _option(
    name: str, hint: Any, default: object, entries: dict[str, tuple[str, str]], panel: str | None = None
) -> inspect.Parameter:
    """A parameter of a command with everything that typer reads in its annotation.

    Args:
        name: of the parameter.
        hint: its type, or `Annotated` with parts of its option.
        default: its default; `inspect.Parameter.empty` for an argument.
        entries: metavar and help by name.
        panel: part of the help page.
    """
    kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    option = copy(next((mark for mark in marks if isinstance(mark, ParameterInfo)), None))
    if option is None:
        option = typer.Argument() if default is inspect.Parameter.empty else typer.Option()
    metavar, text = entries.get(name, ("", ""))
    option.metavar = option.metavar or metavar or None
    option.help = option.help or text
    option.rich_help_panel = option.rich_help_panel or panel
    if default is None and option.show_default is True:
        option.show_default = False
    named = option.default is not ...  # typer moves the first of the names there
    if kind is bool and isinstance(option, OptionInfo) and not named:
        option.param_decls = (f"--{name.replace('_', '-')}",)  # without a second flag --no-NAME
    if Path in (kind, *get_args(kind)) and option.callback is None:
        option.callback = expand_home
    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, keyword, default=default, annotation=Annotated[kind, option])


def expand_home(path: Path | None) -> Path | None:
    """Expand "~" in a path option, as in MODEL: shells do not expand it in --output=~/x."""
    return None if path is None else expanded(path)


Positive = Annotated[int, typer.Option(min=1)]
OptionalPositive = Annotated[int | None, typer.Option(min=1)]
SequenceLength = Annotated[
    int,
    typer.Option(min=2, metavar="N", help="Tokens per window; at most the model's context.", rich_help_panel="Data"),
]
DataSources = Annotated[list[str] | None, typer.Option(autocompletion=complete(CORPORA), callback=existing_data)]
Recipe = Annotated[str | None, typer.Option(autocompletion=complete(RECIPES), callback=existing_recipe)]
EvaluationData = Annotated[list[str] | None, typer.Option(callback=existing_data)]
Output = Annotated[Path | None, typer.Option("--output", "-o")]
Precision = Annotated[str | None, typer.Option(show_default="int8", callback=one_of(PRECISIONS))]
PrecisionOrDense = Annotated[str | None, typer.Option(show_default="int8", callback=one_of((*PRECISIONS, "dense")))]
Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Hugging Face directory or name, timm:NAME, or FILE.py:function; by default the embedded model.",
        callback=existing_model,
    ),
]
GivenModel = Annotated[str, typer.Argument(callback=existing_model)]
Questions = Annotated[Path | None, typer.Option(callback=checked(require_questions))]
Table = Annotated[Path, typer.Argument(callback=existing_table)]
WrittenDirectory = Annotated[Path, typer.Argument(callback=written_directory)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier output of iobs.")]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Also run model code that comes with the weights.",
        rich_help_panel="Machine and files",
    ),
]
Shape = Annotated[
    str | None, typer.Option("--shape", metavar="C,H,W", help="Shape of an image, if the model does not say it.")
]


@dataclass(frozen=True)
class Talk:
    """Options of every command for what it prints; `command` applies them.

    Attributes:
        quiet: Print results, warnings and errors only.
        as_json: Print the result as one JSON object, and no tables.
    """

    panel: ClassVar = "Messages"
    quiet: Annotated[bool, typer.Option("--quiet", "-q")] = False
    as_json: Annotated[bool, typer.Option("--json")] = False


@dataclass(frozen=True)
class DataOptions:
    """The data of a command.

    Attributes:
        data (SOURCE): Text files (.txt, .jsonl, .gz; repeat the option), an .npz, a folder or zip of images,
            FILE.py:function that returns batches, or wikitext2, c4, redpajama; to score an embedding model a table of
            labelled pairs of texts. Default: the embedded model uses its own
            text, other language models use C4 for calibration and WikiText-2 for evaluation.
    """

    panel: ClassVar = "Data"
    data: DataSources = None


@dataclass(frozen=True)
class Loading:
    """Options for loading MODEL, shared by the commands that run it.

    Attributes:
        dtype (NAME): float32, bfloat16 or float16; by default as stored.
        device (NAME): cpu, cuda, ...; by default the first GPU, else the CPU.
        allow_pickle: Also read pickled weights; loading them can run any code.
        trust_remote_code: Also run model code that comes with the weights.
    """

    panel: ClassVar = "Machine and files"
    dtype: Annotated[str | None, typer.Option(autocompletion=complete(DTYPES), callback=one_of(DTYPES))] = None
    device: Annotated[str | None, typer.Option(autocompletion=complete(DEVICES), callback=known_device)] = None
    allow_pickle: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True)
class LoadingOnCPU(Loading):
    """Options for loading MODEL, of commands that run on the CPU only.

    Attributes:
        device (NAME): cpu: this command runs on the CPU only.
    """

    device: Annotated[str | None, completed(("cpu",))] = None

    def require_cpu(self, why: str) -> None:
        """Raise unless --device is left out or names the CPU.

        Args:
            why: the reason why no other device does, for the message.

        Raises:
            typer.BadParameter: it names another device.
        """
        if self.device not in (None, "cpu"):
            raise typer.BadParameter(why, param_hint="--device")


def parse_shape(text: str | None) -> tuple[int, ...] | None:
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


def missing(text: str) -> Missing:
    """The treatment of missing values that --missing names.

    Raises:
        typer.BadParameter: it names none.
    """
    if text not in ("error", "drop", "mean"):
        raise typer.BadParameter("give error, drop or mean", param_hint="--missing")
    return cast("Missing", text)


def unique_names(text: str) -> list[str]:
    """The names in a list with commas between them, each once."""
    return [*dict.fromkeys(name.strip() for name in text.split(",") if name.strip())]
