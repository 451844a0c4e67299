"""What every function to be minimised can tell about itself."""

from __future__ import annotations

from typing import Protocol

from iobs.optimize.designs import Array, Indices


class Objective(Protocol):
    """A twice differentiable function of d real variables.

    Attributes:
        dimension: d.
        forced: coordinates that are always in the support and not counted in k.
        quadratic: the Hessian is the same everywhere.
        rank: what the rank of the Hessian is at most.
    """

    dimension: int
    forced: Indices
    quadratic: bool

    @property
    def rank(self) -> int:
        """At most d; the number of samples for a linear model without ridge."""
        ...

    def value(self, theta: Array) -> float:
        """f(theta)."""
        ...

    def value_and_gradient(self, theta: Array) -> tuple[float, Array]:
        """f and its gradient (d,), which belong to the same function."""
        ...

    def hessian_product(self, theta: Array, vector: Array) -> Array:
        """H v, (d,)."""
        ...

    def hessian_block(self, theta: Array, support: Indices) -> Array:
        """H_QQ, (k, k)."""
        ...

    def hessian_columns(self, theta: Array, support: Indices, rows: Indices | None = None) -> Array:
        """H_:Q, (d, k), or only the given rows of it."""
        ...

    def hessian_diagonal(self, theta: Array) -> Array:
        """diag H, (d,)."""
        ...

    def restricted(self, support: Indices) -> Objective:
        """z -> f(theta with theta_Q = z and zero elsewhere), a function of k variables."""
        ...

    def split(self, theta: Array) -> tuple[Array, float]:
        """The coefficients as the user numbers them, and the intercept (0 where there is none)."""
        ...

    def constant_coordinates(self) -> Indices:
        """Coordinates that f does not depend on, such as zero columns; they never enter a support."""
        ...
