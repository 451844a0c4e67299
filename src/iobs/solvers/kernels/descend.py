"""Coordinate descent over values on a grid, and moves of two entries at once, in every row.

With g = v H - b, changing entry j by t changes the loss of a row by g_j t + H_jj t^2 / 2. Changing i and j together
changes it by the sum of both and H_ij t_i t_j.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from iobs.solvers.kernels import over_rows

if TYPE_CHECKING:
    from iobs.solvers.kernels.descend_numba import GridArrays

_WIDE = 1024  # columns from which rows are swept in blocks
_BLOCK = 256  # columns of a block
_MOST_PAIRS = 1 << 24  # pairs of entries that the torch form of an exchange compares at once
_DENSE_CHANGES = 0.04  # share of changed values above which a matrix product is cheaper than a step for each of them


@dataclass(frozen=True)
class GridRows:
    """Rows of weights on a grid; the tensors are changed in place by the moves.

    Attributes:
        weight: (rows, d) contiguous, on the grid, zero outside the mask.
        gradient: (rows, d) contiguous, v H - b.
        mask: boolean (rows, d) contiguous.
        scales: (rows, groups) contiguous.
        hessian: (d, d) contiguous.
        group: columns that share a scale.
        levels: largest multiple of the scale.
    """

    weight: Tensor
    gradient: Tensor
    mask: Tensor
    scales: Tensor
    hessian: Tensor
    group: int
    levels: int

    def arrays(self) -> GridArrays:
        """The attributes with tensors as numpy arrays that share their memory."""
        from iobs.solvers.kernels.descend_numba import GridArrays

        weight, gradient, mask = self.weight.numpy(), self.gradient.numpy(), self.mask.numpy()
        return GridArrays(weight, gradient, mask, self.scales.numpy(), self.hessian.numpy(), self.group, self.levels)

    def spread(self) -> Tensor:
        """Scale of every entry, (rows, d)."""
        columns = self.weight.shape[1]
        return self.scales.repeat_interleave(min(self.group, columns), 1)[:, :columns]

    @property
    def compiled(self) -> bool:
        """True if the numba forms can run."""
        return self.weight.device.type == "cpu"


def descend_values(rows: GridRows, sweeps: int) -> None:
    """Set each kept entry in turn to its best value on the grid, for `sweeps` sweeps or until nothing changes.

    On a CPU, while many values change, wide rows are swept in blocks of columns with one matrix product after each.
    """
    if not rows.compiled:
        descend_values_torch(rows, sweeps)
        return
    from iobs.solvers.kernels import descend_numba as kernel

    if rows.weight.shape[1] >= _WIDE:
        enough = _DENSE_CHANGES * float(rows.mask.sum())
        while sweeps and _improvable(rows) > enough:
            _sweep_in_blocks(rows)
            sweeps -= 1
    _over_rows(kernel.values, rows, sweeps)


def exchange_entries(rows: GridRows, of: int, candidates: int, limit: int) -> None:
    """Exchange a kept entry and a removed one, which takes its best value, while that lowers the loss of the row.

    Args:
        rows: the rows.
        of: neighbouring columns within which entries are exchanged; d for the whole row.
        candidates: kept entries, and removed ones, that are compared in a whole row: those of least change alone.
        limit: largest number of exchanges in a row.
    """
    if not rows.compiled:
        exchange_entries_torch(rows, of, candidates, limit)
        return
    from iobs.solvers.kernels import descend_numba as kernel

    _over_rows(kernel.exchanges, rows, of, candidates, limit)


def step_pairs(rows: GridRows, candidates: int, limit: int) -> None:
    """Move two kept entries by one step of their grids each, while that lowers the loss of the row.

    Args:
        rows: the rows.
        candidates: steps of single entries that are compared, those of least change relative to their curvature.
        limit: largest number of moves in a row.
    """
    if not rows.compiled:
        step_pairs_torch(rows, candidates, limit)
        return
    from iobs.solvers.kernels import descend_numba as kernel

    _over_rows(kernel.pairs, rows, candidates, limit)


def descend_values_torch(rows: GridRows, sweeps: int) -> None:
    """Torch form of `descend_values`: sweeps in blocks of columns, with one matrix product after each block."""
    curvature, spread, columns = rows.hessian.diagonal(), rows.spread(), rows.weight.shape[1]
    for _ in range(sweeps):
        changed = torch.zeros((), dtype=torch.bool, device=rows.weight.device)  # read once a sweep: a GPU waits for it
        for first in range(0, columns, _BLOCK):
            span = slice(first, min(first + _BLOCK, columns))
            gradient, before = rows.gradient[:, span].clone(), rows.weight[:, span].clone()
            for j in range(span.start, span.stop):
                old, scale = rows.weight[:, j].clone(), spread[:, j]
                codes = ((old - gradient[:, j - first] / curvature[j]) / scale).round_()
                value = torch.where(rows.mask[:, j], codes.clamp_(-rows.levels, rows.levels) * scale, old)
                gradient.addr_(value - old, rows.hessian[j, span])
                rows.weight[:, j] = value
            step = rows.weight[:, span] - before
            changed |= step.any()
            rows.gradient.addmm_(step, rows.hessian[span])
        if not bool(changed):
            return


def exchange_entries_torch(rows: GridRows, of: int, candidates: int, limit: int) -> None:
    """Torch form of `exchange_entries`: compares all pairs of candidates of some rows at once."""
    columns = rows.weight.shape[1]
    compared = min(candidates, columns) ** 2 if of >= columns else columns * of
    size = max(1, _MOST_PAIRS // compared)
    for start in range(0, len(rows.weight), size):
        part = slice(start, start + size)
        tensors = rows.weight[part], rows.gradient[part], rows.mask[part], rows.scales[part]
        _exchange_in_rows(GridRows(*tensors, rows.hessian, rows.group, rows.levels), of, candidates, limit)


def _exchange_in_rows(rows: GridRows, of: int, candidates: int, limit: int) -> None:
    curvature, spread = rows.hessian.diagonal(), rows.spread()
    columns = rows.weight.shape[1]

    def entries(values: Tensor, index: Tensor) -> Tensor:
        """Entries of (rows, d) at an index (rows or 1, groups, n)."""
        return values.gather(1, index.flatten(1).expand(len(values), -1)).reshape(-1, *index.shape[1:])

    for _ in range(limit):
        leaving = (0.5 * curvature * rows.weight - rows.gradient) * rows.weight
        leaving = leaving.masked_fill(~rows.mask, torch.inf)
        if of >= columns:
            entering = (-0.5 * rows.gradient.square() / curvature).masked_fill(rows.mask, torch.inf)
            i, j = (_smallest(values, min(candidates, columns))[:, None] for values in (leaving, entering))
        else:
            i = j = torch.arange(columns, device=leaving.device).reshape(1, -1, of)
        crossed = rows.hessian[i[..., :, None], j[..., None, :]]
        gradient = entries(rows.gradient, j)[..., None, :] - crossed * entries(rows.weight, i)[..., :, None]
        scale, bending = entries(spread, j)[..., None, :], curvature[j][..., None, :]
        value = (-gradient / bending / scale).round_().clamp_(-rows.levels, rows.levels) * scale
        change = entries(leaving, i)[..., :, None] + (gradient + 0.5 * bending * value) * value
        change = change.masked_fill(entries(rows.mask, j)[..., None, :], torch.inf).flatten(1)
        best, at = change.min(1)
        active = (best < -_least(rows)).nonzero().flatten()
        if len(active) == 0:
            return
        at = at[active]
        n = i.shape[-1]
        first = at // n**2 * n  # of the group, in the flattened index
        leave, enter = (
            index.flatten(1).expand(len(rows.weight), -1)[active, first + place]
            for index, place in ((i, at % n**2 // n), (j, at % n))
        )
        new = value.flatten(1)[active, at]
        rows.gradient[active] += new[:, None] * rows.hessian[enter]
        rows.gradient[active] -= rows.weight[active, leave][:, None] * rows.hessian[leave]
        rows.weight[active, leave] = 0
        rows.weight[active, enter] = new
        rows.mask[active, leave], rows.mask[active, enter] = False, True


def step_pairs_torch(rows: GridRows, candidates: int, limit: int) -> None:
    """Torch form of `step_pairs`."""
    curvature, spread = rows.hessian.diagonal(), rows.spread()
    columns = rows.weight.shape[1]
    top = (rows.levels + 0.5) * spread
    for _ in range(limit):
        steps = torch.cat([spread, -spread], 1)
        both = torch.cat([rows.weight, rows.weight], 1) + steps
        single = torch.cat([rows.gradient, rows.gradient], 1) * steps + 0.5 * curvature.repeat(2) * steps.square()
        allowed = torch.cat([rows.mask, rows.mask], 1) & (both.abs() < torch.cat([top, top], 1))
        ratio = (single / (curvature.repeat(2) * steps.square())).masked_fill(~allowed, torch.inf)
        chosen = _smallest(ratio, min(candidates, 2 * columns))
        at, move = chosen % columns, steps.gather(1, chosen)
        alone = single.gather(1, chosen).masked_fill(~allowed.gather(1, chosen), torch.inf)
        crossed = rows.hessian[at[:, :, None], at[:, None, :]] * move[:, :, None] * move[:, None, :]
        change = alone[:, :, None] + alone[:, None, :] + crossed
        change = change.masked_fill(at[:, :, None] >= at[:, None, :], torch.inf).flatten(1)
        best, pair = change.min(1)
        active = (best < -_least(rows)).nonzero().flatten()
        if len(active) == 0:
            return
        pair = pair[active]
        for part in (pair // at.shape[1], pair % at.shape[1]):
            column, step = at[active, part], move[active, part]
            code = (rows.weight[active, column] / spread[active, column]).round_() + step.sign()
            rows.weight[active, column] = code * spread[active, column]
            rows.gradient[active] += step[:, None] * rows.hessian[column]


def _smallest(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` smallest values of each row, ascending: of equal moves the first is made."""
    indices: Tensor = values.sort(dim=1, stable=True).indices[:, :count]
    return indices.sort(dim=1).values


