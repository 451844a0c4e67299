"""Bounds on coefficients that have neither a ridge nor bounds, such as an intercept, over all vectors of a known value.

Let U be these coordinates. A tangent at any point w says of every vector v that is allowed and has f(v) <= ceiling

    g_U^T v_U <= ceiling - L,      L = F(w) - g^T w - the costs of all other coordinates.

Points w whose slope g_U is a multiple of +-e_a bound v_a from both sides. They are found from the minimiser by steps
with the inverse Hessian there. What is left of the other slopes is accounted for: with h_a = (ceiling - L) / |g_a| and
A_ai = |g_i| / |g_a|, every such v has |v_U| <= h + A |v_U|. So |v_U| <= (I - A)^-1 h if the rows of A sum to less than
1.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from iobs.errors import ProblemError
from iobs.optimize.bounds.choices import Choices
from iobs.optimize.bounds.perspective import SparseConvex
from iobs.optimize.objectives.design import Array, Booleans, Indices

_SCALES = (1.0, 0.5, 0.25, 0.1, 0.01)  # sizes of the slope, relative to the best of a quadratic
_WEAK = 0.02  # a ridge that is a smaller share of the curvature is helped by bounds
_MANY = 8  # samples for each coordinate with a weak ridge, from which bounds are computed
_REST = 0.2  # largest sum of a row of A
_CHORDS = 8  # most steps to a point whose slope is about +-e_a
_GRACE = 3  # coordinates that may take their time before the pace is judged
_FAR = 1e3  # bounds while the minimiser is sought, relative to the known fit; they need not hold
_UNBOUNDED = (
    "f has no bounds on coefficient {0}: the data do not determine it together with the others. Give a ridge, or "
    "lower and upper bounds of the coefficients."
)


class OutOfTimeError(Exception):
    """The bounds would take longer than there is time."""


@dataclass(frozen=True)
class Level:
    """The vectors that bounds must hold for: at most `room` of the `candidates` (p,) used, and f at most `ceiling`."""

    room: int
    candidates: Booleans
    ceiling: float


def reached(
    problem: SparseConvex, room: int, candidates: Booleans, start: Array, ceiling: float, deadline: float
) -> SparseConvex:
    """The problem with bounds on all coordinates that have no ridge or a weak one, or narrower bounds if it has some.

    Args:
        problem: f.
        room: largest number of used features.
        candidates: features that may be used (p,).
        start: a known fit (d,).
        ceiling: the bounds hold for all vectors with at most this value.
        deadline: on `time.perf_counter`; coordinates with a weak ridge get half of the time, or no bounds.

    Raises:
        ProblemError: the data do not bound such a coordinate.
        OutOfTimeError: the time does not suffice for the coordinates without ridge; it does for a single one.
    """
    allowed = problem.always | problem.coordinates(candidates)
    unbounded = (np.isinf(problem.lower) | np.isinf(problem.upper)) & allowed
    weak = (problem.ridge < _WEAK * problem.objective.hessian_diagonal(start)) & allowed
    without = unbounded & (problem.ridge == 0)
    if problem.samples < _MANY * int(weak.sum()):
        weak = without  # bounds from so few samples are wide, and take a pass over the data each
    if not (weak == without).all():
        now = time.perf_counter()
        try:
            return _reached(problem, weak, Level(room, candidates, ceiling), start, now + 0.5 * (deadline - now))
        except (ProblemError, OutOfTimeError):
            pass
    return _reached(problem, without, Level(room, candidates, ceiling), start, deadline)


def _reached(problem: SparseConvex, chosen: Booleans, level: Level, start: Array, deadline: float) -> SparseConvex:
    places = np.flatnonzero(chosen).astype(np.int64)
    if not places.size:
        return problem
    _inverse(problem, places, start)  # refuses dependent coordinates before any work
    point = _minimiser(problem, places, level, start)
    inverse = _inverse(problem, places, point)
    within = problem.within(places, 0.0, 0.0)
    ridge = problem.ridge.copy()
    ridge[places] = 0.0  # a weak ridge counts as part of F
    without = SparseConvex(problem.objective, problem.owner, ridge, within.lower, within.upper)
    begun = time.perf_counter()
    high, rests = np.zeros((2, places.size)), np.zeros((places.size, places.size))
    for number in range(places.size):
        share = (number + _GRACE) / (places.size + _GRACE)
        if number and time.perf_counter() - begun > share * (deadline - begun):
            raise OutOfTimeError
        for side, sign in enumerate((1.0, -1.0)):
            high[side, number], rest = _one_side(without, places, inverse, number, sign, point, level)
            rests[number] = np.maximum(rests[number], rest)
    high *= 1 + 1e-9  # rounding of the slopes
    reach = np.linalg.solve(np.eye(places.size) - rests, high.max(axis=0))
    slack = rests @ reach
    lower, upper = (
        np.maximum(problem.lower[places], -(high[1] + slack)),
        np.minimum(problem.upper[places], high[0] + slack),
    )
    return problem.within(places, np.minimum(lower, 0.0), np.maximum(upper, 0.0))


def _inverse(problem: SparseConvex, places: Indices, point: Array) -> Array:
    """The inverse of the Hessian of some coordinates at a point.

    Raises:
        ProblemError: it is not definite enough.
    """
    block = problem.objective.hessian_block(point, places)
    try:
        factor = np.linalg.cholesky(block)
    except np.linalg.LinAlgError:
        raise ProblemError(_UNBOUNDED.format(int(places[0]))) from None
    if not (factor.diagonal() ** 2 > 1e-10 * block.diagonal()).all():
        weakest = int(places[np.argmin(factor.diagonal() ** 2 / block.diagonal())])
        raise ProblemError(_UNBOUNDED.format(weakest))
    return np.asarray(np.linalg.inv(block), dtype=np.float64)


def _minimiser(problem: SparseConvex, places: Indices, level: Level, start: Array) -> Array:
    """About the minimiser of the relaxation in which all of U is used."""
    far = _FAR * (1.0 + float(np.abs(start).max(initial=0.0)))
    used = np.zeros_like(level.candidates)
    used[problem.owner[places][problem.owner[places] >= 0]] = True
    choices = Choices.of(used, level.candidates & ~used, level.room + int(used.sum()))
    return problem.within(places, -far, far).relax(choices, start, np.zeros(1), level.ceiling).theta


def _one_side(
    problem: SparseConvex, places: Indices, inverse: Array, number: int, sign: float, point: Array, level: Level
) -> tuple[float, Array]:
    """(h_a, A_a) of one coordinate and sign, by the first of several points w that is good enough.

    Raises:
        ProblemError: no point is good enough.
    """
    missing, slope = _missing(problem, point, level)
    # The least h_a = (missing + slope^2 / 2 V_aa) / slope of a quadratic f.
    size = float(np.sqrt(2 * max(missing, 1e-12 * abs(level.ceiling)) / inverse[number, number]))
    for scale in _SCALES:
        wanted = np.zeros(places.size)
        wanted[number] = sign * scale * size
        moved, here = point.copy(), slope[places]
        for _ in range(_CHORDS):
            moved[places] += inverse @ (wanted - here)
            missing_there, slope_there = _missing(problem, moved, level)
            if not np.isfinite(missing_there):
                break
            here = slope_there[places]
            rest = np.abs(here)
            rest[number] = 0.0
            along = sign * here[number]
            if along > 0 and rest.sum() <= _REST * along:
                return max(missing_there, 0.0) / along, rest / along
    raise ProblemError(_UNBOUNDED.format(int(places[number])))


def _missing(problem: SparseConvex, point: Array, level: Level) -> tuple[float, Array]:
    """Ceiling - L at a point, and the slope of F there (d,); infinite where f is not finite."""
    value, gradient = problem.objective.value_and_gradient(point)
    if not (np.isfinite(value) and np.isfinite(gradient).all()):
        return np.inf, np.zeros_like(point)
    choices = Choices.of(np.zeros_like(level.candidates), level.candidates, level.room)
    bound = problem.tangent(point, value, gradient).bound(choices)
    return level.ceiling - bound, problem.split(point, value, gradient)[1]
