"""Certificates: upper bounds on the distance between a solution and the best support, by branch and bound.

f is a convex quadratic. A node of the search tree excludes some coordinates from the support, includes
others and leaves the rest free. Let c be the minimiser over all coordinates that are not excluded, P the inverse
Hessian there and q the value of f at c. Then:

- excluding j raises q by exactly c_j^2 / (2 P_jj), the saliency of Optimal Brain Surgeon (leaps and bounds, Furnival
  and Wilson 1974). A coordinate that would raise q above the best known value must be included;
- if m free coordinates must be excluded, q rises by at least the m-th smallest saliency;
- q also rises by at least half the sum of the m smallest Delta_j c_j^2, for any diagonal Delta with H - Delta positive
  semi-definite. This is the value of the perspective relaxation at c.

They need a definite Hessian. Where it is singular, equal columns are merged first. If all supports can be tried in the
time limit, they are (module `enumeration`). Otherwise coordinates that others can replace are branched on until the
Hessian of what is left is definite (module `ties`).

Where H is too large to store, coordinates that cannot be in a better support are left out first (module `components`).

These bounds are tight with many more samples than columns, and useless near n = d, where c fits all samples. A gap that
they do not close early is bounded by tangents within a box (module `tangents`), for any convex quadratic. All
comparisons allow for a rounding margin, which is reported.
"""

from __future__ import annotations

import heapq
import itertools
import time
from dataclasses import replace

import numpy as np

from iobs.core.quadratic import Quadratic
from iobs.errors import ProblemError
from iobs.optimize.bounds.certificate import Certificate, Limits, relative_gap, summarised
from iobs.optimize.bounds.components import screened
from iobs.optimize.bounds.enumeration import enumerable, enumerate_supports
from iobs.optimize.bounds.relaxation import Node, QuadraticArrays
from iobs.optimize.bounds.tangents import Boxes
from iobs.optimize.bounds.ties import split_ties
from iobs.optimize.curvature.models import QuadraticObjective
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.design import Array, Indices
from iobs.optimize.objectives.linear import LeastSquares
from iobs.optimize.problem import DENSE_LIMIT, Problem, require_storable
from iobs.optimize.refit.fit import Fit
from iobs.optimize.refit.newton import refit
from iobs.optimize.search import auto

_STORED_BYTES = 1 << 30
_FIRST_SHARE = 0.1  # share of the time limit for branch and bound before tangents are tried
_BOX_LIMIT = 2048  # most coordinates for tangents, which hold several arrays of d^2 numbers


def certify(
    objective: Objective | Quadratic,
    k: int,
    *,
    fit: Fit | None = None,
    gap: float = 1e-4,
    seconds: float = 60.0,
    max_nodes: int = 1_000_000,
    seed: int = 0,
) -> Certificate:
    """Bound the best value over all supports of k coordinates.

    Args:
        objective: a convex quadratic: least squares, or an `iobs.Quadratic` of one row.
        k: number of non-zeros, forced coordinates not counted.
        fit: the support to start from; found by the best known method if not given.
        gap: relative gap at which to stop.
        seconds: time limit, compilation not counted; the remaining gap is reported.
        max_nodes: largest number of nodes.
        seed: random seed of the search for a first support.

    Raises:
        ProblemError: f is not quadratic; above 4,096 coordinates f is no least squares, has forced coordinates, or the
            time is too short to see all columns; `fit` is not a `Fit` of at most k coordinates.
        NotPositiveDefiniteError: the Hessian has a negative eigenvalue.
    """
    if isinstance(objective, Quadratic):
        objective = QuadraticObjective.of(objective)
    if not objective.quadratic:
        raise ProblemError("Branch and bound needs a quadratic objective; others are known to be 1-swap optimal only.")
    if not isinstance(objective, LeastSquares):
        require_storable("Branch and bound stores H", objective.dimension)
    problem = Problem(objective, k, rng=np.random.default_rng(seed))
    if fit is None:
        auto.compile_stages(objective)
    begun = time.perf_counter()
    if fit is None:
        fit = list(auto.stages(problem))[-1].fit
    if not isinstance(fit, Fit):
        raise ProblemError(f"fit must be an iobs.optimize.refit.Fit, got {type(fit).__name__}; give refit(f, support).")
    if np.setdiff1d(fit.support, problem.forced).size > k:
        raise ProblemError(f"The fit has {fit.support.size} coordinates, which is more than k = {k}.")
    if objective.dimension > DENSE_LIMIT:
        return _certify_screened(problem, fit, Limits(gap, begun, seconds, max_nodes))
    search = _Search(QuadraticArrays(problem), fit, Limits(gap, begun, seconds, max_nodes))
    search.begin()
    if search.singular:
        search.enumerate_all()
    found = search.run(_FIRST_SHARE)
    if found.closed or problem.size == 0 or not np.isfinite(found.lower):
        return found
    if not search.singular and search.enumerate_all():
        return search.run(1.0)
    lower, margin = _bound_in_boxes(search.quadratic, found, begun + 0.9 * seconds)
    search.raise_bound(lower, margin)
    return search.run(1.0)


