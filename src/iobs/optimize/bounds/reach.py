"""Bounds on coefficients that have neither a ridge nor bounds, such as an intercept, over all vectors of a known value.

Let U be these coordinates. A tangent at any point w says of every vector v that is allowed and has f(v) <= ceiling

    g_U^T v_U <= ceiling - L,      L = F(w) - g^T w - the costs of all other coordinates.

Points w whose slope g_U is about +-e_a bound v_a from both sides. They lie on a line through the minimiser, along a
column of the inverse Hessian. What is left of the other slopes is accounted for: with h_a = (ceiling - L) / |g_a| and
A_ai = |g_i| / |g_a|, every such v has |v_U| <= h + A |v_U|, so |v_U| <= (I - A)^-1 h if the rows of A sum to less than 1.
"""

from __future__ import annotations

import numpy as np

from iobs.errors import ProblemError
from iobs.optimize.bounds.perspective import SparseConvex
from iobs.optimize.objectives.design import Array, Booleans, Indices

_SCALES = (1.0, 0.5, 2.0, 0.25, 0.1, 0.01)  # lengths of a step from the minimiser, relative to the best of a quadratic
_REST = 0.5  # largest sum of a row of A
_FAR = 1e3  # bounds while the minimiser is sought, relative to the known fit; they need not hold
_UNBOUNDED = (
    "f has no bounds on coefficient {0}: the data do not determine it together with the others. Give a ridge, or "
    "lower and upper bounds of the coefficients."
)


def reached(problem: SparseConvex, room: int, candidates: Booleans, start: Array, ceiling: float) -> SparseConvex:
    """The problem with bounds on all coordinates that have neither a ridge nor bounds.

    Args:
        problem: f.
        room: largest number of used features.
        candidates: features that may be used (p,).
        start: a known fit (d,).
        ceiling: the bounds hold for all vectors with at most this value.

    Raises:
        ProblemError: the data do not bound such a coordinate.
    """
    allowed = problem.always | candidates[problem.owner]
    open_ended = (problem.ridge == 0) & (np.isinf(problem.lower) | np.isinf(problem.upper)) & allowed
    if not open_ended.any():
        return problem
    places = np.flatnonzero(open_ended).astype(np.int64)
    point = _minimiser(problem, places, room, candidates, start, ceiling)
    block = problem.objective.hessian_block(point, places)
    try:
        factor = np.linalg.cholesky(block)
    except np.linalg.LinAlgError:
        raise ProblemError(_UNBOUNDED.format(int(places[0]))) from None
    if not (factor.diagonal() ** 2 > 1e-10 * block.diagonal()).all():
        weakest = int(places[np.argmin(factor.diagonal() ** 2 / block.diagonal())])
        raise ProblemError(_UNBOUNDED.format(weakest))
    inverse = np.linalg.inv(block)
    without = problem.within(places, 0.0, 0.0)
    high, rests = np.zeros((2, places.size)), np.zeros((places.size, places.size))
    for number in range(places.size):
        for side, sign in enumerate((1.0, -1.0)):
            high[side, number], rest = _one_side(
                without, places, number, sign * inverse[:, number], point, (room, candidates, ceiling)
            )
            rests[number] = np.maximum(rests[number], rest)
    high *= 1 + 1e-9  # rounding of the slopes
    reach = np.linalg.solve(np.eye(places.size) - rests, high.max(axis=0))
    slack = rests @ reach
    return problem.within(places, -(high[1] + slack), high[0] + slack)


def _minimiser(
    problem: SparseConvex, places: Indices, room: int, candidates: Booleans, start: Array, ceiling: float
) -> Array:
    """About the minimiser of the relaxation in which all of U is used."""
    far = _FAR * (1.0 + float(np.abs(start).max(initial=0.0)))
    used = np.zeros_like(candidates)
    used[problem.owner[places][problem.owner[places] >= 0]] = True
    free = candidates & ~used
    return problem.within(places, -far, far).relax(used, free, min(room, int(free.sum())), start, 0.0, ceiling).theta


def _one_side(
    problem: SparseConvex, places: Indices, number: int, direction: Array, point: Array, level: tuple[int, Booleans, float]
) -> tuple[float, Array]:
    """(h_a, A_a) of one coordinate and sign, by the best step along a direction from the minimiser.

    Raises:
        ProblemError: no step is good enough.
    """
    room, candidates, ceiling = level
    nothing = np.zeros_like(candidates)
    best, best_rest = np.inf, np.zeros(places.size)
    size = None
    for scale in (0.0, *_SCALES):
        moved = point.copy()
        if size is not None:
            moved[places] += scale * size * direction
        value, gradient = problem.objective.value_and_gradient(moved)
        if not np.isfinite(value):
            continue
        tangent = problem.tangent(moved, value, gradient)
        missing = ceiling - tangent.bound(nothing, candidates, room)
        if size is None:  # the decrease of h_a = (missing + size^2 / 2 V_aa) / size ends here if f is quadratic
            size = float(np.sqrt(2 * max(missing, 1e-12 * abs(ceiling)) / abs(direction[number])))
            continue
        slope = problem.split(moved, value, gradient)[1][places]
        rest = np.abs(slope)
        rest[number] = 0.0
        along = np.sign(direction[number]) * slope[number]
        if along > 0 and rest.sum() <= _REST * along and missing / along < best:
            best, best_rest = max(missing, 0.0) / along, rest / along
    if not np.isfinite(best):
        raise ProblemError(_UNBOUNDED.format(int(places[number])))
    return best, best_rest
