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
    return _inverse(shifted)


def _inverse(matrix: Tensor) -> Tensor:
    d = len(matrix)
    if d <= _LEAF:
        return linalg.inverse(matrix)
    half = d // 2
    result = torch.empty_like(matrix)
    first = _inverse(matrix[:half, :half])
    carried = first @ matrix[:half, half:]
    second = _inverse(torch.addmm(matrix[half:, half:], matrix[half:, :half], carried, alpha=-1))
    crossed = carried @ second
    torch.addmm(first, crossed, carried.T, out=result[:half, :half])
    result[half:, half:] = second
    result[:half, half:] = crossed.neg_()
    result[half:, :half] = crossed.T
    return result
