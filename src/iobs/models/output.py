"""Output directories that appear complete or not at all."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from iobs.errors import OutputError

if sys.platform != "win32":
    import fcntl

_PARTIAL = ".partial"


def check_output(directory: Path, needed_bytes: int = 0, replaceable: Collection[str] = ()) -> None:
    """Find out before any work whether an output directory could be written.

    Args:
        directory: the directory to be.
        needed_bytes: what will be written, about.
        replaceable: an existing directory that holds nothing but these names may be replaced.

    Raises:
        OutputError: it exists and is not empty, its parent cannot be written, or the disk has too little room.
    """
    if directory.exists() and not directory.is_dir():
        raise OutputError(f"{directory} is a file; choose another output directory.")
    if directory.is_dir() and {entry.name for entry in directory.iterdir()} - set(replaceable):
        raise OutputError(f"{directory} exists and is not empty; remove it or choose another output directory.")
    parent = _existing_parent(directory)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"{parent} cannot be written; choose another output directory.")
    free = shutil.disk_usage(parent).free
    if free < needed_bytes:
        raise OutputError(
            f"{directory} needs about {needed_bytes / 1e6:.0f} MB and {parent} has {free / 1e6:.0f} MB left; "
            "free some space or choose another output directory."
        )


@contextmanager
def output_directory(directory: Path, replaceable: Collection[str] = ()) -> Iterator[Path]:
    """A temporary sibling to write into, renamed to `directory` at the end, removed on any failure or Ctrl-C.

    What a killed process left of the same output is removed at the start: a living one keeps its sibling locked.

    Raises:
        OutputError: as `check_output`, or the disk filled up while writing.
    """
    check_output(directory, replaceable=replaceable)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(directory)
        temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=_PARTIAL, dir=directory.parent))
        lock = _locked(temporary)
    except OSError as error:
        raise _explained(directory, error) from error
    try:
        yield temporary
        _publish(temporary, directory)
    except (OSError, SafetensorError) as error:
        if isinstance(error, OutputError):
            raise
        raise _explained(directory, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _locked(directory: Path) -> int | None:
    """A handle that holds a directory's lock; None where another process holds it, or there are no such locks."""
    if sys.platform == "win32":
        return None
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _remove_abandoned(directory: Path) -> None:
    for entry in directory.parent.iterdir():
        if entry.name.startswith(f".{directory.name}.") and entry.name.endswith(_PARTIAL) and entry.is_dir():
            handle = _locked(entry)
            if handle is not None:
                shutil.rmtree(entry, ignore_errors=True)
                os.close(handle)


def _publish(temporary: Path, directory: Path) -> None:
    # The temporary directory, and the weights that safetensors writes, start out readable by their owner alone.
    mask = _umask()
    temporary.chmod(0o777 & ~mask)
    for file in temporary.rglob("*"):
        file.chmod((0o777 if file.is_dir() else 0o666) & ~mask)
    if directory.exists():
        # Moved aside first, so that even a replaced directory is at every moment the old one, none, or the new one.
        old = temporary / ".replaced"
        directory.rename(old)
        shutil.rmtree(old)
    temporary.rename(directory)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _existing_parent(directory: Path) -> Path:
    for parent in directory.absolute().parents:
        if parent.exists():
            return parent
    return Path("/")


def _explained(directory: Path, error: Exception) -> OutputError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return OutputError(f"{directory} could not be written ({reason}); nothing was left behind.")
