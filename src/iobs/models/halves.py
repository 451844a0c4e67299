"""16-bit models on a CPU without fast instructions for them: computed in float32, saved in their own dtype.

That is float16 on every CPU, and bfloat16 where the CPU has no instructions for it. There a product in bfloat16 takes
torch five times as long as in float32, and its gradient some hundred times as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

_INSTRUCTIONS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16"),
}

# The dtypes that tensors had in 16 bits by name, by network.
_HALVES: WeakKeyDictionary[nn.Module, dict[str, torch.dtype]] = WeakKeyDictionary()


def native(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype itself, or float32 on a CPU without instructions for it."""
    if device.type != "cpu" or stored not in _INSTRUCTIONS:
        return stored
    able = torch.cpu.get_capabilities()
    return stored if any(able.get(name) for name in _INSTRUCTIONS[stored]) else torch.float32


def quick(stored: torch.dtype) -> torch.dtype:
    """The dtype that a model in this dtype is computed in on this CPU: itself, or float32 where that is quicker."""
    return torch.float32 if stored is torch.float16 else native(stored, torch.device("cpu"))


def widen(module: nn.Module) -> None:
    """Convert slow 16-bit parameters and buffers to float32, and remember their names and dtypes."""
    halves = {name: tensor for name, tensor in _tensors(module) if quick(tensor.dtype) is not tensor.dtype}
    _HALVES[module] = {name: tensor.dtype for name, tensor in halves.items()}
    for tensor in halves.values():
        tensor.data = tensor.data.float()


@contextmanager
def stored_as_half(module: nn.Module) -> Iterator[None]:
    """Convert widened tensors to their own dtype while they are saved. Then they keep the rounded, saved values."""
    widened = [*_widened(module)]
    for tensor, dtype in widened:
        tensor.data = tensor.data.to(dtype)
    try:
        yield
    finally:
        for tensor, _ in widened:
            tensor.data = tensor.data.float()


def bytes_saved(module: nn.Module) -> int:
    """Bytes that saving the widened tensors in 16 bits saves."""
    return sum(tensor.nbytes - 2 * tensor.numel() for tensor, _ in _widened(module))


def _widened(module: nn.Module) -> Iterator[tuple[Tensor, torch.dtype]]:
    """Tensors that are still as widened, with their own dtypes; tensors the user has converted again are left alone."""
    halves = _HALVES.get(module, {})
    pairs = ((tensor, halves.get(name)) for name, tensor in _tensors(module) if tensor.dtype == torch.float32)
    return ((tensor, dtype) for tensor, dtype in pairs if dtype is not None)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
