"""Exact 1-swaps with optimal weights, in closed form, until no swap that the pattern allows lowers the loss.

Let S be the support of a row, P the other variables, A = H_SS^-1 and w = A b_S the optimal weights. Let T = H_PS A,
s the diagonal of the Schur complement H_PP - T H_SP, and g = b_P - H_PS w. Admitting j gains g_j^2 / (2 s_j). Then
removing i costs (w_i - T_ji g_j / s_j)^2 / (2 (A_ii + T_ji^2 / s_j)). Each swap is two updates of rank one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from iobs.core import linalg
from iobs.core.partition import Partition
from iobs.core.patterns import Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.solvers.protocols import SolveCost, require_whole, unless_worse, usual_cost

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
        # One row after another, with a decision after each swap, would leave a GPU idle.
        groups = pattern.groups(problem.shape)
        hessian, linear, scale = (tensor.cpu() for tensor in _scaled(problem))
        search = _SwapSearch(hessian, linear, groups)
        mask = solution.mask.clone().cpu()
        weight = torch.zeros_like(linear)
        search.swap_in_rows(mask, weight, range(len(mask)))
        certified = groups.size <= problem.shape[1] or search.exchange(mask, weight, self.rounds)
        weight, mask = (weight / scale).to(problem.device, problem.dtype), mask.to(problem.device)
        stats = {**solution.stats, "swaps": search.swaps, "exchanges": search.exchanges, "certified": certified}
        return unless_worse(Solution.of(problem, weight, mask, **stats), solution)


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
            mask[givers, self.leaves[givers]] = False
            mask[takers, self.enters[takers]] = True
            self.exchanges += len(givers)
            self.swap_in_rows(mask, weight, [*givers.tolist(), *takers.tolist()])
        return False


@dataclass
class RowState:
    """State of one row for swaps. An admitted variable takes the slot of the removed one, so slots keep their group.

    Attributes:
        support: int64 (k,), the variables of S; ascending when built.
        rest: int64 (p,), the variables of P; ascending when built.
        inverse: (k, k), A.
        spread: (p, k), T.
        schur: (p,), s.
        gradient: (p,), g.
        weight: (k,), w.
    """

    support: Tensor
    rest: Tensor
    inverse: Tensor
    spread: Tensor
    schur: Tensor
    gradient: Tensor
    weight: Tensor

    @classmethod
    def build(cls, hessian: Tensor, linear: Tensor, mask: Tensor) -> RowState:
        """Build the state of a row from its support.

        Args:
            hessian: (d, d).
            linear: (d,).
            mask: boolean (d,).

        Raises:
            NotPositiveDefiniteError: H_SS is singular.
        """
        support, rest = mask.nonzero().flatten(), (~mask).nonzero().flatten()
        columns = hessian.index_select(0, support)
        square, crossed = columns.index_select(1, support), columns.index_select(1, rest).T
        inverse = linalg.inverse(square).contiguous() if len(support) else square
        spread = crossed @ inverse
        weight = inverse @ linear[support]
        schur = hessian.diagonal()[rest] - (spread * crossed).sum(1)
        gradient = (linear[rest] - crossed @ weight).masked_fill(~independent(schur, hessian, rest), 0)
        # The Schur complement of a definite matrix is positive; rounding must not make it negative.
        schur = torch.maximum(schur, torch.finfo(schur.dtype).eps * hessian.diagonal()[rest])
        return cls(support, rest, inverse, spread, schur, gradient, weight)

    def admissions(self) -> Tensor:
        """Twice the gain of admitting each variable of P alone, (p,)."""
        return self.gradient.square() / self.schur

    def removals(self) -> Tensor:
        """Twice the cost of removing each variable of S alone, (k,)."""
        return self.weight.square() / self.inverse.diagonal()


def independent(schur: Tensor, hessian: Tensor, rest: Tensor) -> Tensor:
    """True where a variable of P does not depend on S, as a duplicate of a member does; others gain nothing, (p,)."""
    return schur > 4 * torch.finfo(schur.dtype).eps * hessian.diagonal()[rest]


def swap_until_optimal(
    state: RowState, hessian: Tensor, inside: int, outside: int, tolerance: float, limit: int
) -> int:
    """Make the best swap until no swap gains more than the tolerance; the state is changed in place.

    Args:
        state: state of the row, on the CPU.
        hessian: (d, d) contiguous.
        inside: slots of S in a group: k for an unstructured row, N for N:M.
        outside: slots of P in a group: p, or M - N.
        tolerance: least gain of a swap, as twice the decrease of the loss.
        limit: largest number of swaps.

    Returns:
        The number of swaps made.
    """
    if state.spread.numel() == 0:
        return 0
    from iobs.solvers.kernels import swaps_numba

    arrays = swaps_numba.RowArrays(*(tensor.numpy() for tensor in vars(state).values()))
    return swaps_numba.swap_until_optimal(arrays, hessian.numpy(), inside, outside, tolerance, limit)


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
