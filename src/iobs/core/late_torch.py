"""torch, loaded at its first use: it takes seconds to load, and a regression on NumPy arrays does not need it."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, TypeGuard

__all__ = ["is_tensor", "torch"]

if TYPE_CHECKING:
    import torch
else:

    class _LateModule:
        """The module torch, loaded when an attribute of it is read."""

        def __getattr__(self, name: str) -> object:
            return getattr(import_module("torch"), name)

    torch = _LateModule()


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Check for a tensor without loading torch: where it is not loaded, nothing is a tensor."""
    return "torch" in sys.modules and isinstance(value, torch.Tensor)
