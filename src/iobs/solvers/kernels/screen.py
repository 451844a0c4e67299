"""1-swaps among candidate columns of each row; the other members of the support are always at their optimum.

Let Q be the candidate columns, F the other members and H_FF = L L^T. Let X = L^-1 H_FQ. Minimised
over F, the quadratic on Q has the Hessian H_QQ - X^T X and the linear term b_Q - X^T L^-1 b_F.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core import linalg
from iobs.core.partition import Partition
from iobs.errors import NotPositiveDefiniteError
from iobs.solvers.kernels.swaps import RowState, swap_until_optimal
from iobs.solvers.kernels.threads import over_rows


@dataclass
class Rows:
    """State of the search in all rows, changed in place.

    Attributes:
        mask: boolean (rows, d) contiguous.
        weight: float32 (rows, d) contiguous, the optimum on the mask for rows that were searched.
        prices: float32 (rows, 3). Column 0 is twice the cost of the cheapest removal. Column 1 is twice the gain of the
            best admission. Column 2 is the scale b H^-1 b of the row on its support.
        names: int64 (rows, 2): columns of the cheapest removal and of the best admission.
        swaps: int64 (rows,), number of swaps made.
    """

    mask: Tensor
    weight: Tensor
    prices: Tensor
    names: Tensor
    swaps: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """The attributes, in their order."""
        return self.mask, self.weight, self.prices, self.names, self.swaps

    @classmethod
    def of(cls, mask: Tensor, weight: Tensor) -> Rows:
        """State before the search; the tensors are not copied."""
        rows = len(mask)
        prices = torch.tensor([torch.inf, 0.0, 0.0], device=mask.device).repeat(rows, 1)
        names = torch.zeros(rows, 2, dtype=torch.int64, device=mask.device)
        return cls(mask, weight, prices, names, torch.zeros(rows, dtype=torch.int64, device=mask.device))


def swap_rows(
    rows: Rows, hessian: Tensor, linear: Tensor, slots: Tensor, groups: Partition, tolerance: float, limit: int
) -> None:
    """In each row make the best swap among its candidate columns until no swap gains more than the tolerance.

    Rows with members that cannot be factorised are left unchanged.

    Args:
        rows: state to change.
        hessian: float32 (d, d) contiguous.
        linear: float32 (rows, d) contiguous.
        slots: int64 (rows, slots): candidate columns of each row, members first, for N:M in whole groups; -1 is
            padding. Rows with padding only are skipped.
        groups: groups of the pattern.
        tolerance: least gain of a swap, relative to the scale of the row.
        limit: largest number of swaps in each row.
    """
    if hessian.device.type == "cpu":
        swap_rows_numba(rows, hessian, linear, slots, groups, tolerance, limit)
        return
    # One row after another, with a decision after each swap, would leave a GPU idle. Cores of the CPU share the rows.
    copies = Rows(*(tensor.cpu() for tensor in rows.tensors()))
    swap_rows_numba(copies, hessian.cpu(), linear.cpu(), slots.cpu(), groups, tolerance, limit)
    for original, copied in zip(rows.tensors(), copies.tensors(), strict=True):
        original.copy_(copied)


def swap_rows_numba(
    rows: Rows, hessian: Tensor, linear: Tensor, slots: Tensor, groups: Partition, tolerance: float, limit: int
) -> None:
    """Numba form of `swap_rows`."""
    from iobs.solvers.kernels import screen_numba

    matrix, right, columns = hessian.numpy(), linear.numpy(), slots.contiguous().numpy()
    mask, weight, prices = rows.mask.numpy(), rows.weight.numpy(), rows.prices.numpy()
    names, swaps = rows.names.numpy(), rows.swaps.numpy()
    keep, size = groups.keep, groups.size

    def part(start: int, stop: int) -> None:
        screen_numba.swap_rows(
            start, stop, matrix, right, mask, weight, columns, keep, size, tolerance, limit, prices, names, swaps
        )

    over_rows(part, len(right))


def swap_rows_torch(
    rows: Rows, hessian: Tensor, linear: Tensor, slots: Tensor, groups: Partition, tolerance: float, limit: int
) -> None:
    """Torch form of `swap_rows`: the plain reference that the numba form is tested against."""
    for row, columns in enumerate(slots):
        inside, outside = groups.keep, groups.size - groups.keep
        columns = columns[columns >= 0]
        if len(columns) == 0:
            continue
        if groups.size >= len(hessian):
            inside = int(rows.mask[row, columns].sum())
            outside = len(columns) - inside
        with suppress(NotPositiveDefiniteError):  # raised before the row is changed
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
    towards, reached = half[:, :-1], half[:, -1]
    small = hessian.index_select(0, columns).index_select(1, columns).addmm_(towards.T, towards, alpha=-1)
    reduced = linear[columns] - reached @ towards
    state = RowState.build(small, reduced, inner)
    scale = float(reached @ reached) + float(state.weight @ reduced[inner])
    rows.swaps[row] += swap_until_optimal(state, small, *slots, tolerance * scale, limit)
    members, rest = columns[state.support], columns[state.rest]
    mask[rest], mask[members] = False, True
    rows.weight[row] = 0
    rows.weight[row, members] = state.weight
    following = (reached - towards.index_select(1, state.support) @ state.weight)[:, None]
    rows.weight[row, others] = torch.linalg.solve_triangular(lower.T, following, upper=True)[:, 0]
    rows.prices[row, 2] = scale
    rows.prices[row, 0], rows.prices[row, 1] = torch.inf, 0.0
    if len(members):
        rows.prices[row, 0], cheapest = state.removals().min(0)
        rows.names[row, 0] = members[cheapest]
    if len(rest):
        rows.prices[row, 1], best = state.admissions().max(0)
        rows.names[row, 1] = rest[best]
