"""Swap: exact 1-swaps, weights solved for anew each time, until no swap that the pattern allows helps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from iobs.core.patterns import Groups, Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.solvers.kernels.swaps import RowState, polish

_REBUILD = 64  # swaps after which a row's state is computed afresh, so that rounding does not build up


@dataclass(frozen=True)
class Swap:
    """Local search over supports. What it ends in is certified: a 1-swap optimum, proven from a fresh factorisation.

    Swaps stay within a row, or within an N:M group; where the whole layer shares a count, one row may also give an
    entry to another.

    Args:
        rounds: exchanges between rows, each at most one entry given or taken a row; None goes on to the end.
    """

    rounds: int | None = None

    def __call__(self, problem: Quadratic, pattern: Pattern, solution: Solution) -> Solution:
        """A solution at least as good; `stats["swaps"]` are those made, `stats["certified"]` says that none is left."""
        groups = pattern.groups(problem.shape)
        hessian, linear, scale = _scaled(problem)
        search = _Search(hessian, linear, groups)
        mask = solution.mask.clone()
        weight = torch.zeros_like(linear)
        search.polish_rows(mask, weight, range(len(mask)))
        certified = groups.size <= problem.shape[1] or search.exchange(mask, weight, self.rounds)
        weight = (weight / scale).to(problem.dtype)
        stats = {**solution.stats, "swaps": search.swaps, "exchanges": search.exchanges}
        stats["certified"] = certified
        found = Solution.of(problem, weight, mask, **stats)
        if float(found.loss.sum()) > float(solution.loss.sum()):  # equal but for the rounding of the dtype
            return replace(solution, stats=stats)
        return found


def _scaled(problem: Quadratic) -> tuple[Tensor, Tensor, Tensor]:
    """The problem with unit curvatures, which keeps the small inverses accurate, and the scale of its variables."""
    scale = problem.matrix.diagonal().double().sqrt()
    hessian = problem.matrix.double() / scale
    hessian /= scale[:, None]
    return hessian.contiguous(), problem.linear.double() / scale, scale


class _Search:
    """Best single removal and admission of every row, kept up to date as rows change."""

    def __init__(self, hessian: Tensor, linear: Tensor, groups: Groups) -> None:
        self.hessian = hessian
        self.linear = linear
        self.groups = groups
        self.tolerance = 1e-10  # of the row's own scale, b H^-1 b on its support
        self.swaps = 0
        self.exchanges = 0
        rows = len(linear)
        self.removal = torch.full((rows,), torch.inf, dtype=torch.float64)
        self.admission = torch.zeros(rows, dtype=torch.float64)
        self.scale = torch.zeros(rows, dtype=torch.float64)
        self.leaves = torch.zeros(rows, dtype=torch.int64)
        self.enters = torch.zeros(rows, dtype=torch.int64)

    def polish_rows(self, mask: Tensor, weight: Tensor, rows: Iterable[int]) -> None:
        """Swap within rows; mask and weight are changed."""
        for row in rows:
            state = self._polish_row(mask, row)
            weight[row] = 0
            weight[row, state.support] = state.weight
            self.removal[row], self.leaves[row] = first(state.removals(), state.support, torch.inf)
            admission, self.enters[row] = first(-state.admissions(), state.rest, 0.0)
            self.admission[row] = -admission

    def _polish_row(self, mask: Tensor, row: int) -> RowState:
        inside, outside = self.groups.keep, self.groups.size - self.groups.keep
        while True:
            state = RowState.build(self.hessian, self.linear[row], mask[row])
            if self.groups.size >= mask.shape[1]:
                inside, outside = len(state.support), len(state.rest)
            self.scale[row] = float(state.weight @ self.linear[row, state.support])
            least = self.tolerance * float(self.scale[row])
            made = polish(state, self.hessian, inside, outside, least, _REBUILD)
            if made:
                self.swaps += made
                mask[row] = False
                mask[row, state.support] = True
            # Where swaps were made, rounding may have built up: only a fresh state that needs none is a certificate.
            if made == 0:
                return state

    def exchange(self, mask: Tensor, weight: Tensor, rounds: int | None) -> bool:
        """Entries move from row to row while that helps: the cheapest to lose pays for the best to gain.

        Returns:
            Whether no exchange is left that helps.
        """
        limit = mask.numel() if rounds is None else rounds
        for _ in range(limit + 1):
            givers, takers = exchange_pairs(self.removal, self.admission, self.tolerance * float(self.scale.mean()))
            if len(givers) == 0:
                return True
            if limit == 0:
                return False
            limit -= 1
            mask[givers, self.leaves[givers].to(mask.device)] = False
            mask[takers, self.enters[takers].to(mask.device)] = True
            self.exchanges += len(givers)
            self.polish_rows(mask, weight, [*givers.tolist(), *takers.tolist()])
        return False


def exchange_pairs(removal: Tensor, admission: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Rows that give and rows that take, matched best with best; each row does one thing at a time.

    Args:
        removal: (rows,), what the cheapest removal costs.
        admission: (rows,), what the best admission gains.
        least: gain that an exchange has to exceed.
    """
    by_cost = removal.argsort(stable=True).tolist()
    by_gain = admission.argsort(descending=True, stable=True).tolist()
    busy: set[int] = set()
    givers, takers = [], []
    cheap, dear = iter(by_cost), iter(by_gain)
    giver, taker = next(cheap, None), next(dear, None)
    while giver is not None and taker is not None:
        if giver in busy:
            giver = next(cheap, None)
        elif taker in busy:
            taker = next(dear, None)
        elif giver == taker:  # one row leads both lists: it takes or gives, whichever gains more with the next best
            other_giver = next((row for row in cheap if row not in busy), None)
            other_taker = next((row for row in dear if row not in busy), None)
            if other_giver is None or other_taker is None:
                break
            takes = admission[taker] - removal[other_giver]
            gives = admission[other_taker] - removal[giver]
            giver, taker = (other_giver, taker) if takes > gives else (giver, other_taker)
            if max(takes, gives) <= least:
                break
            busy |= {giver, taker}
            givers.append(giver)
            takers.append(taker)
        elif admission[taker] - removal[giver] <= least:
            break
        else:
            busy |= {giver, taker}
            givers.append(giver)
            takers.append(taker)
    return torch.tensor(givers, dtype=torch.int64), torch.tensor(takers, dtype=torch.int64)


def first(values: Tensor, names: Tensor, empty: float) -> tuple[float, int]:
    """The least value and its name."""
    if len(values) == 0:
        return empty, 0
    best = int(values.argmin())
    return float(values[best]), int(names[best])
