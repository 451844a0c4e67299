"""Branch and bound for any convex f with the bounds of `perspective`: the nodes, and what a search does with them.

A node has used some features, excluded others, and left the rest free. Its relaxation gives a tangent, which also says
what the bound would be with any one free feature used or excluded. Features whose choice is settled by that are fixed
at once (reduced costs). Then the free feature of the largest share and those that are correlated with it become a
group: one child excludes them all, the other uses at least one. Once no features are left beside the groups, the group
whose shares are spread most is split into two parts: one child uses one of the first, the other excludes the first.

Nodes are visited by ascending bound. A support that is decided is fitted, and its own tangent bounds it too, so that
nothing depends on how well a fit converged.
"""

from __future__ import annotations

import heapq
import itertools
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from iobs.optimize.bounds.choices import Choices
from iobs.optimize.bounds.perspective import Relaxed, SparseConvex, Tangent
from iobs.optimize.curvature import NO_INDICES
from iobs.optimize.objectives.design import Array, Booleans, Indices
from iobs.optimize.refit.newton import Fit, refit
from iobs.optimize.refit.within import Bounds

OUT_OF_TIME = "the time limit was reached"

_STORED_BYTES = 1 << 30  # of the open nodes; above this the search goes depth first
_NEIGHBOURS = 0.5  # features whose columns have at least this correlation are branched on together
_KEPT_BYTES = 1 << 26  # of correlations
_SEEN = 100_000  # most supports that are remembered as fitted


@dataclass
class ConvexNode:
    """A node of the search tree.

    Attributes:
        roles: of the features (p,), as `Choices`.
        bound: a lower bound on f at the node.
        places: coordinates that are not zero at the parent's minimiser.
        values: of these coordinates there.
        prices: of the parent's relaxation.
    """

    roles: Indices
    bound: float
    places: Indices
    values: Array
    prices: Array

    @property
    def nbytes(self) -> int:
        """Bytes that the node holds."""
        return 500 + self.roles.nbytes + self.places.nbytes + self.values.nbytes + self.prices.nbytes


class Correlations:
    """Absolute correlations of the columns of features at zero, given the coordinates that are always used.

    Args:
        problem: f; of a feature with several coordinates the first one counts.
    """

    def __init__(self, problem: SparseConvex) -> None:
        self._objective, owner = problem.objective, problem.owner
        self._places = np.unique(np.where(owner < 0, problem.features, owner), return_index=True)[1]
        self._places = self._places[: problem.features].astype(np.int64)
        self._always = np.flatnonzero(owner < 0).astype(np.int64)
        self._rows: dict[int, Array] = {}

    @cached_property
    def _scales(self) -> tuple[Array, Array]:
        """(A, lengths): a column less A^T times the columns that are always used has that length."""
        zero = np.zeros(self._objective.dimension)
        lengths = self._objective.hessian_diagonal(zero)[self._places]
        if not self._always.size:
            return np.zeros((0, self._places.size)), np.sqrt(lengths)
        columns = self._objective.hessian_columns(zero, self._always, self._places).T
        block = self._objective.hessian_block(zero, self._always)
        explained = np.linalg.lstsq(block, columns, rcond=None)[0]
        return np.asarray(explained, dtype=np.float64), np.sqrt(
            np.maximum(lengths - (explained * columns).sum(axis=0), 0.0)
        )

    def of(self, feature: int) -> Array:
        """The correlations of a feature with all (p,)."""
        if feature not in self._rows:
            explained, lengths = self._scales
            zero, place = np.zeros(self._objective.dimension), self._places[[feature]]
            row = self._objective.hessian_columns(zero, place, self._places)[:, 0]
            if self._always.size:
                row = row - explained.T @ self._objective.hessian_columns(zero, place, self._always)[:, 0]
            if (len(self._rows) + 1) * row.nbytes > _KEPT_BYTES:
                self._rows.clear()
            with np.errstate(divide="ignore", invalid="ignore"):
                self._rows[feature] = np.nan_to_num(np.abs(row) / (lengths * lengths[feature]), posinf=0.0)
        return self._rows[feature]


@dataclass(frozen=True)
class TreeState:
    """A search between two nodes, from which it can go on.

    Attributes:
        open: nodes that are left, in the order in which they are opened again: the least bound last.
        nodes: number of nodes looked at.
        dropped: the least bound of a node that was dropped.
        margin: the largest allowance for rounding.
    """

    open: list[ConvexNode]
    nodes: int
    dropped: float
    margin: float


