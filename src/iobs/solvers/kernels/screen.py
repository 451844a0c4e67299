"""1-swaps among some columns of each row, all other members of the support following.

With F the members that take no part, Q the columns that do and H_FF = L L^T, the quadratic on Q alone, its F always at
their optimum, has the Hessian H_QQ - X^T X and the linear term b_Q - X^T L^-1 b_F, where X = L^-1 H_FQ.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from iobs.core import linalg
from iobs.core.patterns import Groups
from iobs.errors import NotPositiveDefiniteError
from iobs.solvers.kernels.swaps import RowState, polish
from iobs.solvers.kernels.threads import over_rows


@dataclass
class Rows:
    """All rows, changed in place.

    Attributes:
        mask: boolean (rows, d) contiguous.
        weight: float32 (rows, d) contiguous, the optimum on the mask once a row has been searched.
        prices: float32 (rows, 3): twice what the cheapest removal of a candidate costs, twice what the best admission
            gains, and the row's scale b H^-1 b on its support.
        names: int64 (rows, 2): the columns of that removal and that admission.
        swaps: int64 (rows,), made.
    """

    mask: Tensor
    weight: Tensor
    prices: Tensor
    names: Tensor
    swaps: Tensor

    @classmethod
    def of(cls, mask: Tensor, weight: Tensor) -> Rows:
        """Before any search; the tensors are kept, not copied."""
        rows = len(mask)
        prices = torch.tensor([torch.inf, 0.0, 0.0], device=mask.device).repeat(rows, 1)
        names = torch.zeros(rows, 2, dtype=torch.int64, device=mask.device)
        return cls(mask, weight, prices, names, torch.zeros(rows, dtype=torch.int64, device=mask.device))


def swap_rows(
    rows: Rows, hessian: Tensor, linear: Tensor, slots: Tensor, groups: Groups, tolerance: float, limit: int
) -> None:
    """Make the best swap among a row's columns until none gains more than the tolerance; a row at a time.

    A row whose members cannot be factorised stays as it is.

    Args:
        rows: to search.
        hessian: float32 (d, d) contiguous.
        linear: float32 (rows, d) contiguous.
        slots: int64 (rows, slots): the columns of each row, its members first, for N:M in whole groups; -1 for none. A
            row without any rests.
        groups: of the pattern.
        tolerance: least gain, relative to the row's scale.
        limit: swaps in a row.
    """
    if hessian.device.type == "cpu":
        swap_rows_numba(rows, hessian, linear, slots, groups, tolerance, limit)
    else:
        swap_rows_torch(rows, hessian, linear, slots, groups, tolerance, limit)


def swap_rows_numba(
    rows: Rows, hessian: Tensor, linear: Tensor, slots: Tensor, groups: Groups, tolerance: float, limit: int
) -> None:
    """The CPU form."""
    from iobs.solvers.kernels import screen_numba

    problem: Any = tuple(tensor.numpy() for tensor in (hessian, linear, rows.mask, rows.weight, slots.contiguous()))
    found: Any = tuple(tensor.numpy() for tensor in (rows.prices, rows.names, rows.swaps))
    kernel: Any = screen_numba.swap_rows
    options = (groups.keep, groups.size, tolerance, limit)
    over_rows(lambda start, stop: kernel(start, stop, *problem, *options, *found), len(linear))


def swap_rows_torch(
    rows: Rows, hessian: Tensor, linear: Tensor, slots: Tensor, groups: Groups, tolerance: float, limit: int
) -> None:
    """The plain form."""
    for row, columns in enumerate(slots):
        inside, outside = groups.keep, groups.size - groups.keep
        columns = columns[columns >= 0]
        if len(columns) == 0:
            continue
        if groups.size >= len(hessian):
            inside = int(rows.mask[row, columns].sum())
            outside = len(columns) - inside
        with suppress(NotPositiveDefiniteError):  # raised before anything of the row is written
            _swap_row_torch(rows, row, hessian, linear[row], columns, (inside, outside), tolerance, limit)


def _swap_row_torch(
    rows: Rows,
    row: int,
    hessian: Tensor,
    linear: Tensor,
    columns: Tensor,
    slots: tuple[int, int],
    tolerance: float,
    limit: int,
) -> None:
    mask = rows.mask[row]
    inner = mask[columns]
    fixed = mask.clone()
    fixed[columns] = False
    others = fixed.nonzero().flatten()
    block = hessian.index_select(0, others)
    lower = linalg.cholesky(block.index_select(1, others))
    right = torch.cat([block.index_select(1, columns), linear[others, None]], 1)
    half = torch.linalg.solve_triangular(lower, right, upper=False)
    towards, own = half[:, :-1], half[:, -1]
    small = hessian.index_select(0, columns).index_select(1, columns).addmm_(towards.T, towards, alpha=-1)
    reduced = linear[columns] - own @ towards
    state = RowState.build(small, reduced, inner)
    scale = float(own @ own) + float(state.weight @ reduced[inner])
    rows.swaps[row] += polish(state, small, *slots, tolerance * scale, limit)
    members, rest = columns[state.support], columns[state.rest]
    mask[rest], mask[members] = False, True
    rows.weight[row] = 0
    rows.weight[row, members] = state.weight
    following = (own - towards.index_select(1, state.support) @ state.weight)[:, None]
    rows.weight[row, others] = torch.linalg.solve_triangular(lower.T, following, upper=True)[:, 0]
    rows.prices[row, 2] = scale
    rows.prices[row, 0], rows.prices[row, 1] = torch.inf, 0.0
    if len(members):
        rows.prices[row, 0], cheapest = state.removals().min(0)
        rows.names[row, 0] = members[cheapest]
    if len(rest):
        rows.prices[row, 1], best = state.admissions().max(0)
        rows.names[row, 1] = rest[best]
