"""The best known way to a sparse minimiser: cheap guesses first, exact exchanges after each, harder guesses if needed.

The stages run until the gradient vanishes altogether (no support can be better for a convex f) or there are none left:

1. hard thresholding pursuit, then exact swaps;
2. for a quadratic: message passing, then swaps, when the design is incoherent enough for it;
3. merging pursuit (CoSaMP), then swaps;
4. kicks: a part of the best support is exchanged at random for promising outsiders, or all of it for anything, then
   swaps; only until stages have agreed on the same support a few times in a row, which also ends what follows but 6;
5. for an under-determined quadratic: adaptive diagonal damping, then swaps; first as if there were no noise, then with
   the noise that the best fit so far leaves;
6. the Top-k support of the Newton step from the best fit, refitted: with it among the candidates the result keeps the
   local rate of the I-OBS theorem. Large problems and general functions find that step by at most 300 products with H,
   so there it is the Newton step only as far as these converge.

Every stage may only lower f.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from iobs.optimize import proposals
from iobs.optimize.curvature import FullHessian
from iobs.optimize.designs import Array, Indices
from iobs.optimize.objectives import LeastSquares, LinearModel
from iobs.optimize.problem import Problem
from iobs.optimize.refit import Fit, newton_direction, refit
from iobs.optimize.swap import Swapper

GLOBAL = "global minimum: the gradient vanishes, so for a convex f no support can be better"
LOCAL = "1-swap optimal: no exchange of two coordinates lowers f"
LOCAL_MODEL = (
    "1-swap optimal by the second-order model: no exchange of two coordinates is predicted to lower f and does"
)

RUNAWAY = "the gradient does not vanish where the best fit ended: f may fall without bound there (check its sign)"

_AGREEMENTS = 2  # stages in a row that must return to the same support, where a swap is not cheap
_MANY_AGREEMENTS = 6  # and where it is: with noise they soon agree, without any they do not until they are right
_WORK_LIMIT = 4e8  # multiplications of one iteration of adaptive damping
_NEWTON_LIMIT = 1024  # coordinates up to which the Newton point is found by factorising H
_NEWTON_PRODUCTS = 300  # with H, for the Newton point of larger problems, by conjugate gradients to a residual of 1e-6
_ROUGH = 1e-5  # residual of the Newton equations, relative and scaled, that single precision may leave
_PASSING_LIMIT = 4_000_000  # entries of a design that message passing may walk hundreds of times


@dataclass(frozen=True)
class Stage:
    """What a stage reached: its name, the best fit so far, and whether nothing can be better."""

    name: str
    fit: Fit
    optimal: bool


def stages(
    problem: Problem, theta: Array | None = None, *, kicks: int = 18, empty: Fit | None = None
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
        yield Stage("nothing to choose: only forced coordinates may be non-zero", best, True)
        return
    if theta is not None:
        best = swapper.improve(best)[0]
        yield Stage("start", best, proposals.solved(problem, best))
    agreed = 0
    for name, propose in _plan(problem, empty, kicks):
        if proposals.solved(problem, best) and problem.size == best.support.size - problem.forced.size:
            return
        if name != "Newton point" and agreed >= (_MANY_AGREEMENTS if swapper.whole else _AGREEMENTS):
            continue
        proposal = propose(best)
        if proposal is not best and not proposals.solved(problem, proposal):
            proposal = swapper.improve(proposal)[0]
        agreed = agreed + 1 if np.array_equal(proposal.support, best.support) else 0
        if proposal.value < best.value or best.support.size < proposal.support.size:
            best = proposal
        yield Stage(name, best, proposals.solved(problem, best))


def _plan(problem: Problem, empty: Fit, kicks: int) -> Iterator[tuple[str, Callable[[Fit], Fit]]]:
    objective = problem.objective
    first_pursuit, second_pursuit = (
        ("pursuit", lambda best: proposals.hard_thresholding_pursuit(problem, empty)),
        ("merging pursuit", lambda best: proposals.compressive_sampling_pursuit(problem, empty)),
    )[:: -1 if problem.dear else 1]  # merging takes fewer differentiations
    yield first_pursuit
    linear = isinstance(objective, LeastSquares) and not objective.ridge.any()
    if linear:
        assert isinstance(objective, LeastSquares)
        n, d = objective.design.shape
        under = problem.size < min(n, d) and n < d
        if n * d <= _PASSING_LIMIT and under:
            yield "message passing", lambda best: _from_scores(problem, proposals.message_passing)
    # Where every refit is a Newton iteration of its own, kicks are cheaper than merging.
    first = 0 if objective.quadratic else min(2, kicks)
    for number in range(first):
        yield "kick", partial(_kick, problem, number)
    yield second_pursuit
    for number in range(first, kicks):
        yield "kick", partial(_kick, problem, number)
    if linear and under and n * n * d <= _WORK_LIMIT:
        yield "adaptive damping", lambda best: _from_scores(problem, partial(proposals.adaptive_damping, steps=150))
        yield "adaptive damping with noise", lambda best: _damped_for_noise(problem, best)
    yield "Newton point", lambda best: _newton_support(problem, best)


def _from_scores(problem: Problem, propose: Callable[[Array, Array, int], Array]) -> Fit:
    """Run a proposal on the scaled design and refit its support."""
    objective = problem.objective
    assert isinstance(objective, LeastSquares)
    usable = np.flatnonzero(problem.candidates)
    columns = objective.design.columns(usable) / problem.scale[usable]
    scores = np.zeros(problem.dimension)
    scores[usable] = propose(columns, objective.target, problem.size)
    return refit(objective, problem.top(scores))


def _damped_for_noise(problem: Problem, best: Fit) -> Fit:
    """Adaptive damping with the variance that is left at the best fit."""
    variance = 2 * best.value / max(1, problem.objective.rank - best.support.size)
    return _from_scores(problem, partial(proposals.adaptive_damping, variance=variance, steps=60))


def _newton_support(problem: Problem, best: Fit) -> Fit:
    """The refit on the support of T_k of the Newton point (Option 1's mask)."""
    objective = problem.objective
    if problem.dimension <= _NEWTON_LIMIT and not problem.dear:
        if problem.damping is None and objective.rank >= problem.dimension:  # H needs no more than one factorisation
            centre = best.theta + _newton_direction(problem, best)
        else:
            centre = FullHessian().model(problem, best.theta, best.gradient).centre()
    else:
        model = FullHessian().products(problem, best.theta, best.gradient)
        centre = model.centre(tolerance=1e-6, steps=_NEWTON_PRODUCTS)
    support = problem.top(np.abs(centre))
    if np.array_equal(support, best.support):
        return best
    fit = refit(objective, support, best.theta)
    return fit if fit.value < best.value else best


def _newton_direction(problem: Problem, fit: Fit) -> Array:
    """-H^-1 g; in single precision where that solves the system well enough to rank coordinates by."""
    objective = problem.objective
    if isinstance(objective, LinearModel) and not objective.quadratic:
        direction = newton_direction(objective.rough_hessian(fit.theta), fit.gradient)
        residual = objective.hessian_product(fit.theta, direction) + fit.gradient
        if np.abs(residual / problem.scale).max() <= _ROUGH * np.abs(fit.gradient / problem.scale).max():
            return direction
    return newton_direction(objective.hessian_block(fit.theta, np.arange(problem.dimension)), fit.gradient)


def _kick(problem: Problem, number: int, best: Fit) -> Fit:
    """Exchange a part of the support for outsiders that are steep once it is gone; every third time start anew.

    Where every refit is a Newton iteration the part is a quarter and nothing starts anew.
    """
    free = np.setdiff1d(best.support, problem.forced)
    if number % 3 == 1 and problem.objective.quadratic:
        usable = np.flatnonzero(problem.candidates)
        anything = problem.rng.choice(usable, problem.size, replace=False)
        return refit(problem.objective, np.sort(np.concatenate([anything, problem.forced])).astype(np.int64))
    count = max(1, free.size // ((2 + number % 3 // 2) if problem.objective.quadratic else 4))
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
