"""Best known weights on a grid: mask of ADMM, rounding with feedback, then descent over values, entries and scales."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from iobs.core.grids import over_columns
from iobs.core.patterns import Grid, Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.solvers.admm import ADMM
from iobs.solvers.gridded.baselines import codes_of
from iobs.solvers.gridded.feedback import feedback_order, is_affordable, round_with_feedback
from iobs.solvers.gridded.lattice import on_grid, parts, refit_scales, rounded, search_scales, working_dtype
from iobs.solvers.kernels.descend import GridRows, descend_values, exchange_entries, step_pairs
from iobs.solvers.protocols import Budget, require_budget

_SWEEPS = 30  # of the values in a round; they end once nothing changes
_CANDIDATES = 48  # entries, or steps, that moves of two entries compare
_SETTLED = 1e-4  # relative decrease of the loss below which a further round is not worth its time


@dataclass(frozen=True)
class Effort:
    """Work of the search for one budget.

    Attributes:
        masks: budget of the ADMM that chooses the entries.
        moves: moves of two entries in a row, in a round.
        rounds: most rounds of moves after each rounding.
        paths: roundings of a row that are carried along.
        roundings: roundings with feedback; later ones begin from the entries and scales of the descent before.
    """

    masks: Budget
    moves: int
    rounds: int
    paths: int
    roundings: int


# Errors over those of the joint pass, with 50 % zeros and 4 bits on the layer L0.o of benchmarks/grid_layers.py: 1 path
# has 0.505, 16 have 0.491 and 64 have 0.489, so more would gain nothing. Rounds settle after 4 to 6.
EFFORTS = {
    "fast": Effort("best", moves=16, rounds=2, paths=4, roundings=1),
    "default": Effort("best", moves=64, rounds=6, paths=16, roundings=2),
    "best": Effort("best", moves=64, rounds=30, paths=64, roundings=4),
}
# Efforts for large layers: those above a limit of rows x columns^2, the work of an iteration of ADMM. Below the limit,
# where an iteration is cheap, ADMM "best" chooses the entries: on that layer its choice has an error of 0.486, that of
# "default" 0.499 and that of "fast" 0.522.
LARGE = {
    "fast": (1 << 31, Effort("fast", moves=0, rounds=1, paths=4, roundings=1)),
    "default": (1 << 33, replace(EFFORTS["default"], masks="default")),
}


def effort_for(budget: Budget, shape: tuple[int, int]) -> Effort:
    """Work of the search for a budget and a shape (rows, columns)."""
    most, large = LARGE.get(budget, (0, EFFORTS[budget]))
    return large if shape[0] * shape[1] ** 2 > most else EFFORTS[budget]


@dataclass(frozen=True)
class GridSearch:
    """ADMM chooses the entries; rounding with error feedback, coordinate descent and new scales choose the values.

    Rounding goes through the columns in the order of best feedback, and carries the best few roundings of each row
    along. A round of the descent sets values one by one, exchanges kept and removed entries, and moves two values at
    once. It also refits the scales of each row in closed form. No step raises the loss of a row. Then the rows are
    rounded again with the entries and scales that were found; a row keeps the better result.

    Args:
        budget: "fast", "default" or "best", time against error.

    Raises:
        ProblemError: any other budget.
    """

    budget: Budget = "default"

    def __post_init__(self) -> None:
        require_budget(self.budget)

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Weights on the grid with the exact counts of the pattern; `stats["scales"]` has the scales (rows, groups)."""
        sparse, grid = parts(pattern)
        effort = effort_for(self.budget, problem.shape)
        wide = problem.to(working_dtype(problem))
        groups = sparse.groups(problem.shape)
        if groups.keep == groups.size:
            centre, mask = wide.centre(), torch.ones(problem.shape, dtype=torch.bool, device=problem.device)
        else:
            pruned = ADMM(effort.masks)(problem, sparse)
            centre, mask = pruned.weight.to(wide.dtype), pruned.mask.clone()
        scales = search_scales(centre, mask, wide.matrix.diagonal(), grid, problem.dtype)
        start = rounded(centre, over_columns(scales, grid, problem.shape[1]), grid.levels) * mask
        state = _GridState(wide, grid, start, mask.contiguous(), scales, problem.dtype)
        width = min(groups.size, problem.shape[1])
        if not is_affordable(mask):
            rounds = state.descend(width, effort)
            return state.solution(problem, rounds=rounds)
        order, rounds = feedback_order(wide.matrix), 0
        for number in range(effort.roundings):
            again = state.rounded_again(order, effort.paths)
            rounds += again.descend(width, effort)
            state = state.better(again) if number else again
        return state.solution(problem, rounds=rounds)


