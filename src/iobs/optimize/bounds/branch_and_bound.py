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
Hessian of what is left is definite (module `tree`).

Where H is too large to store, coordinates that cannot be in a better support are left out first (module `components`).

These bounds are quick, tight with many more samples than columns, and useless near n = d, where c fits all samples.
What they do not close early is left to the perspective relaxation, which serves every convex f (module `convex`). It
needs a ridge, bounds or a definite Hessian. Where a quadratic has none of these, tangents within a box bound it (module
`tangents`). All comparisons allow for a rounding margin, which is reported.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from iobs.errors import ProblemError
from iobs.optimize.bounds.certificate import Certificate, ProofLimits, relative_gap, require_limits, summarised
from iobs.optimize.bounds.components import screened
from iobs.optimize.bounds.convex import INTERRUPTED, Progress, certify_convex, compile_proofs, unproved
from iobs.optimize.bounds.convex_tree import OUT_OF_TIME
from iobs.optimize.bounds.enumeration import enumerable, enumerate_supports
from iobs.optimize.bounds.tangents import Boxes
from iobs.optimize.bounds.tree import Node, QuadraticArrays, SupportTree
from iobs.optimize.curvature import as_objective
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.design import Indices, VectorLike
from iobs.optimize.objectives.linear import LeastSquares
from iobs.optimize.objectives.tabled import Tabled
from iobs.optimize.problem import DENSE_LIMIT, Problem, generator_of, require_storable
from iobs.optimize.refit.newton import Fit, refit
from iobs.optimize.refit.within import Bounds
from iobs.optimize.search import auto

if TYPE_CHECKING:
    from iobs.core.quadratic import Quadratic

_FIRST_SECONDS = 0.5  # time of this tree of quadratics before the perspective relaxation is tried
_RELAXED_SHARE = 0.3  # share of the time limit for the relaxation where there is no ridge
_FIRST_SHARE = 0.1  # share of the time limit before tangents are tried
_NO_CHOICE = "there is nothing to choose"
_BY_MINIMISERS = "minimisers of the quadratic without excluded columns, and what more exclusions cost at least"
_BY_COMPONENTS = "the most that each independent part of the columns can save"
_BOX_LIMIT = 2048  # most coordinates for tangents, which hold several arrays of d^2 numbers


