"""16-bit models on a CPU without fast instructions for them: computed in float32, saved in their own dtype.

That is float16 on every CPU, and bfloat16 where the CPU has no instructions for it. There a product in bfloat16 takes
torch five times as long as in float32, and its gradient some hundred times as long. Where a model in float32 would take
too much memory, the weights of `WideLinear` stay in 16 bits, and a part of their rows is converted at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from iobs.core.integers import looks_coded
from iobs.core.slices import is_exact

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


def store_alike(copy: nn.Module, module: nn.Module) -> None:
    """Remember for a copy of a network the dtypes that its tensors are saved in."""
    if module in _HALVES:
        _HALVES[copy] = _HALVES[module]


@contextmanager
def stored_as_half(module: nn.Module) -> Iterator[None]:
    """Convert widened tensors to their own dtype while they are saved. Then they keep the rounded, saved values.

    Integers times steps stay in float32, where their products are exact, so that their code does not get lost.
    """
    widened = [
        (tensor, dtype) for tensor, dtype in _widened(module) if is_exact(tensor, dtype) or not looks_coded(tensor)
    ]
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


_PART = 2**23  # entries of the weight that are float32 at a time


class WideLinear(nn.Linear):
    """A linear layer with products in float32; inputs and outputs keep their dtype.

    Only the input has a gradient: the weight is frozen, as everything outside the blocks is.
    """

    def forward(self, input: Tensor) -> Tensor:
        """The product of inputs (..., columns) with the weight (rows, columns), plus the bias."""
        output: Tensor = _WideProduct.apply(input, self.weight)  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias


class _WideProduct(torch.autograd.Function):
    """Inputs times the transposed weight; the gradient of the weight is left out."""

    @staticmethod
    def forward(ctx: FunctionCtx, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        wide, output = inputs.float(), inputs.new_empty(*inputs.shape[:-1], len(weight))
        parts = _parts(weight)
        for part, out in zip(parts, torch.split(output, [len(part) for part in parts], -1), strict=True):
            out.copy_(wide @ part.float().T)
        return output

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors  # type: ignore[attr-defined]
        total = gradient.new_zeros(*gradient.shape[:-1], weight.shape[1], dtype=torch.float32)
        parts = _parts(weight)
        for part, pull in zip(parts, torch.split(gradient, [len(part) for part in parts], -1), strict=True):
            total += pull.float() @ part.float()
        return total.to(gradient.dtype), None


def _parts(weight: Tensor) -> tuple[Tensor, ...]:
    return torch.split(weight, max(1, _PART // weight.shape[1]))
