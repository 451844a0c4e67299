"""Output directories that appear complete or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from math import ceil, floor
from pathlib import Path

from safetensors import SafetensorError

from iobs.errors import OutputError
from iobs.prune.checkpoint import locked

_PARTIAL = ".partial"


def check_output(directory: Path, needed_bytes: int = 0, replaceable: Collection[str] = ()) -> None:
    """Find out before any work whether an output directory could be written.

    Args:
        directory: the directory to be.
        needed_bytes: what will be written, about.
        replaceable: an existing directory that holds nothing but these names may be replaced.

    Raises:
        OutputError: it exists and is not empty, it or its parent cannot be written, or the disk has too little room.
    """
    _require_empty(directory, replaceable)
    target = _target(directory)
    place = target if target.is_dir() else _existing_parent(target)
    if not os.access(place, os.W_OK | os.X_OK):
        raise OutputError(f"{place} cannot be written; choose another output directory.")
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise OutputError(
            f"{directory} needs about {ceil(needed_bytes / 1e6)} MB and {place} has {floor(free / 1e6)} MB left; "
            "free some space or choose another output directory."
        )


@contextmanager
def output_directory(directory: Path, replaceable: Collection[str] = ()) -> Iterator[Path]:
    """A temporary directory to write into, which becomes `directory` at the end and is removed on failure or Ctrl-C.

    A new directory appears by one renaming. One that exists already may be a mount point, the current directory or
    what a link leads to, none of which can be renamed: it stays, and what was written is moved into it at the end.
    What a killed process left of the same output is removed at the start: a living one keeps its directory locked.

    Raises:
        OutputError: as `check_output`, or the disk filled up while writing.
    """
    check_output(directory, replaceable=replaceable)
    target = _target(directory)
    place = target if target.is_dir() else target.parent
    try:
        place.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(place, target.name)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=_PARTIAL, dir=place))
        lock = locked(temporary)
    except OSError as error:
        raise _explained(directory, error) from error
    try:
        yield temporary
        _make_readable(temporary)
        if place == target:
            _require_empty(directory, replaceable)  # another process may have been quicker
            _move_up(temporary, target)
        else:
            temporary.rename(target)
    except (OSError, SafetensorError) as error:
        if isinstance(error, OutputError):
            raise
        raise _explained(directory, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def make_folder(output: Path) -> None:
    """Make the folder of the results before any work.

    Raises:
        OutputError: it cannot be made, or nothing can be written there.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        # Permissions do not tell of every place that takes no files, and nothing binds the superuser: try it.
        with tempfile.NamedTemporaryFile(dir=output, prefix=".iobs-"):
            pass
    except OSError as error:
        raise OutputError(
            f"{output} cannot be the folder of the results: no file can be written there ({error.strerror}); "
            "choose another output directory."
        ) from error


def beside(directory: Path, suffix: str) -> Path:
    """A directory's neighbour: its own name, a dot and the suffix; "." has a name too, if not of its own."""
    here = Path(os.path.abspath(expanded(directory)))
    return here.with_name(f"{here.name}.{suffix}")


def expanded(path: str | Path) -> Path:
    """A path whose "~" is the home folder, also where no shell has seen it; kept as it is where there is no home."""
    return Path(os.path.expanduser(path))


def _target(directory: Path) -> Path:
    """The directory itself, in full, where a link leads to it."""
    return Path(os.path.realpath(expanded(directory)))


def _require_empty(directory: Path, replaceable: Collection[str]) -> None:
    """Refuse a directory that holds anything but what may be replaced and what is no one's.

    Raises:
        OutputError: it does, or it is a file, or cannot be looked into.
    """
    target = _target(directory)
    if not target.is_dir():
        if target.exists() or target.is_symlink():  # still a link: one that leads round in a circle
            raise OutputError(f"{directory} is a file; choose another output directory.")
        return
    try:
        names = [entry.name for entry in target.iterdir() if not _is_partial(entry, target.name)]
    except OSError as error:
        raise OutputError(f"{directory} cannot be read; choose another output directory.") from error
    if target.is_mount():
        names = [name for name in names if name != "lost+found"]  # which new file systems come with
    if set(names) - set(replaceable):
        raise OutputError(f"{directory} exists and is not empty; remove it or choose another output directory.")


def _is_partial(entry: Path, name: str) -> bool:
    """Whether this is the temporary directory of an output of that name."""
    return entry.name.startswith(f".{name}.") and entry.name.endswith(_PARTIAL) and entry.is_dir()


def _remove_abandoned(place: Path, name: str) -> None:
    for entry in place.iterdir():
        if _is_partial(entry, name):
            with suppress(OSError):  # of a living process, or of another user
                handle = locked(entry)
                if handle is not None:
                    shutil.rmtree(entry, ignore_errors=True)
                    os.close(handle)


def _make_readable(temporary: Path) -> None:
    """The temporary directory, and the weights that safetensors writes, start out readable by their owner alone."""
    mask = _umask()
    with suppress(PermissionError):  # a file system that knows no such modes
        temporary.chmod(0o777 & ~mask)
        for file in temporary.rglob("*"):
            file.chmod((0o777 if file.is_dir() else 0o666) & ~mask)


def _move_up(temporary: Path, directory: Path) -> None:
    """Put what was written into the directory around it, in place of what may be replaced; all of it or nothing."""
    new = sorted(temporary.iterdir())
    old = temporary / ".replaced"
    old.mkdir()
    moved: list[tuple[Path, Path]] = []
    try:
        for entry in [*directory.iterdir()]:
            if not _is_partial(entry, directory.name) and entry.name != "lost+found":
                moved.append((entry, entry.rename(old / entry.name)))
        for entry in new:
            moved.append((entry, entry.rename(directory / entry.name)))
    except BaseException:
        for before, after in reversed(moved):
            after.rename(before)
        raise


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