def certify(
    objective: Objective | Quadratic,
    k: int,
    *,
    fit: Fit | None = None,
    gap: float = 1e-4,
    seconds: float = 60.0,
    max_nodes: int = 1_000_000,
    lower: float | VectorLike | None = None,
    upper: float | VectorLike | None = None,
    on_progress: Progress | None = None,
    checkpoint: str | Path | None = None,
    seed: int = 0,
) -> Certificate:
    """Bound the best value over all supports of k coordinates.

    A quadratic without bounds is first searched for half a second by a tree of its own. What that leaves, all other
    convex objectives, and bounds are searched with the perspective relaxation. It is the tighter the larger the ridge
    is and the narrower the bounds are. Without either, bounds on the coefficients are derived from the data where there
    are more samples than columns.

    An interruption (Ctrl+C) ends the search and returns the gap so far. With a checkpoint a later call goes on, also in
    another process; the limits are then those of this call, and nodes and seconds in the certificate those of all. All
    is then left to the search with the relaxation.

    Args:
        objective: a convex objective of `iobs.objectives`, or an `iobs.Quadratic` of one row. Of an objective with
            several coefficients per feature k counts features.
        k: number of non-zeros, forced coordinates not counted.
        fit: the support to start from, fitted anew; found by the best known method if not given.
        gap: relative gap at which to stop.
        seconds: time limit, compilation not counted; the remaining gap is reported.
        max_nodes: largest number of nodes.
        lower: least value of every coefficient, at most 0; as `iobs.minimize`.
        upper: largest value of every coefficient, at least 0.
        on_progress: called with a `ProofProgress` every half a second by the search with the relaxation.
        checkpoint: file (.npz) from which to go on if it exists; it is written every two minutes and at the end, also
            of an interruption, and stays afterwards.
        seed: random seed of the search for a first support.

    Raises:
        ProblemError: f is not known to be convex, or has a coefficient that nothing bounds; above 4,096 coordinates f
            is a quadratic but no least squares, has forced coordinates, or the time is too short to see all columns; a
            limit is negative or NaN; `fit` is not a `Fit` of at most k coordinates, or one of another size.
        NotPositiveDefiniteError: the Hessian has a negative eigenvalue.
        CheckpointError: the checkpoint is of another problem or gap, damaged, or no checkpoint of a proof.
    """
    require_limits(gap=gap, seconds=seconds, max_nodes=max_nodes)
    objective = as_objective(objective)
    bounds = Bounds.on_objective(lower, upper, objective)
    general = not objective.quadratic or isinstance(objective, Tabled) or bounds is not None or checkpoint is not None
    if not isinstance(objective, LeastSquares) and objective.quadratic:
        require_storable("Branch and bound stores H", objective.dimension)
    problem = Problem(objective, k, rng=generator_of(seed))
    if fit is None:
        auto.compile_stages(objective)
    if general:
        compile_proofs()
    begun = time.perf_counter()
    if not isinstance(fit, Fit | None):
        raise ProblemError(f"fit must be an iobs.optimize.refit.Fit, got {type(fit).__name__}; give refit(f, support).")
    limits = ProofLimits(gap, begun, seconds, max_nodes)
    if fit is not None and np.setdiff1d(fit.support, problem.forced).size > k * objective.outputs:
        raise ProblemError(f"The fit has {fit.support.size} coordinates, which is more than k = {k}.")
    if fit is not None:  # it may be of other data, or outside the bounds
        if fit.theta.size != objective.dimension:
            raise ProblemError(f"The fit has {fit.theta.size} coefficients and f has {objective.dimension}.")
        fit = refit(objective, np.union1d(fit.support, problem.forced).astype(np.int64), fit.theta, bounds=bounds)
    if general:
        return certify_convex(problem, bounds, fit, limits, on_progress, checkpoint)
    proved: Certificate | None = None
    try:
        for certificate in _proofs(problem, fit, limits, on_progress):
            proved = certificate
    except KeyboardInterrupt:
        proved = unproved(problem, None, fit, limits, INTERRUPTED) if proved is None else proved
        start = problem.at_zero[0]
        return summarised(
            proved.lower, proved.fit, start, limits, proved.nodes, proved.margin, INTERRUPTED, proved.basis,
            complete=False,
        )  # fmt: skip
    assert proved is not None
    return proved


def _proofs(
    problem: Problem, fit: Fit | None, limits: ProofLimits, on_progress: Progress | None
) -> Iterator[Certificate]:
    """The certificates of a quadratic without bounds after each step of its proof; the last one is the result."""
    objective = problem.objective
    for stage in auto.stages(problem) if fit is None else ():
        fit = stage.fit
        yield unproved(problem, None, fit, limits, OUT_OF_TIME)
        if limits.elapsed() > 0.5 * limits.seconds:
            break
    assert fit is not None
    if objective.dimension > DENSE_LIMIT:
        yield _certify_screened(problem, fit, limits)
        return
    tree = CertificateTree(QuadraticArrays(problem), fit, limits)
    tree.begin()
    if tree.singular:
        tree.enumerate_all()
    certificate = tree.run(min(_FIRST_SHARE, _FIRST_SECONDS / max(limits.seconds, 1e-9)))
    yield certificate
    if certificate.closed or problem.size == 0 or not np.isfinite(certificate.lower) or tree.reason == INTERRUPTED:
        return
    if not tree.singular and tree.enumerate_all():
        yield tree.run(1.0)
        return
    penalised = isinstance(objective, LeastSquares) and bool(objective.ridge.all())
    relaxed = _certify_relaxed(problem, certificate, limits, 1.0 if penalised else _RELAXED_SHARE, on_progress)
    if relaxed is not None:
        yield relaxed
        if penalised or relaxed.closed or relaxed.reason == INTERRUPTED:
            return
        tree.take(relaxed)
    certificate = tree.run(min(1.0, limits.elapsed() / max(limits.seconds, 1e-9) + _FIRST_SHARE))
    yield certificate
    if certificate.closed or tree.reason == INTERRUPTED:
        return
    lower, margin = _bound_in_boxes(tree.quadratic, certificate, limits.begun + 0.9 * limits.seconds)
    tree.raise_bound(lower, margin, "tangents of the quadratic within boxes around all better supports")
    yield tree.run(1.0)


