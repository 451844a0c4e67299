"""Tensors in files that are mapped into memory, so that they take no anonymous memory."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import torch
from torch import Tensor


def reserve(file: Path, size: int) -> None:
    """Create a file of `size` bytes with its space on the disk reserved.

    Without the reservation, writing into a mapped file kills the process if the disk is full.

    Raises:
        OSError: the disk is full.
    """
    with file.open("wb") as opened:
        if sys.platform != "linux" or not size:
            return
        try:
            os.posix_fallocate(opened.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # raised by file systems without reservations
                raise


def spilled(file: Path, hidden: Tensor) -> Tensor:
    """A copy of a tensor in a file that is mapped into memory, so that it takes no anonymous memory."""
    reserve(file, hidden.numel() * hidden.element_size())
    kept = torch.from_file(str(file), shared=True, size=hidden.numel(), dtype=hidden.dtype)
    return kept.reshape(hidden.shape).copy_(hidden)
