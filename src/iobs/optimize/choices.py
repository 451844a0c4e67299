"""Choices: how the quadratic model of a step is minimised over sparse vectors."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from iobs.errors import ProblemError
from iobs.optimize import kernels
from iobs.optimize.curvature import Model
from iobs.optimize.designs import Array, Booleans, Indices
from iobs.optimize.models import QuadraticObjective
from iobs.optimize.problem import Problem
from iobs.optimize.refit import Fit, inverse_block, refit
from iobs.optimize.swap import Swapper

_ENUMERATION_LIMIT = 200_000


class Choice(Protocol):
    """Minimises a model, approximately, over vectors with `count` free non-zeros inside `allowed`."""

    def __call__(self, problem: Problem, model: Model, count: int, allowed: Booleans) -> Array:
        """A (d,) vector; forced coordinates of the problem come on top."""
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
    """One removal at a time, each the cheapest by c_i^2 / (2 [H^-1]_ii), the rest re-optimised (OBS, OBC).

    For a diagonal H this is the saliency H_ii c_i^2 / 2 of Optimal Brain Damage.
    """

    def __call__(self, problem: Problem, model: Model, count: int, allowed: Booleans) -> Array:
        """Starts from the model's minimiser on all allowed coordinates."""
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
    """Option 2 as it is written: every support, the best one refitted. Small problems only.

    Raises:
        ProblemError: more than 200,000 supports.
    """

    def __call__(self, problem: Problem, model: Model, count: int, allowed: Booleans) -> Array:
        """The exact minimiser of the model."""
        free = np.flatnonzero(allowed)
        if math.comb(free.size, count) > _ENUMERATION_LIMIT:
            raise ProblemError(
                f"There are {math.comb(free.size, count):.3g} supports of {count} among {free.size} coordinates; "
                'use method="iobs", or iobs.optimize.certificate for a bound.'
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
    """Option 2 as well as is known: the Top-k mask and the greedy mask, each improved by exact swaps; the best.

    Since the Top-k mask is among the candidates and swaps only lower the model, the theorem's local rate holds:
    its proof needs no more than a support that is no worse than that of Top-k.
    """

    greedy_limit: int = 1024

    def __call__(self, problem: Problem, model: Model, count: int, allowed: Booleans) -> Array:
        """The lowest of the candidates."""
        inner = Problem(model, count, rng=problem.rng, allowed=allowed)
        swapper = Swapper(inner)
        supports = [problem.top(np.where(allowed, np.abs(model.centre()), -1.0), count)]
        if isinstance(model, QuadraticObjective) and model.dimension <= self.greedy_limit:
            supports.append(np.sort(_support(Greedy()(problem, model, count, allowed), problem.forced)))
        fits = [swapper.improve(refit(model, support))[0] for support in supports]
        return min(fits, key=lambda fit: fit.value).theta


def stochastic_length(theta: Array, gradient: Array, mask: Booleans, smoothness: float) -> float:
    """The step length eta of stochastic I-OBS for a mask Q (appendix; S is its complement).

        eta = (1 - g_S^T theta_S / norm(g)) / (lambda + norm(g_Q)^2 / norm(g))

    With supp(theta) inside Q the numerator is 1, as in the paper. For g = 0 or an empty Q it is 1 / lambda: the limit.

    Args:
        theta: (d,).
        gradient: g (d,).
        mask: boolean (d,), true on Q.
        smoothness: lambda.
    """
    norm = float(np.linalg.norm(gradient))
    if norm == 0:
        return 1.0 / smoothness
    outside = float(gradient[~mask] @ theta[~mask]) / norm
    return (1.0 - outside) / (smoothness + float(gradient[mask] @ gradient[mask]) / norm)


def _support(theta: Array, forced: Indices) -> Indices:
    return np.union1d(np.flatnonzero(theta), forced).astype(np.int64)
