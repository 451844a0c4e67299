"""Branch and bound for any convex f with the bounds of `perspective`: the nodes, and what a search does with them.

A node has used some features, excluded others, and left the rest free. Its relaxation gives a tangent, which also says
what the bound would be with any one free feature used or excluded. Features whose choice is settled by that are fixed
at once (reduced costs); of the others the one with the share nearest 1/2 is branched on. Nodes are visited by ascending
bound. A support that is decided is fitted, and its own tangent bounds it too, so that nothing depends on how well a fit
converged.
"""

from __future__ import annotations

import heapq
import itertools
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from iobs.optimize.bounds.perspective import Relaxed, SparseConvex, Tangent
from iobs.optimize.objectives.design import Array, Booleans, Indices
from iobs.optimize.refit.newton import Fit, refit
from iobs.optimize.refit.within import Bounds

OUT_OF_TIME = "the time limit was reached"

_STORED_BYTES = 1 << 30  # of the open nodes; above this the search goes depth first
_SEEN = 100_000  # most supports that are remembered as fitted


@dataclass
class ConvexNode:
    """A node of the search tree.

    Attributes:
        used: features that are used (p,).
        free: features that may be used (p,).
        bound: a lower bound on f at the node.
        places: coordinates that are not zero at the parent's minimiser.
        values: of these coordinates there.
        price: of the parent's relaxation.
    """

    used: Booleans
    free: Booleans
    bound: float
    places: Indices
    values: Array
    price: float

    @property
    def nbytes(self) -> int:
        """Bytes that the node holds."""
        return 400 + self.used.nbytes + self.free.nbytes + self.places.nbytes + self.values.nbytes


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
        nothing = np.zeros(problem.features, dtype=np.bool_)
        self._push(ConvexNode(nothing, candidates, -np.inf, np.zeros(0, np.int64), np.zeros(0), 0.0))

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
        used, free = node.used.copy(), node.free.copy()
        start = np.zeros(self.problem.ridge.size)
        start[node.places] = node.values
        relaxed: Relaxed | None = None
        bound = node.bound
        while True:
            support = self.decided(used, free)
            if support is not None:
                if support.size == self.problem.features:
                    self._decide(support, start)
                return []
            if relaxed is not None:
                break
            room = self.most - int(used.sum())
            excluded = ~(used | free)
            start[self.problem.coordinates(excluded)] = 0.0
            relaxed = self.problem.relax(used, free, room, start, node.price, self.limit)
            self.margin = max(self.margin, relaxed.tangent.margin(used, free))
            start, bound = relaxed.theta, max(bound, relaxed.bound)
            if bound > self.limit:
                self.dropped = min(self.dropped, bound)
                return []
            self._round(relaxed, used, free, room)
            if bound > self.limit:
                self.dropped = min(self.dropped, bound)
                return []
            self._fix(relaxed.tangent, used, free, room)
        return self._children(relaxed, used, free, bound)

    def _fix(self, tangent: Tangent, used: Booleans, free: Booleans, room: int) -> None:
        """Use and exclude the features of which the other choice is above the limit, in place."""
        places = np.flatnonzero(free)
        costs, bound, limit = tangent.costs[places], tangent.bound(used, free, room), self.limit
        if places.size > room:
            order = np.argsort(-costs, kind="stable")
            last, following = costs[order[room - 1]], costs[order[room]]
            top = np.zeros(places.size, dtype=np.bool_)
            top[order[:room]] = True
        else:
            last, following, top = np.inf, 0.0, np.ones(places.size, dtype=np.bool_)
        must = top & (bound + costs - following > limit)
        out = ~top & (bound + last - costs > limit)
        raised = [float((bound + costs - following)[must].min())] if must.any() else []
        raised += [float((bound + last - costs)[out].min())] if out.any() else []
        self.dropped = min([self.dropped, *raised])
        used[places[must]] = True
        free[places[must | out]] = False

    def _children(self, relaxed: Relaxed, used: Booleans, free: Booleans, bound: float) -> list[ConvexNode]:
        """The two nodes that differ by the use of one feature."""
        shares = np.where(free, relaxed.shares, -1.0)
        between = np.minimum(shares, 1.0 - shares)
        if between.max() > 1e-3:
            chosen = int(np.argmax(between))
        else:  # among equal shares the costs, of any size, decide
            places = np.flatnonzero(free)
            chosen = int(places[np.lexsort((relaxed.tangent.costs[places], shares[places]))[-1]])
        children = []
        for use in (False, True):
            now_used, now_free = used.copy(), free.copy()
            now_free[chosen] = False
            now_used[chosen] = use
            room = self.most - int(now_used.sum())
            below = max(bound, relaxed.tangent.bound(now_used, now_free, room))
            theta = relaxed.theta
            places = np.flatnonzero(theta).astype(np.int64)
            if not use:
                places = places[self.problem.owner[places] != chosen]
            children.append(ConvexNode(now_used, now_free, below, places, theta[places], relaxed.price))
        return children

    def _round(self, relaxed: Relaxed, used: Booleans, free: Booleans, room: int) -> None:
        """Fit the support of the largest shares, unless its bound or an earlier fit rules it out."""
        sizes = self.problem.by_feature(relaxed.theta**2 * self.problem.ridge)
        places = np.flatnonzero(free)
        order = places[np.lexsort((-sizes[places], -relaxed.shares[places]))[:room]]
        chosen = used.copy()
        chosen[order] = True
        self._fit(chosen, relaxed.theta, relaxed.tangent)

    def _fit(self, used: Booleans, start: Array, tangent: Tangent) -> None:
        nothing = np.zeros_like(used)
        key = np.packbits(used).tobytes()
        if key in self._seen or tangent.bound(used, nothing, 0) > self.limit:
            return
        if len(self._seen) < _SEEN:
            self._seen.add(key)
        start = np.where(self.problem.coordinates(used) | self.problem.always, start, 0.0)
        relaxed = self.problem.relax(
            used, nothing, 0, start, 0.0, self.limit
        )  # stops once its bound is above the limit
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
        relaxed = self.problem.relax(used, np.zeros_like(used), 0, fit.theta, 0.0, self.limit)
        self.margin = max(self.margin, relaxed.tangent.margin(used, np.zeros_like(used)))
        self.dropped = min(self.dropped, relaxed.bound)
