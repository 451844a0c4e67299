"""Silence of libraries that report on a standard stream, by warnings and in a log."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO


@contextmanager
def silenced(
    library: str,
    level: int = logging.ERROR,
    redirect: type[redirect_stdout[StringIO]] | type[redirect_stderr[StringIO]] = redirect_stdout,
) -> Iterator[None]:
    """Context without the progress and the warnings of a library; its errors are raised.

    Args:
        library: name of its logger.
        level: least level that it still logs.
        redirect: of the standard stream that it writes to.
    """
    logger = logging.getLogger(library)
    before = logger.level
    logger.setLevel(level)
    try:
        with warnings.catch_warnings(), redirect(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
