"""The search for a sparse minimiser within bounds on the coefficients.

A support is fitted within the bounds (`refit.within`), so every exchange costs a refit. A removed coordinate is
replaced by those that promise most in one step within their bounds; on a small problem by every other one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.design import Array, Indices
from iobs.optimize.objectives.gram import by_gram
from iobs.optimize.problem import Problem, generator_of
from iobs.optimize.refit.newton import Fit, refit
from iobs.optimize.refit.within import Bounds
from iobs.optimize.search import auto, pursuits

ALL_TRIED = "1-swap optimal: no exchange of two coordinates lowers f within the bounds"
SOME_TRIED = "no promising exchange of two coordinates lowers f within the bounds"

_WIDTH = 12  # coordinates that are tried in the place of a removed one
_ALL_PAIRS = 1000  # most exchanges of which all are tried
_TOLERANCE = 1e-10  # least relative decrease of f that counts as an improvement
_KICKS = 6


@dataclass(frozen=True)
class BoundedSearch:
    """A problem with bounds.

    Attributes:
        problem: f, k and the candidates.
        bounds: of all coordinates.
    """

    problem: Problem
    bounds: Bounds

    @property
    def tries_all(self) -> bool:
        """True if every exchange is tried."""
        outside = int(self.problem.candidates.sum()) - self.problem.size
        return self.problem.size * outside <= _ALL_PAIRS and not self.problem.expensive_columns

    def fitted(self, support: Indices, start: Array | None = None) -> Fit:
        """The refit on a support within the bounds."""
        return refit(self.problem.objective, np.sort(support).astype(np.int64), start, bounds=self.bounds)

    def gains(self, fit: Fit) -> Array:
        """The decrease of f that a step of each coordinate outside the support promises (d,); -1 where none may."""
        problem = self.problem
        costly = problem.objective.quadratic or problem.expensive_columns
        curvature = problem.scale**2 if costly else problem.objective.hessian_diagonal(fit.theta)
        gain = self.bounds.promised(fit.theta, fit.gradient, curvature)
        gain[~problem.candidates] = -1.0
        gain[fit.support] = -1.0
        return gain

    def extended(self, fit: Fit) -> Fit:
        """Add the most promising coordinates one by one, up to k; fewer where none can lower f."""
        fit = self._without_zeros(fit)
        while fit.support.size - self.problem.forced.size < self.problem.size:
            gain = self.gains(fit)
            best = int(np.argmax(gain))
            if not gain[best] > 0:
                break
            fit = self.fitted(np.append(fit.support, best), fit.theta)
        return fit

    def _without_zeros(self, fit: Fit) -> Fit:
        kept = (fit.theta[fit.support] != 0) | np.isin(fit.support, self.problem.forced)
        return replace(fit, support=fit.support[kept])

    def improved(self, fit: Fit) -> Fit:
        """Make the best exchange that is tried, until none lowers f."""
        while True:
            better = self._best_exchange(fit)
            if better is None:
                return fit
            fit = self.extended(better)

    def _best_exchange(self, fit: Fit) -> Fit | None:
        size = max(abs(fit.value), abs(self.problem.at_zero[0] - fit.value), 1e-300)
        least, best = fit.value - _TOLERANCE * size, None
        for leaving in np.setdiff1d(fit.support, self.problem.forced):
            rest = self.fitted(np.setdiff1d(fit.support, leaving), fit.theta)
            gain = self.gains(rest)
            gain[leaving] = -1.0
            order = np.argsort(-gain, kind="stable")
            # A coordinate that promises nothing cannot lower a convex f: the gradient points out of its bounds.
            promising = order[: int((gain > 0).sum())]
            for entering in promising if self.tries_all else promising[:_WIDTH]:
                trial = self.fitted(np.append(rest.support, entering), rest.theta)
                if trial.value < least:
                    least, best = trial.value, trial
        return best

    def kicked(self, fit: Fit) -> Fit:
        """Replace a random half of the support by random ones of the most promising coordinates."""
        rng = self.problem.rng
        free = np.setdiff1d(fit.support, self.problem.forced)
        count = max(1, free.size // 2)
        rest = self.fitted(np.setdiff1d(fit.support, rng.choice(free, count, replace=False)), fit.theta)
        gain = self.gains(rest)
        pool = np.argsort(-gain, kind="stable")[: 4 * count]
        pool = pool[gain[pool] > 0]
        if pool.size:
            entering = rng.choice(pool, min(count, pool.size), replace=False)
            rest = self.fitted(np.append(rest.support, entering), rest.theta)
        return self.extended(rest)


def stages(problem: Problem, bounds: Bounds, start: Array | None = None) -> Iterator[auto.Stage]:
    """Run the stages one after the other and yield the best fit after each.

    The starts are a forward selection, the best support without bounds, and random restarts around the best fit.

    Args:
        problem: f, k and the candidates.
        bounds: of all coordinates.
        start: a start (d,), improved before the other stages.
    """
    problem = problem.without_copies(limits=(bounds.lower, bounds.upper))
    gram = by_gram(problem.objective)
    search = BoundedSearch(problem if gram is None else replace(problem, objective=gram), bounds)
    empty = search.fitted(problem.forced)
    if problem.size == 0:
        yield auto.Stage("nothing to choose: only forced coordinates may be non-zero", empty, True)
        return
    best: Fit | None = None
    for name, proposal in _proposals(search, problem, empty, start):
        if best is None or proposal.value < best.value:
            best = proposal
        yield auto.Stage(name, _on_data(problem.objective, best, bounds), False)
    assert best is not None
    for number in range(_KICKS):
        if not np.setdiff1d(best.support, problem.forced).size:
            return
        proposal = search.improved(search.kicked(best))
        best = proposal if proposal.value < best.value else best
        yield auto.Stage(f"kick {number + 1}", _on_data(problem.objective, best, bounds), False)


def _proposals(search: BoundedSearch, problem: Problem, empty: Fit, start: Array | None) -> Iterator[tuple[str, Fit]]:
    if start is not None:
        support = pursuits.support_of(problem, start)
        yield "start", search.improved(search.extended(search.fitted(support, start)))
    yield "forward selection", search.improved(search.extended(empty))
    free = list(auto.stages(problem))[-1].fit
    yield "support without bounds", search.improved(search.extended(search.fitted(free.support, free.theta)))


def _on_data(objective: Objective, fit: Fit, bounds: Bounds) -> Fit:
    """A fit by the Gram matrix, fitted on the data; any other fit unchanged."""
    return fit if by_gram(objective) is None else refit(objective, fit.support, fit.theta, bounds=bounds)


def bounded_path(
    objective: Objective, bounds: Bounds, sizes: Sequence[int], *, seed: int = 0, thorough: bool = False
) -> list[Fit]:
    """Sparse fits within bounds for ascending k, each from the one before; by all stages if `thorough`."""
    gram = by_gram(objective)
    fits: list[Fit] = []
    fit: Fit | None = None
    for size in sizes:
        problem = Problem(objective, size, rng=generator_of(seed))
        problem = problem.without_copies(penalised=True, limits=(bounds.lower, bounds.upper))
        search = BoundedSearch(problem if gram is None else replace(problem, objective=gram), bounds)
        fit = search.improved(search.extended(search.fitted(problem.forced) if fit is None else fit))
        fitted = _on_data(objective, fit, bounds)
        if thorough:
            fitted = min(fitted, list(stages(problem, bounds))[-1].fit, key=lambda each: each.value)
        fits.append(fitted)
    return fits
