"""float16 models on a CPU: computed in float32, since float16 arithmetic is very slow there, saved as float16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

# Names of the tensors that were float16, by network.
_HALVES: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


def widen(module: nn.Module) -> None:
    """Convert float16 parameters and buffers to float32, and remember their names."""
    halves = {name: tensor for name, tensor in _tensors(module) if tensor.dtype == torch.float16}
    for tensor in halves.values():
        tensor.data = tensor.data.float()
    _HALVES[module] = frozenset(halves)


@contextmanager
def stored_as_half(module: nn.Module) -> Iterator[None]:
    """Convert widened tensors to float16 while they are saved. Afterwards they keep the rounded, saved values."""
    widened = [*_widened(module)]
    for tensor in widened:
        tensor.data = tensor.data.half()
    try:
        yield
    finally:
        for tensor in widened:
            tensor.data = tensor.data.float()


def bytes_saved(module: nn.Module) -> int:
    """Bytes that saving the widened tensors as float16 saves."""
    return sum(tensor.nbytes - 2 * tensor.numel() for tensor in _widened(module))


def _widened(module: nn.Module) -> Iterator[Tensor]:
    """Tensors converted from float16 that are still float32; tensors the user has converted again are left alone."""
    halves = _HALVES.get(module, frozenset())
    return (tensor for name, tensor in _tensors(module) if name in halves and tensor.dtype == torch.float32)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
