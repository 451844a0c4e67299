"""Models whose units cannot be found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from iobs.errors import ModelError, first_line, is_out_of_memory
from iobs.pruning.samples import batches


@contextmanager
def refused(reason: str) -> Iterator[None]:
    """Say why units cannot be found if the model fails inside, and what to do.

    Raises:
        ModelError: the model failed, but not for want of memory.
    """
    try:
        yield
    except batches.REFUSALS as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"Units cannot be found: {reason} ({type(error).__name__}: {first_line(error)}). Prune entries instead: "
            "Unstructured or NM."
        ) from error
