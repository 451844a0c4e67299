"""The protocol of a function that can be minimised."""

from __future__ import annotations

from typing import Protocol

from iobs.optimize.objectives.design import Array, Indices


class Objective(Protocol):
    """A twice differentiable function of d real variables.

    Attributes:
        dimension: d.
        forced: coordinates that are always in the support and not counted in k.
        quadratic: whether the Hessian is the same everywhere.
        rank: an upper bound on the rank of the Hessian.
    """

    dimension: int
    forced: Indices
    quadratic: bool

    @property
    def rank(self) -> int:
        """An upper bound on the rank of H; at most d, or the number of samples for a linear model without ridge."""
        ...

    def value(self, theta: Array) -> float:
        """f(theta)."""
        ...

    def value_and_gradient(self, theta: Array) -> tuple[float, Array]:
        """f and its gradient (d,); gradient and Hessian must belong to the same function."""
        ...

    def hessian_product(self, theta: Array, vector: Array) -> Array:
        """H v, (d,)."""
        ...

    def hessian_block(self, theta: Array, support: Indices) -> Array:
        """H_QQ, (k, k)."""
        ...

    def hessian_columns(self, theta: Array, support: Indices, rows: Indices | None = None) -> Array:
        """H_:Q, (d, k), or only the rows in `rows`."""
        ...

    def hessian_diagonal(self, theta: Array) -> Array:
        """diag H, (d,)."""
        ...

    def restricted(self, support: Indices) -> Objective:
        """The function z -> f(theta with theta_Q = z and zero elsewhere) of k variables."""
        ...

    def split(self, theta: Array) -> tuple[Array, float]:
        """The coefficients in the user's numbering, and the intercept (0 if there is none)."""
        ...

    def constant_coordinates(self) -> Indices:
        """Coordinates that f does not depend on, such as zero columns; they never enter a support."""
        ...
