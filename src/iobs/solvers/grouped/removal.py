"""Greedy removal of whole groups with exact updates, and removal in batches in OSSCAR's order.

Removing group g changes P to P - u f^T with f = P[:, g] and u = f P_gg^-1. It changes M to M - u v^T - v u^T with
v = M[:, g] - u M_gg / 2. Like a pivoted Cholesky factor, the updates of some groups are kept as columns, and only the
diagonal blocks are updated at once. One matrix product then applies them all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core.linalg import cholesky
from iobs.core.patterns import Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.solvers.grouped.system import GroupSystem, blocks, groups_of, refitted, traces
from iobs.solvers.protocols import require_whole

_PENDING = 64  # columns of updates that are kept before a matrix product applies them


@dataclass(frozen=True)
class RemovalPath:
    """Groups in the order of their removal.

    Attributes:
        order: group numbers, first removed first.
        losses: loss above that of the dense problem after each removal, with all other weights refitted.
    """

    order: list[int]
    losses: list[float]

    def kept(self, groups: int, keep: int) -> Tensor:
        """Boolean (groups,), the groups that are left when `keep` of them are."""
        mask = torch.ones(groups, dtype=torch.bool)
        mask[self.order[: groups - keep]] = False
        return mask


def removal_path(system: GroupSystem, keep: int = 0, batch: int = 1) -> RemovalPath:
    """Remove the cheapest groups, one or a batch at a time, until `keep` are left.

    Args:
        system: matrices of the problem.
        keep: number of groups left at the end.
        batch: groups removed between two computations of the costs.

    Raises:
        NotPositiveDefiniteError: rounding made a block of P indefinite.
    """
    state = _RemovalState(system)
    order: list[int] = []
    losses: list[float] = []
    total = 0.0
    removals = system.shape[0] - keep
    while len(order) < removals:
        costs = traces(state.inverse_blocks, state.energy_blocks).masked_fill(state.gone, torch.inf)
        chosen = costs.topk(min(batch, removals - len(order)), largest=False).indices.tolist()
        for group in chosen:
            # Within a batch the cost has changed since it was compared; the path records the true one.
            total += 0.5 * state.remove(group)
            order.append(state.names[group])
            losses.append(total)
        if len(order) < removals:
            state.apply_if_full()
    return RemovalPath(order, losses)


class _RemovalState:
    """P and M of the remaining groups, with pending updates."""

    def __init__(self, system: GroupSystem) -> None:
        self.groups, self.size = system.shape
        self.names = list(range(self.groups))
        self.inverse, self.energy = system.inverse.clone(), system.energy.clone()
        self._begin()

    def _begin(self) -> None:
        self.gone = torch.zeros(self.groups, dtype=torch.bool, device=self.inverse.device)
        self.inverse_blocks, self.energy_blocks = blocks(self.inverse, self.groups), blocks(self.energy, self.groups)
        none = self.inverse.new_zeros(len(self.inverse), _PENDING + self.size)
        self.f, self.u, self.v = none, none.clone(), none.clone()
        self.pending = 0

    def remove(self, group: int) -> float:
        """Remove a group and return twice the loss that this adds."""
        at, t = slice(group * self.size, (group + 1) * self.size), self.pending
        if t + self.size > self.f.shape[1]:  # a large batch
            tables = self.f, self.u, self.v
            self.f, self.u, self.v = (torch.cat([table, torch.zeros_like(table)], 1) for table in tables)
        f_old, u_old, v_old = self.f[:, :t], self.u[:, :t], self.v[:, :t]
        f = self.inverse[at].T - u_old @ f_old[at].T  # P and M are symmetric: rows lie together in memory
        m = self.energy[at].T - u_old @ v_old[at].T - v_old @ u_old[at].T
        factor = cholesky(f[at])
        u = torch.cholesky_solve(f.T, factor).T
        cost = float(torch.cholesky_solve(m[at], factor).diagonal().sum())
        v = m - 0.5 * (u @ m[at])
        self.f[:, t : t + self.size], self.u[:, t : t + self.size], self.v[:, t : t + self.size] = f, u, v
        self.pending = t + self.size
        self.gone[group] = True
        self._update_blocks(f, u, v)
        return cost

    def _update_blocks(self, f: Tensor, u: Tensor, v: Tensor) -> None:
        shape = self.groups, self.size, self.size
        f, u, v = f.reshape(shape), u.reshape(shape), v.reshape(shape)
        if self.size == 1:
            self.inverse_blocks -= u * f
            self.energy_blocks -= 2 * u * v
        else:
            crossed = u @ v.transpose(1, 2)
            self.inverse_blocks -= u @ f.transpose(1, 2)
            self.energy_blocks -= crossed + crossed.transpose(1, 2)
        identity = torch.eye(self.size, dtype=f.dtype, device=f.device)
        self.inverse_blocks[self.gone] = identity  # removed blocks are zero up to rounding
        self.energy_blocks[self.gone] = 0

    def apply_if_full(self) -> None:
        """Apply the pending updates once there are enough of them, and drop the removed groups."""
        if self.pending < _PENDING:
            return
        remaining = (~self.gone).nonzero().flatten()
        slots = (remaining[:, None] * self.size + torch.arange(self.size, device=remaining.device)).flatten()
        f, u, v = (table[slots, : self.pending] for table in (self.f, self.u, self.v))
        self.inverse = self.inverse[slots][:, slots].addmm_(u, f.T, alpha=-1)
        self.energy = self.energy[slots][:, slots].addmm_(u, v.T, alpha=-1).addmm_(v, u.T, alpha=-1)
        self.names = [self.names[group] for group in remaining.tolist()]
        self.groups = len(remaining)
        self._begin()


@dataclass(frozen=True)
class Removal:
    """Remove the group that raises the loss least, refit all other weights exactly, and repeat."""

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Remove groups until the count of the pattern is left; the weights are exact."""
        labels, keep = groups_of(pattern, problem.shape[1])
        path = removal_path(GroupSystem.of(problem, labels), keep)
        return refitted(problem, labels, path.kept(int(labels.max()) + 1, keep))


@dataclass(frozen=True)
class Osscar:
    """Removal in batches, the order of OSSCAR (Meng et al., 2024) without its exchanges: exact costs, several at once.

    Args:
        rounds: number of batches.

    Raises:
        ProblemError: `rounds` is not a positive whole number.
    """

    rounds: int = 10

    def __post_init__(self) -> None:
        require_whole("rounds", self.rounds, 1, "10 are usual")

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Remove groups in batches until the count of the pattern is left; the weights are exact."""
        labels, keep = groups_of(pattern, problem.shape[1])
        groups = int(labels.max()) + 1
        path = removal_path(GroupSystem.of(problem, labels), keep, max(1, -(-(groups - keep) // self.rounds)))
        return refitted(problem, labels, path.kept(groups, keep))
