"""Places of output directories, checked before any work and without loading what a command needs to work."""

from __future__ import annotations

import fnmatch
import os
import shutil
import tempfile
from collections.abc import Collection
from math import ceil, floor
from pathlib import Path

from iobs.core.files import expanded
from iobs.errors import UnusableOutputError

PARTIAL = ".partial"  # end of the names of temporary folders


def check_output(directory: Path, needed_bytes: int = 0, replaceable: Collection[str] = ()) -> None:
    """Raise, before any work, unless an output directory can be written.

    Args:
        directory: the output directory.
        needed_bytes: approximate size of the output.
        replaceable: names that may already be in the directory and will be replaced.

    Raises:
        UnusableOutputError: the directory is not empty, it or its parent cannot be written, or the disk is too full.
    """
    require_empty(directory, replaceable)
    place = existing(directory)
    if not os.access(place, os.W_OK | os.X_OK):
        raise UnusableOutputError(f"{place} cannot be written; choose another output directory.")
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise UnusableOutputError(
            f"{directory} needs about {ceil(needed_bytes / 1e6)} MB and {place} has {floor(free / 1e6)} MB left; "
            "free some space or choose another output directory."
        )


def names_to_replace(directory: Path, marks: Collection[str], overwrite: bool) -> tuple[str, ...]:
    """Names in an output directory that may be replaced: everything if the user asks for it and iobs wrote it.

    Args:
        directory: the output directory.
        marks: shell patterns of file names; a directory with such a file was written by iobs.
        overwrite: the user allows an existing output.

    Raises:
        UnusableOutputError: the directory is not empty, and `overwrite` is False or no file has a name of `marks`; or
            it is a file, or cannot be read.
    """
    names = _contents(directory)
    if names and not any(fnmatch.filter(names, mark) for mark in marks):
        raise UnusableOutputError(
            f"{directory} is not empty and holds no {' and no '.join(marks)}, so iobs did not write it; remove it "
            "yourself or choose another output directory."
        )
    if names and not overwrite:
        raise UnusableOutputError(
            f"{directory} exists and is not empty; add --overwrite to replace it, or choose another output directory."
        )
    return tuple(names)


def make_folder(output: Path) -> None:
    """Create the results folder before any work, and check that it can be written.

    Raises:
        UnusableOutputError: the folder cannot be created, or no file can be written in it.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        # Write a file instead of asking for permissions: these do not bind the superuser and miss read-only mounts.
        with tempfile.NamedTemporaryFile(dir=output, prefix=".iobs-"):
            pass
    except OSError as error:
        raise UnusableOutputError(
            f"{output} cannot be the folder of the results: no file can be written there ({error.strerror}); "
            "choose another output directory."
        ) from error


def beside(directory: Path, suffix: str) -> Path:
    """The path `directory.suffix` in the same parent folder; "." is resolved to its real name first."""
    here = Path(os.path.abspath(expanded(directory)))
    return here.with_name(f"{here.name}.{suffix}")


def holds(directory: Path, source: Path) -> bool:
    """True if a file or directory exists, and is an output directory or lies inside it."""
    output, path = absolute(directory), absolute(source)
    return path.exists() and (path == output or output in path.parents)


def absolute(directory: Path) -> Path:
    """The absolute path of a directory, links resolved."""
    return Path(os.path.realpath(expanded(directory)))


def existing(folder: str | Path) -> Path:
    """The folder itself, or the nearest of its parents that exists, or the root; "~" is the home folder."""
    path = absolute(Path(folder))
    places = (path, *path.parents)
    return next((place for place in places if place.exists()), places[-1])  # Windows has drives that do not exist


def require_empty(directory: Path, replaceable: Collection[str]) -> None:
    """Raise unless a directory holds nothing but replaceable names and abandoned temporary directories.

    Raises:
        UnusableOutputError: the directory holds something else, is a file, or cannot be read.
    """
    if set(_contents(directory)) - set(replaceable):
        raise UnusableOutputError(f"{directory} exists and is not empty; remove it or choose another output directory.")


def is_partial(entry: Path, name: str) -> bool:
    """True if an entry is a temporary folder of the name `name`."""
    return entry.name.startswith(f".{name}.") and entry.name.endswith(PARTIAL) and entry.is_dir()


def _contents(directory: Path) -> list[str]:
    """Names in a directory, except abandoned temporary directories; empty if it does not exist.

    Raises:
        UnusableOutputError: the directory is a file, or cannot be read.
    """
    target = absolute(directory)
    if not target.is_dir():
        if target.exists() or target.is_symlink():  # still a link after resolving: a circular link
            raise UnusableOutputError(f"{directory} is a file; choose another output directory.")
        return []
    try:
        names = [entry.name for entry in target.iterdir() if not is_partial(entry, target.name)]
    except OSError as error:
        raise UnusableOutputError(f"{directory} cannot be read; choose another output directory.") from error
    if os.path.ismount(target):  # Path.is_mount is missing on Windows before Python 3.12
        names = [name for name in names if name != "lost+found"]  # part of every new ext file system
    return names
