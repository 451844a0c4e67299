"""Certificates: how far from the best possible support an answer can be, at most.

For a quadratic f with a definite Hessian, branch and bound over supports. A node has coordinates that are in, others
that are out, and free ones. With c the minimiser over all that are not out, P the inverse Hessian there, q its value:

- putting j out costs exactly c_j^2 / (2 P_jj), the saliency of Optimal Brain Surgeon (leaps and bounds, Furnival and
  Wilson 1974): whatever exceeds the best known value must be in;
- m of the free coordinates have to go, so the cost is at least the m-th smallest saliency;
- and at least 1/2 sum of the m smallest Delta_j c_j^2, for any diagonal Delta with H - Delta positive semi-definite:
  what the perspective relaxation gives at c.

These bounds are sharp where there are many more samples than columns. Near n = d the first term vanishes, and so do
they; what is not closed soon is then bounded by tangents within a box (`boxes`), which needs no definite
Hessian. Everything is compared with a margin for rounding, which is reported.
"""

from __future__ import annotations

import heapq
import itertools
import time
from dataclasses import dataclass, field

import numpy as np

from iobs.core.quadratic import Quadratic
from iobs.errors import NotPositiveDefiniteError, ProblemError
from iobs.optimize import auto
from iobs.optimize.boxes import Boxes
from iobs.optimize.designs import Array, Booleans, Indices
from iobs.optimize.models import QuadraticObjective
from iobs.optimize.objective import Objective
from iobs.optimize.objectives import LeastSquares
from iobs.optimize.problem import Problem, require_storable
from iobs.optimize.refit import Fit, refit

_STORED_BYTES = 1 << 30
_FIRST_SHARE = 0.1  # of the time, for branch and bound before anything else is tried
_BOX_LIMIT = 2048  # coordinates up to which tangents are tried: a few arrays of their square are held


@dataclass(frozen=True)
class Certificate:
    """What branch and bound has proved.

    Attributes:
        lower: no support of k coordinates has a lower value than this (less `margin`).
        upper: value of the best known support.
        gap: (upper - lower) / |upper|, or 0 when closed to the tolerance asked for.
        gap_explained: the same difference relative to |f(0) - upper|: the gap that solvers which drop the constant
            1/2 norm(y)^2 report.
        fit: the best support, its coefficients and value.
        nodes: how many were looked at.
        seconds: wall time, finding the first support included.
        closed: whether the gap is at most what was asked for.
        margin: absolute allowance for rounding in every comparison.
        message: the same in words.
    """

    lower: float
    upper: float
    gap: float
    gap_explained: float
    fit: Fit = field(repr=False)
    nodes: int
    seconds: float
    closed: bool
    margin: float
    message: str


