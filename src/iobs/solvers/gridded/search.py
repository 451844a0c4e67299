"""Best known weights on a grid: mask of ADMM, rounding with feedback, then descent over values, entries and scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core import linalg
from iobs.core.grids import over_columns
from iobs.core.patterns import Grid, Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.solvers.admm import ADMM
from iobs.solvers.gridded.baselines import codes_of
from iobs.solvers.gridded.feedback import BLOCK, feed_back, feed_back_on_support
from iobs.solvers.gridded.lattice import (
    on_grid,
    parts,
    refit_scales,
    rounded,
    search_scales,
    working_dtype,
)
from iobs.solvers.kernels.descend import GridRows, descend_values, exchange_entries, step_pairs
from iobs.solvers.options import require_budget
from iobs.solvers.protocols import Budget

_FEEDBACK = 1 << 38  # rows x (kept entries of a row)^3 up to which each row gets feedback through its own support
_SWEEPS = 30  # of the values in a round; they end once nothing changes
_CANDIDATES = 48  # entries, or steps, that moves of two entries compare
_MOVES = 64  # moves of two entries in a row, in a round
_SETTLED = 1e-4  # relative decrease of the loss below which a further round is not worth its time
_ROUNDS = {"fast": 1, "default": 6, "best": 30}


@dataclass(frozen=True)
class GridSearch:
    """ADMM chooses the entries; rounding with error feedback, coordinate descent and new scales choose the values.

    A round sets values one by one, exchanges kept and removed entries, moves two values at once, and refits the scales
    of each row in closed form. No step raises the loss of a row.

    Args:
        budget: "fast", "default" or "best", time against error: 1, 6 or 30 rounds.

    Raises:
        ProblemError: any other budget.
    """

    budget: Budget = "default"

    def __post_init__(self) -> None:
        require_budget(self.budget)

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Weights on the grid with the exact counts of the pattern; `stats["scales"]` has the scales (rows, groups)."""
        sparse, grid = parts(pattern)
        wide = problem.to(working_dtype(problem))
        groups = sparse.groups(problem.shape)
        if groups.keep == groups.size:
            centre, mask = wide.centre(), torch.ones(problem.shape, dtype=torch.bool, device=problem.device)
        else:
            found = ADMM(self.budget)(problem, sparse)
            centre, mask = found.weight.to(wide.dtype), found.mask.clone()
        scales = search_scales(centre, mask, wide.matrix.diagonal(), grid, problem.dtype)
        start = _start(wide, centre, mask, scales, grid)
        state = _State(wide, grid, start, mask.contiguous(), scales, problem.dtype)
        rounds = state.descend(min(groups.size, problem.shape[1]), _ROUNDS[self.budget])
        return on_grid(
            problem, codes_of(state.weight, state.scales, grid), state.scales, state.mask, grid, rounds=rounds
        )


def _start(problem: Quadratic, centre: Tensor, mask: Tensor, scales: Tensor, grid: Grid) -> Tensor:
    """Rounded weights: with feedback through the support of each row if that is affordable, else to nearest."""
    spread = over_columns(scales, grid, centre.shape[1])
    if bool(mask.all()):
        upper = linalg.upper_factor(problem.matrix)
        return feed_back(
            centre,
            upper,
            lambda _, own: lambda values, j: rounded(values, spread[:, own.start + j], grid.levels),
            BLOCK,
        )
    if len(mask) * int(mask.sum(1).max()) ** 3 <= _FEEDBACK:
        best = linalg.solve_on_support(problem.matrix, problem.linear, mask).to(centre.dtype)
        return feed_back_on_support(best, problem.matrix, mask, scales, grid)
    return rounded(centre, spread, grid.levels) * mask


class _State:
    """Weights on the grid during the descent."""

    def __init__(
        self, problem: Quadratic, grid: Grid, weight: Tensor, mask: Tensor, scales: Tensor, dtype: torch.dtype
    ) -> None:
        self.problem = problem
        self.grid = grid
        self.weight = weight
        self.mask = mask
        self.scales = scales
        self.dtype = dtype

    def descend(self, of: int, rounds: int) -> int:
        """Lower the loss until it has settled or the rounds end; returns the number of rounds."""
        loss = self.problem.loss(self.weight)
        for made in range(rounds):
            before = loss
            self._move(of)
            loss = self._refit(self.problem.loss(self.weight))
            if float((before - loss).sum()) <= _SETTLED * self._size(loss):
                return made + 1
        self._move(of)
        return rounds

    def _size(self, loss: Tensor) -> float:
        """Loss above that of the dense minimiser: the error of the layer."""
        return float((loss - self.problem.loss(self.problem.centre())).sum())

    def _move(self, of: int) -> None:
        gradient = self.problem.gradient(self.weight).contiguous()
        hessian = self.problem.matrix.contiguous()
        scales = self.scales.contiguous()
        rows = GridRows(self.weight, gradient, self.mask, scales, hessian, self.grid.group, self.grid.levels)
        descend_values(rows, _SWEEPS)
        if not bool(self.mask.all()):
            exchange_entries(rows, of, _CANDIDATES, _MOVES)
        step_pairs(rows, _CANDIDATES, _MOVES)
        descend_values(rows, _SWEEPS)

    def _refit(self, loss: Tensor) -> Tensor:
        """Refit the scales of the rows whose loss that lowers; returns the losses."""
        codes = codes_of(self.weight, self.scales, self.grid)
        scales = refit_scales(codes, self.scales, self.problem, self.grid, self.dtype)
        weight = codes * over_columns(scales, self.grid, codes.shape[1])
        refitted = self.problem.loss(weight)
        better = refitted < loss
        self.weight = torch.where(better[:, None], weight, self.weight)
        self.scales = torch.where(better[:, None], scales, self.scales)
        return torch.where(better, refitted, loss)
