"""Exact 1-swaps with optimal weights, until no swap that the pattern allows lowers the loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from iobs.core.partition import Partition
from iobs.core.patterns import Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.solvers.kernels.swaps import RowState, swap_until_optimal
from iobs.solvers.protocols import SolveCost, require_whole, usual_cost

_REBUILD = 64  # swaps after which the state of a row is recomputed, so that rounding does not build up


@dataclass(frozen=True)
class Swap:
    """Local search over supports that ends in a certified 1-swap optimum: a new factorisation of every row proves it.

    Swaps stay within a row, or within an N:M group. If the whole layer shares one count, rows also exchange entries.

    Args:
        rounds: largest number of rounds of exchanges between rows, each with at most one exchange for each row. None
            continues until no exchange lowers the loss.

    Raises:
        ProblemError: `rounds` is negative or not a whole number.
    """

    rounds: int | None = None

    def __post_init__(self) -> None:
        if self.rounds is not None:
            require_whole("rounds", self.rounds, 0, "None exchanges entries until no exchange helps")

    def cost(self, rows: int, columns: int) -> SolveCost:
        """For every row one inverse of half of the columns, the least that proves that no swap helps."""
        usual = usual_cost(rows, columns)
        return replace(usual, loops=rows * float(columns) ** 3 / 4)

    def __call__(self, problem: Quadratic, pattern: Pattern, solution: Solution) -> Solution:
        """Return a solution of at most the same loss.

        `stats` counts its "swaps" and its "exchanges" between rows; "certified" is True if no exchange is left.
        """
        groups = pattern.groups(problem.shape)
        hessian, linear, scale = _scaled(problem)
        search = _SwapSearch(hessian, linear, groups)
        mask = solution.mask.clone()
        weight = torch.zeros_like(linear)
        search.swap_in_rows(mask, weight, range(len(mask)))
        certified = groups.size <= problem.shape[1] or search.exchange(mask, weight, self.rounds)
        weight = (weight / scale).to(problem.dtype)
        stats = {**solution.stats, "swaps": search.swaps, "exchanges": search.exchanges}
        stats["certified"] = certified
        refined = Solution.of(problem, weight, mask, **stats)
        if float(refined.loss.sum()) > float(solution.loss.sum()):  # rounding to the dtype can raise the loss
            return replace(solution, stats=stats)
        return refined


def _scaled(problem: Quadratic) -> tuple[Tensor, Tensor, Tensor]:
    """Scale the problem to unit curvatures, which keeps the inverses of sub-matrices accurate.

    Returns:
        Hessian (d, d), linear term (rows, d) and scale (d,), float64.
    """
    scale = problem.matrix.diagonal().double().sqrt()
    hessian = problem.matrix.double() / scale
    hessian /= scale[:, None]
    return hessian.contiguous(), problem.linear.double() / scale, scale


class _SwapSearch:
    """State of the search: the best single removal and the best single admission of every row."""

    def __init__(self, hessian: Tensor, linear: Tensor, groups: Partition) -> None:
        self.hessian = hessian
        self.linear = linear
        self.groups = groups
        self.tolerance = 1e-10  # least gain, relative to the row's b H^-1 b on its support
        self.swaps = 0
        self.exchanges = 0
        rows = len(linear)
        self.removal = torch.full((rows,), torch.inf, dtype=torch.float64)
        self.admission = torch.zeros(rows, dtype=torch.float64)
        self.scale = torch.zeros(rows, dtype=torch.float64)
        self.leaves = torch.zeros(rows, dtype=torch.int64)
        self.enters = torch.zeros(rows, dtype=torch.int64)

    def swap_in_rows(self, mask: Tensor, weight: Tensor, rows: Iterable[int]) -> None:
        """Swap within rows until no swap helps; `mask` and `weight` are changed in place."""
        for row in rows:
            state = self._swap_in_row(mask, row)
            weight[row] = 0
            weight[row, state.support] = state.weight
            self.removal[row], self.leaves[row] = _least(state.removals(), state.support, torch.inf)
            admission, self.enters[row] = _least(-state.admissions(), state.rest, 0.0)
            self.admission[row] = -admission

    def _swap_in_row(self, mask: Tensor, row: int) -> RowState:
        inside, outside = self.groups.keep, self.groups.size - self.groups.keep
        while True:
            state = RowState.build(self.hessian, self.linear[row], mask[row])
            if self.groups.size >= mask.shape[1]:
                inside, outside = len(state.support), len(state.rest)
            self.scale[row] = float(state.weight @ self.linear[row, state.support])
            least = self.tolerance * float(self.scale[row])
            made = swap_until_optimal(state, self.hessian, inside, outside, least, _REBUILD)
            if made:
                self.swaps += made
                mask[row] = False
                mask[row, state.support] = True
            # After swaps rounding may have built up: only a new state without an improving swap is a certificate.
            if made == 0:
                return state

    def exchange(self, mask: Tensor, weight: Tensor, rounds: int | None) -> bool:
        """Exchange entries between rows, the cheapest removals for the best admissions, while the loss falls.

        Returns:
            True if no exchange is left that lowers the loss.
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
            self.swap_in_rows(mask, weight, [*givers.tolist(), *takers.tolist()])
        return False


def exchange_pairs(removal: Tensor, admission: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Match rows that give an entry with rows that take one, best with best; each row gives or takes at most once.

    Args:
        removal: (rows,), cost of the cheapest removal in each row.
        admission: (rows,), gain of the best admission in each row.
        least: an exchange must gain more than this.

    Returns:
        Indices of the giving rows and of the taking rows, int64 (exchanges,) each.
    """
    by_cost = removal.argsort(stable=True).tolist()
    by_gain = admission.argsort(descending=True, stable=True).tolist()
    busy: set[int] = set()
    givers, takers = [], []
    costs, gains = iter(by_cost), iter(by_gain)
    giver, taker = next(costs, None), next(gains, None)
    while giver is not None and taker is not None:
        if giver in busy:
            giver = next(costs, None)
        elif taker in busy:
            taker = next(gains, None)
        elif giver == taker:
            # One row is first in both orders: it takes or gives, whichever gains more with the next row.
            other_giver = next((row for row in costs if row not in busy), None)
            other_taker = next((row for row in gains if row not in busy), None)
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


def _least(values: Tensor, names: Tensor, empty: float) -> tuple[float, int]:
    """The least value and its name; `empty` and 0 for no values."""
    if len(values) == 0:
        return empty, 0
    best = int(values.argmin())
    return float(values[best]), int(names[best])
