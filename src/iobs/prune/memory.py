"""Peak memory of this process: anonymous resident pages (mapped files do not count), or the device's own peak."""

from __future__ import annotations

import ctypes
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_INTERVAL = 0.02  # seconds between two looks
_MMAP_THRESHOLD = -3  # mallopt's number for: blocks from this size on are mapped one by one


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
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):  # other C libraries have no such switch
            ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)


def resident() -> int:
    """Anonymous resident memory now, in bytes; the largest resident memory where the system does not tell."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
