"""The compiled search of small least-squares problems, from objectives to fits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from scipy.linalg.lapack import dposv, sposv

from iobs.optimize.objectives.design import Array, Indices
from iobs.optimize.objectives.gram import GramLeastSquares
from iobs.optimize.problem import Problem
from iobs.optimize.refit.fit import Fit
from iobs.optimize.search import gram_search
from iobs.optimize.search.gram_kernels import GramProblem

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
        _LOG.warning("Compiling the search for this machine. It takes about 10 seconds, once per installation.")
    return new


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
    _announce_once(gram_search.search)
    merged = max(1, min(2 * k, rank - k - problem.forced.size - 1))
    found: tuple[bool, Indices, Array, float, Array] = gram_search.search(
        gram, k, merged, np.abs(centre), problem.rng.random((kicks, 2, k)), _AGREEMENTS
    )
    return found


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
    _announce_once(gram_search.path)
    done, supports, thetas = gram_search.path(gram_problem(problem, gram), largest)
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
