"""The line of code that gives a tensor a size which removed units would change, such as `x.view(-1, 256)`."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import iobs

_SIZED = {
    *(Tensor.view, Tensor.reshape, torch.reshape, Tensor.unflatten, torch.unflatten, Tensor.expand),
    *(Tensor.split, torch.split, Tensor.narrow, torch.narrow),
}
_LIBRARIES = tuple(Path(each.__path__[0]) for each in (torch, iobs))  # whose lines no user changes


class FixedSizes(TorchFunctionMode):
    """Finds the last call, while it is active, with a size that is a multiple of a number of units.

    Args:
        count: the number of units.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.line = count, ""

    def __torch_function__(
        self, function: Callable[..., object], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        """Look at the sizes of a call, and call."""
        if function in _SIZED:
            sizes = _whole_numbers((args[1:], kwargs or {}))
            if any(size >= self.count and size % self.count == 0 for size in sizes):
                self.line = _line_of_code() or self.line
        return function(*args, **(kwargs or {}))


def _whole_numbers(values: Any) -> Iterator[int]:
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, tuple | list):
        for value in values:
            yield from _whole_numbers(value)
    elif type(values) is int:
        yield values


def _line_of_code() -> str:
    """Place and text of the innermost line that runs and is no line of torch or iobs; "" without one."""
    for frame in reversed(traceback.extract_stack()):
        file = Path(frame.filename)
        if not any(file.is_relative_to(folder) for folder in _LIBRARIES):
            text = f": {frame.line}" if frame.line else ""
            return f"{file.name}, line {frame.lineno}{text}"
    return ""
