"""Make torchvision importable if its compiled operators do not match this torch.

The torchvision wheel of the public registry is a CUDA build. Beside a CPU build of torch its import raises
``RuntimeError: operator torchvision::nms does not exist``. Every import of timm and of every transformers model then
raises it too. Declaring the two operators that torchvision registers shapes for at import is enough; only detection
operators (non-maximum suppression) stay unusable.
"""

from __future__ import annotations

import functools
import importlib
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import torch

from iobs.errors import ModelError, first_line

State = Literal["native", "shimmed", "absent"]


def ensure_torchvision() -> State:
    """Import torchvision if it is installed; if the import fails for missing operators, declare them.

    Raises:
        ModelError: torchvision is for another release of torch, and more than its operators is missing.
    """
    error = _failure()
    if isinstance(error, ModuleNotFoundError) and error.name == "torchvision":
        return "absent"
    if error is not None and "torchvision::" in str(error):
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        _declared_operators()
        error = _failure()
    if error is not None:
        raise _misfit(error) from error
    return "shimmed" if _declared_operators.cache_info().currsize else "native"


def _failure() -> Exception | None:
    """Import torchvision; the error that this raises, or None."""
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError, AttributeError, OSError) as error:
        return error
    return None


def _misfit(error: Exception) -> ModelError:
    try:
        release = version("torchvision")
    except PackageNotFoundError:
        release = "(of unknown release)"
    return ModelError(
        f"torchvision {release} does not fit torch {torch.__version__} ({first_line(error)}). Install the torchvision "
        "that was made for this torch, from the same place as torch, or uninstall torchvision."
    )


@functools.cache
def _declared_operators() -> torch.library.Library:
    """Declare the missing operators. The declarations last as long as the returned object, so it is cached."""
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    return library
