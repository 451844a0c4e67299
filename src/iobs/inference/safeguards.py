"""Refusals of stored layers: gradients and traces, which would be silently wrong, and damaged states."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from iobs.errors import ProblemError


class _WithoutGradient(torch.autograd.Function):
    """A function whose gradient is an error."""

    @staticmethod
    def forward(ctx: object, inputs: Tensor, anchor: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute, recording nothing."""
        return compute(inputs)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> None:
        """Raise the error."""
        raise ProblemError(
            "A layer that iobs.accelerate or iobs pack stored has no gradient. Train the dense model, and accelerate "
            "or pack it afterwards; for outputs alone use torch.no_grad()."
        )


def without_gradient(compute: Callable[[Tensor], Tensor], inputs: Tensor, trained: bool = True) -> Tensor:
    """Apply a function that has no gradient.

    Where torch records, the output asks for a gradient as that of a dense layer does, and `backward` through it is a
    ProblemError. Otherwise the layers before would get wrong gradients without a word.

    Args:
        compute: the function.
        inputs: its argument.
        trained: the dense layer had a weight that asks for a gradient.

    Raises:
        ProblemError: `torch.jit.trace` runs the model; the trace would hold the outputs of this call.
    """
    if torch.jit.is_tracing():  # type: ignore[no-untyped-call, attr-defined]
        raise ProblemError(
            "A layer that iobs.accelerate or iobs pack stored cannot be traced. Trace or export the dense model."
        )
    if not torch.is_grad_enabled():
        return compute(inputs)
    if trained or inputs.requires_grad:
        anchor = torch.empty(0, requires_grad=True)  # so that the output asks for a gradient
        output: Tensor = _WithoutGradient.apply(inputs, anchor, compute)  # type: ignore[no-untyped-call]
        return output
    with torch.no_grad():
        return compute(inputs)


def buffers_after(
    module: nn.Module, state: Mapping[str, object], prefix: str, metadata: Mapping[str, object]
) -> dict[str, Tensor] | None:
    """The buffers that a module will have after a state dict is loaded; None for shapes that torch refuses itself.

    Args:
        module: with buffers of its own.
        state: the state dict; buffers that it lacks stay as they are.
        prefix: of the module's names in the state dict.
        metadata: of the module, as torch gives it to `_load_from_state_dict`.
    """
    buffers = {}
    for name, buffer in module.named_buffers(recurse=False):
        loaded = state.get(f"{prefix}{name}", buffer)
        if not isinstance(loaded, Tensor) or loaded.shape != buffer.shape:
            return None
        buffers[name] = loaded if metadata.get("assign_to_params_buffers") else loaded.to(buffer).contiguous()
    return buffers
