"""The paper's convergence theorem on a given problem: its constants, its bounds and the measured steps.

Theorem (I-OBS, Option 2):   norm(e_{t+1}) <= (1 + sqrt(L / mu * r)) M / (2 mu) norm(e_t)^2,   e_t = theta_t - theta*

The ratio r is printed as (d - k*) / (d - k). The paper's own lemma on the Top-k operator gives (d - k) / (d - k*),
which is smaller, and finite at k = d. For Top-k-I-OBS the factor is 1 + sqrt(k* / k) (paper, eq. WT-topk,rate).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from iobs.errors import ProblemError
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.design import Array
from iobs.optimize.problem import DENSE_LIMIT


@dataclass(frozen=True)
class Constants:
    """Constants of f on a segment that ends in theta*.

    Attributes:
        mu: smallest eigenvalue of the Hessian.
        L: largest eigenvalue.
        M: largest norm(H(a) - H(b)) / norm(a - b).
    """

    mu: float
    L: float
    M: float


@dataclass(frozen=True)
class Step:
    """One measured step and its bounds, all as distances to theta*.

    Attributes:
        before: norm(theta_t - theta*).
        after: norm(theta_{t+1} - theta*).
        tight: bound with the ratio (d - k) / (d - k*).
        paper: bound with the ratio as printed; infinite at k = d.
        topk: bound of the lemma for Top-k-I-OBS.
        constants: over the segment from theta_t to theta*.
    """

    before: float
    after: float
    tight: float
    paper: float
    topk: float
    constants: Constants


def constants_on_segment(objective: Objective, theta: Array, target: Array, *, points: int = 9) -> Constants:
    """mu, L and M between theta and theta*, from eigenvalues of the Hessians at evenly spaced points.

    Args:
        objective: f of at most `DENSE_LIMIT` variables.
        theta: one end (d,).
        target: theta* (d,).
        points: number of points, including both ends.

    Raises:
        ProblemError: too many variables to store H.
    """
    if objective.dimension > DENSE_LIMIT:
        raise ProblemError(
            f"The constants need stored Hessians: f must have at most {DENSE_LIMIT} variables, got "
            f"{objective.dimension}."
        )
    everything = np.arange(objective.dimension)
    shares = np.linspace(0.0, 1.0, points)
    hessians = [objective.hessian_block(target + share * (theta - target), everything) for share in shares]
    spectra = [np.linalg.eigvalsh(hessian) for hessian in hessians]
    length = float(np.linalg.norm(theta - target))
    slopes = [0.0]
    for i in range(points):
        for j in range(i):
            distance = (shares[i] - shares[j]) * length
            if distance > 0:
                slopes.append(float(np.abs(np.linalg.eigvalsh(hessians[i] - hessians[j])).max()) / distance)
    least, largest = min(float(values[0]) for values in spectra), max(float(values[-1]) for values in spectra)
    return Constants(least, largest, max(slopes))


def quadratic_factors(constants: Constants, d: int, k: int, k_star: int) -> tuple[float, float, float]:
    """(tight, paper, topk): the factors c in norm(e_{t+1}) <= c norm(e_t)^2.

    Args:
        constants: mu, L and M.
        d: number of variables.
        k: sparsity of the iterates.
        k_star: sparsity of theta*, at most k.
    """
    mu, curvature = constants.mu, constants.M / (2 * constants.mu)
    condition = constants.L / mu
    tight = 1 + float(np.sqrt(condition * (d - k) / max(d - k_star, 1)))
    paper = 1 + float(np.sqrt(condition * (d - k_star) / (d - k))) if k < d else float("inf")
    topk = 1 + float(np.sqrt(k_star / max(k, 1)))  # at k = 0 theta* is zero too
    return tight * curvature, paper * curvature, topk * curvature


def compare(objective: Objective, iterates: list[Array], target: Array, k: int) -> list[Step]:
    """Compare every step of a run with the bounds; the constants are those on the segment from its start to theta*.

    Args:
        objective: f.
        iterates: the start, then the thetas that a callback of `iobs.minimize` collects.
        target: theta*, the global minimiser.
        k: sparsity of the run.
    """
    k_star = int(np.count_nonzero(target))
    steps = []
    for theta, following in itertools.pairwise(iterates):
        constants = constants_on_segment(objective, theta, target)
        factors = quadratic_factors(constants, objective.dimension, k, k_star)
        before = float(np.linalg.norm(theta - target))
        tight, paper, topk = (factor * before**2 for factor in factors)
        steps.append(Step(before, float(np.linalg.norm(following - target)), tight, paper, topk, constants))
    return steps
