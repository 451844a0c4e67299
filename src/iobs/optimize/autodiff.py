"""Objectives given as a torch function: gradients, Hessian products and blocks by automatic differentiation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from iobs.errors import ProblemError
from iobs.optimize.designs import Array, Indices
from iobs.optimize.objective import Objective


class TorchObjective:
    """Any twice differentiable f: (d,) tensor -> scalar tensor, by automatic differentiation; see `from_torch`."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], dimension: int, dtype: torch.dtype) -> None:
        if dimension < 1:
            raise ProblemError(f"A function needs at least one variable, got d = {dimension}.")
        self.function = function
        self.dimension = dimension
        self.dtype = dtype
        self.forced = np.zeros(0, np.int64)
        self.quadratic = False

    @property
    def rank(self) -> int:
        """Nothing is known: d."""
        return self.dimension

    def _tensor(self, theta: Array) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(theta)).to(self.dtype)

    def _evaluate(self, theta: torch.Tensor) -> torch.Tensor:
        result = self.function(theta)
        if not isinstance(result, torch.Tensor) or result.numel() != 1:
            raise ProblemError(
                "The function given to from_torch must return one number as a tensor; end it with .sum()."
            )
        return result.reshape(())

    def value(self, theta: Array) -> float:
        """f(theta)."""
        with torch.no_grad():
            return float(self._evaluate(self._tensor(theta)))

    def value_and_gradient(self, theta: Array) -> tuple[float, Array]:
        """f and its gradient by reverse differentiation."""
        point = self._tensor(theta).requires_grad_()
        value = self._evaluate(point)
        return float(value.detach()), _numpy(_derivative(value, point))

    def hessian_product(self, theta: Array, vector: Array) -> Array:
        """H v, reverse over reverse."""
        return self.hessian_products(theta, vector[None]).reshape(-1)

    def hessian_products(self, theta: Array, vectors: Array) -> Array:
        """H v for every row v, (m, d); the same graph serves them all."""
        point = self._tensor(theta).requires_grad_()
        gradient = _derivative(self._evaluate(point), point, create_graph=True)
        return _second_derivative(gradient, point, self._tensor(vectors))

    def hessian_block(self, theta: Array, support: Indices) -> Array:
        """H_QQ, differentiating with respect to the k variables only."""
        index = torch.from_numpy(support)
        base = self._tensor(theta)
        part = base[index].clone().requires_grad_()
        gradient = _derivative(self._evaluate(base.index_put((index,), part)), part, create_graph=True)
        block = _second_derivative(gradient, part, torch.eye(support.size, dtype=self.dtype))
        return 0.5 * (block + block.T)

    def hessian_columns(self, theta: Array, support: Indices, rows: Indices | None = None) -> Array:
        """H_:Q by one product a column."""
        units = np.zeros((support.size, self.dimension))
        units[np.arange(support.size), support] = 1
        columns = self.hessian_products(theta, units).T
        return columns if rows is None else columns[rows]

    def hessian_diagonal(self, theta: Array) -> Array:
        """diag H, exact, by d products in blocks that fit in memory."""
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

    def constant_coordinates(self) -> Indices:
        """Unknown for a general function: none."""
        return np.zeros(0, np.int64)

    def split(self, theta: Array) -> tuple[Array, float]:
        """No intercept of its own."""
        return theta, 0.0


def from_torch(
    function: Callable[[torch.Tensor], torch.Tensor], d: int, *, dtype: torch.dtype = torch.float64
) -> TorchObjective:
    """Any twice differentiable function of d variables.

    Args:
        function: takes a (d,) tensor of `dtype` on the CPU, returns a scalar tensor made of differentiable operations;
            it may move its argument to another device.
        d: the number of variables.
        dtype: what the function computes in.

    Raises:
        ProblemError: d < 1, or (when it is first evaluated) a result that is not one number.
    """
    return TorchObjective(function, d, dtype)


def _derivative(value: torch.Tensor, point: torch.Tensor, **keep: Any) -> torch.Tensor:
    """The gradient of a number, zero where it does not depend on the point; `keep` is for `torch.autograd.grad`."""
    if not value.requires_grad:
        return torch.zeros_like(point)
    (gradient,) = torch.autograd.grad(value, point, materialize_grads=True, **keep)
    return gradient


def _second_derivative(gradient: torch.Tensor, point: torch.Tensor, vectors: torch.Tensor) -> Array:
    # One product at a time: the batched form is no faster. As the derivative of a number, not of a vector with weights:
    # checking those weights loads half of torch's compiler, seconds of it, when it is first done.
    products = [_derivative(gradient @ row, point, retain_graph=True) for row in vectors]
    return _numpy(torch.stack(products)) if products else np.zeros((0, point.numel()))


def _numpy(tensor: torch.Tensor) -> Array:
    return np.asarray(tensor.detach().double().cpu().numpy())
