"""Weights on a fixed support in a metric of the rows, in which the error of one row compensates that of another.

The solvers take the rows of a layer one by one: they minimise sum_i m_i (v_i - c_i) H (v_i - c_i)^T. The outputs of a
layer are read together, however. To second order, errors E of its outputs cost the model tr(M E E^T), with the Fisher
information M of the outputs. Its largest directions are shared by many rows. On a given support the weights that
minimise tr(M (V - C) H (V - C)^T) lie where the rows' errors cancel in these directions. This curvature of a layer is
a Kronecker product (Martens and Grosse 2015, Optimizing neural networks with Kronecker-factored approximate curvature).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core.quadratic import Quadratic

_ITERATIONS = 8  # of conjugate gradients, from the weights that are best row by row


@dataclass(frozen=True)
class RowMetric:
    """The metric of a layer's output rows: M = diag(diagonal - squared norms of the factor's rows) + factor factor^T.

    Attributes:
        diagonal: (rows,) positive, with the mean 1: the weights of the rows' errors.
        factor: (rows, rank); None: M is diagonal.
    """

    diagonal: Tensor
    factor: Tensor | None = None

    def rows(self, index: Tensor | slice) -> RowMetric:
        """The metric of some rows."""
        index = index.to(self.diagonal.device) if isinstance(index, Tensor) else index
        return RowMetric(self.diagonal[index], None if self.factor is None else self.factor[index])

    def uncoupled(self) -> RowMetric:
        """The metric without what rows share."""
        return RowMetric(self.diagonal)


def coupled_operations(rows: float, columns: int, rank: int) -> float:
    """Operations of `coupled_weight` for a matrix (rows, columns) and a factor (rows, rank)."""
    return 2.0 * rows * columns * (columns + 2 * rank) * (_ITERATIONS + 1)


def coupled_weight(
    problem: Quadratic,
    weight: Tensor,
    mask: Tensor,
    metric: RowMetric,
    damping: float,
    add_up: Callable[[Tensor], None] = lambda tensor: None,
) -> Tensor:
    """The weights on a support that minimise tr(M (V H V^T - 2 V B^T)), by conjugate gradients from given weights.

    Args:
        problem: Hessian H (columns, columns) and linear term B (rows, columns).
        weight: (rows, columns), zero outside the mask.
        mask: boolean (rows, columns).
        metric: M, with a factor.
        damping: relative to the mean of the Hessian's diagonal; it holds the weights near the given ones.
        add_up: adds up a tensor over all processes that have rows of the layer, in place.

    Returns:
        (rows, columns) in the dtype of the problem, zero outside the mask.
    """
    assert metric.factor is not None
    diagonal, factor = (values.to(weight.device, problem.dtype) for values in (metric.diagonal[:, None], metric.factor))
    alone = (diagonal - factor.square().sum(1, keepdim=True)).clamp_min(0.0)
    hessian, kept = problem.matrix.to(problem.dtype), mask.to(problem.dtype)
    amount = damping * hessian.diagonal().mean()

    def through(rows: Tensor) -> Tensor:
        """M times a matrix (rows, columns), of which other processes may have other rows."""
        shared = factor.T @ rows
        add_up(shared)
        return torch.addcmul(factor @ shared, alone, rows)

    def inner(left: Tensor, right: Tensor) -> Tensor:
        product = (left * right).sum(dtype=torch.float64)[None]
        add_up(product)
        return product.to(problem.dtype)

    curvature = diagonal * (hessian.diagonal() + amount)
    preconditioner = torch.where(curvature > 0, kept / curvature, 0.0)
    solution = weight.to(problem.dtype).clone()
    residual = through(problem.linear - solution @ hessian).mul_(kept)
    preconditioned = residual * preconditioner
    direction, slope = preconditioned.clone(), inner(residual, preconditioned)
    for _ in range(_ITERATIONS):
        product = through(direction @ hessian).addcmul_(diagonal, direction, value=float(amount)).mul_(kept)
        steepness = inner(direction, product)
        step = torch.where(steepness > 0, slope / steepness, 0.0)
        solution.addcmul_(step, direction)
        residual.addcmul_(step, product, value=-1)
        torch.mul(residual, preconditioner, out=preconditioned)
        before, slope = slope, inner(residual, preconditioned)
        direction.mul_(torch.where(before > 0, slope / before, 0.0)).add_(preconditioned)
    return solution
