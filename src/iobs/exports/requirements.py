"""Optional packages of the exports, imported when a target needs them."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, TypeAlias

from iobs.errors import ModelError

Foreign: TypeAlias = Any  # an object of such a package, or of transformers


def needed(package: str, target: str) -> ModuleType:
    """Import a package that a target is written with.

    Args:
        package: name to import, such as "onnx".
        target: name of the target, for the message.

    Raises:
        ModelError: the package is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] != package.partition(".")[0]:
            raise  # the package is there, but is broken
        missing = package.partition(".")[0]
        extra = "export-coreml" if target == "coreml" else "export"
        raise ModelError(
            f"An export to {target} needs {missing}, which is not installed; run: pip install 'iobs[{extra}]'"
        ) from error