class _GridState:
    """Weights on the grid during the descent, with their gradient."""

    def __init__(
        self, problem: Quadratic, grid: Grid, weight: Tensor, mask: Tensor, scales: Tensor, dtype: torch.dtype
    ) -> None:
        self.problem = problem
        self.grid = grid
        self.mask = mask
        self.scales = scales
        self.dtype = dtype
        self.centre = problem.centre()
        self.set(weight)

    def set(self, weight: Tensor) -> None:
        """Take other weights on the same grid."""
        self.weight = weight.contiguous()
        self.gradient = self.problem.gradient(self.weight).contiguous()

    def spread(self) -> Tensor:
        """Scale of every entry, (rows, d)."""
        return over_columns(self.scales, self.grid, self.weight.shape[1])

    def error(self) -> Tensor:
        """Loss of every row above that of the dense minimiser, (rows,)."""
        return _error(self.weight, self.centre, self.gradient)

    def rounded_again(self, order: Tensor, paths: int) -> _GridState:
        """State with the same entries and scales, whose values are rounded with feedback."""
        weight = round_with_feedback(self.problem, self.mask, self.spread(), self.grid.levels, order, paths)
        return _GridState(self.problem, self.grid, weight, self.mask.clone(), self.scales.clone(), self.dtype)

    def better(self, other: _GridState) -> _GridState:
        """The better one of two states in each row."""
        lower = (other.error() < self.error())[:, None]
        pairs = (self.weight, other.weight), (self.mask, other.mask), (self.scales, other.scales)
        weight, mask, scales = (torch.where(lower, theirs, ours) for ours, theirs in pairs)
        return _GridState(self.problem, self.grid, weight, mask, scales, self.dtype)

    def solution(self, problem: Quadratic, **stats: object) -> Solution:
        """Solution of the problem in the user's dtype."""
        codes = codes_of(self.weight, self.scales, self.grid)
        return on_grid(problem, codes, self.scales, self.mask, self.grid, **stats)

    def rows(self) -> GridRows:
        """Weights, gradient, mask and scales for moves, which change them in place."""
        hessian, scales = self.problem.matrix.contiguous(), self.scales.contiguous()
        return GridRows(self.weight, self.gradient, self.mask, scales, hessian, self.grid.group, self.grid.levels)

    def descend(self, of: int, effort: Effort) -> int:
        """Lower the loss until it has settled or the rounds end; returns the number of rounds."""
        error = self.error()
        for made in range(effort.rounds):
            before = error
            self._move(of, effort.moves)
            error = self._refit()
            if float((before - error).sum()) <= _SETTLED * float(error.sum()):
                return made + 1
        self._move(of, effort.moves)
        return effort.rounds

    def _move(self, of: int, moves: int) -> None:
        rows = self.rows()
        descend_values(rows, _SWEEPS)
        if not moves:
            return
        if not bool(self.mask.all()):
            exchange_entries(rows, of, _CANDIDATES, moves)
        step_pairs(rows, _CANDIDATES, moves)
        descend_values(rows, _SWEEPS)

    def _refit(self) -> Tensor:
        """Refit the scales of the rows whose loss that lowers; returns the errors of all rows."""
        codes = codes_of(self.weight, self.scales, self.grid)
        scales = refit_scales(codes, self.scales, self.problem, self.grid, self.dtype)
        weight = codes * over_columns(scales, self.grid, codes.shape[1])
        gradient = self.problem.gradient(weight)
        error, refitted = self.error(), _error(weight, self.centre, gradient)
        better = (refitted < error)[:, None]
        self.weight = torch.where(better, weight, self.weight)
        self.scales = torch.where(better, scales, self.scales)
        self.gradient = torch.where(better, gradient, self.gradient)
        return torch.minimum(refitted, error)


def _error(weight: Tensor, centre: Tensor, gradient: Tensor) -> Tensor:
    """(v - c) H (v - c)^T / 2 of every row, from the gradient (v - c) H."""
    return 0.5 * ((weight - centre) * gradient).sum(1)
