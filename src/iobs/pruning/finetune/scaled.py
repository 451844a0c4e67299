"""Gradients of float16 parameters, from a scaled loss: without a scale, small gradients would be rounded to zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def scale_of(denominator: float, tensors: Sequence[Tensor]) -> float:
    """The scale of a loss that is a sum divided by `denominator`: a power of two, so that it changes no bits.

    Args:
        denominator: of the loss.
        tensors: whose gradients are computed; without float16 among them the scale is 1.
    """
    if not any(one.dtype is torch.float16 for one in tensors):
        return 1.0
    return 2.0 ** max(0, math.floor(math.log2(max(denominator, 1.0))))


def scaled_gradients(
    compute: Callable[[], Tensor], tensors: Sequence[Tensor], scale: float, pull: Tensor | None = None
) -> tuple[Tensor, list[Tensor | None], float]:
    """The value, and the gradients of a scaled value; the scale is halved until they are finite.

    Args:
        compute: the value; called again after each halving.
        tensors: whose gradients are computed.
        scale: of the value, or of `pull`.
        pull: gradient of the value, with its scale; None: the value is a loss.

    Returns:
        The value, the gradients times a scale, and the scale.
    """
    with torch.enable_grad():
        while True:
            value = compute()
            scaled = value * scale if pull is None and scale != 1.0 else value
            found = torch.autograd.grad(scaled, tensors, pull, allow_unused=True)
            if scale <= 1.0 or not bool(value.isfinite().all()) or _finite(found):
                return value.detach(), [*found], scale
            scale, pull = scale / 2, None if pull is None else pull / 2


def _finite(gradients: Sequence[Tensor | None]) -> bool:
    return all(one is None or bool(one.isfinite().all()) for one in gradients)
