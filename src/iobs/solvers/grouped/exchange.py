"""Exchanges of a kept and a removed group with exact weights, until no exchange lowers the loss.

Let K be the kept columns and O the others. Let A = H_KK^-1, W = B_K A, U = A H_KO and R = B_O - W H_KO. Let S_j be the
block j of the Schur complement H_OO - H_OK U. Admitting group j gains tr(S_j^-1 R_j^T R_j) / 2. It changes W to
W - R_j S_j^-1 U_j^T and A to A + U_j S_j^-1 U_j^T. The new W and A give the cost of removing group i afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core.linalg import cholesky
from iobs.core.patterns import Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.errors import NotPositiveDefiniteError
from iobs.solvers.grouped.system import (
    blocks,
    columns_of,
    definite_factor,
    groups_of,
    kept_groups,
    refitted,
    spread,
    traces,
)
from iobs.solvers.protocols import require_whole, unless_worse

_LEAST = 1e-10  # least gain of an exchange, relative to the energy that the kept groups capture
_PAIRS = 1 << 22  # entries of the blocks of one batch of pairs


@dataclass(frozen=True)
class Exchange:
    """Exchange kept and removed groups until no exchange lowers the loss; ends in a 1-swap optimum of groups.

    A pass computes the gain of every pair. It makes the best pairs together if that gains more than the best alone.

    Args:
        passes: largest number of passes; None continues until no exchange helps.

    Raises:
        ProblemError: `passes` is negative or not a whole number.
    """

    passes: int | None = None

    def __post_init__(self) -> None:
        if self.passes is not None:
            require_whole("passes", self.passes, 0, "None exchanges groups until no exchange helps")

    def __call__(self, problem: Quadratic, pattern: Pattern, solution: Solution) -> Solution:
        """Return a solution of at most the same loss.

        `stats` counts the "swaps"; "certified" is True if no exchange of two groups lowers the loss.
        """
        labels, _ = groups_of(pattern, problem.shape[1])
        tableau = Tableau.of(problem, labels)
        kept, swaps, certified = exchanged(tableau, kept_groups(solution.mask, labels), self.passes)
        stats = {**solution.stats, "swaps": swaps, "certified": certified}
        return unless_worse(refitted(problem, labels, kept, **stats), solution)


@dataclass(frozen=True)
class Tableau:
    """H and B with the columns in the slots of their groups, float64; B is compressed to at most d rows.

    Attributes:
        hessian: (groups size, groups size).
        linear: (rows, groups size), with the Gram matrix of the columns of B.
        groups: number of groups.
    """

    hessian: Tensor
    linear: Tensor
    groups: int

    @classmethod
    def of(cls, problem: Quadratic, labels: Tensor) -> Tableau:
        """The tableau of a problem; `labels` is the group of every column, int64 (d,)."""
        columns = columns_of(labels).to(problem.device)
        linear = problem.linear.double()
        if len(linear) > linear.shape[1]:  # only B^T B matters
            linear = torch.linalg.qr(linear, mode="r").R
        slots = columns.flatten()
        chosen = linear[:, slots.clamp_min(0)].masked_fill(slots < 0, 0)
        return cls(spread(problem.matrix.double(), columns, 1.0), chosen, len(columns))

    def at(self, kept: Tensor) -> ExchangeView:
        """Gains and costs at the kept groups, boolean (groups,)."""
        size = len(self.hessian) // self.groups
        inside, outside = kept.nonzero().flatten(), (~kept).nonzero().flatten()
        steps = torch.arange(size, device=kept.device)
        k, o = ((chosen[:, None] * size + steps).flatten() for chosen in (inside, outside))
        crossed = self.hessian[k][:, o]
        factor = definite_factor(self.hessian[k][:, k])
        spread_ = torch.cholesky_solve(crossed, factor)
        weight = torch.cholesky_solve(self.linear[:, k].T, factor).T
        residual = self.linear[:, o] - weight @ crossed
        schur = _paired(crossed, spread_, len(outside)).neg_().add_(blocks(self.hessian[o][:, o], len(outside)))
        captured = float((weight * self.linear[:, k]).sum())
        return ExchangeView(inside, outside, torch.cholesky_inverse(factor), spread_, weight, residual, schur, captured)


def _paired(first: Tensor, second: Tensor, groups: int) -> Tensor:
    """Blocks left_g^T right_g of two matrices whose columns are groups, (groups, size, size)."""
    shape = first.shape[0], groups, first.shape[1] // max(1, groups)
    return torch.einsum("ngi,ngj->gij", first.reshape(shape), second.reshape(shape))


@dataclass(frozen=True)
class ExchangeView:
    """State at one set of kept groups; names as in the module's text.

    Attributes:
        inside: int64 (k,), kept groups.
        outside: int64 (o,), removed groups.
        inverse: A.
        spread: U.
        weight: W.
        residual: R.
        schur: (o, size, size), S.
        captured: tr(B_K A B_K^T).
    """

    inside: Tensor
    outside: Tensor
    inverse: Tensor
    spread: Tensor
    weight: Tensor
    residual: Tensor
    schur: Tensor
    captured: float

    def gains(self) -> Tensor:
        """Twice the gain of every exchange, (k, o); minus infinity where it cannot beat the best found."""
        k, o, size = len(self.inside), len(self.outside), self.schur.shape[1]
        if size == 1:
            return self._single_gains()
        inverse_schur = torch.cholesky_inverse(cholesky(self.schur))
        energy = _paired(self.residual, self.residual, o)
        admission = (inverse_schur * energy).sum((1, 2))
        table = torch.full((k, o), -torch.inf, dtype=torch.float64, device=self.schur.device)
        crossed = (self.weight.T @ self.residual).reshape(k, size, o, size)
        coupled = self.spread.reshape(k, size, o, size)
        inverse_blocks = blocks(self.inverse, k)
        gram = _paired(self.weight, self.weight, k)
        step = max(1, _PAIRS // (k * size * size))
        best = 0.0
        for chosen in torch.split(admission.argsort(descending=True), step):
            if float(admission[chosen[0]]) <= best:  # no later admission gains more, and a removal costs something
                break
            s = inverse_schur[chosen]
            u = coupled[:, :, chosen].permute(2, 0, 1, 3)
            x = crossed[:, :, chosen].permute(2, 0, 1, 3)
            us = u @ s[:, None]
            first = x @ us.transpose(2, 3)
            moved = gram - first - first.transpose(2, 3) + us @ energy[chosen, None] @ us.transpose(2, 3)
            removal = traces(inverse_blocks + us @ u.transpose(2, 3), moved)
            table[:, chosen] = (admission[chosen, None] - removal).T
            best = max(best, float(table[:, chosen].max()))
        return table

    def _single_gains(self) -> Tensor:
        schur, residual = self.schur.flatten(), self.residual
        if bool((schur <= 0).any()):
            raise NotPositiveDefiniteError("Rounding made a Schur complement negative: raise the damping.")
        energy = residual.square().sum(0)
        ratio = self.spread / schur
        moved = self.weight.square().sum(0)[:, None] - 2 * ratio * (self.weight.T @ residual) + ratio.square() * energy
        return energy / schur - moved / (self.inverse.diagonal()[:, None] + self.spread * ratio)


def exchanged(tableau: Tableau, kept: Tensor, passes: int | None) -> tuple[Tensor, int, bool]:
    """Exchange groups until no exchange helps or the passes are used up.

    Args:
        tableau: the problem.
        kept: boolean (groups,), at the start.
        passes: largest number of passes, None for no limit.

    Returns:
        The kept groups, the number of exchanges, and True if no exchange is left that lowers the loss.
    """
    count = int(kept.sum())
    if count in (0, tableau.groups):
        return kept, 0, True
    view, swaps, made = tableau.at(kept), 0, 0
    while True:
        table = view.gains()
        least = _LEAST * view.captured
        if float(table.max()) <= least:
            return kept, swaps, True
        if passes is not None and made >= passes:
            return kept, swaps, False
        made += 1
        pairs = _best_pairs(table, least)
        while True:
            trial = kept.clone()
            trial[view.inside[[i for i, _ in pairs]]] = False
            trial[view.outside[[j for _, j in pairs]]] = True
            next_view = tableau.at(trial)
            if len(pairs) == 1 or next_view.captured - view.captured >= float(table.max()):
                break
            pairs = pairs[: len(pairs) // 2]
        if next_view.captured <= view.captured:  # the gain was rounding
            return kept, swaps, True
        kept, view, swaps = trial, next_view, swaps + len(pairs)


def _best_pairs(table: Tensor, least: float) -> list[tuple[int, int]]:
    """Exchanges of largest gain that share no group."""
    pairs: list[tuple[int, int]] = []
    table = table.clone()
    while len(pairs) < min(table.shape):
        i, j = divmod(int(table.argmax()), table.shape[1])
        if float(table[i, j]) <= least:
            break
        pairs.append((i, j))
        table[i], table[:, j] = -torch.inf, -torch.inf
    return pairs
