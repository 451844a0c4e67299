"""Cholesky factorisations that raise an error on failure, inverses, and solves on the support of each row."""

from __future__ import annotations

import torch
from torch import Tensor

from iobs.errors import NotPositiveDefiniteError

_BATCH_ELEMENTS = 1 << 25  # largest number of entries in one batch of small systems: 256 MB in float64


def cholesky(matrix: Tensor) -> Tensor:
    """Lower Cholesky factor of a symmetric positive definite matrix.

    Args:
        matrix: (d, d) or (batch, d, d).

    Raises:
        NotPositiveDefiniteError: a pivot is not positive, or the factor is not finite.
    """
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(matrix)
    if bool((info != 0).any()) or not bool(torch.isfinite(factor.diagonal(dim1=-2, dim2=-1)).all()):
        raise _not_definite(matrix)
    return factor


def rounding(dtype: torch.dtype) -> float:
    """Pivot of a Cholesky factorisation, relative to the diagonal entry, below which it may be only rounding.

    Columns that depend linearly on others have pivots of up to some 40 eps. In float32 only the least of them are
    refused, since definite Hessians of wide layers come near them.
    """
    return (64 if dtype is torch.float64 else 4) * torch.finfo(dtype).eps


def _not_definite(matrix: Tensor) -> NotPositiveDefiniteError:
    return NotPositiveDefiniteError(
        f"A {matrix.shape[-1]} x {matrix.shape[-1]} Hessian is not positive definite: "
        "raise the damping, or give more calibration samples than the layer has inputs."
    )


