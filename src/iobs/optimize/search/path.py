"""Sparse fits for many k, each warm started from the one before, and criteria to choose k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from iobs.errors import ProblemError
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.cox import Cox
from iobs.optimize.objectives.design import Array
from iobs.optimize.objectives.gram import GramLeastSquares, by_gram
from iobs.optimize.objectives.linear import LeastSquares, LinearModel
from iobs.optimize.objectives.tabled import Multinomial, MultiResponse, Tabled
from iobs.optimize.problem import Problem, generator_of
from iobs.optimize.refit.newton import Fit, inverse_block, on_data, refit
from iobs.optimize.refit.within import Bounds
from iobs.optimize.search import auto, gram_search
from iobs.optimize.search.bounded import bounded_path
from iobs.optimize.search.groups import CoordinateGroups, group_path
from iobs.optimize.search.hierarchy import Hierarchy, hierarchical_path
from iobs.optimize.search.swaps import Swapper

_DEPENDENT = 1e-11  # share of a column, squared, that the columns before it leave
Criterion = Literal["aic", "bic", "ebic"]


def path(
    objective: Objective, sizes: Sequence[int], *, seed: int = 0, thorough: bool = False, exact: bool = True
) -> list[Fit]:
    """Sparse fits for ascending k.

    Each fit starts from the one before plus the steepest coordinate, and is improved by exact swaps.

    Args:
        objective: f.
        sizes: ascending values of k.
        seed: seed of random restarts.
        thorough: run every stage of the best known method for every k, not only the warm start.
        exact: refit least squares on the data. Otherwise coefficients and values come from the Gram matrix: exact up to
            rounding relative to f(0), which is enough to predict.
    """
    if thorough and len(sizes) == 1 and isinstance(objective, LinearModel):  # this search is as good as the path
        problem = Problem(objective, sizes[0], rng=generator_of(seed)).without_copies(penalised=True)
        return [list(auto.stages(problem))[-1].fit]
    searched = by_gram(objective) or objective
    if isinstance(searched, GramLeastSquares) and searched.complete and not thorough:
        largest = Problem(objective, max(sizes, default=0), rng=generator_of(seed))
        problem = largest.without_copies(penalised=True)
        compiled = gram_search.path_fits(problem, searched, sizes)
        if compiled is not None:
            return [on_data(objective, fit) for fit in compiled] if exact else compiled
    fits: list[Fit] = []
    fit: Fit | None = None
    gram = None
    for size in sizes:
        problem = Problem(searched, size, rng=generator_of(seed)).without_copies(penalised=True)
        swapper = Swapper(problem, gram=gram)
        fit = _extend(problem, refit(searched, np.sort(problem.forced)) if fit is None else fit)
        fit = swapper.improve(fit)
        gram = swapper.gram
        if thorough:
            better = list(auto.stages(replace(problem, objective=objective)))[-1].fit
            fit = refit(searched, better.support) if better.value < fit.value else fit
        fits.append(fit)
    return [on_data(objective, fit) for fit in fits] if exact else fits


def _extend(problem: Problem, fit: Fit) -> Fit:
    """Add the steepest coordinates one by one."""
    while fit.support.size - problem.forced.size < problem.size:
        score = np.where(problem.candidates, np.abs(fit.gradient) / problem.scale, -1.0)
        score[fit.support] = -1.0
        support = np.sort(np.append(fit.support, np.argmax(score))).astype(np.int64)
        fit = refit(problem.objective, support, fit.theta)
    return fit


def without_dependent(objective: Objective, fit: Fit) -> Fit:
    """The fit without coordinates that add nothing to the others, as a sum of two columns beside both.

    Forced coordinates stay; of the others the earlier ones do. Coordinates with a ridge all add something.
    """
    free = np.setdiff1d(fit.support, objective.forced)
    order = np.concatenate([np.setdiff1d(fit.support, free), free]).astype(np.int64)
    # Where all coordinates are zero: at the fit, columns that separate the outcomes leave nothing either.
    block = objective.hessian_block(np.zeros_like(fit.theta), order)
    scale = np.sqrt(np.maximum(block.diagonal(), 1e-300))
    left = block / np.outer(scale, scale)
    with suppress(np.linalg.LinAlgError):
        if (np.linalg.cholesky(left).diagonal() ** 2 >= _DEPENDENT).all():
            return fit
    kept = np.ones(order.size, dtype=np.bool_)
    for place in range(order.size):  # Cholesky's elimination
        if left[place, place] < _DEPENDENT:
            kept[place] = place < order.size - free.size
        else:
            left = left - np.outer(left[place], left[place]) / left[place, place]
    return fit if kept.all() else refit(objective, np.sort(order[kept]), fit.theta)


def fit_path(
    objective: Objective,
    groups: CoordinateGroups | Hierarchy | None,
    sizes: Sequence[int],
    thorough: bool,
    seed: int,
    exact: bool = True,
    bounds: Bounds | None = None,
) -> list[Fit]:
    """The path over groups or terms with a hierarchy if given, else over coordinates, within bounds if given.

    Raises:
        ProblemError: bounds with a hierarchy or with more than two classes.
    """
    if bounds is not None:
        if isinstance(groups, Hierarchy):
            raise ProblemError(
                "Bounds do not work with interactions: the sign of a product's effect depends on the origin of its "
                "features. Leave the bounds out, or give the products as columns."
            )
        if isinstance(objective, Multinomial):
            raise ProblemError(
                "Bounds do not work with more than two classes: a number added to the coefficients of all classes "
                "changes no probability, so a bound on one of them says nothing. Fit two classes at a time."
            )
        if groups is not None:
            outputs = objective.outputs
            return group_path(groups, list(sizes), bounds.repeated(outputs).extended(objective.dimension))
        return bounded_path(objective, bounds.extended(objective.dimension), sizes, seed=seed, thorough=thorough)
    if isinstance(groups, Hierarchy):
        return hierarchical_path(groups, sizes, seed=seed, thorough=thorough)
    if groups is not None:
        return group_path(groups, list(sizes))
    return path(objective, sizes, seed=seed, thorough=thorough, exact=exact)


def information(
    objective: Objective, fit: Fit, criterion: Criterion, samples: float, candidates: int, chosen: int
) -> float:
    """The deviance plus a penalty per parameter; lower is better.

    Args:
        objective: a negative log-likelihood; for least squares half the residual sum of squares.
        fit: a fit of the objective.
        criterion: the penalty. "aic": 2 per parameter. "bic": log n per parameter. "ebic": as "bic", plus 2 log of the
            number of supports of this size (Chen and Chen 2008).
        samples: n, or the sum of the sample weights.
        candidates: number of coordinates or groups to choose from.
        chosen: number of coordinates or groups chosen.

    Raises:
        ProblemError: an unknown criterion.
    """
    if criterion not in ("aic", "bic", "ebic"):
        raise ProblemError(f'The criterion must be "aic", "bic" or "ebic", got {criterion!r}.')
    # An intercept that is estimated as exactly zero, as of two classes of equal size, is a parameter too.
    parameters = int(np.union1d(np.flatnonzero(fit.theta), objective.forced).size)
    if isinstance(objective, Multinomial):  # of the C coefficients of a feature, only C - 1 change the probabilities
        parameters = parameters // objective.outputs * (objective.outputs - 1)
    loss = unpenalised(objective, fit)
    deviance = 2 * loss
    if isinstance(objective, LinearModel):
        deviance = objective.deviance(loss, samples)
    elif isinstance(objective, MultiResponse):  # with one variance of the noise for all responses
        count = samples * objective.outputs
        deviance = count * math.log(max(2 * loss, 1e-300) / count)
    if criterion == "aic":
        return deviance + 2 * parameters
    price = deviance + parameters * math.log(max(samples, 2.0))
    if criterion == "bic":
        return price
    choices = math.lgamma(candidates + 1) - math.lgamma(chosen + 1) - math.lgamma(candidates - chosen + 1)
    return price + 2 * choices


def unpenalised(objective: Objective, fit: Fit) -> float:
    """The loss of a fit without its ridge term."""
    ridge = objective.ridge if isinstance(objective, (LinearModel, Tabled, Cox)) else np.zeros(1)
    return max(0.0, fit.value - 0.5 * float((ridge * fit.theta**2).sum()))


@dataclass(frozen=True)
class Inference:
    """Classical standard errors on the support, as if the support had been known beforehand.

    Attributes:
        errors: (k,) in the order of `Fit.support`.
        noise: square root of the dispersion; for least squares the estimated standard deviation of the noise.
    """

    errors: Array
    noise: float


def standard_errors(objective: Objective, fit: Fit, samples: float, intercept: bool) -> Inference:
    """Square roots of the diagonal of noise^2 H_QQ^-1. They ignore that the support was chosen by the same data.

    Args:
        objective: f.
        fit: a fit of f.
        samples: n, or the sum of the sample weights.
        intercept: whether centring estimated one more parameter.
    """
    noise = 1.0
    if isinstance(objective, LinearModel):
        block = _expected(objective, fit)
    else:
        block = objective.hessian_block(fit.theta, fit.support)
    if isinstance(objective, Multinomial):
        return Inference(_contrast_errors(block, objective.outputs), noise)
    if isinstance(objective, LinearModel):
        freedom = samples - fit.support.size - (intercept and objective.quadratic)
        if objective.quadratic:
            noise = math.sqrt(2 * unpenalised(objective, fit) / freedom) if freedom > 0 else math.nan
        else:
            noise = math.sqrt(objective.dispersion(fit.theta, freedom))
    if isinstance(objective, MultiResponse):
        freedom = objective.outputs * (samples - intercept) - fit.support.size
        noise = math.sqrt(2 * unpenalised(objective, fit) / freedom) if freedom > 0 else math.nan
    inverse = inverse_block(block)
    return Inference(noise * np.sqrt(np.maximum(inverse.diagonal(), 0.0)), noise)


def _expected(objective: LinearModel, fit: Fit) -> Array:
    """The expected Hessian of a fit on its support (k, k), which classical standard errors use."""
    if objective.quadratic:
        return _cheapest(objective).hessian_block(fit.theta, fit.support)
    weights = objective.weights * objective.information(objective.margin(fit.theta))
    half = np.sqrt(weights)[:, None] * objective.design.columns(fit.support)
    return np.asarray(half.T @ half + np.diag(objective.ridge[fit.support]))


def _cheapest(objective: LinearModel) -> Objective:
    """The Gram form of least squares if it exists already, else the objective itself."""
    gram = objective.by_gram if isinstance(objective, LeastSquares) else None
    return gram if isinstance(gram, GramLeastSquares) else objective


def _contrast_errors(hessian: Array, classes: int) -> Array:
    """Standard errors of coefficients about their mean over the classes, which alone change the probabilities.

    A constant added to the coefficients of a feature in all classes changes nothing but the ridge term. H has a
    curvature added in these directions, so that it can be inverted, and they are projected out of the inverse.
    """
    features = hessian.shape[0] // classes
    level = float(np.mean(hessian.diagonal())) if hessian.size else 0.0
    inverse = inverse_block(hessian + level * np.kron(np.eye(features), np.ones((classes, classes))))
    centring = np.eye(classes) - 1 / classes
    blocks = [
        centring @ inverse[start : start + classes, start : start + classes] @ centring
        for start in range(0, hessian.shape[0], classes)
    ]
    return np.sqrt(np.maximum([entry for each in blocks for entry in each.diagonal()], 0.0))
