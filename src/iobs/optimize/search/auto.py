"""The best known search for a sparse minimiser: cheap guesses first, exact swaps after each, expensive guesses last.

The stages run until the whole gradient vanishes (no support can be better for a convex f) or none is left:

1. hard thresholding pursuit, then exact swaps;
2. for generalised linear models: the best support of the second-order model at the best fit, found by the compiled
   search; then a refit and swaps. It is repeated at the new best fit, and ends the search once both agree;
3. merging pursuit (CoSaMP), then swaps;
4. kicks, then swaps: part of the best support is replaced at random by promising coordinates, or all of it by any
   coordinates. Once several stages in a row agree on a support, all further stages but 7 are skipped;
5. for an under-determined quadratic, after the first kick: message passing, then swaps;
6. for an under-determined quadratic: adaptive diagonal damping, then swaps; first without noise, then with the noise
   that the best fit leaves;
7. a refit on the Top-k support of the Newton step from the best fit. With this candidate the result keeps the local
   rate of the I-OBS theorem, which needs a definite H. Where H is singular, it is skipped like the others once stages
   agree. For large problems and general functions the Newton step is computed by at most 300 products with H. There the
   rate holds as far as these products converge.

No stage raises f. Least squares with at least as many samples as columns is searched by its Gram matrix. Where that
matrix is whole, and no start is given, one compiled stage does all of this (`gram_search`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from iobs.optimize.curvature import FullHessian
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.design import Array, Indices
from iobs.optimize.objectives.gram import GramLeastSquares, by_gram
from iobs.optimize.objectives.linear import LeastSquares, LinearModel
from iobs.optimize.problem import Problem
from iobs.optimize.refit.newton import Fit, newton_direction, on_data, refit
from iobs.optimize.search import gram_search, pursuits
from iobs.optimize.search.swaps import Swapper

GLOBAL = "global minimum: the gradient vanishes, so for a convex f no support can be better"
FLAT = "stationary: the gradient vanishes, and f fell along no direction that was tried; a convex f would be least here"
LOCAL = "1-swap optimal: no exchange of two coordinates lowers f"
LOCAL_MODEL = (
    "1-swap optimal by the second-order model: no exchange of two coordinates is predicted to lower f and does"
)

BY_GRAM = "search by the Gram matrix"
RUNAWAY = "the gradient does not vanish where the best fit ended: f may be unbounded below there (check its sign)"

_MODEL = "second-order model"
_MODELS = 3  # most models in a row, each at the best fit so far
_AGREEMENTS = 2  # stages in a row that must agree on a support, if swaps are expensive
# The same if swaps are cheap: with noise stages soon agree, without noise only on the right support.
_MANY_AGREEMENTS = 6
_WORK_LIMIT = 4e8  # most multiplications of one iteration of adaptive damping
# Most products with H for the Newton point of larger problems, by conjugate gradients to a residual of 1e-6.
_NEWTON_PRODUCTS = 300
_ROUGH_DAMPING = 0.2  # relative residual of the eigenvalue; its own error is about the square
_GRAM_ACCURACY = 1e-8  # below this share of f(0) the Gram matrix no longer tells values of f apart
_PASSING_LIMIT = 4_000_000  # most entries of a design for message passing, which reads it hundreds of times


@dataclass(frozen=True)
class Stage:
    """The result of a stage: its name, the best fit so far, and whether that fit is known to be optimal."""

    name: str
    fit: Fit
    optimal: bool


def stages(
    problem: Problem, theta: Array | None = None, *, kicks: int = 18, empty: Fit | None = None
) -> Iterator[Stage]:
    """Run the stages one after the other and yield the best fit after each; stop once f cannot be lower.

    Args:
        problem: f, k and the candidates.
        theta: a start (d,), improved by swaps before the first stage.
        kicks: largest number of random restarts around the best support.
        empty: the fit of the forced coordinates alone, if known.
    """
    problem = problem.without_copies()
    n_below_d = problem.objective.rank < problem.dimension
    gram = None if n_below_d or problem.size == 0 else by_gram(problem.objective)
    if gram is None:
        yield from _stages(problem, theta, kicks, empty)
        return
    best: Fit | None = None
    optimal = False
    for stage in _by_gram(problem, gram, theta, kicks):
        if best is None or not np.array_equal(stage.fit.support, best.support):
            fit = on_data(problem.objective, stage.fit)
            best = fit if best is None or fit.value < best.value or best.support.size < fit.support.size else best
        optimal = stage.optimal or pursuits.solved(problem, best)
        yield Stage(stage.name, best, optimal)
    if best is not None and not optimal and best.value < _GRAM_ACCURACY * gram.constant:
        for stage in _stages(problem, best.theta, kicks, empty):
            best = stage.fit if stage.fit.value < best.value else best
            yield Stage(stage.name, best, stage.optimal)


def compile_stages(objective: Objective) -> None:
    """Compile what `stages` needs for an objective, by a small problem: limits of seconds begin afterwards."""
    _compile_stages(objective.rank < objective.dimension)


@cache
def _compile_stages(n_below_d: bool) -> None:
    design = np.eye(3 if n_below_d else 4, 4)
    list(stages(Problem(LeastSquares(design, np.ones(len(design))), 2)))


def _by_gram(problem: Problem, gram: GramLeastSquares, theta: Array | None, kicks: int) -> Iterator[Stage]:
    """The stages on the Gram matrix; all of them as one compiled stage where the whole matrix is known."""
    fit = gram_search.best_fit(problem, gram, kicks) if theta is None and gram.complete else None
    if fit is None:
        yield from _stages(replace(problem, objective=gram), theta, kicks, None)
    else:
        yield Stage(BY_GRAM, fit, False)


def _stages(problem: Problem, theta: Array | None, kicks: int, empty: Fit | None) -> Iterator[Stage]:
    swapper = Swapper(problem)
    empty = pursuits.start(problem) if empty is None else empty
    best = empty if theta is None else pursuits.start(problem, theta)
    if problem.size == 0:
        yield Stage("nothing to choose: only forced coordinates may be non-zero", best, True)
        return
    if theta is not None:
        best = swapper.improve(best)
    optimal = theta is not None and pursuits.solved(problem, best)
    if theta is not None:
        yield Stage("start", best, optimal)
    agreed = 0
    singular = problem.objective.quadratic and problem.objective.rank < problem.dimension
    enough = _MANY_AGREEMENTS if swapper.whole else _AGREEMENTS
    for name, propose in _plan(swapper, empty, kicks):
        if optimal and problem.size == best.support.size - problem.forced.size:
            return
        if agreed >= enough and (name != "Newton point" or singular):
            continue
        proposal = propose(best)
        if proposal is None:
            continue
        if proposal is not best and not np.array_equal(proposal.support, best.support):
            proposal = proposal if pursuits.solved(problem, proposal) else swapper.improve(proposal)
        weight = enough if name == _MODEL else 1  # the search of a model has stages that agreed of its own
        agreed = agreed + weight if np.array_equal(proposal.support, best.support) else 0
        if proposal.value < best.value or best.support.size < proposal.support.size:
            best, optimal = proposal, pursuits.solved(problem, proposal)
        yield Stage(name, best, optimal)


def _plan(swapper: Swapper, empty: Fit, kicks: int) -> Iterator[tuple[str, Callable[[Fit], Fit | None]]]:
    problem, objective = swapper.problem, swapper.problem.objective
    first_pursuit, second_pursuit = (
        ("pursuit", lambda best: pursuits.hard_thresholding_pursuit(problem, empty)),
        ("merging pursuit", lambda best: pursuits.compressive_sampling_pursuit(problem, empty)),
    )[:: -1 if problem.expensive_columns else 1]  # merging takes fewer differentiations
    yield first_pursuit
    if isinstance(objective, LinearModel) and not objective.quadratic and problem.dimension <= gram_search.NEWTON_LIMIT:
        for _ in range(_MODELS if kicks else 0):
            yield _MODEL, lambda best: _by_model(swapper, best, kicks)
    n, d = objective.design.shape if isinstance(objective, LeastSquares) else (0, 0)
    under = isinstance(objective, LeastSquares) and not objective.ridge.any() and problem.size < n < d
    # Where every refit is a Newton iteration of its own, kicks are cheaper than merging.
    first = 0 if objective.quadratic else min(2, kicks)
    for number in range(first):
        yield "kick", partial(_kick, problem, number)
    yield second_pursuit
    for number in range(first, kicks):
        if number == 1 and under and n * d <= _PASSING_LIMIT:  # takes as long as many kicks
            yield "message passing", lambda best: _from_scores(problem, pursuits.message_passing)
        yield "kick", partial(_kick, problem, number)
    if under and n * n * d <= _WORK_LIMIT:
        yield "adaptive damping", lambda best: _from_scores(problem, partial(pursuits.adaptive_damping, steps=150))
        yield "adaptive damping with noise", lambda best: _damped_for_noise(problem, best)
    yield "Newton point", lambda best: _newton_support(swapper, best)


def _by_model(swapper: Swapper, best: Fit, kicks: int) -> Fit | None:
    """Refit on the best support of the second-order model at the best fit; None if that model has no minimiser."""
    problem = swapper.problem
    if best.support.size == problem.forced.size or problem.objective.rank < problem.dimension:
        return None
    support = gram_search.model_support(problem, swapper.hessian(best), best, kicks)
    if support is None:
        return None
    if np.array_equal(support, best.support):
        return best
    return refit(problem.objective, support, best.theta)


def _from_scores(problem: Problem, propose: Callable[[Array, Array, int], Array]) -> Fit:
    """Call a scoring function on the scaled design and refit on the support of its k largest scores."""
    objective = problem.objective
    assert isinstance(objective, LeastSquares)
    usable = np.flatnonzero(problem.candidates)
    columns = objective.design.columns(usable) / problem.scale[usable]
    scores = np.zeros(problem.dimension)
    scores[usable] = propose(columns, objective.target, problem.size)
    return refit(objective, problem.top(scores))


def _damped_for_noise(problem: Problem, best: Fit) -> Fit:
    """Adaptive damping with the variance of the residual at the best fit."""
    variance = 2 * best.value / max(1, problem.objective.rank - best.support.size)
    return _from_scores(problem, partial(pursuits.adaptive_damping, variance=variance, steps=60))


def _newton_support(swapper: Swapper, best: Fit) -> Fit:
    """Refit on the support of T_k of the Newton point (Option 1's mask)."""
    problem, objective = swapper.problem, swapper.problem.objective
    costly = isinstance(objective, GramLeastSquares) and not objective.complete
    if problem.dimension <= gram_search.NEWTON_LIMIT and not problem.expensive_columns and not costly:
        if problem.damping is None and objective.rank >= problem.dimension:
            # H is definite and takes only one factorisation.
            centre = best.theta + newton_direction(swapper.hessian(best), best.gradient)
        else:
            centre = FullHessian().model(problem, best.theta, best.gradient).centre()
    else:
        # A dense spectrum takes many products to find the largest eigenvalue, and the damping needs only its size.
        model = FullHessian().products(problem, best.theta, best.gradient, accuracy=_ROUGH_DAMPING)
        centre = model.centre(tolerance=1e-6, steps=_NEWTON_PRODUCTS)
    support = problem.top(np.abs(centre))
    if np.array_equal(support, best.support):
        return best
    fit = refit(objective, support, best.theta)
    return fit if fit.value < best.value else best


def _kick(problem: Problem, number: int, best: Fit) -> Fit:
    """Replace part of the support by steep coordinates; every third kick draws a new support.

    The part is a half or a third for a quadratic. Otherwise it is a quarter, and no new support is drawn, because every
    refit is a Newton iteration.
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
