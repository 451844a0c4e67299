"""The Rashomon set: every support of k coordinates whose loss is near the best, proved complete by branch and bound.

The name is Breiman's (2001). The search tree and its bounds are those of `branch_and_bound`. Here a node is dropped
only if its bound exceeds the ceiling (1 + gap) f*. So the tree ends with every support below the ceiling. A better
support lowers the ceiling on the way. Nodes are visited by ascending bound. So a search that is stopped has still found
every support whose loss lies below the bound of the next node.

Of equal columns the tree holds one; supports with the others are added afterwards (`_expanded`). The last coordinate of
a support is not branched on: all its choices are computed at once.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from scipy.linalg import eigh

from iobs.core.quadratic import Quadratic
from iobs.errors import ProblemError
from iobs.optimize.bounds.members import Member, RashomonSet
from iobs.optimize.bounds.relaxation import Node, QuadraticArrays
from iobs.optimize.bounds.ties import split_ties
from iobs.optimize.curvature.models import QuadraticObjective
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.design import Array, Indices
from iobs.optimize.problem import Problem, require_storable
from iobs.optimize.refit.fit import Fit, inverse_block
from iobs.optimize.refit.newton import refit
from iobs.optimize.search import auto

_STORED_BYTES = 1 << 30
_MOST_OPEN = 2_000_000  # most open nodes
_EQUAL = 1e-9  # losses that differ by less, relative to the best, count as equal
_EQUAL_START = 1e-12  # the same relative to f(0), for fits without residual
_NULL = 1e-12  # relative eigenvalues below this count as zero


def rashomon_set(
    objective: Objective | Quadratic,
    k: int,
    *,
    gap: float = 0.05,
    at_most: bool = False,
    seconds: float = 60.0,
    max_members: int = 20_000,
    seed: int = 0,
) -> RashomonSet:
    """Find every support of k coordinates whose loss is within a relative gap of the best loss.

    Supports whose losses equal the ceiling up to rounding belong to the set, so `gap=0` returns all best supports.
    Coordinates that f does not depend on are in no support. With more samples than columns the search is quick for some
    hundred columns. Where columns depend on each other it is little better than trying every support.

    Args:
        objective: a convex quadratic: least squares, or an `iobs.Quadratic` of one row.
        k: size of a support, forced coordinates not counted.
        gap: largest (f - f*) / |f*| of a member, f* being the best loss.
        at_most: whether supports of fewer than k coordinates are members too.
        seconds: time limit, compilation not counted; the result says whether the set is complete.
        max_members: the search stops, and the set is not complete, at more members.
        seed: random seed of the search for a first support.

    Raises:
        ProblemError: f is not quadratic, unbounded below, or too large to store H; gap, seconds or max_members are out
            of range.
        NotPositiveDefiniteError: the Hessian has a negative eigenvalue.
    """
    if isinstance(objective, Quadratic):
        objective = QuadraticObjective.of(objective)
    if not objective.quadratic:
        raise ProblemError("The Rashomon set needs a quadratic objective, such as LeastSquares; others have no bounds.")
    if not (gap >= 0 and np.isfinite(gap)) or not seconds >= 0 or max_members < 1:
        raise ProblemError(
            f"gap and seconds must not be negative and max_members at least 1, got {gap}, {seconds} and {max_members}."
        )
    require_storable("Branch and bound stores H", objective.dimension)
    problem = Problem(objective, k, rng=np.random.default_rng(seed))
    auto.compile_stages(objective)
    begun = time.perf_counter()
    first = list(auto.stages(problem))[-1].fit
    tree = _Tree(QuadraticArrays(problem), first.value, gap, at_most)
    reason = tree.run(begun + seconds, max_members)
    return _result(tree, reason, begun, max_members)


@dataclass(frozen=True)
class _Sizes:
    """Sizes of the supports in the tree, forced coordinates included."""

    least: int
    most: int


@dataclass
class _Tree:
    """Best-first branch and bound that keeps every support below the ceiling.

    Attributes:
        quadratic: f as arrays.
        best: the lowest loss known.
        gap: relative gap of the ceiling.
        at_most: whether smaller supports count.
        margin: absolute allowance for rounding of the bounds.
        open: heap of (bound, number, node).
        found: the fits of supports below the ceiling at the time.
        nodes: number of nodes visited.
        stored: bytes of the inverses that open nodes hold.
    """

    quadratic: QuadraticArrays
    best: float
    gap: float
    at_most: bool
    margin: float = 0.0
    open: list[tuple[float, int, Node]] = field(default_factory=list)
    found: list[Fit] = field(default_factory=list)
    nodes: int = 0
    stored: int = 0

    def __post_init__(self) -> None:
        quadratic, problem = self.quadratic, self.quadratic.problem
        forced = int(np.isin(quadratic.usable, problem.forced).sum())
        spare = sum(len(columns) - 1 for columns in quadratic.represented.values())
        least = forced if self.at_most else max(forced, quadratic.count - spare)
        self.sizes = _Sizes(least, min(quadratic.count, quadratic.usable.size))
        self._number = itertools.count()

    @property
    def tolerance(self) -> float:
        """The difference below which two losses count as equal."""
        return _EQUAL * abs(self.best) + _EQUAL_START * abs(self.quadratic.start)

    @property
    def ceiling(self) -> float:
        """The largest loss of a member."""
        return self.best + self.gap * abs(self.best) + self.tolerance

    @property
    def limit(self) -> float:
        """The bound above which a node holds no member: the ceiling and the allowance for rounding."""
        return self.ceiling + self.margin

    def run(self, deadline: float, max_members: int) -> str:
        """Search until no node is left below the ceiling, or a limit is reached; return which one, or ""."""
        self._begin()
        while self.open and self.open[0][0] <= self.limit:
            if time.perf_counter() > deadline:
                return "the time limit was reached"
            if len(self.found) > max_members:
                self._drop()
                if len(self.found) > max_members:
                    return f"there are more than {max_members:,} members"
            if len(self.open) > _MOST_OPEN:
                return f"there are more than {_MOST_OPEN:,} open nodes"
            node = heapq.heappop(self.open)[2]
            self.stored -= 0 if node.inverse is None else node.inverse.nbytes
            self.nodes += 1
            if node.tied:
                self._branch_tied(node)
            else:
                self._branch(node)
        self.open.clear()
        self._drop()
        return ""

    def _begin(self) -> None:
        active = self.quadratic.usable
        inside = np.isin(active, self.quadratic.problem.forced)
        if active.size == 0 or self.sizes.most == 0:
            self._keep(active[:0])
            return
        root = self.quadratic.root(active, inside)
        if root is not None:
            self.margin = root[1]
            self._push(root[0].value, root[0])
            return
        lower, self.margin = self.quadratic.unconstrained()
        if not np.isfinite(lower):
            raise ProblemError("f may be unbounded below where the Hessian is singular; add a ridge.")
        self._push(lower, self.quadratic.tied_root(lower))

    def _branch(self, node: Node) -> None:
        """Include what must be included, then split on the free coordinate that costs most to exclude."""
        inverse = node.inverse
        if inverse is None:
            block = self.quadratic.hessian[np.ix_(node.active, node.active)]
            inverse = np.asarray(np.linalg.inv(block), dtype=np.float64)
        saliency = 0.5 * node.centre**2 / inverse.diagonal()
        node.inside = node.inside | (node.value + saliency > self.limit)
        if self._ended(node):
            return
        free = np.flatnonzero(~node.inside)
        removals = node.active.size - self.sizes.most
        if node.bound(saliency, free, removals) > self.limit:
            return
        chosen = int(free[np.argmax(saliency[free])])
        child = node.excluded(inverse, chosen, node.value + float(saliency[chosen]))
        assert child.inverse is not None
        rises, others = 0.5 * child.centre**2 / child.inverse.diagonal(), np.flatnonzero(~child.inside)
        self._push(child.bound(rises, others, removals - 1), child)
        node.inside = node.inside.copy()
        node.inside[chosen] = True
        node.inverse = inverse
        self._push(node.bound(saliency, np.flatnonzero(~node.inside), removals), node)

    def _branch_tied(self, node: Node) -> None:
        """Split where the Hessian is singular; go on as usual once it is definite on the active coordinates."""
        root = self.quadratic.root(node.active, node.inside)
        if root is not None:
            self.margin = max(self.margin, root[1])
            self._push(max(node.value, root[0].value), root[0])
            return
        block = self.quadratic.hessian[np.ix_(node.active, node.active)]
        tied = split_ties(block, self.quadratic.linear[node.active], self.quadratic.start, node.inside)
        value = max(node.value, tied.value)
        node.inside = node.inside | (value + tied.saliency > self.limit)
        if self._ended(node):
            return
        inside, free = node.inside, np.flatnonzero(~node.inside)
        removals, bound = node.active.size - self.sizes.most, value
        if removals > 0:
            bound += float(np.partition(tied.saliency[free], removals - 1)[removals - 1])
        chosen = tied.tie if tied.tie >= 0 and not inside[tied.tie] else int(free[np.argmax(tied.saliency[free])])
        keep, included = np.arange(inside.size) != chosen, inside.copy()
        included[chosen] = True
        for active, chosen_in in ((node.active[keep], inside[keep]), (node.active, included)):
            self._push(bound, Node(active, chosen_in, node.centre, None, value, node.delta, tied=True))

    def _push(self, bound: float, node: Node) -> None:
        if bound > self.limit or node.active.size < self.sizes.least:
            return
        if node.inverse is not None and self.stored + node.inverse.nbytes > _STORED_BYTES:
            node.inverse = None  # computed again by `_branch`
        elif node.inverse is not None:
            self.stored += node.inverse.nbytes
        heapq.heappush(self.open, (bound, next(self._number), node))

    def _ended(self, node: Node) -> bool:
        """Keep the supports of a node that needs no further split; return whether it was such a node."""
        inside, free = node.active[node.inside], node.active[~node.inside]
        room = self.sizes.most - inside.size
        if room < 0 or node.active.size < self.sizes.least:
            return True
        if node.active.size == self.sizes.least:
            self._keep(node.active)
            return True
        if room > 1 and free.size:
            return False
        value, gains = self._last(inside, free)
        if inside.size >= self.sizes.least and value <= self.limit:
            self._keep(inside)
        if room and inside.size + 1 >= self.sizes.least:
            for j in free[value - gains <= self.limit]:
                self._keep(np.append(inside, j))
        return True

    def _last(self, inside: Indices, free: Indices) -> tuple[float, Array]:
        """f fitted on the included coordinates, and how much each free coordinate would lower it (free.size,)."""
        hessian, linear = self.quadratic.hessian, self.quadratic.linear
        if not inside.size:
            return self.quadratic.start, 0.5 * linear[free] ** 2 / hessian[free, free]
        units = 1.0 / np.sqrt(hessian[inside, inside])
        values, vectors = eigh(hessian[np.ix_(inside, inside)] * units * units[:, None])
        good = values > _NULL * values[-1]
        half = (vectors[:, good] / np.sqrt(values[good])).T * units  # half^T half = H_QQ^-1
        explained = half @ linear[inside]
        cross = half @ hessian[np.ix_(inside, free)]
        diagonal = hessian[free, free]
        left = diagonal - (cross**2).sum(axis=0)
        slope = linear[free] - cross.T @ explained
        usable = left > _NULL * diagonal
        gains = np.where(usable, 0.5 * slope**2 / np.where(usable, left, 1.0), 0.0)
        return self.quadratic.start - 0.5 * float(explained @ explained), gains

    def _keep(self, support: Indices) -> None:
        """Fit a support on the data, and keep it if its loss is below the ceiling."""
        fit = refit(self.quadratic.problem.objective, np.union1d(support, self.quadratic.problem.forced))
        if fit.value <= self.ceiling:
            self.best = min(self.best, fit.value)
            self.found.append(fit)

    def _drop(self) -> None:
        """Drop the fits that a better support has put above the ceiling."""
        self.found = [fit for fit in self.found if fit.value <= self.ceiling]


def _result(tree: _Tree, reason: str, begun: float, max_members: int) -> RashomonSet:
    objective = tree.quadratic.problem.objective
    # Sorted by loss; ties by the indices, so that the order does not depend on the search.
    ordered = sorted((fit for fit in tree.found if fit.value <= tree.ceiling), key=_by_loss)
    every = ((fit, support) for fit in ordered for support in _expanded(tree, fit.support))
    members: list[Member] = []
    known = tree.ceiling if not reason else tree.open[0][0] if tree.open else tree.best
    for fit, support in every:
        if len(members) == max_members:
            reason, known = reason or f"there are more than {max_members:,} members", min(known, fit.value)
            break
        same = np.array_equal(support, fit.support)
        members.append(_member(objective, fit if same else refit(objective, support), fit.value))
    below = min(known - tree.margin, tree.ceiling) if reason else tree.ceiling
    features = objective.split(np.zeros(objective.dimension))[0].size
    seconds = time.perf_counter() - begun
    return RashomonSet(tuple(members), features, tree.best, tree.gap, not reason, below, tree.nodes, seconds, reason)


def _by_loss(fit: Fit) -> tuple[float, list[int]]:
    return fit.value, fit.support.tolist()


def _member(objective: Objective, fit: Fit, loss: float) -> Member:
    inverse = inverse_block(objective.hessian_block(fit.theta, fit.support))
    values = fit.theta[fit.support]
    increases = 0.5 * values**2 / np.maximum(inverse.diagonal(), 1e-300)
    coefficients, intercept = objective.split(fit.theta)
    return Member(fit.support, coefficients[fit.support], intercept, loss, increases)


def _expanded(tree: _Tree, support: Indices) -> Iterator[Indices]:
    """Every support with the span of `support`, by exchange for equal columns or addition of them."""
    quadratic, forced = tree.quadratic, tree.quadratic.problem.forced
    k = quadratic.problem.size
    chosen = np.setdiff1d(support, forced)
    classes = [quadratic.represented[int(j)] for j in chosen]
    # Columns equal to a forced one change nothing, and may fill a support.
    fillers = [np.setdiff1d(quadratic.represented[int(j)], forced) for j in forced if int(j) in quadratic.represented]
    optional = np.concatenate([np.zeros(0, np.int64), *fillers])
    for required in _one_of_each(classes, k):
        room = k - len(required)
        for count in range(0 if tree.at_most else room, min(room, optional.size) + 1):
            for extra in itertools.combinations(optional.tolist(), count):
                yield np.sort(np.concatenate([forced, required, extra])).astype(np.int64)


def _one_of_each(classes: list[Indices], room: int) -> Iterator[list[int]]:
    """Every choice of at least one coordinate of each class, at most `room` in all."""
    if not classes:
        yield []
        return
    first, *rest = classes
    for count in range(1, min(first.size, room - len(rest)) + 1):
        for chosen in itertools.combinations(first.tolist(), count):
            for others in _one_of_each(rest, room - count):
                yield [*chosen, *others]
