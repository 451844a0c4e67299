"""Exact search over sets of groups by branch and bound.

Only the groups that may still be removed matter below a node: P and M of the others are dropped. A removal costs more
after others than alone, so the costs at a node bound the costs below it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from iobs.core.patterns import Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.solvers.grouped.exchange import Tableau, exchanged
from iobs.solvers.grouped.removal import removal_path
from iobs.solvers.grouped.system import GroupSystem, groups_of, refitted
from iobs.solvers.options import require_whole

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

_TIE = 1e-12  # relative difference of losses up to which two sets of groups are equally good


@dataclass(frozen=True)
class Proof:
    """Outcome of an exact search.

    Attributes:
        kept: boolean (groups,), the best set found.
        proved: True if no other set has a smaller loss.
        nodes: nodes visited.
    """

    kept: Tensor
    proved: bool
    nodes: int


@dataclass(frozen=True)
class GroupExact:
    """Branch and bound from the result of greedy removal and exchanges.

    Args:
        limit: largest number of nodes; a search that needs more ends with `stats["proved"]` False.

    Raises:
        ProblemError: `limit` is not a positive whole number.
    """

    limit: int = 100_000

    def __post_init__(self) -> None:
        require_whole("limit", self.limit, 1, "100000 nodes prove at least 16 groups")

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """The best set of groups with exact weights; `stats["proved"]` is True if it is optimal."""
        labels, keep = groups_of(pattern, problem.shape[1])
        system = GroupSystem.of(problem, labels)
        kept = removal_path(system, keep).kept(system.shape[0], keep).to(problem.device)
        kept, swaps, _ = exchanged(Tableau.of(problem, labels), kept, None)
        proof = prove(system, kept, self.limit)
        return refitted(problem, labels, proof.kept, swaps=swaps, proved=proof.proved, nodes=proof.nodes)


def prove(system: GroupSystem, kept: Tensor, limit: int) -> Proof:
    """Search all sets with as many groups as a given set.

    Args:
        system: matrices of the problem.
        kept: boolean (groups,), the best set known.
        limit: largest number of nodes.
    """
    groups, size = system.shape
    removed = (~kept).nonzero().flatten().tolist()
    if len(removed) in (0, groups):
        return Proof(kept, True, 0)
    inverse, energy = system.inverse.cpu().numpy(), system.energy.cpu().numpy()
    search = _Search(size, removed, limit)
    slots = (np.array(removed)[:, None] * size + np.arange(size)).ravel()
    search.best = _joint_cost(inverse[np.ix_(slots, slots)], energy[np.ix_(slots, slots)])
    search.visit(inverse, energy, np.arange(groups), [], 0.0)
    found = torch.ones_like(kept)
    found[search.removed] = False
    return Proof(found, search.nodes <= limit, search.nodes)


def _joint_cost(inverse: Array, energy: Array) -> float:
    """tr(P^-1 M): twice the loss that removing all these columns adds."""
    return float(np.trace(np.linalg.solve(inverse, energy)))


class _Search:
    """Depth-first search over sets of removed groups.

    Attributes:
        size: columns of a group.
        removed: groups that the best set known removes.
        limit: largest number of nodes.
        best: twice the loss that the best set known adds.
        nodes: nodes visited.
    """

    def __init__(self, size: int, removed: list[int], limit: int) -> None:
        self.size = size
        self.removed = removed
        self.limit = limit
        self.best = np.inf
        self.nodes = 0

    def visit(self, inverse: Array, energy: Array, free: Indices, gone: list[int], lost: float) -> None:
        """Search below a node.

        Args:
            inverse: P of the free groups after the removals so far.
            energy: M of the free groups after the removals so far.
            free: groups that may still be removed.
            gone: groups removed so far.
            lost: twice the loss that they added.
        """
        self.nodes += 1
        if self.nodes > self.limit:
            return
        todo = len(self.removed) - len(gone)
        costs = np.trace(np.linalg.solve(self._own(inverse), self._own(energy)), axis1=1, axis2=2)
        open_ = np.flatnonzero(costs < (self.best - lost) * (1 - _TIE))
        if len(open_) < todo:
            return
        if len(open_) == todo:
            slots = self._slots(open_)
            total = _joint_cost(inverse[np.ix_(slots, slots)], energy[np.ix_(slots, slots)])
            self._improve([*gone, *free[open_].tolist()], lost + total)
            return
        # Expensive removals first: they leave little room below them, so their branches end early.
        order = open_[np.argsort(-costs[open_], kind="stable")]
        if todo == 1:
            self._improve([*gone, int(free[order[-1]])], lost + float(costs[order[-1]]))
            return
        for position in range(len(order) - todo + 1):
            group, rest = order[position], order[position + 1 :]
            below = [*gone, int(free[group])], lost + float(costs[group])
            if todo == 2:
                last = self._costs_after(inverse, energy, group, rest)
                self._improve([*below[0], int(free[rest[last.argmin()]])], below[1] + float(last.min()))
            else:
                self.visit(*self._without(inverse, energy, group, rest), free[rest], *below)
            if self.nodes > self.limit:
                return

    def _improve(self, removed: list[int], total: float) -> None:
        if total < self.best * (1 - _TIE):
            self.best, self.removed = total, removed

    def _slots(self, groups: Indices) -> Indices:
        slots: Indices = (groups[:, None] * self.size + np.arange(self.size)).ravel()
        return slots

    def _own(self, matrix: Array) -> Array:
        """Diagonal blocks, (groups, size, size)."""
        count = len(matrix) // self.size
        at, shape = np.arange(count), (count, self.size, count, self.size)
        own: Array = matrix.reshape(shape)[at, :, at]
        return own

    def _step(self, inverse: Array, energy: Array, group: int, rest: Indices) -> tuple[Array, Array, Array]:
        """P_gr, u^T = P_gg^-1 P_gr, and v^T with which removing g changes M by - u v^T - v u^T."""
        own, left = self._slots(np.array([group])), self._slots(rest)
        crossed = inverse[np.ix_(own, left)]
        u = np.linalg.solve(inverse[np.ix_(own, own)], crossed).astype(np.float64, copy=False)
        return crossed, u, energy[np.ix_(own, left)] - 0.5 * energy[np.ix_(own, own)] @ u

    def _costs_after(self, inverse: Array, energy: Array, group: int, rest: Indices) -> Array:
        """Costs of removing each of the groups `rest` after a group: only the diagonal blocks change hands."""
        crossed, u, v = (
            one.reshape(self.size, len(rest), self.size).transpose(1, 0, 2)
            for one in self._step(inverse, energy, group, rest)
        )
        turned = u.transpose(0, 2, 1)
        moved = turned @ v
        own = self._own(inverse)[rest] - turned @ crossed
        left = self._own(energy)[rest] - moved - moved.transpose(0, 2, 1)
        costs: Array = np.trace(np.linalg.solve(own, left), axis1=1, axis2=2)
        return costs

    def _without(self, inverse: Array, energy: Array, group: int, rest: Indices) -> tuple[Array, Array]:
        """P and M of the groups `rest` after the removal of a group."""
        crossed, u, v = self._step(inverse, energy, group, rest)
        left = self._slots(rest)
        moved = u.T @ v
        return inverse[np.ix_(left, left)] - u.T @ crossed, energy[np.ix_(left, left)] - moved - moved.T
