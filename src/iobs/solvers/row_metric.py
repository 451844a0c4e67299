"""Weights on a fixed support in a metric of the rows, in which the error of one row cancels that of another.

The solvers take the rows of a layer one by one: they minimise sum_i m_i (v_i - c_i) H (v_i - c_i)^T. The outputs of a
layer are read together, however. To second order, errors E of its outputs cost the model tr(M E E^T), with the Fisher
information M of the outputs. On a given support the weights that minimise tr(M (V - C) H (V - C)^T) are those with
which the rows' errors cancel where the model reads them. This curvature of a layer is a Kronecker product (Martens and
Grosse 2015, Optimizing neural networks with Kronecker-factored approximate curvature).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core.linalg import cholesky

_ITERATIONS = 8  # of conjugate gradients, from the weights that are best row by row


@dataclass(frozen=True)
class RowMetric:
    """The metric M of a layer's output rows: M_ii = diagonal_i, and M_ij = scale moment_ij for other entries.

    Attributes:
        diagonal: (rows,) positive, with the mean 1: the weights of the rows' errors.
        moment: (rows, rows), positive semidefinite, with a diagonal of at most diagonal / scale; None: M is diagonal.
        scale: of the moment.
    """

    diagonal: Tensor
    moment: Tensor | None = None
    scale: float = 1.0

    def uncoupled(self, rows: Tensor | None = None) -> RowMetric:
        """The diagonal alone, of all rows or of these."""
        return RowMetric(self.diagonal if rows is None else self.diagonal[rows.to(self.diagonal.device)])

    def matrix(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """M, (rows, rows), of a metric with a moment."""
        assert self.moment is not None
        matrix = (self.scale * self.moment).to(device, dtype)
        matrix.diagonal().copy_(self.diagonal)
        return matrix

    def factor(self, device: torch.device) -> Tensor:
        """The lower Cholesky factor of M, (rows, rows) float64, of a metric with a moment."""
        return cholesky(self.matrix(device, torch.float64))


def coupled_operations(rows: float, columns: int) -> float:
    """Operations of `coupled_weight` for a matrix (rows, columns)."""
    return 2.0 * rows * columns * (rows + columns) * (_ITERATIONS + 1)


def coupled_weight(
    hessian: Tensor, linear: Tensor, weight: Tensor, mask: Tensor, metric: RowMetric, damping: float
) -> Tensor:
    """The weights on a support that minimise tr(M (V H V^T - 2 V B^T)), by conjugate gradients from given weights.

    Args:
        hessian: H, (columns, columns).
        linear: B, (rows, columns).
        weight: (rows, columns), zero outside the mask.
        mask: boolean (rows, columns).
        metric: M, with a moment.
        damping: relative to the mean of the Hessian's diagonal; it holds the weights near the given ones.

    Returns:
        (rows, columns) in the dtype of the linear term, zero outside the mask.
    """
    assert metric.moment is not None
    coupling, hessian = metric.matrix(linear.device, linear.dtype), hessian.to(linear.dtype)
    diagonal, amount = coupling.diagonal()[:, None].clone(), damping * float(hessian.diagonal().mean())

    def inner(left: Tensor, right: Tensor) -> Tensor:
        return (left * right).sum(dtype=torch.float64).to(linear.dtype)

    # Zero outside the mask, and where neither the inputs nor the damping say anything.
    preconditioner = (mask / (diagonal * (hessian.diagonal() + amount))).nan_to_num_(0.0, 0.0, 0.0)
    solution = weight.to(linear.dtype, copy=True)
    residual = (coupling @ (linear - solution @ hessian)).mul_(mask)
    preconditioned = residual * preconditioner
    direction, slope = preconditioned.clone(), inner(residual, preconditioned)
    for _ in range(_ITERATIONS):
        product = (coupling @ (direction @ hessian)).addcmul_(diagonal, direction, value=amount).mul_(mask)
        steepness = inner(direction, product)
        step = torch.where(steepness > 0, slope / steepness, 0.0)
        solution.addcmul_(step, direction)
        residual.addcmul_(step, product, value=-1)
        torch.mul(residual, preconditioner, out=preconditioned)
        before, slope = slope, inner(residual, preconditioned)
        direction.mul_(torch.where(before > 0, slope / before, 0.0)).add_(preconditioned)
    return solution
