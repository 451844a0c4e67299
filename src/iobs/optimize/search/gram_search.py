"""The search of a least-squares problem on its Gram matrix, compiled as a whole with numba.

On small problems a search by calls from Python spends most of its time between the calls. Here the stages of
`search.auto` (pursuit, merging pursuit, kicks, each followed by exact swaps) are one call, and so is a path over k.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numba import njit
from scipy.linalg.lapack import dposv, sposv

from iobs.optimize.objectives.design import Array, Booleans, Indices
from iobs.optimize.objectives.gram import GramLeastSquares
from iobs.optimize.problem import Problem
from iobs.optimize.refit.newton import Fit
from iobs.optimize.search.kernels import (
    GramProblem,
    SwapState,
    fitted,
    grown,
    improved,
    is_solved,
    state_at,
    swap_until_optimal,
    value_at,
)

_DEPENDENT = 1e-9  # a column's square outside the span of the support, relative to its square, that counts as zero
_FRESH = 8  # number of rank-one updates after which a state is computed anew
_LIMIT = 1000  # most exchanges for one k


@njit(cache=True, nogil=True)
def _marked(size: int, support: Indices) -> Booleans:
    """(size,) true on the support."""
    inside = np.zeros(size, dtype=np.bool_)
    for j in support:
        inside[j] = True
    return inside


@njit(cache=True, nogil=True)
def _largest(scores: Array, usable: Booleans, count: int) -> Indices:
    """The `count` largest scores among the usable coordinates, largest first; ties to the lower; fewer if none left."""
    open_coordinates = usable.copy()
    chosen = np.empty(count, dtype=np.int64)
    for number in range(count):
        best = -1
        for j in range(open_coordinates.size):
            if open_coordinates[j] and (best < 0 or scores[j] > scores[best]):
                best = j
        if best < 0:
            return chosen[:number]
        chosen[number] = best
        open_coordinates[best] = False
    return chosen


@njit(cache=True, nogil=True)
def _top(problem: GramProblem, scores: Array, count: int) -> Indices:
    """The support of the `count` largest scores among the candidates, and of the forced coordinates."""
    inside = _marked(scores.size, problem.forced)
    for j in _largest(scores, problem.candidates, count):
        inside[j] = True
    return np.flatnonzero(inside)


@njit(cache=True, nogil=True)
def _slopes(problem: GramProblem, gradient: Array) -> Array:
    """Absolute scaled gradient (d,)."""
    slope = np.empty(gradient.size)
    for j in range(gradient.size):
        slope[j] = abs(gradient[j]) / problem.scale[j]
    return slope


@njit(cache=True, nogil=True)
def _step_length(problem: GramProblem, support: Indices, gradient: Array, k: int) -> float:
    """The exact step length along the k steepest coordinates outside the support, in scaled variables."""
    outside = _slopes(problem, gradient)
    for j in support:
        outside[j] = 0.0
    chosen = _largest(outside, problem.candidates, k)
    size, curvature = 0.0, 0.0
    for a in chosen:
        if outside[a] > 0:
            size += outside[a] * outside[a]
            slope = gradient[a] / problem.scale[a] ** 2
            for b in chosen:
                if outside[b] > 0:
                    curvature += slope * problem.hessian[a, b] * gradient[b] / problem.scale[b] ** 2
    return size / curvature if curvature > 0 else 1.0


@njit(cache=True, nogil=True)
def _pursuit(problem: GramProblem, k: int, steps: int) -> Indices:
    """The best support of hard thresholding pursuit from the forced coordinates alone."""
    d = problem.linear.size
    support = problem.forced.copy()
    fine, theta, gradient = fitted(problem, support)
    best, least = support, np.inf
    seen = np.zeros((steps, k + problem.forced.size), dtype=np.int64)
    moved = np.empty(d)
    for number in range(steps):
        length = _step_length(problem, support, gradient, k)
        for j in range(d):
            moved[j] = -length * gradient[j] / problem.scale[j]
        for i in range(support.size):
            moved[support[i]] += theta[i] * problem.scale[support[i]]
        for j in range(d):
            moved[j] = abs(moved[j])
        support = _top(problem, moved, k)
        for past in range(number):
            if np.array_equal(seen[past], support):
                return best
        for i in range(support.size):
            seen[number, i] = support[i]
        fine, theta, gradient = fitted(problem, support)
        if not fine:
            return support
        value = value_at(problem, support, theta, gradient)
        if value < least:
            best, least = support, value
        if is_solved(problem, support, theta, gradient):
            return support
    return best


@njit(cache=True, nogil=True)
def _merged(problem: GramProblem, k: int, count: int, steps: int) -> Indices:
    """The best support of the merging pursuit (CoSaMP) from the forced coordinates alone."""
    support = problem.forced.copy()
    fine, theta, gradient = fitted(problem, support)
    best, least = support, np.inf
    for _ in range(steps):
        slope = _slopes(problem, gradient)
        inside = _marked(slope.size, support)
        for j in support:
            slope[j] = 0.0
        for j in _largest(slope, problem.candidates, count):
            inside[j] = True
        wide = np.flatnonzero(inside)
        fine, theta, gradient = fitted(problem, wide)
        if not fine:
            return best
        scores = np.zeros(slope.size)
        for i in range(wide.size):
            scores[wide[i]] = abs(theta[i] * problem.scale[wide[i]])
        support = _top(problem, scores, k)
        fine, theta, gradient = fitted(problem, support)
        if not fine:
            return best
        value = value_at(problem, support, theta, gradient)
        if value >= least - 1e-9 * abs(least):
            return best
        best, least = support, value
        if is_solved(problem, support, theta, gradient):
            return best
    return best


@njit(cache=True, nogil=True)
def _drawn(values: Indices, count: int, draws: Array) -> Indices:
    """`count` of the values, without repetition, by uniform draws in [0, 1)."""
    pool = values.copy()
    for i in range(count):
        other = i + min(int(draws[i] * (pool.size - i)), pool.size - i - 1)
        pool[i], pool[other] = pool[other], pool[i]
    return pool[:count]


@njit(cache=True, nogil=True)
def _kicked(problem: GramProblem, best: Indices, k: int, number: int, draws: Array) -> Indices:
    """A support drawn anew, or the best one with part of it replaced by steep coordinates, as `auto._kick`."""
    if number % 3 == 1 or best.size < k + problem.forced.size:
        inside = _marked(problem.linear.size, problem.forced)
        for j in _drawn(np.flatnonzero(problem.candidates), k, draws[0]):
            inside[j] = True
        return np.flatnonzero(inside)
    inside = _marked(problem.linear.size, best)
    usable = problem.candidates & ~inside
    free = np.flatnonzero(problem.candidates & inside)
    count = max(1, k // (2 + number % 3 // 2))
    for j in _drawn(free, count, draws[0]):
        inside[j] = False
    kept = np.flatnonzero(inside)
    fine, _, gradient = fitted(problem, kept)
    slope = _slopes(problem, gradient)
    for j in range(slope.size):
        usable[j] = usable[j] and slope[j] > 0
    pool = _largest(slope, usable, 4 * count)
    if not fine or pool.size < count:
        return best
    for j in _drawn(pool, count, draws[1]):
        inside[j] = True
    return np.flatnonzero(inside)


@njit(cache=True, nogil=True)
def path(problem: GramProblem, largest: int) -> tuple[int, Indices, Array]:
    """Supports for k = 0, 1, ..., `largest`: the one before plus the steepest coordinate, improved by exact swaps.

    Returns:
        The number of sizes done, fewer than `largest` + 1 if no independent column is left. Row k of the second array
        holds the sorted support, and row k of the third array its refit. Row k uses its first k entries, and one more
        for each forced coordinate.
    """
    forced, d = problem.forced.size, problem.linear.size
    supports = np.zeros((largest + 1, largest + forced), dtype=np.int64)
    thetas = np.zeros((largest + 1, largest + forced))
    fine, state = state_at(problem, problem.forced)
    if not fine:
        return 0, supports, thetas
    supports[0, :forced], thetas[0, :forced] = state.support, state.theta
    updates = 0
    for k in range(1, largest + 1):
        entering, steepest = -1, -1.0
        for j in range(d):
            if state.allowed[j] > 0 and state.schur[j] > _DEPENDENT * problem.hessian[j, j]:
                score = abs(state.gradient[j]) / problem.scale[j]
                if score > steepest:
                    entering, steepest = j, score
        if entering < 0:
            return k, supports, thetas
        state = grown(state, entering)
        updates += 1
        while True:
            value = value_at(problem, state.support, state.theta, state.gradient)
            size = max(value, problem.constant - value, 1e-300)
            if updates > _FRESH:
                fine, fresh = state_at(problem, state.support)
                if not fine:
                    return k, supports, thetas
                state, updates = fresh, 0
            if is_solved(problem, state.support, state.theta, state.gradient):
                break
            count = swap_until_optimal(state, problem.tolerance * size, _LIMIT)
            updates += 2 * count
            if updates <= _FRESH or count == 0:
                break
        order = np.argsort(state.support)
        supports[k, : k + forced], thetas[k, : k + forced] = state.support[order], _refined(problem, state)[order]
    return largest + 1, supports, thetas


@njit(cache=True, nogil=True)
def _refined(problem: GramProblem, state: SwapState) -> Array:
    """theta of a state (k,) after one step of iterative refinement."""
    theta = state.theta.copy()
    for i in range(theta.size):
        slope = -problem.linear[state.support[i]]
        for j in range(theta.size):
            slope += problem.hessian[state.support[i], state.support[j]] * state.theta[j]
        for j in range(theta.size):
            theta[j] -= state.inverse[j, i] * slope
    return theta


@njit(cache=True, nogil=True)
def search(
    problem: GramProblem, k: int, merged: int, centre: Array, draws: Array, agreements: int
) -> tuple[bool, Indices, Array, float, Array]:
    """The best support of k candidates that the stages find.

    Args:
        problem: f and the candidates, more than k of them.
        k: number of candidates in the support, at least 1.
        merged: number of coordinates that the merging pursuit adds.
        centre: absolute values of the minimiser of f without a limit (d,); its k largest entries are a start; empty if
            not known. If the first three starts agree on a support, it is the result.
        draws: uniform in [0, 1), (kicks, 2, k).
        agreements: number of stages in a row that must agree on the support, after which the kicks end.

    Returns:
        Whether any start had a refit, the support, its refit, f, and the gradient (d,).
    """
    best, value, agreed = problem.forced, np.inf, 0
    kicks = draws.shape[0]
    for number in range(kicks + 4):
        if agreed >= agreements:
            break
        if number == 0:
            done, supports, _ = path(problem, k)
            proposal = supports[k] if done > k else problem.forced
        elif number == 1:
            proposal = _pursuit(problem, k, 12)
        elif number == 2:
            if not centre.size:
                continue
            proposal = _top(problem, centre, k)
        elif number == 3:
            proposal = _merged(problem, k, merged, 20)
        else:
            proposal = _kicked(problem, best, k, number - 4, draws[number - 4])
        if np.array_equal(proposal, best):
            # A pursuit that ends on the best support without any swap is strong evidence for it.
            agreed += agreements // 2 if number < 4 else 1
            continue
        fine, proposal, new, minimal = improved(problem, proposal)
        if not fine or proposal.size < k + problem.forced.size:
            continue
        agreed = agreed + 1 if np.array_equal(proposal, best) else 0
        if new < value:
            best, value = proposal, new
        if minimal:
            break
    _, theta, gradient = fitted(problem, best)
    return value < np.inf, best, theta, value, gradient


_LOG = logging.getLogger("iobs")
_TOLERANCE = 1e-10  # least relative decrease of f by a swap, as in `swaps.Swapper`
_AGREEMENTS = 6  # stages in a row that must agree on a support
_SINGLE_FROM = 256  # number of coordinates from which single precision is worth its check
_ROUGH = 1e-4  # largest residual of a solution in single precision, relative, that is accepted to rank coordinates
NEWTON_LIMIT = 1024  # most coordinates for which the minimiser without a limit is computed


def announce_compilation(kernel: Callable[..., object]) -> bool:
    """Log that `kernel`, a function of numba, is compiled now; True if neither this process nor the cache has it."""
    if getattr(kernel, "signatures", [True]):
        return False
    folder = Path(getattr(getattr(kernel, "stats", None), "cache_path", None) or ".")
    new = not any(folder.glob(f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}-*.nbi"))
    if new:
        _log_compilation()
    return new


@cache
def _log_compilation() -> None:  # a search compiles several kernels
    _LOG.warning("Compiling the search for this machine. It takes about half a minute, once per installation.")


@cache
def _announce_once(kernel: Callable[..., object]) -> None:
    announce_compilation(kernel)  # to list the signatures of a kernel takes as long as a small search


def gram_problem(problem: Problem, gram: GramLeastSquares) -> GramProblem:
    """The arrays of a problem whose whole Gram matrix is known."""
    assert gram.complete
    return GramProblem(
        np.ascontiguousarray(gram.rows),
        gram.linear,
        gram.constant,
        problem.scale,
        problem.candidates,
        np.sort(problem.forced).astype(np.int64),
        _TOLERANCE,
    )


def best_fit(problem: Problem, gram: GramLeastSquares, kicks: int) -> Fit | None:
    """The best fit of the search; None if some support has no unique refit, or nothing is to be chosen.

    Args:
        problem: k and the candidates.
        gram: the Gram form, whole.
        kicks: largest number of random restarts around the best support.
    """
    k = problem.size
    if not 0 < k < int(problem.candidates.sum()) or problem.damping is not None:
        return None
    centre = _minimiser(gram.rows, gram.linear) if gram.dimension <= NEWTON_LIMIT else np.zeros(0)
    fine, support, values, value, gradient = _search(problem, gram_problem(problem, gram), gram.rank, centre, kicks)
    theta = np.zeros(gram.dimension)
    theta[support] = values
    return Fit(support, theta, value, gradient) if fine else None


def model_support(problem: Problem, hessian: Array, fit: Fit, kicks: int) -> Indices | None:
    """The best support that the search finds for the second-order model of f at a fit; None if H is not definite.

    Args:
        problem: f, k and the candidates.
        hessian: H at the fit (d, d).
        fit: where the model is taken.
        kicks: largest number of random restarts.
    """
    if not 0 < problem.size < int(problem.candidates.sum()):
        return None
    linear = hessian @ fit.theta - fit.gradient
    centre = _minimiser(hessian, linear)
    diagonal = hessian.diagonal()
    if not centre.size or not (diagonal > 0).all():
        return None
    model = GramProblem(
        hessian,
        linear,
        0.5 * float(linear @ centre),  # the least value of the model becomes zero
        np.sqrt(diagonal),
        problem.candidates,
        np.sort(problem.forced).astype(np.int64),
        _TOLERANCE,
    )
    fine, support, *_ = _search(problem, model, problem.objective.rank, centre, kicks)
    return np.asarray(support) if fine else None


def _search(
    problem: Problem, gram: GramProblem, rank: int, centre: Array, kicks: int
) -> tuple[bool, Indices, Array, float, Array]:
    k = problem.size
    _announce_once(search)
    merged = max(1, min(2 * k, rank - k - problem.forced.size - 1))
    result: tuple[bool, Indices, Array, float, Array] = search(
        gram, k, merged, np.abs(centre), problem.rng.random((kicks, 2, k)), _AGREEMENTS
    )
    return result


def _minimiser(hessian: Array, linear: Array) -> Array:
    """The minimiser without a limit on k, in single precision where this solves the system; empty if not unique."""
    if linear.size > _SINGLE_FROM:
        with np.errstate(over="ignore", invalid="ignore"):  # of columns of very different scales
            _, rough, info = sposv(hessian.astype(np.float32), linear.astype(np.float32), lower=1)
        solution: Array = rough.astype(np.float64)
        if info == 0 and np.abs(hessian @ solution - linear).max() <= _ROUGH * np.abs(linear).max():
            return solution
    _, solution, info = dposv(hessian, linear, lower=1)
    return solution if info == 0 and np.isfinite(solution).all() else np.zeros(0)


def path_fits(problem: Problem, gram: GramLeastSquares, sizes: Sequence[int]) -> list[Fit] | None:
    """The fits of a path over ascending k by the Gram matrix; None if some k has no support of independent columns."""
    counts = [min(size, int(problem.candidates.sum())) for size in sizes]
    largest = max(counts, default=0)
    _announce_once(path)
    done, supports, thetas = path(gram_problem(problem, gram), largest)
    if done <= largest:
        return None
    forced = problem.forced.size
    fits = []
    for k in counts:
        theta: Array = np.zeros(gram.dimension)
        support = supports[k, : k + forced].copy()
        theta[support] = thetas[k, : k + forced]
        fits.append(Fit(support, theta, *gram.value_and_gradient(theta)))
    return fits
