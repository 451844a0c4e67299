"""Output files of one command: complete, or absent after a failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from iobs.errors import OutputError


@contextmanager
def complete_or_absent(file: Path) -> Iterator[None]:
    """Remove `file` if the block fails after it began to write; a file that it has not touched stays.

    Raises:
        OutputError: the file cannot be written.
    """
    before = _state(file)
    try:
        yield
    except BaseException as error:
        if file.is_file() and _state(file) != before:  # a device or a pipe is no regular file
            with suppress(OSError):
                file.unlink()
        if isinstance(error, OSError):
            raise OutputError(f"Cannot write {file}: {error.strerror or error}.") from error
        raise


def _state(file: Path) -> tuple[int, int] | None:
    """Time of the last change in nanoseconds and size in bytes; None for a file that does not exist."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
