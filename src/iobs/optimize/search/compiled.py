"""The compiled search of small least-squares problems, from objectives to fits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.linalg.lapack import dposv

from iobs.optimize.objectives.design import Array
from iobs.optimize.objectives.gram import GramLeastSquares
from iobs.optimize.problem import Problem
from iobs.optimize.refit.fit import Fit
from iobs.optimize.refit.newton import refit
from iobs.optimize.search import gram_search
from iobs.optimize.search.gram_kernels import GramProblem

_LOG = logging.getLogger("iobs")
_TOLERANCE = 1e-10  # least relative decrease of f by a swap, as in `swaps.Swapper`
_AGREEMENTS = 6  # stages in a row that must agree on a support
_NEWTON_LIMIT = 1024  # most coordinates for which the minimiser without a limit is computed


def announce_compilation(kernel: Callable[..., object]) -> bool:
    """Log that `kernel`, a function of numba, is compiled now; True if neither this process nor the cache has it."""
    signatures = getattr(kernel, "signatures", [True])
    folder = Path(getattr(getattr(kernel, "stats", None), "cache_path", None) or ".")
    new = not signatures and not any(folder.glob(f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}-*.nbi"))
    if new:
        _LOG.warning("Compiling the search for this machine. It takes about 10 seconds, once per installation.")
    return new


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
    spare = gram.rank - k - problem.forced.size - 1
    centre = np.zeros(0)
    if gram.dimension <= _NEWTON_LIMIT:
        _, solution, info = dposv(gram.rows, gram.linear, lower=1)
        centre = np.abs(solution) if info == 0 and np.isfinite(solution).all() else centre
    announce_compilation(gram_search.search)
    fine, support, _ = gram_search.search(
        gram_problem(problem, gram),
        k,
        max(1, min(2 * k, spare)),
        centre,
        problem.rng.random((kicks, 2, k)),
        _AGREEMENTS,
    )
    return refit(gram, support) if fine else None


def path_fits(problem: Problem, gram: GramLeastSquares, sizes: Sequence[int]) -> list[Fit] | None:
    """The fits of a path over ascending k by the Gram matrix; None if some k has no support of independent columns."""
    counts = [min(size, int(problem.candidates.sum())) for size in sizes]
    largest = max(counts, default=0)
    announce_compilation(gram_search.path)
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
