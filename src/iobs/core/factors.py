"""Cache of the factorisations of one Hessian.

Problems with one Hessian share it: the q, k and v layers of attention, or one layer at several sparsities.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar, cast

Value = TypeVar("Value")


class Factors:
    """Cache of values computed from one Hessian, by name.

    Args:
        keep: store computed values. False for a single problem: it needs each value once, and storing costs memory.
    """

    def __init__(self, keep: bool = False) -> None:
        self.keep = keep
        self._values: dict[Hashable, object] = {}

    def get(self, name: Hashable, compute: Callable[[], Value]) -> Value:
        """Return the stored value of `name`, or compute it. The caller must not change the value in place."""
        if name in self._values:
            return cast(Value, self._values[name])
        value = compute()
        if self.keep:
            self._values[name] = value
        return value