class ConvexTree(ABC):
    """Best-first branch and bound that can be stopped and continued.

    Args:
        problem: f, its features and bounds.
        most: largest number of used features.
        candidates: features that may be used (p,).
        bounds: of all coordinates, within which supports are fitted; None without any. The problem may have more,
            which hold for all vectors of interest.

    Attributes:
        best: the best fit known. A search sets it before the tree is made, whose limits depend on it.
        nodes: number of nodes looked at.
        dropped: the least bound of a node that was dropped.
        margin: the largest allowance for rounding; it is subtracted from all bounds.
    """

    best: Fit

    def __init__(self, problem: SparseConvex, most: int, candidates: Booleans, bounds: Bounds | None) -> None:
        self.problem, self.most, self._bounds = problem, most, bounds
        self.nodes, self.dropped, self.margin = 0, np.inf, 0.0
        self._open: list[tuple[float, int, ConvexNode]] = []
        self._stack: list[ConvexNode] = []  # children of the node at hand, once the open nodes take too much memory
        self._children_left: list[ConvexNode] = []  # of the node at hand, still to be opened
        self._stored = 0
        self._numbers = itertools.count()
        self._seen: set[bytes] = set()
        self._correlations = Correlations(problem)
        root = Choices.of(np.zeros_like(candidates), candidates, most)
        self._push(ConvexNode(root.roles, -np.inf, np.zeros(0, np.int64), np.zeros(0), np.zeros(1)))

    @property
    @abstractmethod
    def limit(self) -> float:
        """The bound above which a node is of no use."""

    def decided(self, used: Booleans, free: Booleans) -> Booleans | None:
        """The features of the only support of a node that counts (p,), none for no support; None to go on.

        Where there is room for all features they are all used: more of them never raise f.
        """
        if int(used.sum()) >= self.most:
            return used
        return used | free if int(used.sum()) + int(free.sum()) <= self.most else None

    @abstractmethod
    def take(self, fit: Fit, used: Booleans) -> None:
        """Take in the fit of a support; `used` are its features (p,)."""

    @property
    def left(self) -> float:
        """The least bound of a node that was dropped or is still open."""
        waiting = [node.bound for node in (*self._stack, *self._children_left)]
        return min([self.dropped, *(bound for bound, _, _ in self._open[:1]), *waiting])

    @property
    def lower(self) -> float:
        """A proved lower bound on f over all supports."""
        return min(self.left, self.best.value)

    @property
    def state(self) -> TreeState:
        """The state between two nodes; after an interruption a node may be there beside its children."""
        by_bound = [node for _, _, node in sorted(self._open, key=lambda entry: entry[:2], reverse=True)]
        return TreeState([*by_bound, *self._stack, *self._children_left], self.nodes, self.dropped, self.margin)

    def go_on_from(self, state: TreeState) -> None:
        """Take the place of a search with the same bounds on coefficients and at most the same limit."""
        self.nodes, self.dropped, self.margin = state.nodes, state.dropped, state.margin
        self._open.clear()
        self._stored = 0
        for node in state.open:
            self._push(node)

    def run(self, deadline: float, max_nodes: int) -> str:
        """Search until no node is left below the limit, or a limit is reached; return which one, or ""."""
        while self._stack or (self._open and self._open[0][0] <= self.limit):
            if self.nodes and time.perf_counter() > deadline:
                return OUT_OF_TIME
            if self.nodes >= max_nodes:
                return f"the limit of {max_nodes:,} nodes was reached"
            reason = self.stopped()
            if reason:
                return reason
            node = self._stack[-1] if self._stack else self._open[0][2]
            self._children_left = self._visit(node)  # an interruption leaves the node or its children
            self._take_off()
            while self._children_left:
                self._push(self._children_left[-1])
                self._children_left.pop()
        if self._open:
            self.dropped = min(self.dropped, self._open[0][0])
        self._open.clear()
        return ""

    def stopped(self) -> str:
        """A reason to stop now, or ""."""
        return ""

    def _take_off(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._stored -= heapq.heappop(self._open)[2].nbytes

    def _push(self, node: ConvexNode) -> None:
        if node.bound > self.limit and node.bound > -np.inf:
            self.dropped = min(self.dropped, node.bound)
        elif self._stored > _STORED_BYTES:
            self._stack.append(node)
        else:
            self._stored += node.nbytes
            heapq.heappush(self._open, (node.bound, -next(self._numbers), node))

    def _visit(self, node: ConvexNode) -> list[ConvexNode]:
        """Bound a node; return its children, none if it is dropped or decided."""
        self.nodes += 1
        choices: Choices | None = Choices(node.roles, self.most)
        start = np.zeros(self.problem.ridge.size)
        start[node.places] = node.values
        relaxed: Relaxed | None = None
        bound = node.bound
        while choices is not None:
            support = self.decided(choices.used, choices.free)
            if support is not None:
                if support.size == self.problem.features:
                    self._decide(support, start)
                return []
            if relaxed is not None:
                return self._children(relaxed, choices, bound)
            start[self.problem.coordinates(~(choices.used | choices.free))] = 0.0
            relaxed = self.problem.relax(choices, start, node.prices, self.limit)
            self.margin = max(self.margin, relaxed.tangent.margin(choices))
            start, bound = relaxed.theta, max(bound, relaxed.bound)
            if bound > self.limit:
                self.dropped = min(self.dropped, bound)
                return []
            self._round(relaxed, choices)
            if bound > self.limit:
                self.dropped = min(self.dropped, bound)
                return []
            choices = self._fixed(relaxed.tangent, choices)
        return []

    def _fixed(self, tangent: Tangent, choices: Choices) -> Choices | None:
        """Use and exclude the features of which the other choice is above the limit; None if no support is left."""
        bound = tangent.bound(choices)
        with_it, without = (bound + smaller for smaller in choices.reduced(tangent.costs))
        out, must = choices.free & (with_it > self.limit), choices.free & (without > self.limit)
        raised = [float(values[fixed].min()) for values, fixed in ((with_it, out), (without, must)) if fixed.any()]
        self.dropped = min([self.dropped, *raised])
        return choices.settled(must, out & ~must)

    def _children(self, relaxed: Relaxed, choices: Choices, bound: float) -> list[ConvexNode]:
        """The two nodes that differ by the use of any feature of a group."""
        group = self._branched(relaxed, choices)
        children = []
        for child in (choices.settled(NO_INDICES, group), choices.with_group(group)):
            if child is not None:
                below = max(bound, relaxed.tangent.bound(child))
                places = np.flatnonzero(relaxed.theta).astype(np.int64)
                excluded = self.problem.coordinates(~(child.used | child.free))
                places = places[~excluded[places]]
                children.append(ConvexNode(child.roles, below, places, relaxed.theta[places], relaxed.prices))
        return children

    def _branched(self, relaxed: Relaxed, choices: Choices) -> Booleans:
        """The features (p,) of which one child uses at least one and the other none: a new group, or half of one."""
        order = np.lexsort((relaxed.tangent.costs, relaxed.shares))  # among equal shares the costs, of any size, decide
        chosen = np.zeros(order.size, dtype=np.bool_)
        plain = order[choices.plain[order]]
        if plain.size:
            row = self._correlations.of(int(plain[-1]))
            usual = float(np.median(row))  # a part that all columns have in common makes no neighbours
            chosen[plain] = row[plain] - usual >= _NEIGHBOURS * (1.0 - usual)
            chosen[plain[-1]] = True
            return chosen
        largest = [relaxed.shares[choices.members(int(group))].max() for group in choices.groups]
        members = order[choices.roles[order] == choices.groups[int(np.argmin(largest))]]
        first, second = (self._correlations.of(int(member))[members] for member in (members[-1], members[-2]))
        chosen[members] = first >= second
        chosen[members[-1]], chosen[members[-2]] = True, False
        return chosen

    def _round(self, relaxed: Relaxed, choices: Choices) -> None:
        """Fit the support of the largest shares, unless its bound or an earlier fit rules it out."""
        sizes = self.problem.by_feature(relaxed.theta**2 * self.problem.ridge)
        order = np.lexsort((-sizes, -relaxed.shares))
        rank = np.empty(order.size)
        rank[order] = np.arange(order.size, 0, -1)
        chosen = choices.used.copy()
        chosen[choices.representatives(rank)] = True
        rest = order[(choices.free & ~chosen)[order]]
        chosen[rest[: choices.room]] = True
        self._fit(chosen, relaxed.theta, relaxed.tangent)

    def _fit(self, used: Booleans, start: Array, tangent: Tangent) -> None:
        only = Choices.of(used, np.zeros_like(used), int(used.sum()))
        key = np.packbits(used).tobytes()
        if key in self._seen or tangent.bound(only) > self.limit:
            return
        if len(self._seen) < _SEEN:
            self._seen.add(key)
        start = np.where(self.problem.coordinates(used) | self.problem.always, start, 0.0)
        relaxed = self.problem.relax(only, start, np.zeros(1), self.limit)  # stops once its bound is above the limit
        if relaxed.bound <= self.limit:
            self.take(self.fitted(used, relaxed.theta), used)

    def fitted(self, used: Booleans, start: Array) -> Fit:
        """The fit of the support of some features."""
        support = np.flatnonzero(self.problem.coordinates(used) | self.problem.always).astype(np.int64)
        return refit(self.problem.objective, support, start, bounds=self._bounds)

    def _decide(self, used: Booleans, start: Array) -> None:
        """Fit a support that is decided, and bound it by its own tangent."""
        fit = self.fitted(used, start)
        self.take(fit, used)
        only = Choices.of(used, np.zeros_like(used), int(used.sum()))
        relaxed = self.problem.relax(only, fit.theta, np.zeros(1), self.limit)
        self.margin = max(self.margin, relaxed.tangent.margin(only))
        self.dropped = min(self.dropped, relaxed.bound)
