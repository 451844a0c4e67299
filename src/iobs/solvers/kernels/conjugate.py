"""Preconditioned conjugate gradients on the supports of all rows at once, to polish weights on a fixed mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from iobs.core import linalg
from iobs.solvers.kernels.threads import over_rows


def polish_weights(hessian: Tensor, linear: Tensor, mask: Tensor, start: Tensor, iterations: int) -> Tensor:
    """`linalg.masked_conjugate_gradients`, with the entrywise work of an iteration fused on the CPU.

    Args:
        hessian: (d, d).
        linear: (rows, d) contiguous.
        mask: boolean (rows, d) contiguous.
        start: (rows, d) contiguous, zero outside the mask.
        iterations: how many.

    Returns:
        (rows, d), zero outside the mask.
    """
    if linear.device.type != "cpu":
        return linalg.masked_conjugate_gradients(hessian, linear, mask, start, iterations=iterations)[0]
    return _numba(hessian, linear, mask, start, iterations)


def _numba(hessian: Tensor, linear: Tensor, mask: Tensor, start: Tensor, iterations: int) -> Tensor:
    from iobs.solvers.kernels import conjugate_numba

    solution = start.clone()
    product = solution @ hessian
    residual, direction = torch.empty_like(product), torch.empty_like(product)
    slope = torch.empty(len(linear), dtype=linear.dtype)
    scale = 1 / hessian.diagonal()
    arrays: Any = tuple(tensor.numpy() for tensor in (product, mask, scale.contiguous(), residual, direction, slope))
    begin: Any = conjugate_numba.begin
    step: Any = conjugate_numba.step
    over_rows(lambda first, last: begin(first, last, linear.numpy(), *arrays), len(linear))
    for _ in range(iterations):
        torch.mm(direction, hessian, out=product)
        over_rows(lambda first, last: step(first, last, solution.numpy(), *arrays), len(linear))
    return solution
