"""Certificates: how far from the best possible support an answer can be, at most.

For a quadratic f with a definite Hessian, branch and bound over supports. A node has coordinates that are in, others
that are out, and free ones. With c the minimiser over all that are not out, P the inverse Hessian there, q its value:

- putting j out costs exactly c_j^2 / (2 P_jj), the saliency of Optimal Brain Surgeon (leaps and bounds, Furnival and
  Wilson 1974): whatever exceeds the best known value must be in;
- m of the free coordinates have to go, so the cost is at least the m-th smallest saliency;
- and at least 1/2 sum of the m smallest Delta_j c_j^2, for any diagonal Delta with H - Delta positive semi-definite:
  what the perspective relaxation gives at c.

The bounds are sharp where there are many more samples than columns. Near n = d the first term vanishes and so do they.
Everything is compared with a margin for rounding, which is reported.
"""

from __future__ import annotations

import heapq
import itertools
import time
from dataclasses import dataclass, field

import numpy as np

from iobs.errors import NotPositiveDefiniteError, ProblemError
from iobs.optimize import auto
from iobs.optimize.designs import Array, Booleans, Indices
from iobs.optimize.objective import Objective
from iobs.optimize.problem import DENSE_LIMIT, Problem
from iobs.optimize.refit import Fit, refit

_STORED_BYTES = 1 << 30


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
    objective: Objective,
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
        objective: a quadratic with a definite Hessian: least squares with more samples than columns, or with a ridge.
        k: the sparsity.
        fit: a support to start from; the best known method finds one otherwise.
        gap: relative gap at which to stop.
        seconds: time limit; the gap left then is reported.
        max_nodes: limit on the search tree.
        seed: of the search for a first support.

    Raises:
        ProblemError: f is not quadratic, or too large to store H.
        NotPositiveDefiniteError: the Hessian is singular (fewer samples than columns and no ridge): nothing better than
            the trivial bound exists here; add a ridge.
    """
    if not objective.quadratic:
        raise ProblemError("Branch and bound needs a quadratic objective; others are known to be 1-swap optimal only.")
    if objective.dimension > DENSE_LIMIT:
        raise ProblemError(f"Branch and bound stores H: at most {DENSE_LIMIT} coordinates, got {objective.dimension}.")
    begun = time.perf_counter()
    problem = Problem(objective, k, rng=np.random.default_rng(seed))
    if fit is None:
        fit = list(auto.stages(problem))[-1].fit
    return _Search(problem, fit, gap, begun, seconds, max_nodes).run()


class _Search:
    def __init__(self, problem: Problem, fit: Fit, gap: float, begun: float, seconds: float, max_nodes: int) -> None:
        self.problem, self.best, self.goal = problem, fit, gap
        self.begun, self.limit, self.max_nodes = begun, seconds, max_nodes
        objective = problem.objective
        self.hessian = objective.hessian_block(np.zeros(objective.dimension), np.arange(objective.dimension))
        self.start, gradient = objective.value_and_gradient(np.zeros(objective.dimension))
        self.linear = -gradient
        self.nodes, self.stored = 0, 0
        self.counter = itertools.count()

    def run(self) -> Certificate:
        root = self._root()
        heap: list[tuple[float, int, _Node]] = []
        self._branch(root, heap)
        while heap and self._gap(heap[0][0]) > self.goal:
            if time.perf_counter() - self.begun > self.limit or self.nodes >= self.max_nodes:
                break
            node = heapq.heappop(heap)[2]
            self.stored -= 0 if node.inverse is None else node.inverse.nbytes
            self._branch(node, heap)
        return self._certificate(min(heap[0][0], self.best.value) if heap else self.best.value, heap)

    def _root(self) -> _Node:
        problem = self.problem
        active = np.sort(np.concatenate([np.flatnonzero(problem.candidates), problem.forced])).astype(np.int64)
        block = self.hessian[np.ix_(active, active)]
        try:
            factor = np.linalg.cholesky(block)
            usable = bool((factor.diagonal() ** 2 > 1e-10 * block.diagonal()).all())
        except np.linalg.LinAlgError:
            usable = False
        if not usable:
            raise NotPositiveDefiniteError(
                "The Hessian is singular (fewer samples than columns?), so every bound here is trivial; "
                "add a ridge to the objective, or remove columns."
            )
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
            room = self.problem.size + self.problem.forced.size - int(node.inside.sum())
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
            if node.inside.sum() - self.problem.forced.size > self.problem.size:
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
        room = self.problem.size + self.problem.forced.size - int(child.inside.sum())
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

    def _certificate(self, lower: float, heap: list[tuple[float, int, _Node]]) -> Certificate:
        upper = self.best.value
        gap = self._gap(lower)
        closed = gap <= self.goal
        explained = max(0.0, upper - lower) / max(abs(self.start - upper), 1e-300)
        seconds = time.perf_counter() - self.begun
        what = f"within {gap:.2g} of the best value possible" if heap else "a global minimiser"
        message = f"{what} ({self.nodes} nodes, {seconds:.2f} s, rounding margin {self.margin:.1e})"
        if not closed:
            message = f"gap {gap:.3g} not closed: at least {lower:.6g}, at most {upper:.6g}; " + message
        return Certificate(lower, upper, gap, explained, self.best, self.nodes, seconds, closed, self.margin, message)
