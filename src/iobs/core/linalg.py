"""Factorisations with an explicit failure policy, inverse down-dates, and exact solves on a support."""

from __future__ import annotations

import torch
from torch import Tensor

from iobs.errors import NotPositiveDefiniteError

_BATCH_ELEMENTS = 1 << 25  # entries of one batch of small systems: 256 MB in float64


def cholesky(matrix: Tensor) -> Tensor:
    """Lower Cholesky factor of a symmetric positive definite matrix.

    Args:
        matrix: (d, d) or (batch, d, d).

    Raises:
        NotPositiveDefiniteError: a pivot is not positive. Nothing is ever replaced by the identity.
    """
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(matrix)
    if bool((info != 0).any()) or not bool(torch.isfinite(factor.diagonal(dim1=-2, dim2=-1)).all()):
        raise NotPositiveDefiniteError(
            f"A {matrix.shape[-1]} x {matrix.shape[-1]} Hessian is not positive definite: "
            "raise the damping, or give more calibration samples than the layer has inputs."
        )
    return factor


def upper_factor(matrix: Tensor) -> Tensor:
    """Upper triangular U with U U^T the given symmetric positive definite (d, d) matrix.

    Its inverse is the upper Cholesky factor R of the inverse matrix, matrix^-1 = R^T R, at a third of the price.

    Raises:
        NotPositiveDefiniteError: as `cholesky`.
    """
    return cholesky(matrix.flip(0, 1)).flip(0, 1)


def inverse(matrix: Tensor) -> Tensor:
    """Inverse of a symmetric positive definite (d, d) matrix.

    Raises:
        NotPositiveDefiniteError: as `cholesky`.
    """
    factor = cholesky(matrix)
    result: Tensor = torch.cholesky_inverse(factor, out=factor)  # in its place: at scale one such matrix is much
    return result


def remove_variable(inverse_hessian: Tensor, index: int) -> Tensor:
    """Inverse of H without row and column `index`, from the inverse of H (OBC, Lemma 1): row and column become zero.

    Args:
        inverse_hessian: (d, d) inverse of H on the variables that remain, zero elsewhere.
        index: the variable to remove; its diagonal entry must be positive.
    """
    column = inverse_hessian[:, index]
    updated = inverse_hessian - torch.outer(column, column) / column[index]
    updated[index] = 0
    updated[:, index] = 0
    return updated


def solve_on_support(hessian: Tensor, linear: Tensor, mask: Tensor) -> Tensor:
    """For every row, the exact minimiser of 1/2 v H v^T - b v^T among vectors that live on the row's support.

    This is Option 2's update of Algorithm 1 for a given mask, in its block form v_Q = H_QQ^-1 b_Q.
    Small systems are factorised, long ones (where rows of Cholesky factors would cost more) are left to conjugate
    gradients run to float64 accuracy, with a factorisation for any row that does not get there.

    Args:
        hessian: (d, d) symmetric, positive definite on every support.
        linear: (rows, d).
        mask: boolean (rows, d).

    Returns:
        (rows, d) in float64, exactly zero outside the mask.

    Raises:
        NotPositiveDefiniteError: a sub-matrix is singular. On long supports only where b has no minimiser there; where
            it has many, conjugate gradients find one.
    """
    hessian, linear = hessian.double(), linear.double()
    longest = int(mask.sum(1).max()) if mask.numel() else 0
    if longest == 0:
        return torch.zeros_like(linear)
    if longest <= 768:
        return _solve_by_cholesky(hessian, linear, mask)
    solution, residual = masked_conjugate_gradients(hessian, linear, mask, tolerance=1e-11, iterations=600)
    late = ~(residual <= 1e-9)  # NaN is late, too
    if bool(late.any()):
        solution[late] = _solve_by_cholesky(hessian, linear[late], mask[late])
    return solution


def _solve_by_cholesky(hessian: Tensor, linear: Tensor, mask: Tensor) -> Tensor:
    solution = torch.zeros_like(linear)
    counts = mask.sum(1)
    order = counts.argsort()  # rows with supports of like size share a batch, so little is padded
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
        # Columns of the support first, padding after it; padded entries become identity rows.
        indices = (~mask[rows]).to(torch.int8).sort(dim=1, stable=True).indices[:, :size]
        real = mask[rows].gather(1, indices)
        systems = hessian[indices[:, :, None], indices[:, None, :]]
        systems *= real[:, :, None] & real[:, None, :]
        systems.diagonal(dim1=1, dim2=2).add_((~real).double())
        right = (linear[rows].gather(1, indices) * real)[:, :, None]
        values = torch.cholesky_solve(right, cholesky(systems))[:, :, 0] * real
        solution[rows] = torch.zeros_like(linear[rows]).scatter_(1, indices, values)
    return solution


def masked_conjugate_gradients(
    hessian: Tensor,
    linear: Tensor,
    mask: Tensor,
    start: Tensor | None = None,
    *,
    iterations: int,
    tolerance: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Solve every row on its support by conjugate gradients, all rows in one matrix product an iteration.

    Preconditioned with the diagonal. Dtype and device are those of `linear`.

    Args:
        hessian: (d, d).
        linear: (rows, d).
        mask: boolean (rows, d).
        start: (rows, d) first guess, zero outside the mask; zero if not given.
        iterations: at most so many.
        tolerance: stop when every row's relative residual is below; 0 never stops early.

    Returns:
        The solution (rows, d), and each row's relative residual (rows,).
    """
    support = mask.to(linear.dtype)
    scale = torch.where(mask, 1 / hessian.diagonal(), 0.0)  # a zero outside the mask is nobody's curvature
    solution = torch.zeros_like(linear) if start is None else start.clone()
    residual = linear * support
    size = residual.norm(dim=1).clamp_min(torch.finfo(linear.dtype).tiny)
    if start is not None:
        residual = residual - (solution @ hessian) * support
    preconditioned = residual * scale
    direction = preconditioned.clone()
    slope = (residual * preconditioned).sum(1)
    for _ in range(iterations):
        if tolerance and bool((residual.norm(dim=1) <= tolerance * size).all()):
            break
        product = (direction @ hessian) * support
        curvature = (direction * product).sum(1)
        step = torch.where(curvature > 0, slope / curvature, 0.0)[:, None]
        solution += step * direction
        residual -= step * product
        preconditioned = residual * scale
        next_slope = (residual * preconditioned).sum(1)
        direction = preconditioned + torch.where(slope > 0, next_slope / slope, 0.0)[:, None] * direction
        slope = next_slope
    return solution, residual.norm(dim=1) / size
