"""Guesses of the support: matching pursuits, message passing and adaptive damping.

All work in the scaled variables theta * scale, so the units of the columns do not matter.
"""

from __future__ import annotations

import numpy as np
from scipy.linalg.lapack import dposv

from iobs.optimize.objectives.autodiff import TorchObjective
from iobs.optimize.objectives.design import Array, Indices
from iobs.optimize.problem import Problem
from iobs.optimize.refit.newton import Fit, refit, refit_exactly, refit_loosely, refitted

_PURSUIT_STEPS, _MERGING_STEPS = 12, 20  # most supports of each pursuit
_PASSING_STEPS = 250  # most iterations of message passing, 2 n d multiplications each
_PASSING_SHARE = 0.5  # share of each of its updates that is taken
_NARROWER = 0.9  # eps of adaptive damping as a share of the (k+1)-th largest entry
_UNCHANGED = 12  # message passing stops after this many iterations with the same k largest scores
_SHRUNK = 1e-3  # a gradient counts as vanished below this share of the gradient at zero
_SETTLED = 1e-3  # adaptive damping stops below this change of an iterate, relative to its largest entry


def start(problem: Problem, theta: Array | None = None) -> Fit:
    """The fit of the forced coordinates alone, or on the support of the k largest scaled entries of a given theta."""
    if theta is None:
        if not problem.forced.size:
            return Fit(np.zeros(0, np.int64), np.zeros(problem.dimension), *problem.at_zero)
        return refit(problem.objective, np.sort(problem.forced))
    return refit(problem.objective, support_of(problem, theta), theta)


def support_of(problem: Problem, theta: Array) -> Indices:
    """The support of the k largest scaled entries of theta that are not zero, and of the forced coordinates."""
    return problem.top(np.abs(theta) * problem.scale, min(problem.size, int(np.count_nonzero(theta))))


def hard_thresholding_pursuit(problem: Problem, fit: Fit) -> Fit:
    """HTP (Foucart 2011) in scaled variables: a gradient step, the k largest, a refit; return the best fit."""
    best, seen = fit, {fit.support.tobytes()}
    scale = problem.scale
    for _ in range(_PURSUIT_STEPS):
        slope = fit.gradient / scale
        moved = fit.theta * scale - _step_length(problem, fit, slope) * slope
        support = problem.top(np.abs(moved))
        if support.tobytes() in seen:
            break
        seen.add(support.tobytes())
        # Intermediate supports need only an inexact refit; `_to_the_end` refits the best one exactly.
        fit = _refit_on_the_way(problem, support, fit.theta, steps=1 if problem.expensive_columns else 2)
        if fit.value < best.value or best.support.size < support.size:
            best = fit
        if solved(problem, fit):
            break
    return best if problem.objective.quadratic else _to_the_end(problem, best)


def _to_the_end(problem: Problem, fit: Fit) -> Fit:
    if not fit.support.size or solved(problem, fit):
        return fit
    return refit(problem.objective, fit.support, fit.theta)


def _refit_on_the_way(problem: Problem, support: Indices, theta: Array, *, steps: int | None) -> Fit:
    """A refit that is as exact as useful: if differentiation is expensive, exact only for a possible final support.

    At an unconstrained minimiser of f the gradient outside the support is only the error of the inexact fit. So it is
    about as small as the gradient inside. A larger gradient outside shows that the support is not final.
    """
    if not problem.expensive_columns:
        return refit(problem.objective, support, theta, steps=steps)
    fit, hessian = refit_loosely(problem.objective, support, theta)
    slope = np.abs(fit.gradient / problem.scale)
    inside = float(slope[support].max(initial=0.0))
    slope[support] = 0.0
    if slope.max() > 2 * inside:
        return fit
    return refit_exactly(problem.objective, support, fit.theta, block=hessian, begun=fit)


def _step_length(problem: Problem, fit: Fit, slope: Array) -> float:
    """The exact step length along the k steepest coordinates outside the support (normalised IHT)."""
    outside = slope.copy()
    outside[fit.support] = 0.0
    direction = problem.truncate(outside)
    size = float(direction @ direction)
    if size == 0:
        return 1.0
    direction /= problem.scale
    support = np.flatnonzero(direction)
    if problem.objective.quadratic:
        part = problem.objective.restricted(support)
        product = part.hessian_product(np.zeros(support.size), direction[support])
    else:
        product = problem.objective.hessian_product(fit.theta, direction)[support]
    curvature = float(direction[support] @ product)
    return size / curvature if curvature > 0 else 1.0


