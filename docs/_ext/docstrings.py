"""Docstrings of iobs in the markup of Sphinx: backticks mark code, and stars are stars."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

import iobs

_CODE = re.compile(r"(`[^`]+`)")
_ARGUMENT = re.compile(r"^\s*\*{1,2}\w+:")  # an entry of the section Args, such as "**options: ..."


def _marked_up(line: str) -> str:
    """One line of a docstring: `code` as a literal or a link to a public name, and other signs escaped."""
    if _ARGUMENT.match(line):
        return line
    parts = _CODE.split(line)
    return "".join(_code(part[1:-1]) if index % 2 else _escaped(part) for index, part in enumerate(parts))


def _code(text: str) -> str:
    name = text.removeprefix("iobs.")
    return f":py:obj:`{name} <iobs.{name}>`" if name in iobs.__all__ else f"``{text}``"


def _escaped(text: str) -> str:
    return re.sub(r"(\*|\||(?<=\w)_(?=\W|$))", r"\\\1", text)


def _with_returns(lines: list[str]) -> list[str]:
    """The section Returns as a field: napoleon would take the words before a colon for a type."""
    found: list[str] = []
    for line in lines:
        if found and found[-1].strip() == "Returns:":
            found[-1] = f":returns: {line.strip()}"
        else:
            found.append(line)
    return found


def _process(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    lines[:] = _with_returns([_marked_up(line) for line in lines])


def _signature(
    app: Sphinx, what: str, name: str, value: object, options: object, arguments: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Defaults that a dataclass makes anew are shown as dots, which Sphinx can parse."""
    return arguments and arguments.replace("<factory>", "..."), returned


def setup(app: Sphinx) -> dict[str, bool]:
    """Rewrite docstrings before napoleon reads their sections, and defaults in signatures."""
    app.connect("autodoc-process-docstring", _process, priority=400)
    app.connect("autodoc-process-signature", _signature)
    return {"parallel_read_safe": True}
