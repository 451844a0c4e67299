"""Peak memory of this process: anonymous resident pages (mapped files do not count), and the device's own peak."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


class MemoryWatch:
    """Remembers the largest resident memory that was seen at the moments it was asked to look."""

    def __init__(self) -> None:
        self.peak = 0
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.look()

    def look(self) -> int:
        """Measure now; returns bytes."""
        self.peak = max(self.peak, _resident())
        if torch.cuda.is_available():
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())
        return self.peak


def _resident() -> int:
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
