"""Linear systems in float32: conjugate gradients for the weights of all rows on a mask, and an inverse by products."""

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
    from iobs.solvers.kernels.conjugate_numba import Iteration, begin, step

    solution = start.clone()
    product = solution @ hessian
    residual, direction = torch.empty_like(product), torch.empty_like(product)
    slope, scale = torch.empty(len(linear), dtype=linear.dtype), (1 / hessian.diagonal()).contiguous()
    tensors = solution, product, mask, scale, residual, direction, slope
    state = Iteration(*(tensor.numpy() for tensor in tensors))
    over_rows(lambda first, last: begin(first, last, linear.numpy(), state), len(linear))
    for _ in range(iterations):
        torch.mm(direction, hessian, out=product)
        over_rows(lambda first, last: step(first, last, state), len(linear))
    return solution


# ---- Inverse of a well-conditioned matrix by matrix products

_LEAF = 384  # columns up to which LAPACK is as fast


def shifted_inverse(hessian: Tensor, shift: float) -> Tensor:
    """Inverse (H + shift I)^-1, (d, d), from the inverses of the leading half and of its Schur complement.

    This takes a third more arithmetic than a Cholesky factorisation, but matrix products run several times faster.
    Rounding grows with the condition number of the leading half, so the shift must not be small against the diagonal.
    The penalties of ADMM are of the size of the diagonal.

    Raises:
        NotPositiveDefiniteError: see `linalg.cholesky`.
    """
    shifted = hessian.clone()
    shifted.diagonal().add_(shift)
    _invert(shifted)
    return shifted


def _invert(matrix: Tensor) -> None:
    """Write the inverse of a symmetric matrix into its own memory; a quarter of its size is taken besides."""
    if len(matrix) <= _LEAF:
        matrix.copy_(linalg.inverse(matrix))
        return
    half = len(matrix) // 2
    first, above, below, second = matrix[:half, :half], matrix[:half, half:], matrix[half:, :half], matrix[half:, half:]
    _invert(first)
    carried = first @ above
    second.addmm_(below, carried, alpha=-1)
    _invert(second)
    torch.mm(carried, second, out=above)
    first.addmm_(above, carried.T)
    above.neg_()
    below.copy_(above.T)
