"""float16 on a CPU, where its arithmetic is extremely slow: computed in float32, and written as float16 again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

# The names of what was float16, by network.
_HALVES: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


def widen(module: nn.Module) -> None:
    """Make float16 parameters and buffers float32, and remember which they were."""
    halves = {name: tensor for name, tensor in _tensors(module) if tensor.dtype == torch.float16}
    for tensor in halves.values():
        tensor.data = tensor.data.float()
    _HALVES[module] = frozenset(halves)


@contextmanager
def stored_as_half(module: nn.Module) -> Iterator[None]:
    """What was widened in float16 while it is written; it keeps the rounded values, which are what was written."""
    widened = [*_widened(module)]
    for tensor in widened:
        tensor.data = tensor.data.half()
    try:
        yield
    finally:
        for tensor in widened:
            tensor.data = tensor.data.float()


def bytes_saved(module: nn.Module) -> int:
    """How much smaller what was widened is in the files."""
    return sum(tensor.nbytes - 2 * tensor.numel() for tensor in _widened(module))


def _widened(module: nn.Module) -> Iterator[Tensor]:
    """What was widened and has stayed so: whoever has converted the network since wants it as it is."""
    halves = _HALVES.get(module, frozenset())
    return (tensor for name, tensor in _tensors(module) if name in halves and tensor.dtype == torch.float32)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
