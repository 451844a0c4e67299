"""Tell transformers how to read packed directories, as soon as it is loaded and not before.

`import iobs` must not load transformers, which takes seconds, and transformers has no list of plugins that it reads. So
an entry of `sys.meta_path` waits for the module that holds the table of quantisers. Where it is loaded already, the
quantiser (`iobs.quantizer`) is registered at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_TABLE = "transformers.quantizers.auto"


def register() -> None:
    """Register the quantiser now, or when transformers loads its table of quantisers."""
    if _TABLE in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Waiting())


class _Waiting:
    """A finder that finds only the table, by the other finders, and registers the quantiser behind its loading."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _TABLE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register() -> None:
    try:
        import_module("iobs.quantizer")
    except ImportError:  # a transformers without such a table: everything else works
        return
