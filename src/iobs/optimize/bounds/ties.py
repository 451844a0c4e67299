"""Coordinates that stand for each other: equal columns, and columns that depend linearly on others.

Of equal columns (up to a factor) a support needs at most one, so the search keeps one of each class (`equal_columns`).

Let N span the null space of H on the active coordinates of a node. A coordinate j with N_j = 0 has the same value at
every minimiser. Excluding it raises f by its saliency, with the pseudo-inverse of H. Any other coordinate can be
replaced by the others at no cost: a tie. `split_ties` branches on the coordinate with the largest N_j, until H is
definite on what is active; then the bounds of `branch_and_bound` apply.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from iobs.optimize.objectives.design import Array, Booleans, Indices
from iobs.optimize.objectives.linear import LinearModel
from iobs.optimize.problem import Problem

_EQUAL = 1e-13  # columns that differ by less, relative to their largest entries, are equal up to rounding
_NEAR = 1e-9  # columns whose correlation differs by more from 1 are not compared
_NULL = 1e-10  # relative eigenvalues below this count as zero
_ROUNDING = 1e-14  # relative eigenvalues below this are only rounding
_UNIQUE = 1e-8  # a coordinate with a smaller part in the null space has a unique value


def equal_columns(problem: Problem, hessian: Array, linear: Array, usable: Indices) -> dict[int, Indices]:
    """The classes of equal columns by their representative: the forced one if there is one, else the first.

    Args:
        problem: with a quadratic objective.
        hessian: H (d, d).
        linear: minus the gradient at zero (d,).
        usable: the coordinates to classify, with positive curvature.
    """
    order = np.concatenate([np.intersect1d(usable, problem.forced), np.setdiff1d(usable, problem.forced)])
    units = 1.0 / np.sqrt(hessian.diagonal()[order])
    correlation = hessian[np.ix_(order, order)] * units * units[:, None]
    owner = np.arange(order.size)
    for i, j in np.argwhere(np.triu(np.abs(correlation) >= 1 - _NEAR, 1)):
        if owner[i] == i and owner[j] == j and _equal(problem, hessian, linear, int(order[i]), int(order[j])):
            owner[j] = i
    return {int(order[i]): np.sort(order[owner == i]).astype(np.int64) for i in np.unique(owner)}


def _equal(problem: Problem, hessian: Array, linear: Array, first: int, second: int) -> bool:
    """Check that a column is a multiple of another, on the data if there is any, else on the rows of H."""
    objective = problem.objective
    if isinstance(objective, LinearModel) and not objective.ridge[[first, second]].any():
        one, other = objective.design.columns(np.array([first, second])).T
    else:
        one, other = (np.append(hessian[j], linear[j]) for j in (first, second))
    factor = float(one @ other) / float(one @ one)
    return bool(np.abs(other - factor * one).max() <= _EQUAL * np.abs(other).max())


@dataclass(frozen=True)
class Tied:
    """A node of the search tree whose Hessian is singular on the active coordinates.

    Attributes:
        value: a lower bound on f over vectors on the active coordinates.
        saliency: a lower bound on the cost of excluding each active coordinate (m,), zero for ties.
        tie: position of the free coordinate with the largest part in the null space; -1 if no free one is tied.
    """

    value: float
    saliency: Array
    tie: int


def split_ties(hessian: Array, linear: Array, start: float, inside: Booleans) -> Tied:
    """The bounds of a node with a singular Hessian, and the coordinate to branch on.

    Args:
        hessian: H on the active coordinates (m, m).
        linear: minus the gradient at zero (m,).
        start: f(0).
        inside: (m,) true where a coordinate is included.
    """
    units = 1.0 / np.sqrt(hessian.diagonal())
    values, vectors = np.linalg.eigh(hessian * units * units[:, None])
    null = values <= _NULL * values[-1]
    projected = vectors.T @ (linear * units)
    usable = values > _ROUNDING * values[-1]
    value = start - 0.5 * float((projected[usable] ** 2 / values[usable]).sum())
    part = np.sqrt((vectors[:, null] ** 2).sum(axis=1))
    good = vectors[:, ~null]
    centre = good @ (projected[~null] / values[~null])
    inverse = (good**2 / values[~null]).sum(axis=1)
    saliency = np.where(part <= _UNIQUE, 0.5 * centre**2 / np.maximum(inverse, 1e-300), 0.0)
    free = np.where(inside, -1.0, part)
    tie = int(np.argmax(free))
    return Tied(value, saliency, tie if free[tie] > _UNIQUE else -1)
