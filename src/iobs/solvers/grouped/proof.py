"""Exact search over sets of groups by branch and bound.

Only the groups that may still be removed matter below a node: P and M of the others are dropped. More removals cost
more, so the costs at a node bound the costs below it. For wide groups each set of removals has a bound of its own,
which is tight where groups are weakly correlated. There the costs of groups are nearly equal, and the first bound
prunes little.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from iobs.core.patterns import Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.errors import NotPositiveDefiniteError
from iobs.solvers.grouped.exchange import Tableau, exchanged
from iobs.solvers.grouped.removal import removal_path
from iobs.solvers.grouped.system import GroupSystem, groups_of, refitted
from iobs.solvers.protocols import require_whole

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

_FEW = 200  # sets that are all computed
_APART = 2  # sets that are computed one by one
_MOST_SETS = 20_000  # sets that bounds are computed for; 12,870 of 16 groups
_WIDE = 8  # columns of a group from which bounds are cheaper than a search
_ROUNDING = 1e-9  # relative error of a bound
_INDEFINITE = "Rounding made a block of the inverse Hessian indefinite: raise the damping."
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

    Raises:
        NotPositiveDefiniteError: rounding made a block of P indefinite.
    """
    groups, size = system.shape
    removed = (~kept).nonzero().flatten().tolist()
    if len(removed) in (0, groups):
        return Proof(kept, True, 0)
    inverse, energy = system.inverse.cpu().numpy(), system.energy.cpu().numpy()
    search = _SetSearch(size, removed, limit)
    try:
        search.best = search.joint(inverse, energy, np.array(removed))
        search.visit(inverse, energy, np.arange(groups), [], 0.0)
    except np.linalg.LinAlgError as error:
        raise NotPositiveDefiniteError(_INDEFINITE) from error
    best = torch.ones_like(kept)
    best[search.removed] = False
    return Proof(best, search.nodes <= limit, search.nodes)


class _SetSearch:
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
        costs = _costs(self._diagonal_blocks(inverse), self._diagonal_blocks(energy))
        open_ = np.flatnonzero(costs < (self.best - lost) * (1 - _TIE))
        if len(open_) < todo:
            return
        if len(open_) == todo:
            self._improve([*gone, *free[open_].tolist()], lost + self.joint(inverse, energy, open_))
            return
        # Expensive removals first: they leave little room below them, so their branches end early.
        order = open_[np.argsort(-costs[open_], kind="stable")]
        if todo == 1:
            self._improve([*gone, int(free[order[-1]])], lost + float(costs[order[-1]]))
            return
        sets = self._candidates(inverse, energy, order, lost, todo)
        if sets is None:
            self._branch(inverse, energy, free, gone, lost, costs, order)
        elif len(sets) <= _FEW:
            self._compute(inverse, energy, free, gone, lost, sets)
        else:
            self._branch(inverse, energy, free, gone, lost, costs, order[np.isin(order, sets)])

    def _candidates(self, inverse: Array, energy: Array, order: Indices, lost: float, todo: int) -> Indices | None:
        """The sets of groups (sets, todo) whose bound is below the best, the lowest bound first.

        None: a search is cheaper than the bounds, or there are too many sets.
        """
        if self.size < _WIDE or todo < 3 or not _FEW < comb(len(order), todo) <= _MOST_SETS:
            return None
        every = np.array([*combinations(range(len(order)), todo)])
        bounds = lower_bounds(self._part(inverse, order, order), self._part(energy, order, order), self.size, every)
        promising = np.flatnonzero(bounds < (self.best - lost) * (1 - _TIE))
        candidates: Indices = order[every[promising[np.argsort(bounds[promising], kind="stable")]]]
        return candidates

    def _compute(
        self, inverse: Array, energy: Array, free: Indices, gone: list[int], lost: float, sets: Indices
    ) -> None:
        """Compute the costs of some sets (sets, todo): sets with a common group share its removal."""
        while len(sets) > _APART and sets.shape[1] > 1:
            group = int(np.bincount(sets.ravel()).argmax())
            held = (sets == group).any(1)
            among, sets = sets[held], sets[~held]
            others = among[among != group].reshape(len(among), -1)
            rest, places = np.unique(others, return_inverse=True)
            below = [*gone, int(free[group])], lost + self.joint(inverse, energy, np.array([group]))
            after = self._without(inverse, energy, group, rest)
            self._compute(*after, free[rest], *below, places.reshape(others.shape))
        for chosen in sets:
            self._improve([*gone, *free[chosen].tolist()], lost + self.joint(inverse, energy, chosen))

    def _branch(
        self, inverse: Array, energy: Array, free: Indices, gone: list[int], lost: float, costs: Array, order: Indices
    ) -> None:
        """Search below every first removal; `order` holds the groups that may be removed, the most expensive first."""
        todo = len(self.removed) - len(gone)
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

    def joint(self, inverse: Array, energy: Array, groups: Indices) -> float:
        """tr(P^-1 M) of some groups: twice the loss that removing all of them adds."""
        parts = (self._part(matrix, groups, groups)[None] for matrix in (inverse, energy))
        return float(_costs(*parts)[0])

    def _improve(self, removed: list[int], total: float) -> None:
        if total < self.best * (1 - _TIE):
            self.best, self.removed = total, removed

    def _part(self, matrix: Array, rows: Indices, columns: Indices) -> Array:
        """A copy of the blocks of some groups; far faster than an index for every row and column."""
        count = len(matrix) // self.size
        selected: Array = matrix.reshape(count, self.size, count, self.size).take(rows, 0).take(columns, 2)
        return selected.reshape(len(rows) * self.size, len(columns) * self.size)

    def _diagonal_blocks(self, matrix: Array) -> Array:
        """Diagonal blocks, (groups, size, size)."""
        count = len(matrix) // self.size
        at, shape = np.arange(count), (count, self.size, count, self.size)
        diagonal: Array = matrix.reshape(shape)[at, :, at]
        return diagonal

    def _step(self, inverse: Array, energy: Array, group: int, rest: Indices) -> tuple[Array, Array, Array]:
        """P_gr, u^T = P_gg^-1 P_gr, and v^T with which removing g changes M by - u v^T - v u^T."""
        index = np.array([group])
        crossed = self._part(inverse, index, rest)
        u = np.linalg.solve(self._part(inverse, index, index), crossed).astype(np.float64, copy=False)
        return crossed, u, self._part(energy, index, rest) - 0.5 * self._part(energy, index, index) @ u

    def _costs_after(self, inverse: Array, energy: Array, group: int, rest: Indices) -> Array:
        """Costs of removing each of the groups `rest` after a group: only the diagonal blocks are computed."""
        crossed, u, v = (
            part.reshape(self.size, len(rest), self.size).transpose(1, 0, 2)
            for part in self._step(inverse, energy, group, rest)
        )
        transposed = u.transpose(0, 2, 1)
        # Only the symmetric part of M counts in a trace: -u v^T - v u^T is as good as -2 u v^T.
        changed = self._diagonal_blocks(inverse)[rest] - transposed @ crossed
        return _costs(changed, self._diagonal_blocks(energy)[rest] - 2 * (transposed @ v))

    def _without(self, inverse: Array, energy: Array, group: int, rest: Indices) -> tuple[Array, Array]:
        """P and M of the groups `rest` after the removal of a group."""
        crossed, u, v = self._step(inverse, energy, group, rest)
        p, m = self._part(inverse, rest, rest), self._part(energy, rest, rest)
        p -= u.T @ crossed
        update = u.T @ v
        m -= update
        m -= update.T
        return p, m


