"""Group sparsity: k groups of coordinates, such as the dummies of a factor or the coefficients of all classes.

As for single coordinates: groups enter by the Newton decrement of their block and leave by their saliency
1/2 theta_G^T (P_GG)^-1 theta_G. Exchanges are tried on f itself, the most promising first, until none lowers f.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from iobs.errors import ProblemError
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.design import Array, Indices
from iobs.optimize.refit.newton import Fit, inverse_block, newton_direction, refit
from iobs.optimize.refit.within import Bounds

_ENTERING = 6  # number of entering groups that are tried with each of the `_LEAVING` cheapest leaving groups
_LEAVING = 4


@dataclass(frozen=True)
class CoordinateGroups:
    """A partition of the free coordinates of an objective.

    Args:
        objective: f.
        members: the coordinates of every group.
        forced: indices of groups that are always in the support, not counted in k.
    """

    objective: Objective
    members: list[Indices]
    forced: frozenset[int] = frozenset()

    @property
    def choices(self) -> int:
        """The number of groups that k counts."""
        return len(self.members) - len(self.forced)

    def support(self, chosen: frozenset[int]) -> Indices:
        """The coordinates of the chosen groups, the forced groups and the objective's forced coordinates."""
        parts = [self.members[number] for number in sorted(chosen | self.forced)]
        return np.sort(np.concatenate([*parts, self.objective.forced])).astype(np.int64)


def labels_to_groups(labels: npt.ArrayLike, dimension: int) -> list[Indices]:
    """The coordinates of each label, in the order in which labels first appear, from one label per coordinate.

    Raises:
        ProblemError: the number of labels is not the number of coordinates.
    """
    labels = np.asarray(labels)
    if labels.shape != (dimension,):
        raise ProblemError(f"groups must give one label to each of {dimension} features, got shape {labels.shape}.")
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    return [np.flatnonzero(inverse == number) for number in np.argsort(first)]


def group_path(groups: CoordinateGroups, sizes: list[int], bounds: Bounds | None = None) -> list[Fit]:
    """The best fits found for each number of groups, each started from the one before.

    Args:
        groups: the partition.
        sizes: ascending numbers of groups.
        bounds: of all coordinates.
    """
    chosen: frozenset[int] = frozenset()
    fit = _fitted(groups, chosen, bounds)
    fits = []
    for size in sizes:
        while len(chosen) < size:
            scores = _entering(groups, fit, chosen, bounds)
            if not scores:
                break
            chosen = chosen | {scores[0]}
            fit = _fitted(groups, chosen, bounds, fit.theta)
        chosen, fit = _exchange(groups, chosen, fit, bounds)
        fits.append(fit)
    return fits


def _fitted(groups: CoordinateGroups, chosen: frozenset[int], bounds: Bounds | None, start: Array | None = None) -> Fit:
    support = groups.support(chosen)
    return refit(groups.objective, support, start, bounds=bounds)


def _entering(groups: CoordinateGroups, fit: Fit, chosen: frozenset[int], bounds: Bounds | None) -> list[int]:
    """Groups that may enter, by the decrease that a step on each promises, best first; no constant groups.

    The step is Newton's; within bounds it is that of each coordinate alone, and a group without any is left out.
    """
    promised = None
    if bounds is not None:
        promised = bounds.promised(fit.theta, fit.gradient, groups.objective.hessian_diagonal(fit.theta))
    copies = groups.objective.copied_coordinates(limits=None if bounds is None else (bounds.lower, bounds.upper))
    dead = {*groups.objective.constant_coordinates().tolist(), *copies.tolist()}
    gains: list[tuple[float, int]] = []
    for number, members in enumerate(groups.members):
        if number in chosen or number in groups.forced or dead.issuperset(members.tolist()):
            continue
        if promised is not None:
            if promised[members].any():
                gains.append((-float(promised[members].sum()), number))
            continue
        slope = fit.gradient[members]
        block = groups.objective.hessian_block(fit.theta, members)
        gains.append((float(slope @ newton_direction(block, slope)), number))
    return [number for _, number in sorted(gains)]


def _leaving(groups: CoordinateGroups, fit: Fit, chosen: frozenset[int]) -> list[int]:
    """Chosen groups by saliency, cheapest first."""
    inverse = inverse_block(groups.objective.hessian_block(fit.theta, fit.support))
    costs: list[tuple[float, int]] = []
    for number in chosen:
        place = np.searchsorted(fit.support, groups.members[number])
        values = fit.theta[groups.members[number]]
        costs.append((float(values @ np.linalg.lstsq(inverse[np.ix_(place, place)], values, rcond=None)[0]), number))
    return [number for _, number in sorted(costs)]


def _exchange(
    groups: CoordinateGroups, chosen: frozenset[int], fit: Fit, bounds: Bounds | None
) -> tuple[frozenset[int], Fit]:
    improved = bool(chosen)
    while improved:
        improved = False
        for leaving in _leaving(groups, fit, chosen)[:_LEAVING]:
            rest = chosen - {leaving}
            without = _fitted(groups, rest, bounds, fit.theta)
            for entering in _entering(groups, without, chosen, bounds)[:_ENTERING]:
                trial = _fitted(groups, rest | {entering}, bounds, without.theta)
                if trial.value < fit.value - 1e-9 * abs(without.value - fit.value) - 1e-12 * abs(fit.value):
                    chosen, fit, improved = rest | {entering}, trial, True
                    break
            if improved:
                break
    return chosen, fit
