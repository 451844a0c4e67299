"""The common part of searches by branch and bound: the quadratic as arrays, nodes and their bounds, the open nodes.

Coordinates may stand for each other. Of equal columns (up to a factor) a support needs at most one, so the search keeps
one of each class (`equal_columns`). For columns that depend linearly on several others, let N span the null space of H
on the active coordinates of a node. A coordinate j with N_j = 0 has the same value at every minimiser. Excluding it
raises f by its saliency, with the pseudo-inverse of H. Any other coordinate can be replaced by the others at no cost: a
tie. `split_ties` branches on the coordinate with the largest N_j, until H is definite on what is active; then the
bounds of `branch_and_bound` apply.
"""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from iobs.errors import NotPositiveDefiniteError
from iobs.optimize.curvature import is_definite
from iobs.optimize.objectives.design import Array, Booleans, Indices
from iobs.optimize.objectives.linear import LeastSquares, LinearModel
from iobs.optimize.problem import Problem

_STORED_BYTES = 1 << 30  # of the inverses that open nodes hold
_EQUAL = 1e-13  # columns that differ by less, relative to their largest entries, are equal up to rounding
_NEAR = 1e-9  # columns whose correlation differs by more from 1 are not compared
_NULL = 1e-10  # relative eigenvalues below this count as zero
_ROUNDING = 1e-14  # relative eigenvalues below this are only rounding
_UNIQUE = 1e-8  # a coordinate with a smaller part in the null space has a unique value


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
        if not is_definite(block, 1e-10):
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


def equal_columns(problem: Problem, hessian: Array, linear: Array, usable: Indices) -> dict[int, Indices]:
    """The classes of equal columns by their representative: the forced one if there is one, else the first.

    Args:
        problem: with a quadratic objective.
        hessian: H (d, d).
        linear: minus the gradient at zero (d,).
        usable: the coordinates to classify, with positive curvature.
    """
    order = np.concatenate([np.intersect1d(usable, problem.forced), np.setdiff1d(usable, problem.forced)])
    units = 1.0 / np.sqrt(hessian.diagonal()[order])
    correlation = hessian[np.ix_(order, order)] * units * units[:, None]
    owner = np.arange(order.size)
    for i, j in np.argwhere(np.triu(np.abs(correlation) >= 1 - _NEAR, 1)):
        if owner[i] == i and owner[j] == j and _equal(problem, hessian, linear, int(order[i]), int(order[j])):
            owner[j] = i
    return {int(order[i]): np.sort(order[owner == i]).astype(np.int64) for i in np.unique(owner)}


def _equal(problem: Problem, hessian: Array, linear: Array, first: int, second: int) -> bool:
    """Check that a column is a multiple of another, on the data if there is any, else on the rows of H."""
    objective = problem.objective
    if isinstance(objective, LinearModel) and not objective.ridge[[first, second]].any():
        column, other_column = objective.design.columns(np.array([first, second])).T
    else:
        column, other_column = (np.append(hessian[j], linear[j]) for j in (first, second))
    factor = float(column @ other_column) / float(column @ column)
    return bool(np.abs(other_column - factor * column).max() <= _EQUAL * np.abs(other_column).max())


@dataclass(frozen=True)
class Tied:
    """A node of the search tree whose Hessian is singular on the active coordinates.

    Attributes:
        value: a lower bound on f over vectors on the active coordinates.
        saliency: a lower bound on the cost of excluding each active coordinate (m,), zero for ties.
        tie: position of the free coordinate with the largest part in the null space; -1 if no free one is tied.
    """

    value: float
    saliency: Array
    tie: int


def split_ties(hessian: Array, linear: Array, start: float, inside: Booleans) -> Tied:
    """The bounds of a node with a singular Hessian, and the coordinate to branch on.

    Args:
        hessian: H on the active coordinates (m, m).
        linear: minus the gradient at zero (m,).
        start: f(0).
        inside: (m,) true where a coordinate is included.
    """
    units = 1.0 / np.sqrt(hessian.diagonal())
    values, vectors = np.linalg.eigh(hessian * units * units[:, None])
    null = values <= _NULL * values[-1]
    projected = vectors.T @ (linear * units)
    usable = values > _ROUNDING * values[-1]
    value = start - 0.5 * float((projected[usable] ** 2 / values[usable]).sum())
    part = np.sqrt((vectors[:, null] ** 2).sum(axis=1))
    good = vectors[:, ~null]
    centre = good @ (projected[~null] / values[~null])
    inverse = (good**2 / values[~null]).sum(axis=1)
    saliency = np.where(part <= _UNIQUE, 0.5 * centre**2 / np.maximum(inverse, 1e-300), 0.0)
    free = np.where(inside, -1.0, part)
    tie = int(np.argmax(free))
    return Tied(value, saliency, tie if free[tie] > _UNIQUE else -1)