def _least(rows: GridRows) -> Tensor:
    """Least decrease of the loss that counts, (rows,): the rest is rounding."""
    size = (rows.hessian.diagonal() * rows.weight.square()).sum(1)
    return 64 * torch.finfo(rows.weight.dtype).eps * size


def _improvable(rows: GridRows) -> int:
    """The number of values that would change if all others stayed, about those that the next sweep changes."""
    from iobs.solvers.kernels import descend_numba as kernel

    arrays, changes = rows.arrays(), torch.zeros(len(rows.weight), dtype=torch.long)
    over_rows(lambda start, stop: kernel.improvable(start, stop, arrays, changes.numpy()), len(changes))
    return int(changes.sum())


def _sweep_in_blocks(rows: GridRows) -> None:
    """Make one sweep over the values of all rows."""
    from iobs.solvers.kernels import descend_numba as kernel

    count, columns = rows.weight.shape
    for first in range(0, columns, _BLOCK):
        span = slice(first, min(first + _BLOCK, columns))
        arrays = rows.arrays()._replace(hessian=rows.hessian[span, span].contiguous().numpy())
        step = torch.empty(count, span.stop - first, dtype=rows.weight.dtype)
        over_rows(lambda start, stop: kernel.block_values(start, stop, arrays, first, step.numpy()), count)  # noqa: B023
        rows.gradient.addmm_(step, rows.hessian[span])


def _over_rows(kernel: Callable[..., None], rows: GridRows, *options: int) -> None:
    arrays = rows.arrays()
    over_rows(lambda start, stop: kernel(start, stop, arrays, *options), len(rows.weight))
