"""Threads of linear algebra: one for small systems."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

from threadpoolctl import ThreadpoolController

_ONE_THREAD = 4_000_000  # most entries of a design for which linear algebra uses a single thread


@cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


def few_threads(entries: int) -> AbstractContextManager[object]:
    """A context in which linear algebra uses one thread if a design has few entries.

    On small systems threads only wait for each other; on a busy machine they are a hundred times slower.
    """
    libraries = _blas().lib_controllers
    if entries > _ONE_THREAD or all(library.num_threads == 1 for library in libraries):
        return nullcontext()
    limited: AbstractContextManager[object] = _blas().limit(limits=1)
    return limited
