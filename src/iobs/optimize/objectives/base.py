"""The protocol of a function that can be minimised, and the part that functions of a design matrix share."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

import numpy as np

from iobs.optimize.objectives.design import Array, Design, Indices


class Objective(Protocol):
    """A twice differentiable function of d real variables.

    A class needs the attributes, `value_and_gradient` and the products with the Hessian; the other methods have
    defaults that a class inherits if it names this one as its base.

    Attributes:
        dimension: d.
        forced: coordinates that are always in the support and not counted in k.
        quadratic: whether the Hessian is the same everywhere.
    """

    dimension: int
    forced: Indices
    quadratic: bool

    @property
    def rank(self) -> int:
        """An upper bound on the rank of H; at most d, or the number of samples for a linear model without ridge."""
        return self.dimension

    def value(self, theta: Array) -> float:
        """f(theta)."""
        return self.value_and_gradient(theta)[0]

    @abstractmethod
    def value_and_gradient(self, theta: Array) -> tuple[float, Array]:
        """f and its gradient (d,); gradient and Hessian must belong to the same function."""
        ...

    @abstractmethod
    def hessian_product(self, theta: Array, vector: Array) -> Array:
        """H v, (d,)."""
        ...

    def hessian_block(self, theta: Array, support: Indices) -> Array:
        """H_QQ, (k, k)."""
        return self.hessian_columns(theta, support, support)

    @abstractmethod
    def hessian_columns(self, theta: Array, support: Indices, rows: Indices | None = None) -> Array:
        """H_:Q, (d, k), or only the rows in `rows`."""
        ...

    @abstractmethod
    def hessian_diagonal(self, theta: Array) -> Array:
        """diag H, (d,)."""
        ...

    @abstractmethod
    def restricted(self, support: Indices) -> Objective:
        """The function z -> f(theta with theta_Q = z and zero elsewhere) of k variables."""
        ...

    def split(self, theta: Array) -> tuple[Array, float]:
        """The coefficients in the user's numbering, and the intercept (0 if there is none)."""
        return theta, 0.0

    def constant_coordinates(self) -> Indices:
        """Coordinates that f does not depend on, such as zero columns; they never enter a support."""
        return np.zeros(0, np.int64)


class DesignObjective(Objective, Protocol):
    """Base class of functions of X theta plus a ridge term.

    Attributes:
        design: X as the objective uses it.
        ridge: weight of 1/2 theta_j^2 of every coordinate (d,).
        outputs: number of coefficients that a column of X has.
    """

    design: Design
    ridge: Array
    outputs: int = 1

    @property
    def rank(self) -> int:
        """An upper bound on the rank of the Hessian."""
        return self.dimension if self.ridge.any() else min(self.design.shape) * self.outputs

    def with_ridge(self, block: Array, rows: Indices | None, support: Indices) -> Array:
        """Rows and columns of a Hessian, the ridge added where they meet on the diagonal."""
        rows = np.arange(self.dimension) if rows is None else rows
        return np.asarray(block + np.where(rows[:, None] == support[None, :], self.ridge[support][None, :], 0.0))
