"""Peak memory of this process: anonymous resident pages (mapped files do not count), or the device's own peak."""

from __future__ import annotations

import ctypes
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_INTERVAL = 0.02  # seconds between two looks
# glibc's mallopt, its numbers and where its own adaptation ends: blocks from the first size on are mapped one by one,
# and free memory at the heap's end is returned from the second size on.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_USUAL, _SMALL, _LARGE = 32 << 20, 1 << 20, 1 << 30  # bytes


class MemoryWatch:
    """Remembers the largest resident memory that was seen at the moments it was asked to look."""

    def __init__(self) -> None:
        self.peak = 0
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.look()

    def look(self) -> int:
        """Measure now; returns the peak so far in bytes."""
        self.peak = max(self.peak, resident())
        if torch.cuda.is_available():
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())
        return self.peak

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look all the time from a thread, so that what comes and goes inside a solve is seen too."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(_INTERVAL):
                self.look()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def give_back_what_is_freed() -> None:
    """Have the C library return freed tensors to the system at once, where it is one that can be told to.

    By itself glibc keeps blocks of up to 32 MB, which is what the middling tensors of a block take: hundreds of
    megabytes that nothing uses.
    """
    _set_thresholds(_SMALL, 2 * _SMALL)


@contextmanager
def reusing_memory() -> Iterator[None]:
    """Keep what is freed for the next tensor, where the C library can be told to; all of it is returned at the end.

    For loops over a network that is in memory whole. By itself glibc gives the activations of a convolutional network
    back to the system after each use, and the system clears them page by page for the next: on MobileNet at 224
    pixels and 32 pictures that is half of the time of a gradient.
    """
    _set_thresholds(_LARGE, -1)
    try:
        yield
    finally:
        _set_thresholds(_USUAL, 2 * _USUAL)
        if (library := _glibc()) is not None:
            library.malloc_trim(0)


def _set_thresholds(mapped: int, trimmed: int) -> None:
    if (library := _glibc()) is not None:
        library.mallopt(_MMAP_THRESHOLD, mapped)
        library.mallopt(_TRIM_THRESHOLD, trimmed)


@cache
def _glibc() -> ctypes.CDLL | None:
    """The C library, where it has the switches."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def resident() -> int:
    """Anonymous resident memory now, in bytes; the largest resident memory where the system does not tell."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
