"""Imports at the first use: of torch, and of the public names of a package; objects of libraries that are imported.

torch takes seconds to load, and a regression on NumPy arrays does not need it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeGuard

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


def library_object(module: str, name: str) -> Any:
    """An object of a library by its name; None if the module is not imported, so that no model uses it."""
    loaded = sys.modules.get(module)
    return None if loaded is None else getattr(loaded, name)


def library_class(module: str, name: str) -> tuple[type, ...]:
    """A class of a library as a tuple for isinstance; empty if the module is not imported."""
    kind = library_object(module, name)
    return () if kind is None else (kind,)


def lazy_names(
    package: str, file: str, rooms: Iterable[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Make `__getattr__`, `__dir__` and `__all__` of a package, whose names are imported on first use.

    Its stub, `__init__.pyi`, is the list: a line `from HOME import NAME as NAME` for each public name. Type checkers
    and editors read the same file. A pattern finds its lines, because `import ast` takes long.

    Args:
        package: `__name__` of the package.
        file: `__file__` of the package; its stub lies beside it.
        rooms: subpackages that are imported on first use too, and are not in `__all__`.
    """
    with open(f"{file.removesuffix('.py')}.pyi", encoding="utf8") as stub:
        homes = {name: home for home, name in re.findall(r"^from (\S+) import (\w+) as \2$", stub.read(), re.MULTILINE)}
    public = list(homes)
    homes |= dict.fromkeys(rooms, package)

    def __getattr__(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:
            return import_module(f"{package}.{name}")
        value = getattr(__import__(homes[name], fromlist=[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return [*public, *{"__version__"}.intersection(vars(sys.modules[package]))]

    return __getattr__, __dir__, public
