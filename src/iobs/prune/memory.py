"""Peak memory of this process: anonymous resident pages (mapped files do not count), or its GPU's if that is more."""

from __future__ import annotations

import ctypes
import os
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
# glibc's mallopt: its numbers, and sizes of blocks that are mapped one by one and of free memory at the heap's end that
# is returned: where glibc's own adaptation ends, and what is wanted here.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_USUAL, _GIVING, _KEEPING = (32 << 20, 64 << 20), (1 << 20, 2 << 20), (1 << 30, -1)  # bytes; -1: never
_thresholds = _USUAL  # now; glibc cannot be asked


class MemoryWatch:
    """Remembers the largest memory that was seen: resident, at the moments it was asked to look, or allocated on a GPU.

    Args:
        device: where the network lies. Only of a CUDA device is CUDA asked anything.
    """

    def __init__(self, device: torch.device) -> None:
        self.peak, self.device = 0, device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self.look()

    def look(self) -> int:
        """Measure now; returns the peak so far in bytes."""
        self.peak = max(self.peak, resident())
        if self.device.type == "cuda":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated(self.device))
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


@contextmanager
def giving_memory_back() -> Iterator[None]:
    """Return freed tensors to the system at once, where the C library can be told to; at the end it is as it was.

    By itself glibc keeps blocks of up to 32 MB, which is what the middling tensors of a block take: hundreds of
    megabytes that nothing uses.
    """
    with _thresholds_of(_GIVING):
        yield


@contextmanager
def reusing_memory() -> Iterator[None]:
    """Keep what is freed for the next tensor, where the C library can be told to; at the end it is as it was.

    For loops over a network that is in memory whole. By itself glibc gives the activations of a convolutional network
    back to the system after each use, and the system clears them page by page for the next: on MobileNet at 224
    pixels and 32 pictures that is half of the time of a gradient.
    """
    before = _thresholds
    try:
        with _thresholds_of(_KEEPING):
            yield
    finally:
        if (library := _glibc()) is not None and before != _KEEPING:
            library.malloc_trim(0)


@contextmanager
def _thresholds_of(sizes: tuple[int, int]) -> Iterator[None]:
    before = _thresholds
    _set_thresholds(sizes)
    try:
        yield
    finally:
        _set_thresholds(before)


def _set_thresholds(sizes: tuple[int, int]) -> None:
    global _thresholds
    if (library := _glibc()) is not None:
        if not library.mallopt(_MMAP_THRESHOLD, sizes[0]):
            library.mallopt(_MMAP_THRESHOLD, _USUAL[0])  # the most that older releases take
        library.mallopt(_TRIM_THRESHOLD, sizes[1])
        _thresholds = sizes


@cache
def _glibc() -> ctypes.CDLL | None:
    """The C library, where it has the switches and the user has not set them."""
    if sys.platform != "linux" or any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
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
