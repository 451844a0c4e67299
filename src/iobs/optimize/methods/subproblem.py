"""Solvers of the subproblem: minimise the quadratic model of a step over sparse vectors."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from iobs.errors import ProblemError
from iobs.optimize.curvature import Model, QuadraticObjective
from iobs.optimize.objectives.design import Array, Booleans, Indices
from iobs.optimize.problem import Problem
from iobs.optimize.refit.newton import Fit, inverse_block, refit
from iobs.optimize.search import kernels
from iobs.optimize.search.swaps import Swapper

_ENUMERATION_LIMIT = 200_000


class SubproblemSolver(Protocol):
    """Approximate minimiser of a model over vectors with `count` free non-zeros inside `allowed`."""

    def __call__(self, problem: Problem, model: Model, count: int, allowed: Booleans) -> Array:
        """The minimiser (d,); forced coordinates of the problem are not counted."""
        ...


@dataclass(frozen=True)
class Truncate:
    """Option 1: the k largest entries of the Newton point, not refitted."""

    def __call__(self, problem: Problem, model: Model, count: int, allowed: Booleans) -> Array:
        """T_k(H^-1 b)."""
        centre = model.centre()
        return problem.truncate(centre, np.where(allowed, np.abs(centre), -1.0), count)


@dataclass(frozen=True)
class TruncateAndRefit:
    """Option 1's mask with Option 2's exact refit of the model."""

    def __call__(self, problem: Problem, model: Model, count: int, allowed: Booleans) -> Array:
        """The model's minimiser on the support of T_k(H^-1 b)."""
        support = problem.top(np.where(allowed, np.abs(model.centre()), -1.0), count)
        return refit(model, support).theta


@dataclass(frozen=True)
class Greedy:
    """Removal of one coordinate at a time, the cheapest by c_i^2 / (2 [H^-1]_ii), then re-optimisation (OBS, OBC).

    For a diagonal H the cost is the saliency H_ii c_i^2 / 2 of Optimal Brain Damage.
    """

    def __call__(self, problem: Problem, model: Model, count: int, allowed: Booleans) -> Array:
        """Start from the model's minimiser on all allowed coordinates and remove until `count` are left.

        Raises:
            ProblemError: the model does not store its Hessian.
        """
        if not isinstance(model, QuadraticObjective):
            raise ProblemError(f"Removing one coordinate at a time stores H, too large for d = {model.dimension}.")
        active = np.sort(np.concatenate([np.flatnonzero(allowed), problem.forced])).astype(np.int64)
        block = model.hessian_block(model.linear, active)
        inverse = np.ascontiguousarray(inverse_block(block))
        centre = inverse @ model.linear[active]
        locked = np.isin(active, problem.forced)
        kept = np.ones(active.size, dtype=np.bool_)
        kernels.remove_greedily(inverse, centre, locked, kept, int(allowed.sum()) - count)
        theta = np.zeros(model.dimension)
        theta[active[kept]] = centre[kept]
        return theta


@dataclass(frozen=True)
class Enumerate:
    """Option 2 as in the paper: every support is refitted. For small problems only."""

    def __call__(self, problem: Problem, model: Model, count: int, allowed: Booleans) -> Array:
        """The exact minimiser of the model.

        Raises:
            ProblemError: more than 200,000 supports.
        """
        free = np.flatnonzero(allowed)
        if math.comb(free.size, count) > _ENUMERATION_LIMIT:
            raise ProblemError(
                f"There are {math.comb(free.size, count):.3g} supports of {count} among {free.size} coordinates; "
                'use method="iobs", or iobs.optimize.bounds.branch_and_bound for a bound.'
            )
        best: Fit | None = None
        for chosen in itertools.combinations(free.tolist(), count):
            support = np.sort(np.concatenate([np.array(chosen, np.int64), problem.forced]))
            fit = refit(model, support)
            if best is None or fit.value < best.value:
                best = fit
        assert best is not None
        return best.theta


@dataclass(frozen=True)
class BestSupport:
    """Option 2 as well as is known: the Top-k mask and the greedy mask, each improved by exact swaps; the better wins.

    The Top-k mask is among the candidates and swaps only lower the model. So the theorem's local rate holds: its proof
    needs only a support that is no worse than the Top-k support.

    Attributes:
        greedy_limit: most coordinates for which the greedy mask is a candidate.
    """

    greedy_limit: int = 1024

    def __call__(self, problem: Problem, model: Model, count: int, allowed: Booleans) -> Array:
        """The candidate with the lowest model value."""
        inner = Problem(model, count, rng=problem.rng, allowed=allowed)
        swapper = Swapper(inner)
        supports = [problem.top(np.where(allowed, np.abs(model.centre()), -1.0), count)]
        if isinstance(model, QuadraticObjective) and model.dimension <= self.greedy_limit:
            supports.append(np.sort(_support(Greedy()(problem, model, count, allowed), problem.forced)))
        fits = [swapper.improve(refit(model, support)) for support in supports]
        return min(fits, key=lambda fit: fit.value).theta


def _support(theta: Array, forced: Indices) -> Indices:
    return np.union1d(np.flatnonzero(theta), forced).astype(np.int64)
