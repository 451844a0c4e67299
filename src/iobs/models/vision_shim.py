"""Make torchvision importable if its compiled operators do not match this torch.

The torchvision wheel of the public registry is a CUDA build. Beside a CPU build of torch its import raises
``RuntimeError: operator torchvision::nms does not exist``, and with it every import of timm and of every transformers
model. Declaring the two operators that torchvision registers shapes for at import is enough; only detection
operators (non-maximum suppression) stay unusable.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Literal

import torch

State = Literal["native", "shimmed", "absent"]


def ensure_torchvision() -> State:
    """Import torchvision if it is installed; if the import fails for missing operators, declare them."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return "absent"
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    else:
        return "shimmed" if _declared_operators.cache_info().currsize else "native"
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    _declared_operators()
    importlib.import_module("torchvision")

    return "shimmed"


@functools.cache
def _declared_operators() -> torch.library.Library:
    """Declare the missing operators. The declarations last as long as the returned object, so it is cached."""
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    return library
