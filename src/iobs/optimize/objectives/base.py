"""The protocol of a function that can be minimised, and the part that functions of a design matrix share."""

from __future__ import annotations

from abc import abstractmethod
from copy import copy
from functools import cached_property
from typing import Protocol, Self

import numpy as np

from iobs.errors import NonFiniteError
from iobs.optimize.objectives.design import Array, Booleans, DenseDesign, Design, Indices, copies_of_columns


class Objective(Protocol):
    """A twice differentiable function of d real variables.

    A class needs the attributes, `value_and_gradient` and the products with the Hessian; the other methods have
    defaults that a class inherits if it names this one as its base.

    Attributes:
        dimension: d.
        forced: coordinates that are always in the support and not counted in k.
        quadratic: whether the Hessian is the same everywhere.
        convex: whether f is known to be convex, so that a stationary point is a minimum.
        outputs: number of coefficients that a feature has.
    """

    dimension: int
    forced: Indices
    quadratic: bool
    convex: bool = False
    outputs: int = 1

    @property
    def coefficient_count(self) -> int:
        """The number of coefficients in the user's numbering, an intercept not counted."""
        return self.split(np.zeros(self.dimension))[0].size

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

    def copied_coordinates(self, *, penalised: bool = True, limits: tuple[Array, Array] | None = None) -> Indices:
        """Coordinates whose column is a multiple of another one that can do all that both can.

        Args:
            penalised: also where either has a ridge: two are then better than one.
            limits: lower and upper bounds (d,) of the coordinates; None without any. Two copies with finite bounds
                reach further than one, and copies of opposite signs, of which neither may be negative, do too.
        """
        return np.zeros(0, np.int64)


class DesignObjective(Objective, Protocol):
    """Base class of functions of X theta plus a ridge term.

    Attributes:
        design: X as the objective uses it.
        weights: of the samples (n,); ones where they are in the design already.
        ridge: weight of 1/2 theta_j^2 of every coordinate (d,).
    """

    convex: bool = True

    design: Design
    weights: Array
    ridge: Array

    @cached_property
    def squares(self) -> Array:
        """sum_i w_i X_ij^2 of every column, by one pass over X, which also checks that X is finite.

        Raises:
            NonFiniteError: X holds NaN or infinity.
        """
        squares = self.design.squares(self.weights)
        bad = np.flatnonzero(~np.isfinite(squares))
        if bad.size:
            raise NonFiniteError(
                f"Column {bad[0]} of the design matrix holds NaN, infinity or numbers too large to square "
                f"({bad.size} such columns); remove or impute those entries first."
            )
        return squares

    @property
    def rank(self) -> int:
        """An upper bound on the rank of the Hessian."""
        return self.dimension if self.ridge.any() else min(self.design.shape) * self.outputs

    def slope_norm(self, theta: Array) -> float:
        """At least the norm of the derivatives of f by the margins; here each term's have absolute sum 2 at most."""
        return 2.0 * float(self.weights.sum())

    def with_ridge(self, block: Array, rows: Indices | None, support: Indices) -> Array:
        """Rows and columns of a Hessian, the ridge added where they meet on the diagonal."""
        rows = np.arange(self.dimension) if rows is None else rows
        return np.asarray(block + np.where(rows[:, None] == support[None, :], self.ridge[support][None, :], 0.0))

    def restricted(self, support: Indices) -> Self:
        """The same loss on the columns in `support`, with all coordinates of each."""
        columns = support if self.outputs == 1 else support[:: self.outputs] // self.outputs
        part = copy(self)
        part.design = DenseDesign(np.asfortranarray(self.design.columns(columns)))
        part.dimension, part.forced = support.size, np.zeros(0, np.int64)
        part.ridge, part.squares = self.ridge[support], self.squares[columns]
        vars(part).pop("_copies", None)
        return part

    def constant_coordinates(self) -> Indices:
        """Coordinates of zero columns without ridge."""
        return np.flatnonzero((self.squares == 0) & (self.ridge == 0)).astype(np.int64)

    @cached_property
    def _copies(self) -> tuple[Indices, Array]:
        """`copies_of_columns`; of equal columns a forced one stays, else one without ridge."""
        order = np.where(self._penalised, 1.0, 0.0)
        if self.outputs == 1:
            order[self.forced] = -1.0
        return copies_of_columns(self.design, self.squares, order)

    @property
    def _penalised(self) -> Booleans:
        """True for the columns with a ridge."""
        return np.asarray((self.ridge.reshape(-1, self.outputs) > 0).any(axis=1))

    def copied_coordinates(self, *, penalised: bool = True, limits: tuple[Array, Array] | None = None) -> Indices:
        """Coordinates whose column is a multiple of another one that can do all that both can; see `Objective`."""
        origins, _ = self._copies
        spare = origins >= 0
        if not penalised:
            spare &= ~self._penalised & ~self._penalised[origins]
        if limits is not None and spare.any():
            spare = self._replaceable(spare, *limits)
        return np.flatnonzero(np.repeat(spare, self.outputs)).astype(np.int64)

    def _replaceable(self, copies: Booleans, lower: Array, upper: Array) -> Booleans:
        """Of copies and their origins the columns that another one can replace within its bounds (d,).

        It can if it has no bound on a side to which the other column moves the sum of both.
        """
        origins, factors = self._copies
        turned = np.repeat(factors < 0, self.outputs)
        shape = (-1, self.outputs)
        low = np.where(turned, -upper, lower).reshape(shape)
        high = np.where(turned, -lower, upper).reshape(shape)
        replaceable = np.zeros_like(copies)
        for origin in np.unique(origins[copies]):
            members = np.append(origin, np.flatnonzero(copies & (origins == origin)))
            open_sides = np.isinf(low[members]).sum(axis=1) + np.isinf(high[members]).sum(axis=1)
            kept: list[int] = []
            for member in members[np.argsort(-open_sides, kind="stable")].tolist():
                within = ((low[member] >= 0) | np.isinf(low[kept])) & ((high[member] <= 0) | np.isinf(high[kept]))
                replaceable[member] = within.all(axis=1).any()
                kept += [] if replaceable[member] else [member]
        return replaceable
