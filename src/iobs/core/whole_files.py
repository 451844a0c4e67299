"""Output files of one command: complete, or as they were before it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from iobs.errors import OutputError


@contextmanager
def replaced(file: Path) -> Iterator[Path]:
    """Yield a temporary path beside `file` that replaces it on success and is removed on failure or Ctrl-C.

    A device, a pipe and the standard output are yielded themselves, and so is a file whose folder takes no new files.

    Raises:
        OSError: the file cannot be written.
    """
    target = file.resolve()  # the file of a link is replaced, not the link
    beside = target.with_name(f".{target.stem[:100]}.{os.getpid()}{target.suffix}")  # savefig reads the suffix
    replaceable = file.is_file() and os.access(target.parent, os.W_OK) and file.parent != Path("/dev")
    if file.exists() and not replaceable:
        target = beside = file
    try:
        yield beside
        if beside != target:
            if target.exists():
                shutil.copymode(target, beside)
            beside.replace(target)
    except BaseException:
        if beside != target:
            with suppress(OSError):
                beside.unlink()
        raise


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """Yield the path of `replaced`.

    Raises:
        OutputError: the file cannot be written.
    """
    try:
        with replaced(file) as written:
            yield written
    except OSError as error:
        raise OutputError(f"Cannot write {file}: {error.strerror or error}.") from error
