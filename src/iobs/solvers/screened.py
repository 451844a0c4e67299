"""Swaps among the entries that are likely to change sides: most of the gain of `swap` for a fraction of its time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from iobs.core.patterns import Groups, Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.solvers.kernels.conjugate import polish_weights
from iobs.solvers.kernels.screen import Rows, swap_rows
from iobs.solvers.swap import exchange_pairs
from iobs.solvers.weights import scaled

_REFIT = 5  # conjugate gradient steps: only rows that exchanged an entry with another one need them
_MOST = 64  # swaps in a row: rounding in float32 has not built up by then
_TOLERANCE = 1e-6  # least gain of a swap, relative to the row's own scale b H^-1 b on its support


@dataclass(frozen=True)
class ScreenedSwap:
    """1-swaps between the weakest members and the strongest outsiders of every row, all other members following.

    Members that take no part are eliminated: the Schur complement on those that do is a small problem of its own, on
    which every gain is exact. Who takes part is judged as if all variables followed, by w_i^2 / [H^-1]_ii and
    g_j^2 [H^-1]_jj: the first is at most what leaving costs, the second at least what entering gains. Where the layer
    shares one count, rows then exchange entries. In float32; nothing is certified.

    Args:
        candidates: members, and outsiders, that take part in each row.
        passes: over the rows; those that the last pass left as they were rest.
    """

    candidates: int = 48
    passes: int = 3

    def __call__(self, problem: Quadratic, pattern: Pattern, solution: Solution) -> Solution:
        """A solution at least as good; `stats["swaps"]` and `stats["exchanges"]` are those made."""
        groups = pattern.groups(problem.shape)
        hessian, linear, scale = scaled(problem)
        rows = Rows.of(solution.mask.clone(), solution.weight.float() * scale)
        root = hessian.diagonal().sqrt()  # of H_ii, which in this scale is [H^-1]_ii too
        moved = torch.ones(len(linear), dtype=torch.bool, device=linear.device)
        exchanges = 0
        for _ in range(self.passes):
            before = rows.mask.clone()
            gradient = linear - rows.weight @ hessian
            slots = _likeliest(rows.weight / root, gradient * root, rows.mask, groups, self.candidates)
            slots = slots.masked_fill(~moved[:, None], -1)
            swap_rows(rows, hessian, linear, slots, groups, _TOLERANCE, _MOST)
            exchanges += _exchange(rows) if groups.size > problem.shape[1] else 0
            rows.weight = polish_weights(hessian, linear, rows.mask, rows.weight.mul_(rows.mask), _REFIT)
            moved = (rows.mask != before).any(1)
        stats = {**solution.stats, "swaps": int(rows.swaps.sum()), "exchanges": exchanges}
        found = Solution.of(problem, (rows.weight / scale).to(problem.dtype), rows.mask, **stats)
        if float(found.loss.sum()) > float(solution.loss.sum()):
            return replace(solution, stats=stats)
        return found


def _exchange(rows: Rows) -> int:
    """One entry of some rows for one of others, the cheapest to lose for the best to gain; how many."""
    removal, admission, scale = rows.prices.cpu().unbind(1)
    givers, takers = exchange_pairs(removal, admission, _TOLERANCE * float(scale.mean()))
    givers, takers = givers.to(rows.mask.device), takers.to(rows.mask.device)
    rows.mask[givers, rows.names[givers, 0]] = False
    rows.mask[takers, rows.names[takers, 1]] = True
    return len(givers)


def _likeliest(cost: Tensor, gain: Tensor, mask: Tensor, groups: Groups, candidates: int) -> Tensor:
    """Columns that take part, (rows, slots): the members first, then the outsiders; -1 where a row has too few.

    Args:
        cost: (rows, d), signed root of what a member's removal costs.
        gain: (rows, d), signed root of what an outsider's admission gains.
        mask: boolean (rows, d).
        groups: of the pattern.
        candidates: of each kind.
    """
    rows, d = mask.shape
    cost = cost.abs().masked_fill(~mask, torch.inf)
    gain = gain.abs().masked_fill(mask, -1.0)
    if groups.size >= d:
        leaving = cost.topk(min(candidates, d), largest=False)
        entering = gain.topk(min(candidates, d))
        members = leaving.indices.masked_fill(leaving.values.isinf(), -1)
        return torch.cat([members, entering.indices.masked_fill(entering.values < 0, -1)], 1)
    # Whole groups of N:M, those where an outsider promises most above a member's price.
    bold = gain.reshape(rows, -1, groups.size).amax(2).square()
    cheap = cost.reshape(rows, -1, groups.size).amin(2).square()
    count = min(d // groups.size, max(1, 2 * candidates // groups.size))
    starts = (bold - cheap).topk(count).indices.sort(1).values * groups.size
    columns = (starts[:, :, None] + torch.arange(groups.size, device=mask.device)).reshape(rows, -1)
    order = (~mask.gather(1, columns)).to(torch.int8).sort(dim=1, stable=True).indices
    return columns.gather(1, order)
