"""The best known way to a sparse minimiser: cheap guesses first, exact exchanges after each, harder guesses if needed.

The stages run until the gradient vanishes altogether (no support can be better for a convex f) or there are none left:

1. hard thresholding pursuit, then exact swaps;
2. for a quadratic: message passing, then swaps, when the design is incoherent enough for it;
3. merging pursuit (CoSaMP), then swaps;
4. kicks: a few members of the best support are exchanged at random for promising outsiders, then swaps, until stages
   have agreed on the same support a few times in a row;
5. for an under-determined quadratic: adaptive diagonal damping, then swaps.

Every stage may only lower f, and the Top-k support of the Newton step is among the candidates at the end, so the
result keeps the local rate of the I-OBS theorem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from iobs.optimize import proposals
from iobs.optimize.designs import Array, Indices
from iobs.optimize.objectives import LeastSquares
from iobs.optimize.problem import Problem
from iobs.optimize.refit import Fit, refit
from iobs.optimize.swap import Swapper

GLOBAL = "global minimum: the gradient vanishes, so for a convex f no support can be better"
LOCAL = "1-swap optimal (by the second-order model where f is not quadratic): no exchange of two coordinates lowers f"

_AGREEMENTS = 3  # stages in a row that must return to the same support; 2 where every refit is a Newton iteration
_WORK_LIMIT = 4e8  # multiplications of one iteration of adaptive damping
_PASSING_LIMIT = 4_000_000  # entries of a design that message passing may walk hundreds of times


@dataclass(frozen=True)
class Stage:
    """What a stage reached: its name, the best fit so far, and whether nothing can be better."""

    name: str
    fit: Fit
    optimal: bool


def stages(
    problem: Problem, theta: Array | None = None, *, kicks: int = 8, empty: Fit | None = None
) -> Iterator[Stage]:
    """The stages one after the other, each with the best fit so far; stops early once f cannot be lower.

    Args:
        problem: what is to be solved.
        theta: a start (d,), improved by swaps before anything else.
        kicks: random restarts around the best support, at most.
        empty: the fit of the forced coordinates alone, where it is known already.
    """
    swapper = Swapper(problem)
    empty = proposals.start(problem) if empty is None else empty
    best = empty if theta is None else proposals.start(problem, theta)
    if problem.size == 0:
        yield Stage("forced coordinates only", best, True)
        return
    if theta is not None:
        best = swapper.improve(best)[0]
        yield Stage("start", best, proposals.solved(problem, best))
    agreed = 0
    for name, propose in _plan(problem, empty, kicks):
        if proposals.solved(problem, best) and problem.size == best.support.size - problem.forced.size:
            return
        if name in ("kick", "merging pursuit") and agreed >= _AGREEMENTS - (not problem.objective.quadratic):
            continue
        proposal = propose(best)
        if not proposals.solved(problem, proposal):
            proposal = swapper.improve(proposal)[0]
        agreed = agreed + 1 if np.array_equal(proposal.support, best.support) else 0
        if proposal.value < best.value or best.support.size < proposal.support.size:
            best = proposal
        yield Stage(name, best, proposals.solved(problem, best))


def _plan(problem: Problem, empty: Fit, kicks: int) -> Iterator[tuple[str, Callable[[Fit], Fit]]]:
    objective = problem.objective
    yield "pursuit", lambda best: proposals.hard_thresholding_pursuit(problem, empty)
    linear = isinstance(objective, LeastSquares) and not objective.ridge.any()
    if linear:
        assert isinstance(objective, LeastSquares)
        n, d = objective.design.shape
        under = problem.size < min(n, d) and n < d
        if n * d <= _PASSING_LIMIT and under:
            yield "message passing", lambda best: _from_scores(problem, proposals.message_passing)
    # Where every refit is a Newton iteration of its own, kicks are cheaper than merging.
    first = 0 if objective.quadratic else min(2, kicks)
    for _ in range(first):
        yield "kick", lambda best: _kick(problem, best)
    yield "merging pursuit", lambda best: proposals.compressive_sampling_pursuit(problem, empty)
    for _ in range(kicks - first):
        yield "kick", lambda best: _kick(problem, best)
    if linear and under and n * n * d <= _WORK_LIMIT:
        yield "adaptive damping", lambda best: _from_scores(problem, proposals.adaptive_damping)


def _from_scores(problem: Problem, propose: Callable[[Array, Array, int], Array]) -> Fit:
    """Run a proposal on the scaled design and refit its support."""
    objective = problem.objective
    assert isinstance(objective, LeastSquares)
    usable = np.flatnonzero(problem.candidates)
    columns = objective.design.columns(usable) / problem.scale[usable]
    scores = np.zeros(problem.dimension)
    scores[usable] = propose(columns, objective.target, problem.size)
    return refit(objective, problem.top(scores))


def _kick(problem: Problem, best: Fit) -> Fit:
    """Exchange a quarter of the support at random for outsiders with a steep gradient once those are gone."""
    free = np.setdiff1d(best.support, problem.forced)
    count = max(1, free.size // 4)
    gone = problem.rng.choice(free, count, replace=False)
    kept = np.setdiff1d(best.support, gone)
    rest = refit(problem.objective, kept, best.theta, steps=5)
    slope = np.abs(rest.gradient) / problem.scale
    slope[best.support] = -1.0
    slope[~problem.candidates] = -1.0
    pool = np.argsort(-slope, kind="stable")[: 4 * count]
    pool = pool[slope[pool] > 0]
    if pool.size < count:
        return best
    entering: Indices = problem.rng.choice(pool, count, replace=False)
    return refit(problem.objective, np.sort(np.concatenate([kept, entering])).astype(np.int64), rest.theta)
