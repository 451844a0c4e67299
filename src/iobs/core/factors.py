"""Factorisations of one Hessian, shared by its problems: q, k and v, or several sparsities of one layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

Value = TypeVar("Value")


class Factors:
    """What was computed from one Hessian, by name.

    Args:
        keep: store what is computed. One problem alone asks for everything once, and memory is better used.
    """

    def __init__(self, keep: bool = False) -> None:
        self.keep = keep
        self._values: dict[Hashable, Any] = {}

    def get(self, name: Hashable, compute: Callable[[], Value]) -> Value:
        """The value of that name, computed now unless it is there. Nobody may change it in place."""
        if name in self._values:
            return cast(Value, self._values[name])
        value = compute()
        if self.keep:
            self._values[name] = value
        return value