def _certify_screened(problem: Problem, fit: Fit, limits: Limits) -> Certificate:
    """The certificate of a problem whose H is too large to store, by what a screening of its components leaves."""
    start = problem.at_zero[0]
    if problem.size == 0:
        fit = refit(problem.objective, problem.forced)
        return summarised(fit.value, fit, start, limits, 0, 0.0, "there is nothing to choose", complete=True)
    found = screened(problem, fit.value, limits.begun + 0.7 * limits.seconds)
    left = np.union1d(found.coordinates, fit.support).astype(np.int64)
    told = f"screening of {found.components:,} components left {left.size:,} of {problem.dimension:,} coordinates"
    if left.size > _BOX_LIMIT:
        reason = f"{told}, and at most {_BOX_LIMIT:,} can be searched"
        lower = max(0.0, found.lower)  # least squares
        return summarised(lower, fit, start, limits, 0, 1e-9 * abs(start), reason, complete=False)
    part = refit(problem.objective.restricted(left), np.searchsorted(left, fit.support).astype(np.int64))
    seconds = max(0.0, limits.seconds - limits.elapsed())
    inner = certify(
        problem.objective.restricted(left), problem.size, fit=part, gap=limits.gap, seconds=seconds,
        max_nodes=limits.max_nodes,
    )  # fmt: skip
    whole = refit(problem.objective, left[inner.fit.support])
    return replace(
        inner,
        fit=whole,
        seconds=limits.elapsed(),
        message=f"{inner.message}; {told}",
        reason=f"{inner.reason}; {told}",
    )


def _bound_in_boxes(quadratic: QuadraticArrays, found: Certificate, deadline: float) -> tuple[float, float]:
    """(bound, margin) by tangents; (-inf, 0) above `_BOX_LIMIT` coordinates."""
    active = quadratic.usable
    if active.size > _BOX_LIMIT:
        return -np.inf, 0.0
    count = min(quadratic.count, active.size)
    boxes = Boxes(quadratic.hessian[np.ix_(active, active)], quadratic.linear[active], quadratic.start, count)
    return boxes.lower(found.lower, found.upper, deadline)