def double_cholesky(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Lower Cholesky factor of a symmetric (d, d) matrix in float64, and the status of `torch.linalg.cholesky_ex`."""
    if matrix.device.type != "cpu":
        lower, status = torch.linalg.cholesky_ex(matrix.double())
        return lower, status
    # LAPACK factorises a matrix of consecutive columns in its own memory.
    factor = matrix.to(torch.float64, copy=True).T
    info = torch.empty((), dtype=torch.int32)
    torch.linalg.cholesky_ex(factor, out=(factor, info))
    return factor, info


def upper_factor(matrix: Tensor) -> Tensor:
    """Upper triangular factor U of a symmetric positive definite (d, d) matrix: U U^T = matrix.

    U^-1 is the upper Cholesky factor R of the inverse, matrix^-1 = R^T R. Computing U costs a third of computing R.

    Raises:
        NotPositiveDefiniteError: see `cholesky`.
    """
    return cholesky(matrix.flip(0, 1)).flip(0, 1)


def inverse(matrix: Tensor) -> Tensor:
    """Inverse of a symmetric positive definite (d, d) matrix.

    Raises:
        NotPositiveDefiniteError: see `cholesky`; or a pivot is only rounding, as that of a duplicate column.
    """
    factor = cholesky(matrix)
    if bool((factor.diagonal().square() <= rounding(matrix.dtype) * matrix.diagonal()).any()):
        raise _not_definite(matrix)
    result: Tensor = torch.cholesky_inverse(factor, out=factor)  # in place, to save the memory of one (d, d) matrix
    return result


_LEAF = 384  # columns up to which LAPACK is as fast


def shifted_inverse(hessian: Tensor, shift: float) -> Tensor:
    """Inverse (H + shift I)^-1, (d, d), from the inverses of the leading half and of its Schur complement.

    This takes a third more arithmetic than a Cholesky factorisation, but matrix products run several times faster.
    Rounding grows with the condition number of the leading half, so the shift must not be small against the diagonal.
    The penalties of ADMM are of the size of the diagonal.

    Raises:
        NotPositiveDefiniteError: see `cholesky`.
    """
    shifted = hessian.clone()
    shifted.diagonal().add_(shift)
    _invert(shifted)
    return shifted


def _invert(matrix: Tensor) -> None:
    """Write the inverse of a symmetric matrix into its own memory; a quarter of its size is taken besides."""
    if len(matrix) <= _LEAF:
        matrix.copy_(inverse(matrix))
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


def solve_on_support(hessian: Tensor, linear: Tensor, mask: Tensor) -> Tensor:
    """Exact minimiser of 1/2 v H v^T - b v^T for every row, with v zero outside the row's mask.

    This is the update of Algorithm 1, Option 2, for a given mask: v_Q = H_QQ^-1 b_Q. Supports of at most 768 entries
    are solved by Cholesky. Longer supports are solved by conjugate gradients to a relative residual of 1e-9, with
    Cholesky for the rows that do not converge.

    Args:
        hessian: (d, d) symmetric, positive definite on every support.
        linear: (rows, d).
        mask: boolean (rows, d).

    Returns:
        (rows, d) in float64, exactly zero outside the mask.

    Raises:
        NotPositiveDefiniteError: H_QQ of a row is singular. On supports longer than 768 this is raised only if the
            row has no minimiser; if the row has many, one of them is returned.
    """
    hessian, linear = hessian.double(), linear.double()
    longest = int(mask.sum(1).max()) if mask.numel() else 0
    if longest == 0:
        return torch.zeros_like(linear)
    if longest <= 768:
        return _solve_by_cholesky(hessian, linear, mask)
    solution, residual = masked_conjugate_gradients(hessian, linear, mask, tolerance=1e-11, iterations=600)
    late = ~(residual <= 1e-9)  # True for NaN
    if bool(late.any()):
        solution[late] = _solve_by_cholesky(hessian, linear[late], mask[late])
    return solution


def _solve_by_cholesky(hessian: Tensor, linear: Tensor, mask: Tensor) -> Tensor:
    solution = torch.zeros_like(linear)
    counts = mask.sum(1)
    order = counts.argsort()  # rows with supports of similar size share a batch, which keeps the padding small
    start = 0
    while start < len(order):
        size = max(1, int(counts[order[start]]))
        rows = order[start : start + max(1, _BATCH_ELEMENTS // (size * size))]
        size = max(1, int(counts[rows].max()))
        rows = rows[: max(1, _BATCH_ELEMENTS // (size * size))]
        size = int(counts[rows].max())
        start += len(rows)
        if size == 0:
            continue
        # Columns of the support come first, then padding.
        indices = (~mask[rows]).to(torch.int8).sort(dim=1, stable=True).indices[:, :size]
        real = mask[rows].gather(1, indices)
        right = (linear[rows].gather(1, indices) * real)[:, :, None]
        values = torch.cholesky_solve(right, cholesky(padded_systems(hessian, indices, real)))[:, :, 0] * real
        solution[rows] = torch.zeros_like(linear[rows]).scatter_(1, indices, values)
    return solution


def padded_systems(matrix: Tensor, indices: Tensor, real: Tensor) -> Tensor:
    """Square parts of a matrix on the supports of some rows, (rows, n, n); padding becomes rows of the identity.

    Args:
        matrix: (d, d).
        indices: (rows, n), columns of each support in any order.
        real: boolean (rows, n), False where an index is padding.
    """
    systems = matrix[indices[:, :, None], indices[:, None, :]]
    systems *= real[:, :, None] & real[:, None, :]
    systems.diagonal(dim1=1, dim2=2).add_((~real).to(systems.dtype))
    return systems


def masked_conjugate_gradients(
    hessian: Tensor,
    linear: Tensor,
    mask: Tensor,
    start: Tensor | None = None,
    *,
    iterations: int,
    tolerance: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Solve every row on its support by conjugate gradients with the diagonal of H as preconditioner.

    Each iteration is one matrix product for all rows. Dtype and device are those of `linear`.

    Args:
        hessian: (d, d).
        linear: (rows, d).
        mask: boolean (rows, d).
        start: (rows, d) initial guess, zero outside the mask; default zero.
        iterations: largest number of iterations.
        tolerance: stop once the relative residual of every row is at most this; 0 runs all iterations.

    Returns:
        The solution (rows, d), and the relative residual of each row, (rows,).
    """
    # All in the memory of five matrices: the passes over them take as long as the products where rows are short.
    support, diagonal = mask.to(linear.dtype), hessian.diagonal()
    scale = torch.where(diagonal > 0, 1 / diagonal, 0.0)  # the diagonal may be zero outside the mask
    solution = torch.zeros_like(linear) if start is None else start.clone()
    residual = linear * support
    size = residual.norm(dim=1).clamp_min(torch.finfo(linear.dtype).tiny)
    product = torch.empty_like(residual)
    if start is not None:
        residual.sub_(torch.mm(solution, hessian, out=product).mul_(support))
    preconditioned = residual * scale
    direction = preconditioned.clone()
    slope = torch.linalg.vecdot(residual, preconditioned)
    for _ in range(iterations):
        if tolerance and bool((residual.norm(dim=1) <= tolerance * size).all()):
            break
        torch.mm(direction, hessian, out=product)
        curvature = torch.linalg.vecdot(direction, product)  # the direction is zero outside the mask
        step = torch.where(curvature > 0, slope / curvature, 0.0)[:, None]
        solution.addcmul_(step, direction)
        residual.addcmul_(step, product.mul_(support), value=-1)
        torch.mul(residual, scale, out=preconditioned)
        next_slope = torch.linalg.vecdot(residual, preconditioned)
        direction.mul_(torch.where(slope > 0, next_slope / slope, 0.0)[:, None]).add_(preconditioned)
        slope = next_slope
    return solution, residual.norm(dim=1) / size
