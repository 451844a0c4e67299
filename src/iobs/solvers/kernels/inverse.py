"""Inverse of a well-conditioned matrix by matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from iobs.core import linalg

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
