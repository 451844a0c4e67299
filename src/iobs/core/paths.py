"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | Path) -> Path:
    """Expand "~" to the home folder; unchanged without such a folder, for which `Path.expanduser` raises."""
    return Path(os.path.expanduser(path))