def _certify_relaxed(
    problem: Problem, before: Certificate, limits: ProofLimits, share: float, on_progress: Progress | None
) -> Certificate | None:
    """The certificate by the perspective relaxation; None where it does not apply: coefficients that nothing bounds.

    Args:
        problem: a quadratic.
        before: what is proved already.
        limits: when to stop.
        share: of the time limit for this search.
        on_progress: called every half a second.
    """
    rest = replace(limits, seconds=share * limits.seconds, max_nodes=limits.max_nodes - before.nodes)
    try:
        relaxed = certify_convex(problem, None, before.fit, rest, on_progress)
    except ProblemError:
        return None
    if relaxed.lower - relaxed.margin < before.lower - before.margin and not relaxed.closed:
        relaxed = replace(before, fit=relaxed.fit, upper=relaxed.upper, reason=relaxed.reason)
    return summarised(
        min(relaxed.lower, relaxed.upper), relaxed.fit, problem.at_zero[0], limits, before.nodes + relaxed.nodes,
        relaxed.margin, relaxed.reason, relaxed.basis, complete=False,
    )  # fmt: skip


def _certify_screened(problem: Problem, fit: Fit, limits: ProofLimits) -> Certificate:
    """The certificate of a problem whose H is too large to store, by what a screening of its components leaves."""
    start = problem.at_zero[0]
    if problem.size == 0:
        fit = refit(problem.objective, problem.forced)
        return summarised(fit.value, fit, start, limits, 0, 0.0, _NO_CHOICE, "the only fit", complete=True)
    screened_problem = screened(problem, fit.value, limits.begun + 0.7 * limits.seconds)
    candidates = np.union1d(screened_problem.coordinates, fit.support).astype(np.int64)
    count = f"{candidates.size:,} of {problem.dimension:,} coordinates"
    screening = f"screening of {screened_problem.components:,} components left {count}"
    if candidates.size > _BOX_LIMIT:
        reason = f"{screening}, and at most {_BOX_LIMIT:,} can be searched"
        lower = max(0.0, screened_problem.lower)  # least squares
        return summarised(lower, fit, start, limits, 0, 1e-9 * abs(start), reason, _BY_COMPONENTS, complete=False)
    part = refit(problem.objective.restricted(candidates), np.searchsorted(candidates, fit.support).astype(np.int64))
    seconds = max(0.0, limits.seconds - limits.elapsed())
    inner = certify(
        problem.objective.restricted(candidates), problem.size, fit=part, gap=limits.gap, seconds=seconds,
        max_nodes=limits.max_nodes,
    )  # fmt: skip
    whole = refit(problem.objective, candidates[inner.fit.support])
    return replace(
        inner,
        fit=whole,
        seconds=limits.elapsed(),
        message=f"{inner.message}; {screening}",
        reason=f"{inner.reason}; {screening}",
    )


def _bound_in_boxes(quadratic: QuadraticArrays, certificate: Certificate, deadline: float) -> tuple[float, float]:
    """(bound, margin) by tangents; (-inf, 0) above `_BOX_LIMIT` coordinates."""
    active = quadratic.usable
    if active.size > _BOX_LIMIT:
        return -np.inf, 0.0
    count = min(quadratic.count, active.size)
    boxes = Boxes(quadratic.hessian[np.ix_(active, active)], quadratic.linear[active], quadratic.start, count)
    return boxes.lower(certificate.lower, certificate.upper, deadline)


