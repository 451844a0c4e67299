"""Objectives given as a torch function: gradients, Hessian products and blocks by automatic differentiation."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral

import numpy as np

from iobs.core.late import is_tensor, torch
from iobs.errors import ProblemError, is_a
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.design import Array, Indices, on_host


class TorchObjective(Objective):
    """A twice differentiable f: (d,) tensor -> scalar tensor; see `from_torch`."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], dimension: int, dtype: torch.dtype) -> None:
        if not is_a(Integral, dimension) or dimension < 1:
            raise ProblemError(f"A function needs a whole number of at least one variable, got d = {dimension}.")
        self.function = function
        self.dimension = dimension
        self.dtype = dtype
        self.forced = np.zeros(0, np.int64)
        self.quadratic = False

    def _tensor(self, theta: Array) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(theta)).to(self.dtype)

    def _evaluate(self, theta: torch.Tensor) -> torch.Tensor:
        result = self.function(theta)
        if not is_tensor(result) or result.numel() != 1:
            raise ProblemError(
                "The function given to from_torch must return one number as a tensor; end it with .sum()."
            )
        return result.reshape(())

    def value_and_gradient(self, theta: Array) -> tuple[float, Array]:
        """f and its gradient by reverse differentiation."""
        point = self._tensor(theta).requires_grad_()
        value = self._evaluate(point)
        return float(value.detach()), on_host(_derivative(value, point))

    def hessian_product(self, theta: Array, vector: Array) -> Array:
        """H v by reverse-over-reverse differentiation."""
        return self.hessian_products(theta, vector[None]).reshape(-1)

    def hessian_products(self, theta: Array, vectors: Array) -> Array:
        """H v for every row v, (m, d), from one graph."""
        point = self._tensor(theta).requires_grad_()
        gradient = _derivative(self._evaluate(point), point, create_graph=True)
        return _second_derivative(gradient, point, self._tensor(vectors))

    def hessian_block(self, theta: Array, support: Indices) -> Array:
        """H_QQ, differentiating with respect to the k variables in the support only."""
        index = torch.from_numpy(support)
        base = self._tensor(theta)
        part = base[index].clone().requires_grad_()
        gradient = _derivative(self._evaluate(base.index_put((index,), part)), part, create_graph=True)
        block = _second_derivative(gradient, part, torch.eye(support.size, dtype=self.dtype))
        return 0.5 * (block + block.T)

    def hessian_columns(self, theta: Array, support: Indices, rows: Indices | None = None) -> Array:
        """H_:Q, one Hessian product per column."""
        units = np.zeros((support.size, self.dimension))
        units[np.arange(support.size), support] = 1
        columns = self.hessian_products(theta, units).T
        return columns if rows is None else columns[rows]

    def hessian_diagonal(self, theta: Array) -> Array:
        """diag H, exact, by d Hessian products in blocks that fit in memory."""
        size = max(1, (1 << 22) // self.dimension)
        diagonal = np.empty(self.dimension)
        for start in range(0, self.dimension, size):
            support = np.arange(start, min(start + size, self.dimension))
            diagonal[support] = self.hessian_columns(theta, support)[support, np.arange(support.size)]
        return diagonal

    def restricted(self, support: Indices) -> Objective:
        """f with all other coordinates at zero."""
        index = torch.from_numpy(support)
        zeros = torch.zeros(self.dimension, dtype=self.dtype)
        return TorchObjective(lambda z: self.function(zeros.index_put((index,), z)), support.size, self.dtype)


def from_torch(
    function: Callable[[torch.Tensor], torch.Tensor], d: int, *, dtype: torch.dtype | None = None
) -> TorchObjective:
    """Make an objective of a twice differentiable function of d variables.

    Args:
        function: takes a (d,) tensor of `dtype` on the CPU and returns a scalar tensor by differentiable operations. It
            may move its argument to another device.
        d: number of variables.
        dtype: dtype of the function's argument; float64 by default.

    Raises:
        ProblemError: d < 1, or (at its first evaluation) the function does not return one number.
    """
    return TorchObjective(function, d, dtype or torch.float64)


def _derivative(
    value: torch.Tensor, point: torch.Tensor, *, create_graph: bool = False, retain_graph: bool | None = None
) -> torch.Tensor:
    """The gradient of a scalar; zero where the scalar does not depend on the point."""
    if not value.requires_grad:
        return torch.zeros_like(point)
    (gradient,) = torch.autograd.grad(
        value, point, materialize_grads=True, create_graph=create_graph, retain_graph=retain_graph
    )
    return gradient


def _second_derivative(gradient: torch.Tensor, point: torch.Tensor, vectors: torch.Tensor) -> Array:
    # One product at a time: the batched form is no faster. Differentiate a scalar, not a vector with weights: torch's
    # check of such weights imports half of its compiler, which takes seconds the first time.
    products = [_derivative(gradient @ row, point, retain_graph=True) for row in vectors]
    return on_host(torch.stack(products)) if products else np.zeros((0, point.numel()))