def compressive_sampling_pursuit(problem: Problem, fit: Fit) -> Fit:
    """CoSaMP (Needell and Tropp 2009) for any f: merge 2k steep coordinates, refit, keep k, refit; the best fit."""
    best = fit
    steps = 1 if problem.expensive_columns else 8
    for _ in range(_MERGING_STEPS):
        slope = np.abs(fit.gradient) / problem.scale
        slope[fit.support] = 0.0
        merged = np.union1d(fit.support, problem.top(slope, _merge_count(problem)))
        wide = refitted(problem.objective, merged.astype(np.int64), fit.theta, steps=steps)
        pruned = _refit_on_the_way(problem, problem.top(np.abs(wide) * problem.scale), wide, steps=None)
        if pruned.value >= best.value - 1e-9 * abs(best.value) and best.support.size == pruned.support.size:
            break
        best = fit = pruned
        if solved(problem, fit):
            break
    return _to_the_end(problem, best) if problem.expensive_columns else best


def _merge_count(problem: Problem) -> int:
    """2k, or fewer so that 3k columns do not exceed the samples of a linear model."""
    spare = problem.objective.rank - problem.size - problem.forced.size - 1
    return max(1, min(2 * problem.size, spare))


def solved(problem: Problem, fit: Fit) -> bool:
    """Check that the whole gradient vanishes, up to rounding: theta is stationary without any constraint.

    Any gradient is small relative to a diverging theta, so the gradient must also be small relative to that at zero.
    Where the Hessian at zero is far larger than at the fit, any gradient near the fit is small in the scale of zero.
    """
    tolerance = 1e-12 if problem.objective.quadratic else 1e-9
    if fit.support.size == problem.forced.size:
        return False
    slope = float(np.abs(fit.gradient / problem.scale).max())
    return (
        slope <= _SHRUNK * problem.first_slope
        and _vanishes(fit, problem.scale, tolerance)
        and _vanishes(fit, _fitted_scale(problem), tolerance)
    )


def _fitted_scale(problem: Problem) -> Array:
    """sqrt(diag H) at the fit of the forced coordinates (d,), in place of zero.

    With a log link a constant of -20 makes H smaller by e^-20 than at zero, as where counts have large exposures.
    """
    objective = problem.objective
    if objective.quadratic or not problem.forced.size or isinstance(objective, TorchObjective):
        return problem.scale
    return problem.scale_at(refitted(objective, problem.forced))


def _vanishes(fit: Fit, scale: Array, tolerance: float) -> bool:
    return bool(np.abs(fit.gradient / scale).max() <= tolerance * np.abs(fit.theta * scale).max())


def settled(problem: Problem, theta: Array, gradient: Array) -> bool:
    """Check that the gradient nearly vanishes on the support, as where f has a minimiser on it."""
    slope = float(np.abs(gradient / problem.scale)[theta != 0].max(initial=0.0))
    if problem.first_slope == 0:  # zero is a saddle or a maximum, with whose gradient nothing can be compared
        return slope <= _SHRUNK * float(np.abs(theta * problem.scale).max(initial=0.0))
    return slope <= _SHRUNK * problem.first_slope


