"""What stored layers refuse: gradients and traces, which would be wrong without a word, and damaged states."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from iobs.errors import ProblemError


class _WithoutGradient(torch.autograd.Function):
    """A function whose gradient is an error."""

    @staticmethod
    def forward(ctx: object, given: Tensor, anchor: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute, recording nothing."""
        return compute(given)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> None:
        """Raise the error."""
        raise ProblemError(
            "A layer that iobs.accelerate or iobs pack stored has no gradient. Train the dense model, and accelerate "
            "or pack it afterwards; for outputs alone use torch.no_grad()."
        )


def without_gradient(compute: Callable[[Tensor], Tensor], given: Tensor, trained: bool = True) -> Tensor:
    """Apply a function that has no gradient.

    Where torch records, the output asks for a gradient as that of a dense layer does, and `backward` through it is a
    ProblemError. Otherwise the layers before would get wrong gradients without a word.

    Args:
        compute: the function.
        given: its argument.
        trained: the dense layer had a weight that asks for a gradient.

    Raises:
        ProblemError: `torch.jit.trace` runs the model; the trace would hold the outputs of this call.
    """
    if torch.jit.is_tracing():  # type: ignore[no-untyped-call, attr-defined]
        raise ProblemError(
            "A layer that iobs.accelerate or iobs pack stored cannot be traced. Trace or export the dense model."
        )
    if not torch.is_grad_enabled():
        return compute(given)
    if trained or given.requires_grad:
        anchor = torch.empty(0, requires_grad=True)  # so that the output asks for a gradient
        found: Tensor = _WithoutGradient.apply(given, anchor, compute)  # type: ignore[no-untyped-call]
        return found
    with torch.no_grad():
        return compute(given)


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
    found = {}
    for name, own in module.named_buffers(recurse=False):
        given = state.get(f"{prefix}{name}", own)
        if not isinstance(given, Tensor) or given.shape != own.shape:
            return None
        found[name] = given if metadata.get("assign_to_params_buffers") else given.to(own).contiguous()
    return found
