"""Grids of a layer: rounding to a grid, the choice of scales, and their best values for given codes."""

from __future__ import annotations

import torch
from torch import Tensor

from iobs.core.grids import entries_of, grid_of, over_columns
from iobs.core.patterns import Grid, Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.errors import PatternError

_SHRINKS = 26  # candidates for a scale, between half of the largest value and the largest value over the levels
_SYSTEMS = 1 << 26  # entries of the equations for scales that are in memory at once
ACCURATE = 2048  # columns up to which grids are searched in float64


def parts(pattern: Pattern) -> tuple[Pattern, Grid]:
    """The pattern of the kept entries, and their grid.

    Raises:
        PatternError: the pattern has no grid.
    """
    grid = grid_of(pattern)
    if grid is None:
        raise PatternError(f"Solvers on a grid take iobs.Grid or a pattern & iobs.Grid, got {pattern}.")
    return entries_of(pattern), grid


def working_dtype(problem: Quadratic) -> torch.dtype:
    """Dtype of the search: float64 up to 2,048 columns, else that of the problem."""
    return torch.float64 if problem.shape[1] <= ACCURATE else problem.dtype


def rounded(values: Tensor, scale: Tensor, levels: int) -> Tensor:
    """Nearest points of the grid."""
    return (values / scale).round_().clamp_(-levels, levels) * scale


def search_scales(values: Tensor, mask: Tensor, diagonal: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """Scale of every row and group of columns with the least rounding error in the metric of diag(H), (rows, groups).

    Args:
        values: (rows, columns).
        mask: boolean (rows, columns), entries that are rounded; the others do not count.
        diagonal: (columns,), diagonal of H.
        grid: the grid.
        dtype: the scales are numbers of this dtype, so that a value is one product in it.
    """
    scales = []
    for first in range(0, values.shape[1], grid.group):
        part = slice(first, first + grid.group)
        entries, kept = values[:, part], mask[:, part]
        weight = diagonal[part] * kept
        largest = (entries.abs() * kept).amax(1, keepdim=True)
        largest = torch.where(largest > 0, largest, torch.ones_like(largest)) / grid.levels
        best = torch.full_like(largest, torch.inf)
        scale = largest.clone()
        for shrink in torch.linspace(1.0, 0.5, _SHRINKS).tolist():
            trial = (largest * shrink).to(dtype)
            trial = trial.masked_fill(trial == 0, torch.finfo(dtype).tiny).to(values.dtype)  # it may underflow
            error = ((rounded(entries, trial, grid.levels) - entries).square_() * weight).sum(1, keepdim=True)
            better = error < best
            best, scale = torch.where(better, error, best), torch.where(better, trial, scale)
        scales.append(scale)
    return torch.cat(scales, 1)


def refit_scales(codes: Tensor, scales: Tensor, problem: Quadratic, grid: Grid, dtype: torch.dtype) -> Tensor:
    """The best scales of every row for fixed codes, by the normal equations in the scales of the row.

    Args:
        codes: (rows, columns) whole numbers.
        scales: (rows, groups), used where all codes of a group are zero.
        problem: the quadratic, in the dtype of the codes.
        grid: the grid.
        dtype: the scales are numbers of this dtype.

    Returns:
        Scales (rows, groups). Rows whose equations are singular, or need a scale that is not positive, keep theirs.
    """
    size = max(1, _SYSTEMS // scales.shape[1] ** 2)
    linear = torch.split(problem.linear, size)
    parts = zip(torch.split(codes, size), torch.split(scales, size), linear, strict=True)
    return torch.cat([_refitted(*part, problem.matrix, grid, dtype) for part in parts])


def _refitted(codes: Tensor, scales: Tensor, linear: Tensor, hessian: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """`refit_scales` for some rows."""
    rows, columns = codes.shape
    groups, width = scales.shape[1], grid.width(columns)

    def by_group(values: Tensor) -> Tensor:
        """Entries (rows, columns) as (rows, groups, width), with zeros behind the last column."""
        return torch.nn.functional.pad(values, (0, groups * width - columns)).reshape(rows, groups, width)

    padded = by_group(codes)
    system = codes.new_empty(rows, groups, groups)
    for group in range(groups):
        span = slice(group * width, min((group + 1) * width, columns))
        system[:, group] = (by_group(codes[:, span] @ hessian[span]) * padded).sum(2)
    right = by_group(codes * linear).sum(2)
    empty = ~padded.any(2)
    system.diagonal(dim1=1, dim2=2)[empty] = 1
    right = torch.where(empty, scales, right)
    factor, info = torch.linalg.cholesky_ex(system)
    fitted = torch.cholesky_solve(right[:, :, None], factor)[:, :, 0].to(dtype).to(scales.dtype)
    usable = (info == 0) & torch.isfinite(fitted).all(1) & (fitted > 0).all(1)
    return torch.where(usable[:, None], fitted, scales)


def on_grid(problem: Quadratic, codes: Tensor, scales: Tensor, mask: Tensor, grid: Grid, **stats: object) -> Solution:
    """Solution whose weights are codes times scales in the dtype of the problem.

    `stats["scales"]` holds the scales (rows, groups) in that dtype; weight / scale is the whole number of each entry.
    """
    scales = scales.to(problem.dtype)
    weight = codes.to(problem.dtype) * over_columns(scales, grid, codes.shape[1])
    return Solution.of(problem, weight, mask, scales=scales, **stats)