class CertificateTree(SupportTree):
    """Best-first branch and bound that can be stopped and continued.

    Attributes:
        best: the best fit so far.
        limits: when to stop.
        singular: whether the Hessian is singular on all usable coordinates.
        lower: a lower bound proved by other means than the tree.
        reason: why the search ended, in words; empty while it can go on.
        basis: how its own bounds are obtained, in words.
    """

    _tied_order = -1  # most bounds are equal there, and only small nodes have better ones

    def __init__(self, quadratic: QuadraticArrays, fit: Fit, limits: ProofLimits) -> None:
        super().__init__(quadratic, quadratic.count)
        self.best, self.limits = fit, limits
        self.singular, self.reason, self.lower = False, "", -np.inf
        self.basis, self._other = _BY_MINIMISERS, ""

    @property
    def limit(self) -> float:
        """The best known value and the allowance for rounding."""
        return self.best.value + self.margin

    def begin(self) -> None:
        """Put the root on the heap, a tied one where the Hessian is singular."""
        if not self.quadratic.usable.size:
            self.lower, self.reason = self.quadratic.start, _NO_CHOICE
            self.basis = "the only fit"
            return
        root = self._root()
        self.singular = root is None or root.tied
        if root is None:
            self.reason = "f may be unbounded below where the Hessian is singular"
        else:
            self._push(root.value, root)

    def enumerate_all(self) -> bool:
        """Try every support if that fits in the limits; return whether it was done."""
        seconds = self.limits.seconds - self.limits.elapsed()
        allowed = self.limits.max_nodes - self.nodes
        if self.reason or not enumerable(self.quadratic, seconds, allowed):
            return False
        result = enumerate_supports(self.quadratic)
        if result.value < self.best.value - result.margin:
            self._try(result.support)
        self.open.clear()
        self.nodes += result.nodes
        self.lower = self.best.value if self.best.value <= result.value + result.margin else result.value
        self.margin = max(self.margin, result.margin)
        self.reason, self.basis = f"all {result.supports:,} supports were tried", "the fit of every support"
        return True

    def raise_bound(self, lower: float, margin: float, basis: str) -> None:
        """Take in a lower bound that was proved by other means, with its rounding margin."""
        if lower > self.lower:
            self.lower, self.margin, self._other = lower, max(self.margin, margin), basis

    def take(self, other: Certificate) -> None:
        """Take in the fit, the bound and the count of nodes of another search."""
        if other.upper < self.best.value:
            self.best = other.fit
        self.nodes = other.nodes
        self.raise_bound(other.lower, other.margin, other.basis)

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
            proved = self._proved()
            try:
                self._branch(self._pop())
            except KeyboardInterrupt:  # the node at hand is lost, so that the search cannot go on
                self.lower, self.reason = proved, INTERRUPTED
                return self.certificate(proved)
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
            bound = self._split(node, inverse)
            if bound is None:
                return
            if int(node.inside.sum()) < self.most and self.open and bound > self.open[0][0]:
                node.inverse = inverse
                self._push(bound, node)
                return

    def _branch_tied(self, node: Node) -> None:
        """Split on a coordinate that others can replace; go on as usual once H is definite on what is active."""
        self.nodes += 1
        root = self.quadratic.root(node.active, node.inside)
        if root is None:
            self._split_tied(node)
        else:
            self.margin = max(self.margin, root[1])
            self._branch(root[0])

    def _ended(self, node: Node) -> bool:
        room = self.most - int(node.inside.sum())
        if room == 0:
            self._try(node.active[node.inside])
        elif room > 0 and node.active.size <= self.most:
            self._try(node.active)
        return room <= 0 or node.active.size <= self.most

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
            self._other if self._other and lower <= self.lower else self.basis,
            complete=not self.open,
        )