class _Search:
    """Best-first branch and bound that can be stopped and continued.

    Attributes:
        quadratic: f as arrays.
        best: the best fit so far.
        limits: when to stop.
        singular: whether the Hessian is singular on all usable coordinates.
        lower: a lower bound proved by other means than the tree.
        margin: absolute allowance for rounding.
        reason: why the search ended, in words; empty while it can go on.
        open: heap of (bound, number, node) still to be branched on.
        counter: numbers the nodes, so that equal bounds leave the heap in the order in which they entered.
        nodes: number of nodes looked at.
        stored: bytes of the inverses that the open nodes hold.
    """

    def __init__(self, quadratic: QuadraticArrays, fit: Fit, limits: Limits) -> None:
        self.quadratic, self.best, self.limits = quadratic, fit, limits
        self.singular, self.reason = False, ""
        self.lower, self.margin = -np.inf, 0.0
        self.open: list[tuple[float, int, Node]] = []
        self.counter = itertools.count()
        self.nodes = self.stored = 0

    def begin(self) -> None:
        """Branch on the root; where the Hessian is singular, put a tied root on the heap."""
        active = self.quadratic.usable
        if not active.size:
            self.lower, self.reason = self.quadratic.start, "there is nothing to choose"
            return
        root = self.quadratic.root(active, np.isin(active, self.quadratic.problem.forced))
        if root is not None:
            self.margin = root[1]
            self._branch(root[0])
            return
        self.singular = True
        lower, self.margin = self.quadratic.unconstrained()
        if np.isfinite(lower):
            self._push(lower, self.quadratic.tied_root(lower))
        else:
            self.reason = "f may be unbounded below where the Hessian is singular"

    def enumerate_all(self) -> bool:
        """Try every support if that fits in the limits; return whether it was done."""
        left = self.limits.seconds - self.limits.elapsed()
        allowed = self.limits.max_nodes - self.nodes
        if self.reason or not enumerable(self.quadratic, left, allowed):
            return False
        found = enumerate_supports(self.quadratic)
        if found.value < self.best.value - found.margin:
            self._try(found.support)
        self.open.clear()
        self.nodes += found.nodes
        self.lower = self.best.value if self.best.value <= found.value + found.margin else found.value
        self.margin = max(self.margin, found.margin)
        self.reason = f"all {found.supports:,} supports were tried"
        return True

    def raise_bound(self, lower: float, margin: float) -> None:
        """Take in a lower bound that was proved by other means, with its rounding margin."""
        if lower > self.lower:
            self.lower, self.margin = lower, max(self.margin, margin)

    def run(self, share: float) -> Certificate:
        """Search for a share of the time limit; a later call continues."""
        heap = self.open
        if self.reason:
            return self.certificate(self.lower)
        while heap and relative_gap(self._proved(), self.best.value) > self.limits.gap:
            if self.limits.elapsed() > share * self.limits.seconds:
                return self.certificate(self._proved(), f"the time limit of {self.limits.seconds:g} s was reached")
            if self.nodes >= self.limits.max_nodes:
                return self.certificate(self._proved(), f"the limit of {self.limits.max_nodes:,} nodes was reached")
            node = heapq.heappop(heap)[2]
            self.stored -= 0 if node.inverse is None else node.inverse.nbytes
            self._branch(node)
        ended = "the bound is close enough to the best value" if heap else "no part of the search tree is left"
        return self.certificate(self._proved(), ended)

    def _proved(self) -> float:
        """The best lower bound known."""
        tree = min(self.open[0][0], self.best.value) if self.open else self.best.value
        return max(tree, self.lower)

    def _branch(self, node: Node) -> None:
        """Include what must be included, bound, and split on the free coordinate that costs most to exclude."""
        if node.tied:
            self._branch_tied(node)
            return
        inverse = self._inverse(node)
        while True:
            self.nodes += 1
            saliency = 0.5 * node.centre**2 / inverse.diagonal()
            ceiling = self.best.value + self.margin
            node.inside = node.inside | (node.value + saliency > ceiling)
            free = np.flatnonzero(~node.inside)
            room = self.quadratic.count - int(node.inside.sum())
            if room < 0:
                return
            if room == 0 or free.size <= room:
                self._try(node.active[node.inside] if room == 0 else node.active)
                return
            if node.bound(saliency, free, free.size - room) > ceiling:
                return
            chosen = int(free[np.argmax(saliency[free])])
            self._exclude(node, inverse, chosen)
            node.inside = node.inside.copy()
            node.inside[chosen] = True
            if node.inside.sum() > self.quadratic.count:
                return
            free = np.flatnonzero(~node.inside)
            bound = node.bound(saliency, free, free.size - room + 1) if free.size > room - 1 else node.value
            if room - 1 > 0 and self.open and bound > self.open[0][0]:
                node.inverse = inverse
                self._push(bound, node)
                return

    def _branch_tied(self, node: Node) -> None:
        """Split on a coordinate that others can replace; go on as usual once H is definite on what is active."""
        self.nodes += 1
        root = self.quadratic.root(node.active, node.inside)
        if root is not None:
            self.margin = max(self.margin, root[1])
            self._branch(root[0])
            return
        block = self.quadratic.hessian[np.ix_(node.active, node.active)]
        tied = split_ties(block, self.quadratic.linear[node.active], self.quadratic.start, node.inside)
        value, ceiling = max(node.value, tied.value), self.best.value + self.margin
        inside = node.inside | (value + tied.saliency > ceiling)
        free = np.flatnonzero(~inside)
        room = self.quadratic.count - int(inside.sum())
        if room < 0:
            return
        if room == 0 or free.size <= room:
            self._try(node.active[inside] if room == 0 else node.active)
            return
        removals = free.size - room
        bound = value + float(np.partition(tied.saliency[free], removals - 1)[removals - 1])
        if bound > ceiling:
            return
        chosen = tied.tie if tied.tie >= 0 and not inside[tied.tie] else int(free[np.argmax(tied.saliency[free])])
        keep, with_chosen = np.arange(inside.size) != chosen, inside.copy()
        with_chosen[chosen] = True
        # Later nodes first: most bounds are equal here, and only small nodes have better ones.
        for active, included in ((node.active[keep], inside[keep]), (node.active, with_chosen)):
            child = Node(active, included, node.centre, None, value, node.delta, tied=True)
            heapq.heappush(self.open, (bound, -next(self.counter), child))

    def _exclude(self, node: Node, inverse: Array, chosen: int) -> None:
        """Push the child of a node in which the active coordinate at position `chosen` is excluded."""
        value = node.value + 0.5 * node.centre[chosen] ** 2 / inverse[chosen, chosen]
        if value > self.best.value + self.margin:
            return
        child = node.excluded(inverse, chosen, value)
        assert child.inverse is not None
        saliency = 0.5 * child.centre**2 / child.inverse.diagonal()
        free = np.flatnonzero(~child.inside)
        room = self.quadratic.count - int(child.inside.sum())
        bound = child.bound(saliency, free, free.size - room)
        if bound <= self.best.value + self.margin:
            self._push(bound, child)

    def _push(self, bound: float, node: Node) -> None:
        if node.inverse is not None and self.stored + node.inverse.nbytes > _STORED_BYTES:
            node.inverse = None  # `_inverse` computes it again
        elif node.inverse is not None:
            self.stored += node.inverse.nbytes
        heapq.heappush(self.open, (bound, next(self.counter), node))

    def _inverse(self, node: Node) -> Array:
        """Take the inverse out of a node, or compute it where it was dropped."""
        if node.inverse is None:
            block = self.quadratic.hessian[np.ix_(node.active, node.active)]
            return np.asarray(np.linalg.inv(block), dtype=np.float64)
        inverse, node.inverse = node.inverse, None
        return inverse

    def _try(self, support: Indices) -> None:
        fit = refit(self.quadratic.problem.objective, np.sort(support))
        if fit.value < self.best.value:
            self.best = fit

    def certificate(self, lower: float, reason: str = "") -> Certificate:
        """Summarise the search, given a proved lower bound and why the search ended (default: `self.reason`)."""
        return summarised(
            lower,
            self.best,
            self.quadratic.start,
            self.limits,
            self.nodes,
            self.margin,
            reason or self.reason,
            complete=not self.open,
        )
