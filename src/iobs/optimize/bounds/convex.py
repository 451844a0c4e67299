"""Certificates and near-optimal sets of convex objectives: generalised linear models, Cox regression, quadratics.

The bounds are those of `perspective`. They divide the ridge of a coefficient by its share, so each coefficient needs a
ridge or bounds. Where it has neither, bounds on it follow from the data and the best known value (module `reach`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from iobs.errors import CheckpointError, ProblemError
from iobs.optimize.bounds.certificate import Certificate, ProofLimits, negligible, relative_gap, summarised
from iobs.optimize.bounds.checkpoint import ProofCheckpoint, SavedProof, identity_of
from iobs.optimize.bounds.convex_tree import OUT_OF_TIME, ConvexTree
from iobs.optimize.bounds.perspective import SparseConvex
from iobs.optimize.bounds.reach import OutOfTimeError, reached
from iobs.optimize.curvature import QuadraticObjective, is_definite
from iobs.optimize.objectives.base import DesignObjective, Objective
from iobs.optimize.objectives.cox import Cox
from iobs.optimize.objectives.design import Array, Booleans, Indices
from iobs.optimize.objectives.families import Logistic
from iobs.optimize.objectives.linear import LinearModel
from iobs.optimize.objectives.tabled import Tabled
from iobs.optimize.problem import DENSE_LIMIT, Problem
from iobs.optimize.refit.newton import Fit, refit
from iobs.optimize.refit.within import Bounds
from iobs.optimize.search import auto, bounded
from iobs.optimize.search.groups import CoordinateGroups, group_path

INTERRUPTED = "the search was interrupted"

_SETTLED = 2e-9  # relative difference of the bound and the value of a support that is fitted
_COPIED = 1 << 25  # most entries of a design that is copied, column by column
_REPORT = 0.5  # seconds between two reports of progress


@dataclass(frozen=True)
class ProofProgress:
    """The state of a proof.

    Attributes:
        lower: the proved lower bound.
        upper: the best known value.
        gap: (upper - lower) / |upper|.
        nodes: number of nodes looked at.
        open: number of nodes that are left for now.
        seconds: time since the begin.
    """

    lower: float
    upper: float
    gap: float
    nodes: int
    open: int
    seconds: float

    def __str__(self) -> str:
        speed = self.nodes / max(self.seconds, 1e-9)
        return f"gap {self.gap:.3g}, {self.nodes:,} nodes ({speed:,.0f}/s), {self.open:,} open"


Progress = Callable[[ProofProgress], None]


@dataclass(frozen=True)
class FeatureProblem:
    """A sparse problem whose k counts features of one or more coordinates.

    Attributes:
        problem: f and the candidates by coordinates.
        owner: for every coordinate the number of its feature, -1 where it is always used (d,).
        candidates: features that may be used (p,).
        size: largest number of used features.
        bounds: of all coordinates (d,); None without any.
    """

    problem: Problem
    owner: Indices
    candidates: Booleans
    size: int
    bounds: Bounds | None

    @classmethod
    def of(cls, problem: Problem, bounds: Bounds | None) -> FeatureProblem:
        """The problem of an objective: a feature is a coordinate, or all coordinates of a column.

        Raises:
            ProblemError: f is not known to be convex, or bounds with several coefficients per feature.
        """
        objective = problem.objective
        if not (objective.quadratic or isinstance(objective, LinearModel | Cox | Tabled)):
            raise ProblemError(
                f"A proof needs a convex objective of iobs.objectives, such as Logistic; got "
                f"{type(objective).__name__}, which has no bounds."
            )
        if objective.outputs > 1 and bounds is not None:
            raise ProblemError("A proof within bounds needs one coefficient for each feature.")
        owner = np.full(objective.dimension, -1, dtype=np.int64)
        free = np.setdiff1d(np.arange(objective.dimension), objective.forced)
        owner[free] = np.arange(free.size) // objective.outputs
        usable = np.bincount(owner[free], problem.candidates[free], free.size // objective.outputs)
        candidates = usable == objective.outputs
        size = min(problem.k, int(candidates.sum()))
        return cls(problem, owner, candidates, size, bounds)

    def identity(self, gap: float) -> dict[str, Array]:
        """Settings and values that tell this problem, to be proved up to a gap, from others."""
        infinite = np.full(self.owner.size, np.inf)
        bounds = Bounds(-infinite, infinite) if self.bounds is None else self.bounds
        return identity_of(
            self.problem.objective, k=self.size, forced=self.problem.forced, candidates=self.candidates,
            lower=bounds.lower, upper=bounds.upper, gap=gap,
        )  # fmt: skip

    def relaxable(
        self, fit: Fit, ceiling: float, deadline: float = np.inf, saved: SavedProof | None = None
    ) -> SparseConvex:
        """f with its ridge and bounds, as the search needs it.

        Args:
            fit: a known fit.
            ceiling: value up to which bounds must hold.
            deadline: of the search for bounds, on `time.perf_counter`.
            saved: an earlier search, whose bounds are taken.

        Raises:
            ProblemError: the data do not bound a coefficient without ridge and bounds.
            OutOfTimeError: the deadline is too early to find such bounds.
        """
        objective = self.problem.objective
        ridge = getattr(objective, "ridge", np.zeros(objective.dimension))
        infinite = np.full(objective.dimension, np.inf)
        bounds = Bounds(-infinite, infinite) if self.bounds is None else self.bounds
        form = searched(objective)
        if isinstance(form, QuadraticObjective):
            ridge = ridge + separable_part(form.matrix - np.diag(ridge))
        if saved is not None:
            return SparseConvex(form, self.owner, ridge, saved.lower, saved.upper)
        convex = SparseConvex(form, self.owner, ridge, bounds.lower, bounds.upper)
        excluded = convex.coordinates(~self.candidates)  # a copy without ridge would have infinite costs
        convex = convex.within(np.flatnonzero(excluded), 0.0, 0.0)
        return reached(convex, self.size, self.candidates, np.where(excluded, 0.0, fit.theta), ceiling, deadline)

    def first_fits(self) -> Iterator[Fit]:
        """The best fits so far of the search without proof, after each of its stages."""
        objective = self.problem.objective
        if isinstance(objective, Tabled):
            yield group_path(CoordinateGroups(objective, objective.groups), [self.size])[-1]
        elif self.bounds is not None:  # the tree finds what the later, slower stages would find
            yield next(bounded.stages(self.problem, self.bounds)).fit
        else:
            yield from (stage.fit for stage in auto.stages(self.problem))

    def first_fit(self) -> Fit:
        """The best fit that the search without proof finds."""
        return list(self.first_fits())[-1]


def searched(objective: Objective) -> DesignObjective | QuadraticObjective:
    """f in the form in which many values are computed: a quadratic by its Hessian, others by a design by columns."""
    everything = np.arange(objective.dimension)
    if objective.quadratic and not isinstance(objective, Tabled) and objective.dimension <= DENSE_LIMIT:
        zero = np.zeros(objective.dimension)
        value, gradient = objective.value_and_gradient(zero)
        return QuadraticObjective(objective.hessian_block(zero, everything), -gradient, constant=value)
    assert isinstance(objective, LinearModel | Cox | Tabled)
    n, d = objective.design.shape
    return objective.restricted(everything) if n * d <= _COPIED else objective


def separable_part(hessian: Array) -> Array:
    """A diagonal D (d,) for which H - diag(D) is positive semi-definite; zero where H is not definite enough.

    Any such D can be taken out of F and counted as ridge. Here D_jj is the same share of 1 / (H^-1)_jj for all j.
    """
    if not is_definite(hessian, 1e-8):
        return np.zeros(len(hessian))
    inverse = np.linalg.inv(hessian)
    scaled = np.sqrt(inverse.diagonal())
    widest = float(np.linalg.eigvalsh(0.5 * (inverse + inverse.T) / scaled / scaled[:, None])[-1])
    return np.asarray((1 - 1e-6) / (widest * inverse.diagonal()), dtype=np.float64)


class CertificateSearch(ConvexTree):
    """The search for the best support, and for a lower bound on its value.

    Args:
        features: the problem.
        fit: the best fit known.
        limits: when to stop.
        on_progress: called every half a second.
        checkpoint: the file from which the search goes on, and which it writes.

    Raises:
        CheckpointError: the file cannot be written.
    """

    def __init__(
        self,
        features: FeatureProblem,
        fit: Fit,
        limits: ProofLimits,
        on_progress: Progress | None = None,
        checkpoint: ProofCheckpoint | None = None,
    ) -> None:
        self.best, self.limits, self._report, self._next = fit, limits, on_progress, 0.0
        self._features = features
        self._checkpoint, saved = checkpoint, None if checkpoint is None else checkpoint.saved
        problem = features.relaxable(fit, fit.value, limits.deadline, saved)
        super().__init__(problem, features.size, features.candidates, features.bounds)
        if saved is not None:
            self.go_on_from(saved.state)
        failed = self.save()
        if failed:  # before any work
            raise CheckpointError(failed)

    @property
    def basis(self) -> str:
        """The way in which bounds are obtained, in words."""
        searched, given = self.problem, self._features.bounds
        counting = searched.always | searched.coordinates(self._features.candidates)
        lower, upper = (-np.inf, np.inf) if given is None else (given.lower, given.upper)
        derived = ((searched.lower > lower) | (searched.upper < upper))[counting].any()
        within = ", within bounds on the coefficients that the data prove" if derived else ""
        return f"tangents of the loss at points of the perspective relaxation{within}"

    @property
    def limit(self) -> float:
        """The bound above which the requested gap is proved."""
        return self.best.value - self.limits.gap * abs(self.best.value)

    def take(self, fit: Fit, used: Booleans) -> None:
        """Keep the better fit."""
        if fit.value < self.best.value:
            self.best = fit

    def stopped(self) -> str:
        """Report the progress, and save the search where that is due; stop where it cannot be saved."""
        elapsed = self.limits.elapsed()
        if self._report is not None and elapsed >= self._next:
            self._next = elapsed + _REPORT
            gap = relative_gap(self.lower, self.best.value)
            count = len(self._open) + len(self._stack)
            self._report(ProofProgress(self.lower, self.best.value, gap, self.nodes, count, elapsed))
        return self.save() if self._checkpoint is not None and self._checkpoint.due else ""

    def save(self) -> str:
        """Write the checkpoint, if there is one; return why that failed, or ""."""
        if self._checkpoint is None:
            return ""
        lower, upper = self.problem.lower, self.problem.upper
        return self._checkpoint.write(SavedProof(self.state, self.best, lower, upper, self.limits.elapsed()))


def certify_convex(
    problem: Problem,
    bounds: Bounds | None,
    fit: Fit | None,
    limits: ProofLimits,
    on_progress: Progress | None,
    file: str | Path | None = None,
) -> Certificate:
    """The certificate of a convex objective; an interruption ends the search with what is proved.

    The search for a first fit ends, after a stage, at half of the time.

    Args:
        problem: f and k.
        bounds: of all coordinates; None without any.
        fit: the best fit known; None to find one.
        limits: when to stop; beyond what an earlier process has used.
        on_progress: called every half a second.
        file: of the checkpoint; None for none.

    Raises:
        ProblemError: as `FeatureProblem`.
        CheckpointError: as `ProofCheckpoint`.
    """
    features = FeatureProblem.of(problem.without_copies() if bounds is None else problem, bounds)
    checkpoint = None if file is None else ProofCheckpoint(file, features.identity(limits.gap))
    if checkpoint is not None and checkpoint.saved is not None:
        saved = checkpoint.saved
        limits = limits.after(saved.seconds, saved.state.nodes)
        fit = saved.fit if fit is None or saved.fit.value <= fit.value else fit
    search: CertificateSearch | None = None
    try:
        for found in features.first_fits() if fit is None else ():
            fit = found
            if limits.elapsed() > 0.5 * limits.seconds:
                break
        assert fit is not None
        search = CertificateSearch(features, fit, limits, on_progress, checkpoint)
        reason = search.run(limits.deadline, limits.max_nodes)
    except KeyboardInterrupt:
        reason = INTERRUPTED
    except OutOfTimeError:
        reason = OUT_OF_TIME
    if search is None:
        return unproved(problem, bounds, fit, limits, reason)
    reason = "; ".join(filter(None, (reason, search.save())))
    best = _on_given(problem.objective, search.best, features.bounds)
    start = problem.at_zero[0]
    # The bounds have their margins subtracted. Values that are equal up to rounding close a tree without open nodes.
    rounding = search.margin + _SETTLED * abs(best.value)
    if reason or rounding > negligible(best.value, start, limits.gap):
        rounding = 0.0
    lower = min(search.lower + rounding, best.value)
    return summarised(
        lower, best, start, limits, search.nodes, max(search.margin, rounding),
        reason or "no part of the search tree is left", search.basis, complete=False,
    )  # fmt: skip


def unproved(problem: Problem, bounds: Bounds | None, fit: Fit | None, limits: ProofLimits, reason: str) -> Certificate:
    """The certificate of a search that ended before its first bound; without a fit that of the forced coordinates."""
    fit = refit(problem.objective, problem.forced, bounds=bounds) if fit is None else fit
    best = _on_given(problem.objective, fit, bounds)
    return summarised(-np.inf, best, problem.at_zero[0], limits, 0, 0.0, reason, "nothing yet", complete=False)


@cache
def compile_proofs() -> None:
    """Compile what a proof needs, by small problems: limits of seconds begin afterwards."""
    labels = np.arange(8) % 2
    objective = Logistic(np.eye(8, 3), labels, ridge=1.0, intercept=True)
    for bounds in (None, Bounds(np.full(4, -0.1), np.full(4, 0.1))):
        limits = ProofLimits(0.0, time.perf_counter(), np.inf, 10)
        certify_convex(Problem(objective, 1), bounds, None, limits, None)


def _on_given(objective: Objective, fit: Fit, bounds: Bounds | None) -> Fit:
    """A fit of the copied objective, with the value and the gradient of the given one."""
    if isinstance(objective, Tabled) or bounds is not None:
        return Fit(fit.support, fit.theta, *objective.value_and_gradient(fit.theta))
    return refit(objective, fit.support, fit.theta)


class NearOptimalSearch(ConvexTree):
    """The search for all supports whose value is at most a share above the best.

    Args:
        features: the problem.
        fit: the best fit known.
        gap: the share.
        equal: relative difference up to which values count as equal.
        at_most: whether supports of fewer features count too.
        max_members: the search stops at more members.
        deadline: of the search for bounds, on `time.perf_counter`.

    Attributes:
        fits: fits of supports below the ceiling at the time, by their features.
    """

    def __init__(
        self,
        features: FeatureProblem,
        fit: Fit,
        gap: float,
        equal: float,
        *,
        at_most: bool,
        max_members: int,
        deadline: float,
    ) -> None:
        self.best, self.gap, self.equal, self.max_members = fit, gap, equal, max_members
        self.least = 0 if at_most else features.size
        self.fits: dict[bytes, Fit] = {}
        problem = features.relaxable(fit, self.limit, deadline)
        super().__init__(problem, features.size, features.candidates, features.bounds)

    @property
    def limit(self) -> float:
        """The largest value of a member."""
        return self.best.value + (self.gap + self.equal) * abs(self.best.value)

    def decided(self, used: Booleans, free: Booleans) -> Booleans | None:
        """A support is decided where no choice is left."""
        count, left = int(used.sum()), int(free.sum())
        if count + left < self.least or count > self.most:
            return used[:0]
        if count == self.most or not left:
            return used
        return used | free if count + left == self.least else None

    def take(self, fit: Fit, used: Booleans) -> None:
        """Keep a fit below the ceiling."""
        if fit.value <= self.limit:
            self.fits[np.packbits(used).tobytes()] = fit
            if fit.value < self.best.value:
                self.best = fit

    def stopped(self) -> str:
        """Stop at too many members."""
        if len(self.fits) > self.max_members:
            self.fits = {key: fit for key, fit in self.fits.items() if fit.value <= self.limit}
            if len(self.fits) > self.max_members:
                return f"there are more than {self.max_members:,} members"
        return ""
