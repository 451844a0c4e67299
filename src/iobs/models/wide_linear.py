"""Linear layers in 16 bits that multiply in float32, for CPUs without 16-bit instructions.

The weight stays in 16 bits: a part of its rows is converted at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

_PART = 2**23  # entries of the weight that are float32 at a time


class WideLinear(nn.Linear):
    """A linear layer with products in float32; inputs and outputs keep their dtype.

    Only the input has a gradient: the weight is frozen, as everything outside the blocks is.
    """

    def forward(self, input: Tensor) -> Tensor:
        """The product of inputs (..., columns) with the weight (rows, columns), plus the bias."""
        output: Tensor = _Product.apply(input, self.weight)  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias


class _Product(torch.autograd.Function):
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