def _costs(inverse: Array, energy: Array) -> Array:
    """tr(P^-1 M) for blocks (groups, size, size); only the symmetric part of M matters."""
    factors, info = torch.linalg.cholesky_ex(torch.from_numpy(inverse))
    if bool(info.any()):
        raise NotPositiveDefiniteError(_INDEFINITE)
    costs: Array = (torch.cholesky_inverse(factors) * torch.from_numpy(energy)).sum((1, 2)).numpy()
    return costs


def lower_bounds(inverse: Array, energy: Array, size: int, sets: Indices) -> Array:
    """Lower bounds of tr(P_RR^-1 M_RR) for sets R of groups, (sets,).

    With M = C^T C it is the largest value of 2 tr(V^T C_R) - tr(V P_RR V^T) over all V. The bound takes the best V of
    the form a C_R + b C_R P_RR, a Krylov space. Its units are the Cholesky factors of P's diagonal blocks. It needs
    only the moments tr(P_RR^p M_RR) for p = 0 to 3. They are sums over R of traces of products of at most four blocks:
    all sets share these traces.

    Args:
        inverse: P, (groups size, groups size).
        energy: M, (groups size, groups size).
        size: columns of a group.
        sets: int64 (sets, removed groups).
    """
    p, m = _whitened(inverse, energy, size)
    groups = len(p)
    member = np.zeros((len(sets), groups))
    np.put_along_axis(member, sets, 1.0, 1)
    pairs = (member[:, :, None] * member[:, None]).reshape(len(sets), -1)
    moments = np.zeros((4, len(sets)))
    for last in range(groups):
        present = member[:, last]
        inner = pairs * present[:, None]
        mixed = m[last][:, None] @ p  # M_lg P_gh, by g and h
        squared = p[last][:, None] @ p  # P_lk P_kh, by k and h: the transposes of P_hk P_kl
        moments[0] += present * np.trace(m[last, last])
        moments[1] += present * (member @ np.einsum("gij,gji->g", m[last], p[:, last]))
        flat, turned = mixed.reshape(groups, groups, -1), squared.reshape(groups, groups, -1)
        moments[2] += inner @ np.einsum("ghx,hx->gh", flat, p[last].reshape(groups, -1)).ravel()
        chains = flat.transpose(1, 0, 2) @ turned.transpose(1, 2, 0)  # by h, g and k
        moments[3] += ((inner @ chains.reshape(groups**2, groups)) * member).sum(1)
    zeroth, first, second, third = moments
    first = np.maximum(first, 1e-300)  # groups of dead inputs have no energy: their bound is 0
    simple = zeroth**2 / first  # the best a without b
    spread = first * third - second**2
    more = (zeroth * second - first**2) ** 2 / first / np.maximum(spread, 1e-300)  # what b adds
    bounds: Array = np.where(spread > _ROUNDING * first * third, simple + more, simple) * (1 - _ROUNDING)
    return bounds


def _blocks(matrix: Array, size: int) -> Array:
    """The blocks of a matrix, (groups, groups, size, size)."""
    groups = len(matrix) // size
    return matrix.reshape(groups, size, groups, size).transpose(0, 2, 1, 3)


def _whitened(inverse: Array, energy: Array, size: int) -> tuple[Array, Array]:
    """P and M as blocks, in units in which P's diagonal blocks are identities."""
    p, m = _blocks(inverse, size), _blocks(energy, size)
    at = np.arange(len(p))
    inward = np.linalg.inv(np.linalg.cholesky(p[at, at]))
    outward = inward.swapaxes(1, 2)[None]
    white: tuple[Array, Array] = inward[:, None] @ p @ outward, inward[:, None] @ m @ outward
    return white