class SupportTree(ABC):
    """Best-first branch and bound: the open nodes, and the steps that do not depend on what is searched for.

    Attributes:
        quadratic: f as arrays.
        most: size of the largest support, forced coordinates included.
        margin: absolute allowance for rounding of the bounds.
        open: heap of (bound, number, node) still to be branched on.
        nodes: number of nodes looked at.
        stored: bytes of the inverses that the open nodes hold.
    """

    _tied_order = 1  # 1 visits nodes with equal bounds in the order in which they were split off, -1 the latest first

    def __init__(self, quadratic: QuadraticArrays, most: int) -> None:
        self.quadratic, self.most, self.margin = quadratic, most, 0.0
        self.open: list[tuple[float, int, Node]] = []
        self.nodes = self.stored = 0
        self._counter = itertools.count()

    @property
    @abstractmethod
    def limit(self) -> float:
        """The bound above which a node is of no use."""

    @abstractmethod
    def _ended(self, node: Node) -> bool:
        """Take in the supports of a node that needs no further split; return whether it was such a node."""

    def _push(self, bound: float, node: Node) -> None:
        """Open a node, unless its bound is above the limit."""
        if bound > self.limit:
            return
        if node.inverse is not None and self.stored + node.inverse.nbytes > _STORED_BYTES:
            node.inverse = None  # `_inverse` computes it again
        elif node.inverse is not None:
            self.stored += node.inverse.nbytes
        number = next(self._counter)
        heapq.heappush(self.open, (bound, self._tied_order * number if node.tied else number, node))

    def _pop(self) -> Node:
        """The open node with the least bound."""
        node = heapq.heappop(self.open)[2]
        self.stored -= 0 if node.inverse is None else node.inverse.nbytes
        return node

    def _inverse(self, node: Node) -> Array:
        """Take the inverse out of a node, or compute it where it was dropped."""
        if node.inverse is None:
            block = self.quadratic.hessian[np.ix_(node.active, node.active)]
            return np.asarray(np.linalg.inv(block), dtype=np.float64)
        inverse, node.inverse = node.inverse, None
        return inverse

    def _root(self) -> Node | None:
        """The root node, with the margin of its bounds, tied where the Hessian is singular; None where f has no bound.

        Raises:
            NotPositiveDefiniteError: the Hessian has a negative eigenvalue.
        """
        active = self.quadratic.usable
        root = self.quadratic.root(active, np.isin(active, self.quadratic.problem.forced))
        if root is not None:
            self.margin = root[1]
            return root[0]
        lower, self.margin = self.quadratic.unconstrained()
        return self.quadratic.tied_root(lower) if np.isfinite(lower) else None

    def _split(self, node: Node, inverse: Array) -> float | None:
        """Split a node on the free coordinate that costs most to exclude, which the node then includes.

        Coordinates that must be included are included first. The child without the coordinate is opened.

        Returns:
            The bound of the node with the coordinate; None if it needs no further split.
        """
        saliency = 0.5 * node.centre**2 / inverse.diagonal()
        node.inside = node.inside | (node.value + saliency > self.limit)
        if self._ended(node):
            return None
        free, removals = np.flatnonzero(~node.inside), node.active.size - self.most
        if node.bound(saliency, free, removals) > self.limit:
            return None
        chosen = int(free[np.argmax(saliency[free])])
        self._exclude(node, inverse, chosen)
        node.inside = node.inside.copy()
        node.inside[chosen] = True
        return node.bound(saliency, np.flatnonzero(~node.inside), removals)

    def _exclude(self, node: Node, inverse: Array, chosen: int) -> None:
        """Open the child of a node in which the active coordinate at position `chosen` is excluded."""
        value = node.value + 0.5 * node.centre[chosen] ** 2 / inverse[chosen, chosen]
        if value > self.limit:
            return
        child = node.excluded(inverse, chosen, float(value))
        assert child.inverse is not None
        saliency = 0.5 * child.centre**2 / child.inverse.diagonal()
        free = np.flatnonzero(~child.inside)
        self._push(child.bound(saliency, free, child.active.size - self.most), child)

    def _split_tied(self, node: Node) -> None:
        """Split a node with a singular Hessian on a coordinate that others can replace."""
        block = self.quadratic.hessian[np.ix_(node.active, node.active)]
        tied = split_ties(block, self.quadratic.linear[node.active], self.quadratic.start, node.inside)
        value = max(node.value, tied.value)
        node.inside = node.inside | (value + tied.saliency > self.limit)
        if self._ended(node):
            return
        inside, free = node.inside, np.flatnonzero(~node.inside)
        removals, bound = node.active.size - self.most, value
        if removals > 0:
            bound += float(np.partition(tied.saliency[free], removals - 1)[removals - 1])
        chosen = tied.tie if tied.tie >= 0 and not inside[tied.tie] else int(free[np.argmax(tied.saliency[free])])
        keep, with_chosen = np.arange(inside.size) != chosen, inside.copy()
        with_chosen[chosen] = True
        for active, included in ((node.active[keep], inside[keep]), (node.active, with_chosen)):
            self._push(bound, Node(active, included, node.centre, None, value, node.delta, tied=True))