@dataclass
class _Node:
    """Coordinates `active` are not out, `inside` marks those that are in; the inverse is found again where dropped."""

    active: Indices
    inside: Booleans
    centre: Array
    inverse: Array | None
    value: float


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
        k: the sparsity.
        fit: a support to start from; the best known method finds one otherwise.
        gap: relative gap at which to stop.
        seconds: time limit; the gap left then is reported.
        max_nodes: limit on the search tree.
        seed: of the search for a first support.

    Raises:
        ProblemError: f is not quadratic, or too large to store H, or `fit` is none of at most k coordinates.
        NotPositiveDefiniteError: the Hessian has a negative eigenvalue.
    """
    if isinstance(objective, Quadratic):
        objective = QuadraticObjective.of(objective)
    if not objective.quadratic:
        raise ProblemError("Branch and bound needs a quadratic objective; others are known to be 1-swap optimal only.")
    require_storable("Branch and bound stores H", objective.dimension)
    begun = time.perf_counter()
    problem = Problem(objective, k, rng=np.random.default_rng(seed))
    if fit is None:
        fit = list(auto.stages(problem))[-1].fit
    if not isinstance(fit, Fit):
        raise ProblemError(f"fit must be an iobs.optimize.refit.Fit, got {type(fit).__name__}; give refit(f, support).")
    if np.setdiff1d(fit.support, problem.forced).size > k:
        raise ProblemError(f"The fit has {fit.support.size} coordinates, which is more than k = {k}.")
    search = _Search(problem, fit, gap, begun, seconds, max_nodes)
    found = search.run(_FIRST_SHARE)
    if found.closed or problem.size == 0:
        return found
    lower, margin = _bound_in_boxes(search, found.lower, begun + 0.9 * seconds)
    if lower <= found.lower:
        return search.run(1.0)
    return search.certificate(
        max(found.lower, lower), max(found.margin, margin) if lower > found.lower else found.margin
    )


def _bound_in_boxes(search: _Search, floor: float, deadline: float) -> tuple[float, float]:
    active = search.usable()
    if active.size > _BOX_LIMIT:
        return -np.inf, 0.0
    count = min(search.count, active.size)
    boxes = Boxes(search.hessian[np.ix_(active, active)], search.linear[active], search.start, count)
    return boxes.lower(floor, search.best.value, deadline)


class _Search:
    def __init__(self, problem: Problem, fit: Fit, gap: float, begun: float, seconds: float, max_nodes: int) -> None:
        self.problem, self.best, self.goal = problem, fit, gap
        self.begun, self.limit, self.max_nodes = begun, seconds, max_nodes
        objective = problem.objective
        self.hessian = objective.hessian_block(np.zeros(objective.dimension), np.arange(objective.dimension))
        self.start, gradient = objective.value_and_gradient(np.zeros(objective.dimension))
        self.linear = -gradient
        # A forced coordinate without curvature is no part of the search: it makes no room for a free one.
        self.count = problem.size + int((self.hessian.diagonal()[problem.forced] > 0).sum())
        self.nodes, self.stored, self.margin, self.searched = 0, 0, 0.0, False
        self.open: list[tuple[float, int, _Node]] = []
        self.counter = itertools.count()

    def run(self, share: float) -> Certificate:
        """Branch and bound for a share of the time, going on where it stopped; f >= 0 where the Hessian is singular."""
        heap = self.open
        if not heap:
            if not self.usable().size:
                return self.certificate(self.start)
            root = self._root()
            if root is None:
                return self.certificate(self._trivial())
            self.searched = True
            self._branch(root, heap)
        while heap and self._gap(heap[0][0]) > self.goal:
            if time.perf_counter() - self.begun > share * self.limit or self.nodes >= self.max_nodes:
                break
            node = heapq.heappop(heap)[2]
            self.stored -= 0 if node.inverse is None else node.inverse.nbytes
            self._branch(node, heap)
        return self.certificate(min(heap[0][0], self.best.value) if heap else self.best.value)

    def usable(self) -> Indices:
        """The coordinates that f depends on."""
        forced = self.problem.forced[self.hessian.diagonal()[self.problem.forced] > 0]
        return np.sort(np.concatenate([np.flatnonzero(self.problem.candidates), forced])).astype(np.int64)

    def _trivial(self) -> float:
        """The least value without any constraint, less rounding; for least squares that is not below zero."""
        block = self.hessian[np.ix_(self.usable(), self.usable())]
        values, vectors = np.linalg.eigh(block)
        if values[0] < -1e-9 * values[-1]:
            raise NotPositiveDefiniteError("The Hessian has a negative eigenvalue: f has no least value to bound.")
        self.margin = 1e-9 * abs(self.start)
        if isinstance(self.problem.objective, LeastSquares):
            return 0.0
        projected = vectors.T @ self.linear[self.usable()]
        good = values > 1e-10 * values[-1]
        # In a direction of hardly any curvature f may fall without end, unless it has no slope there but rounding.
        if float(np.abs(projected[~good]).max(initial=0.0)) > 1e-12 * float(np.linalg.norm(projected)):
            return -np.inf
        gains = 0.5 * projected[good] ** 2 / values[good]
        self.margin += float((gains * (8 * values.size * np.finfo(float).eps * values[-1] / values[good])).sum())
        return self.start - float(gains.sum())

    def _root(self) -> _Node | None:
        problem = self.problem
        active = self.usable()
        block = self.hessian[np.ix_(active, active)]
        try:
            factor = np.linalg.cholesky(block)
            usable = bool((factor.diagonal() ** 2 > 1e-10 * block.diagonal()).all())
        except np.linalg.LinAlgError:
            usable = False
        if not usable:
            return None
        inverse = np.linalg.inv(block)
        inverse = 0.5 * (inverse + inverse.T)
        scaled = np.sqrt(inverse.diagonal())
        correlation = inverse / scaled / scaled[:, None]
        widest = float(np.linalg.eigvalsh(correlation)[-1])
        self.delta = np.zeros(problem.dimension)
        self.delta[active] = (1 - 1e-9) / (widest * inverse.diagonal())
        centre = inverse @ self.linear[active]
        # Rounding of q is about cond(H) eps relative to the explained part; the margin allows for a hundred times that.
        condition = widest * float((block.diagonal() * inverse.diagonal()).max())
        value = self.start - 0.5 * float(self.linear[active] @ centre)
        self.margin = float(100 * np.finfo(float).eps * condition * max(abs(self.start - value), abs(self.start)))
        inside = np.isin(active, problem.forced)
        return _Node(active, inside, centre, inverse, value)

    def _gap(self, lower: float) -> float:
        return max(0.0, self.best.value - lower) / max(abs(self.best.value), 1e-300)

    def _branch(self, node: _Node, heap: list[tuple[float, int, _Node]]) -> None:
        """Fix what must be in, bound, and split on the free coordinate that is dearest to put out."""
        inverse = self._inverse(node)
        while True:
            self.nodes += 1
            saliency = 0.5 * node.centre**2 / inverse.diagonal()
            ceiling = self.best.value + self.margin
            node.inside = node.inside | (node.value + saliency > ceiling)
            free = np.flatnonzero(~node.inside)
            room = self.count - int(node.inside.sum())
            if room < 0:
                return
            if room == 0 or free.size <= room:
                self._try(node.active[node.inside] if room == 0 else node.active)
                return
            if self._bound(node, saliency, free, free.size - room) > ceiling:
                return
            chosen = int(free[np.argmax(saliency[free])])
            self._put_out(node, inverse, chosen, heap)
            node.inside = node.inside.copy()
            node.inside[chosen] = True
            if node.inside.sum() > self.count:
                return
            free = np.flatnonzero(~node.inside)
            bound = self._bound(node, saliency, free, free.size - room + 1) if free.size > room - 1 else node.value
            if room - 1 > 0 and heap and bound > heap[0][0]:
                node.inverse = inverse
                self._push(bound, node, heap)
                return

    def _bound(self, node: _Node, saliency: Array, free: Indices, removals: int) -> float:
        """A lower bound on the value when `removals` of the free coordinates go."""
        if removals <= 0:
            return node.value
        single = np.partition(saliency[free], removals - 1)[removals - 1]
        joint = 0.5 * self.delta[node.active[free]] * node.centre[free] ** 2
        total = float(np.partition(joint, removals - 1)[:removals].sum())
        return node.value + max(float(single), total)

    def _put_out(self, node: _Node, inverse: Array, chosen: int, heap: list[tuple[float, int, _Node]]) -> None:
        pivot = inverse[chosen, chosen]
        column = inverse[:, chosen]
        value = node.value + 0.5 * node.centre[chosen] ** 2 / pivot
        if value > self.best.value + self.margin:
            return
        keep = np.arange(node.active.size) != chosen
        centre = (node.centre - column * (node.centre[chosen] / pivot))[keep]
        smaller = inverse[np.ix_(keep, keep)]
        smaller -= np.outer(column[keep] / pivot, column[keep])
        child = _Node(node.active[keep], node.inside[keep], centre, smaller, value)
        saliency = 0.5 * centre**2 / smaller.diagonal()
        free = np.flatnonzero(~child.inside)
        room = self.count - int(child.inside.sum())
        bound = self._bound(child, saliency, free, free.size - room)
        if bound <= self.best.value + self.margin:
            self._push(bound, child, heap)

    def _push(self, bound: float, node: _Node, heap: list[tuple[float, int, _Node]]) -> None:
        if node.inverse is not None and self.stored + node.inverse.nbytes > _STORED_BYTES:
            node.inverse = None  # found again when the node's turn comes
        elif node.inverse is not None:
            self.stored += node.inverse.nbytes
        heapq.heappush(heap, (bound, next(self.counter), node))

    def _inverse(self, node: _Node) -> Array:
        if node.inverse is None:
            return np.asarray(np.linalg.inv(self.hessian[np.ix_(node.active, node.active)]), dtype=np.float64)
        inverse, node.inverse = node.inverse, None
        return inverse

    def _try(self, support: Indices) -> None:
        fit = refit(self.problem.objective, np.sort(support))
        if fit.value < self.best.value:
            self.best = fit

    def certificate(self, lower: float, margin: float | None = None) -> Certificate:
        """What is known when the search ends."""
        margin = self.margin if margin is None else margin
        upper = self.best.value
        gap = self._gap(lower)
        closed = gap <= self.goal
        explained = max(0.0, upper - lower) / max(abs(self.start - upper), 1e-300)
        seconds = time.perf_counter() - self.begun
        if closed and ((self.searched and not self.open) or lower >= upper - margin):
            what = "a global minimiser"
        elif closed:
            what = f"within {gap:.2g} of the best value possible"
        elif np.isfinite(lower):
            what = f"gap {gap:.3g} not closed: at least {lower:.6g}, at most {upper:.6g}"
        else:
            what = f"no bound: f may fall for ever where the Hessian is singular; at most {upper:.6g}"
        message = f"{what} ({self.nodes} nodes, {seconds:.2f} s, rounding margin {margin:.1e})"
        return Certificate(lower, upper, gap, explained, self.best, self.nodes, seconds, closed, margin, message)
