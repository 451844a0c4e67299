"""Temporary folders for large files, on the disk that a run or a command writes to."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from math import ceil, floor
from pathlib import Path

from safetensors import SafetensorError

from iobs.core.outputs import PARTIAL, existing, is_partial
from iobs.errors import OutputError

if sys.platform != "win32":
    import fcntl


@contextmanager
def scratch_folder(folder: Path | None, name: str = "iobs", needed_bytes: int = 0) -> Iterator[Path]:
    """Yield a locked temporary folder `.NAME.*.partial`, which is removed at the end.

    The default folder for temporary files is often small, or lies in main memory. It is used only if `folder` is None
    or cannot be written. Folders of the same name that killed processes left in `folder` are removed first.

    Args:
        folder: where the temporary folder is created; the nearest existing parent if it does not exist.
        name: part of its name.
        needed_bytes: size of the files that will be written.

    Raises:
        OutputError: the disk has too little room, or became full.
    """
    place = Path(tempfile.gettempdir()) if folder is None else existing(folder)
    with ExitStack() as stack:
        try:
            remove_abandoned(place, name)
            scratch = stack.enter_context(locked_folder(place, name))
        except OSError:
            place = Path(tempfile.gettempdir())
            scratch = stack.enter_context(locked_folder(place, name))
        try:
            require_free(place, needed_bytes)
            yield scratch
        except (OSError, SafetensorError) as error:
            if isinstance(error, OutputError) or not _is_full(error):
                raise
            raise OutputError(
                f"The disk of {place}, which holds temporary files, became full; free some space."
            ) from error


@contextmanager
def locked_folder(place: Path, name: str) -> Iterator[Path]:
    """Yield a new locked folder `.NAME.*.partial` in `place`, which is removed at the end.

    Raises:
        OSError: it cannot be created.
    """
    folder, handle = _make_locked(place, name)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def _is_full(error: Exception) -> bool:
    """True if an error says that the disk is full; that of safetensors says so in words."""
    code = error.errno if isinstance(error, OSError) else None
    return code in (errno.ENOSPC, errno.EDQUOT) or f"os error {errno.ENOSPC}" in str(error)


def require_free(place: Path, needed_bytes: int) -> None:
    """Raise unless a disk has room for temporary files.

    Args:
        place: an existing folder on it.
        needed_bytes: size of the files.

    Raises:
        OutputError: the disk has too little room.
    """
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise OutputError(
            f"Temporary files need about {ceil(needed_bytes / 1e6)} MB, and {place} has {floor(free / 1e6)} MB left; "
            "free some space there, or work on another disk."
        )


def remove_abandoned(place: Path, name: str) -> None:
    """Remove the temporary folders of a name that killed processes left in `place`.

    Raises:
        OSError: `place` cannot be read.
    """
    for entry in place.iterdir():
        if is_partial(entry, name):
            with suppress(OSError):  # belongs to a running process, or to another user
                handle = lock_folder(entry)
                if handle is not None:
                    shutil.rmtree(entry, ignore_errors=True)
                    os.close(handle)


def _make_locked(place: Path, name: str) -> tuple[Path, int | None]:
    """A new temporary folder and its lock.

    Raises:
        OSError: it cannot be created.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=PARTIAL, dir=place))
        try:
            handle = lock_folder(folder)
        except (BlockingIOError, FileNotFoundError):  # another process has taken it for abandoned, before it was locked
            continue
        except OSError:  # as when too many files are open: another folder could not be locked either
            folder.rmdir()
            raise
        if folder.is_dir():
            return folder, handle
        if handle is not None:
            os.close(handle)


def lock_folder(directory: Path) -> int | None:
    """Lock a directory; returns the file handle that holds the lock, or None if the system has no such locks.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the directory cannot be opened.
    """
    if sys.platform == "win32":
        return None
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return handle
