"""Write docs/command-line.md from the commands themselves; `tests/docs/test_command_page.py` compares the two."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from typer.main import get_command

from iobs.cli import COMMANDS, app

PAGE = Path(__file__).parent / "command-line.md"
_EXAMPLE = re.compile(r"^- `(.+?)`(?:: (.+))?$", re.MULTILINE)
_BEGINNING = """# The command line

<!-- Written by docs/make_command_page.py from the commands; do not edit. -->

`iobs COMMAND --help` shows the same in a terminal. `MODEL` is a Hugging Face directory or name, `timm:NAME`, or
`FILE.py:function`; without it the commands take the small language model that comes with iobs. Results go to standard
output, or as one JSON object with `--json`; progress, warnings and errors go to standard error. The exit code is 2 for
wrong input and 1 for any other failure.

| command | does |
|---|---|
"""


def page() -> str:
    """The page as Markdown."""
    commands = {name: get_command(app).commands[name] for name in COMMANDS}  # type: ignore[attr-defined]
    summary = "".join(
        f"| [`iobs {name}`](#iobs-{name}) | {_cell(_first_paragraph(each))} |\n" for name, each in commands.items()
    )
    return _BEGINNING + summary + "".join(_section(name, each) for name, each in commands.items())


def _section(name: str, command: Any) -> str:
    arguments = " ".join(_value(each) for each in command.params if each.param_type_name == "argument")
    lines = [f"\n## iobs {name}\n", command.help.strip(), ""]
    lines += ["```console", *(_example(*found) for found in _EXAMPLE.findall(command.epilog or "")), "```", ""]
    lines += [f"`iobs {name} {arguments} [OPTIONS]`".replace("  ", " "), ""]
    lines += ["| argument or option | meaning | default |", "|---|---|---|"]
    lines += [_row(each) for each in command.params if each.name != "help"]
    return "\n".join(lines) + "\n"


def _example(line: str, comment: str) -> str:
    return f"{line}  # {comment}" if comment else line


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        names = f"`{_escaped(_value(parameter))}`"
    else:
        value = "" if parameter.is_flag else _value(parameter)
        names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        names += f" `{_escaped(value)}`" if value else ""
    default = parameter.default
    shown = (
        "" if default is None or default is False or callable(default) or "UNSET" in repr(default) else f"`{default}`"
    )
    return f"| {names} | {_cell(parameter.help or '')} | {shown} |"


def _value(parameter: Any) -> str:
    """The word that stands for a value: that of its help page, or the name of the parameter."""
    return parameter.metavar or parameter.name.upper().replace("_", "-")


def _first_paragraph(command: Any) -> str:
    return " ".join(command.help.strip().split("\n\n")[0].split())


def _cell(text: str) -> str:
    return _escaped(" ".join(text.split())).replace("*", "\\*").replace("<", "&lt;")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf8")
