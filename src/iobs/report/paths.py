"""Names without folders: written files tell nothing about the folders of the machine that wrote them."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath, PureWindowsPath

_LONGEST = 4096  # characters of a path
# An absolute path of Linux, macOS or Windows, at the beginning of a text or after a separator.
_START, _REST = r"""(?:(?<=^)|(?<=[\s'"=\[(,;]))""", r"""[^\s'",;)\]]"""
_ABSOLUTE = re.compile(rf"{_START}(?:/(?!/){_REST}*(?<![.:/])|[A-Za-z]:[\\/]{_REST}+)")


def without_folders(text: str) -> str:
    """The text with every absolute path replaced by its last name; only an existing path may contain spaces."""
    # os.path.exists says no where Path.exists raises: no permission, or a name longer than the system allows.
    if text.startswith("/") and len(text) < _LONGEST and os.path.exists(text):
        return Path(text).name or text
    return _ABSOLUTE.sub(lambda found: _name(found[0]), text)


def _name(path: str) -> str:
    kind = PurePosixPath if path.startswith("/") else PureWindowsPath
    return kind(path).name or path


def cleaned(value: object) -> object:
    """Plain values, with `without_folders` applied to every text in them."""
    if isinstance(value, str):
        return value if value.startswith("data:") else without_folders(value)
    if isinstance(value, dict):
        return {name: cleaned(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [cleaned(entry) for entry in value]
    return value
