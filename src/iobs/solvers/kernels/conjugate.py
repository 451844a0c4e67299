"""Preconditioned conjugate gradients for the weights of all rows on a fixed mask."""

from __future__ import annotations

import torch
from torch import Tensor

from iobs.core import linalg
from iobs.solvers.kernels.threads import over_rows


def improve_weights(hessian: Tensor, linear: Tensor, mask: Tensor, start: Tensor, iterations: int) -> Tensor:
    """`linalg.masked_conjugate_gradients`, with the entrywise work of each iteration fused on the CPU.

    Args:
        hessian: (d, d).
        linear: (rows, d) contiguous.
        mask: boolean (rows, d) contiguous.
        start: (rows, d) contiguous initial guess, zero outside the mask.
        iterations: number of iterations.

    Returns:
        The weights (rows, d), zero outside the mask.
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
    arrays = tuple(tensor.numpy() for tensor in (product, mask, scale.contiguous(), residual, direction, slope))
    begin, step = conjugate_numba.begin, conjugate_numba.step
    over_rows(lambda first, last: begin(first, last, linear.numpy(), *arrays), len(linear))
    for _ in range(iterations):
        torch.mm(direction, hessian, out=product)
        over_rows(lambda first, last: step(first, last, solution.numpy(), *arrays), len(linear))
    return solution
