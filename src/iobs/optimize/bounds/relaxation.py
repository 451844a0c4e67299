"""The quadratic of a certificate as arrays: its root node, its separable lower bound, its unconstrained minimum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from iobs.errors import NotPositiveDefiniteError
from iobs.optimize.bounds.ties import equal_columns
from iobs.optimize.objectives.design import Array, Booleans, Indices
from iobs.optimize.objectives.linear import LeastSquares
from iobs.optimize.problem import Problem


@dataclass
class Node:
    """A node of the search tree: some coordinates are excluded, some included, the others free.

    Attributes:
        active: coordinates that are not excluded (m,).
        inside: (m,) true where a coordinate is included.
        centre: minimiser over all active coordinates (m,).
        inverse: inverse Hessian on the active coordinates (m, m); None once dropped to save memory.
        value: f at the centre.
        delta: diagonal Delta (d,) with H - Delta positive semi-definite on the active coordinates.
        tied: whether H may be singular on the active coordinates; centre, inverse and delta are then unknown.
    """

    active: Indices
    inside: Booleans
    centre: Array
    inverse: Array | None
    value: float
    delta: Array
    tied: bool = False

    def bound(self, saliency: Array, free: Indices, removals: int) -> float:
        """A lower bound on f once `removals` of the free coordinates are excluded.

        Args:
            saliency: the rise of f if one active coordinate is excluded (m,).
            free: positions of the free coordinates among the active ones.
            removals: number of free coordinates that must be excluded.
        """
        if removals <= 0:
            return self.value
        single = np.partition(saliency[free], removals - 1)[removals - 1]
        joint = 0.5 * self.delta[self.active[free]] * self.centre[free] ** 2
        total = float(np.partition(joint, removals - 1)[:removals].sum())
        return self.value + max(float(single), total)

    def excluded(self, inverse: Array, chosen: int, value: float) -> Node:
        """The child in which the active coordinate at position `chosen` is excluded.

        Args:
            inverse: inverse Hessian on the active coordinates (m, m).
            chosen: position of the coordinate among the active ones.
            value: f at the child's centre.
        """
        pivot = inverse[chosen, chosen]
        column = inverse[:, chosen]
        keep = np.arange(self.active.size) != chosen
        centre = (self.centre - column * (self.centre[chosen] / pivot))[keep]
        smaller = inverse[np.ix_(keep, keep)]
        smaller -= np.outer(column[keep] / pivot, column[keep])
        return Node(self.active[keep], self.inside[keep], centre, smaller, value, self.delta)


class QuadraticArrays:
    """f(v) = start + 1/2 v^T H v - linear^T v and the number of coordinates that a support holds.

    Args:
        problem: with a quadratic objective.

    Attributes:
        hessian: H (d, d).
        linear: minus the gradient at zero (d,).
        start: f(0).
        count: size of a support, forced coordinates included.
        usable: sorted coordinates that f depends on and that may be in a support; one of each class of equal columns.
        represented: for each usable coordinate the coordinates with an equal column, itself included.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        objective = problem.objective
        self.hessian = objective.hessian_block(np.zeros(objective.dimension), np.arange(objective.dimension))
        self.start, gradient = objective.value_and_gradient(np.zeros(objective.dimension))
        self.linear = -gradient
        # A forced coordinate without curvature is not searched over; counting it would let in one more free coordinate.
        forced = problem.forced[self.hessian.diagonal()[problem.forced] > 0]
        self.count = problem.size + forced.size
        usable = np.sort(np.concatenate([np.flatnonzero(problem.candidates), forced])).astype(np.int64)
        self.represented = equal_columns(problem, self.hessian, self.linear, usable)
        self.usable = np.array(sorted(self.represented), dtype=np.int64)
        self.count -= np.setdiff1d(forced, self.usable).size

    def root(self, active: Indices, inside: Booleans) -> tuple[Node, float] | None:
        """(node, rounding margin) with these coordinates active; None where H is not definite enough to invert."""
        block = self.hessian[np.ix_(active, active)]
        try:
            factor = np.linalg.cholesky(block)
        except np.linalg.LinAlgError:
            return None
        if not (factor.diagonal() ** 2 > 1e-10 * block.diagonal()).all():
            return None
        inverse = np.linalg.inv(block)
        inverse = 0.5 * (inverse + inverse.T)
        scaled = np.sqrt(inverse.diagonal())
        correlation = inverse / scaled / scaled[:, None]
        widest = float(np.linalg.eigvalsh(correlation)[-1])
        delta = np.zeros(self.linear.size)
        delta[active] = (1 - 1e-9) / (widest * inverse.diagonal())
        centre = inverse @ self.linear[active]
        # The rounding error of the value is about cond(H) eps, relative to the explained part; the margin is 100 times
        # as large.
        condition = widest * float((block.diagonal() * inverse.diagonal()).max())
        value = self.start - 0.5 * float(self.linear[active] @ centre)
        margin = float(100 * np.finfo(float).eps * condition * max(abs(self.start - value), abs(self.start)))
        return Node(active, inside, centre, inverse, value, delta), margin

    def tied_root(self, value: float) -> Node:
        """The root node where H is singular; `value` bounds f from below."""
        nothing = np.zeros(0)
        return Node(self.usable, np.isin(self.usable, self.problem.forced), nothing, None, value, nothing, tied=True)

    def unconstrained(self) -> tuple[float, float]:
        """(bound, margin): the minimum of f without any constraint; 0 for least squares; -inf where f is unbounded.

        Raises:
            NotPositiveDefiniteError: the Hessian has a negative eigenvalue.
        """
        block = self.hessian[np.ix_(self.usable, self.usable)]
        values, vectors = np.linalg.eigh(block)
        if values[0] < -1e-9 * values[-1]:
            raise NotPositiveDefiniteError(
                f"The Hessian has a negative eigenvalue, {values[0]:.3g}: f is unbounded below; make it positive."
            )
        margin = 1e-9 * abs(self.start)
        if isinstance(self.problem.objective, LeastSquares):
            return 0.0, margin
        projected = vectors.T @ self.linear[self.usable]
        good = values > 1e-10 * values[-1]
        # In a direction of hardly any curvature f may be unbounded below, unless its slope there is only rounding.
        if float(np.abs(projected[~good]).max(initial=0.0)) > 1e-12 * float(np.linalg.norm(projected)):
            return -np.inf, margin
        gains = 0.5 * projected[good] ** 2 / values[good]
        margin += float((gains * (8 * values.size * np.finfo(float).eps * values[-1] / values[good])).sum())
        return self.start - float(gains.sum()), margin