def message_passing(columns: Array, target: Array, k: int) -> Array:
    """Scores |x_j| (d,) for y = A x by approximate message passing, with a prior that is learned on the way.

    The prior is a spike at zero and two Gaussians at +-m, whose m and width follow the data (expectation-maximisation,
    Vila and Schniter 2013). It knows k, so on incoherent designs it recovers far more non-zeros than convex
    relaxations. On coherent designs it diverges; divergence is detected and the last finite scores are returned.

    Args:
        columns: A (n, d) with columns of norm one.
        target: y (n,).
        k: number of non-zeros.
    """
    n, d = columns.shape
    energy = float(target @ target)
    power, share = energy / k, min(k / d, 0.99)
    place, width = np.sqrt(0.5 * power), 0.5 * power
    estimate, residual, scores = np.zeros(d), target.copy(), np.zeros(d)
    support, same = np.zeros(0, np.int64), 0
    for iteration in range(_PASSING_STEPS):
        noise = float(residual @ residual) / n
        if not noise < 1e4 * energy / n or noise < 1e-13 * energy / n:
            break
        observed = estimate + columns.T @ residual
        mean, variance, learned = _posterior(observed, noise, share, place, width)
        scores = np.abs(observed)
        if iteration > 3:
            place, width = learned
        change = float(np.abs(mean - estimate).max())
        chosen = np.sort(np.argpartition(-scores, k - 1)[:k])
        same = same + 1 if np.array_equal(chosen, support) else 0
        support = chosen
        if change <= 1e-6 * float(np.abs(mean).max()) or same >= _UNCHANGED:
            break
        estimate = _PASSING_SHARE * mean + (1 - _PASSING_SHARE) * estimate
        onsager = residual * (float(variance.sum()) / noise / n)
        residual = _PASSING_SHARE * (target - columns @ estimate + onsager) + (1 - _PASSING_SHARE) * residual
    return scores


def _posterior(
    observed: Array, noise: float, share: float, place: float, width: float
) -> tuple[Array, Array, tuple[float, float]]:
    """Mean and variance (d,) of x given x + noise under the prior, and the new place and width of its Gaussians."""
    total = width + noise
    base = np.log(max(1 - share, 1e-12)) - 0.5 * np.log(noise) - 0.5 * observed**2 / noise
    bell = np.log(share / 2) - 0.5 * np.log(total)
    plus = np.exp(np.clip(bell - 0.5 * (observed - place) ** 2 / total - base, -500, 500))
    minus = np.exp(np.clip(bell - 0.5 * (observed + place) ** 2 / total - base, -500, 500))
    norm = 1 + plus + minus
    plus, minus = plus / norm, minus / norm
    up, down = (observed * width + place * noise) / total, (observed * width - place * noise) / total
    spread = width * noise / total
    mean = plus * up + minus * down
    variance = plus * (up**2 + spread) + minus * (down**2 + spread) - mean**2
    mass = max(float(plus.sum() + minus.sum()), 1e-300)
    new_place = float(plus @ up - minus @ down) / mass
    new_width = float(plus @ ((up - new_place) ** 2 + spread) + minus @ ((down + new_place) ** 2 + spread)) / mass
    return mean, variance, (new_place, max(new_width, 1e-12 * new_place**2 + 1e-300))


def adaptive_damping(columns: Array, target: Array, k: int, *, variance: float = 0.0, steps: int = 250) -> Array:
    """Scores |x_j| (d,) by I-OBS with a diagonal damping 1 / (x_j^2 + eps^2) that follows the iterate.

    This is reweighted least squares (FOCUSS; Chartrand and Yin 2008; Daubechies et al. 2010) in its n x n form

        x = W A^T (A W A^T + variance I)^-1 y,    W = diag(x^2 + eps^2).

    eps never grows and follows the (k+1)-th largest entry down, so iteration ends where exactly k entries remain.

    Args:
        columns: A (n, d) with columns of norm one.
        target: y (n,).
        k: number of non-zeros.
        variance: of the noise; positive values keep the residual from being forced to zero.
        steps: largest number of iterations, n^2 d multiplications each.
    """
    n, d = columns.shape
    weights, scores, level = np.ones(d), np.zeros(d), np.inf
    for iteration in range(steps):
        half = columns * np.sqrt(weights)
        system = half @ half.T  # a product of a matrix with its own transpose takes half of the multiplications
        system[np.diag_indices(n)] += variance + 1e-12 * float(system.trace()) / n
        _, dual, info = dposv(system, target, lower=1, overwrite_a=1)
        if info != 0:
            break
        solution = weights * (columns.T @ dual)
        settled = float(np.abs(np.abs(solution) - scores).max()) <= _SETTLED * float(scores.max())
        scores = np.abs(solution)
        ordered = np.partition(scores, (d - k - 1, d - k))
        next_size, last_size = float(ordered[d - k - 1]), float(ordered[d - k])
        level = min(level, _NARROWER * next_size)
        if level < 1e-5 * scores.max() or (iteration > 4 and next_size < 1e-3 * last_size):
            break
        if settled:  # with noise the iterates converge early, without k entries that stand out
            break
        weights = solution**2 + level**2
    return scores
