"""Peak memory of this process, and the thresholds of its allocator.

Memory is anonymous resident memory (mapped files do not count), or memory allocated on the GPU if that is more.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from iobs.core.memory import available, resident

_MAPS = Path("/proc/self/maps")
_INTERVAL = 0.02  # seconds between two measurements
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
# First: bytes from which a block is mapped on its own. Second: bytes of free memory at the end of the heap that are
# returned to the system (-1: never). The defaults are the values at which glibc's own adaptation ends.
_DEFAULT, _RETURN, _REUSE = (32 << 20, 64 << 20), (1 << 20, 2 << 20), (1 << 30, -1)
_thresholds = _DEFAULT  # the current values, which glibc does not report


class MemoryWatch:
    """Record the peak memory: resident memory at each measurement, or memory allocated on a GPU.

    Args:
        device: of the model. CUDA is used only if this is a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.peak, self.device = 0, device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self.look()

    def look(self) -> int:
        """Measure now; returns the peak so far, in bytes."""
        self.peak = max(self.peak, resident())
        if self.device.type == "cuda":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated(self.device))
        return self.peak

    @property
    def on_device(self) -> int | None:
        """The peak of the memory allocated on a GPU alone; None for other devices."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure continuously from a thread, to include memory that is freed again within a solve."""
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
    """Return freed tensors to the system at once, if the C library is glibc; the thresholds are restored on exit.

    By default glibc keeps freed blocks of up to 32 MB. Tensors of that size add up to hundreds of unused megabytes.
    """
    with _thresholds_of(_RETURN):
        yield


@contextmanager
def reusing_memory() -> Iterator[None]:
    """Reuse freed memory for the next tensor, if the C library is glibc; the thresholds are restored on exit.

    For loops over a model that is entirely in memory. By default glibc returns the activations of a convolutional model
    to the system after each use, and the system clears every page again. On MobileNet (224 pixels, 32 images) this is
    half of the time of a gradient.

    Inside `giving_memory_back` it does nothing: later tensors would fill the gaps that it leaves in the heap, whose
    pages stay resident when they are freed.
    """
    before = _thresholds
    if before == _RETURN:
        yield
        return
    try:
        with _thresholds_of(_REUSE):
            yield
    finally:
        if before != _REUSE:
            give_back()


def give_back() -> None:
    """Return the pages that freed tensors have left in the heap to the system, if the C library is glibc."""
    if (library := _glibc()) is not None:
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
            library.mallopt(_MMAP_THRESHOLD, _DEFAULT[0])  # the maximum of older releases
        library.mallopt(_TRIM_THRESHOLD, sizes[1])
        _thresholds = sizes


@cache
def _glibc() -> ctypes.CDLL | None:
    """The C library, if it has `mallopt` and no environment variable of the user configures it; otherwise None."""
    if sys.platform != "linux" or any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def mapped_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors in main memory that lie in mapped files; pages that are written become memory of the process.

    0 where the system does not say.
    """
    if not _MAPS.exists():
        return 0
    ranges = []
    for line in _MAPS.read_text(encoding="utf8", errors="replace").splitlines():
        bounds, _, _, _, number, *_ = line.split(maxsplit=5)
        if number != "0":
            start, _, end = bounds.partition("-")
            ranges.append((int(start, 16), int(end, 16)))
    ranges.sort()
    starts = [start for start, _ in ranges]
    in_files = 0
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.numel():
            place = bisect_right(starts, tensor.data_ptr()) - 1
            in_files += tensor.nbytes if place >= 0 and tensor.data_ptr() < ranges[place][1] else 0
    return in_files


def reachable(device: torch.device) -> int:
    """Memory of a device that this process has or can take, in bytes; 0 where the system does not say."""
    if device.type == "cuda":
        return free_on(device) + torch.cuda.memory_allocated(device)
    free = available()
    return free + resident() if free else 0


def free_on(gpu: torch.device) -> int:
    """Memory of a GPU that new tensors of this process can take, in bytes."""
    kept = torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)  # freed blocks, for the next tensors
    return torch.cuda.mem_get_info(gpu)[0] + kept
