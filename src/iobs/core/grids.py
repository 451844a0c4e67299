"""Stored form of weights on a grid: codes, 16-bit scales, and their bits.

A weight is code * scale, computed in the dtype of the weights. Scales are float16 numbers, or bfloat16 where float16
under- or overflows, so a float32 weight is the exact product. Codes and scales can therefore be read back from the
weights alone: files need no further tensors.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from iobs.core.patterns import NM, Grid, Pattern, Rate, SparseGrid, Unstructured
from iobs.core.slices import is_exact, slices
from iobs.errors import PatternError

SCALE_BITS = 16
# Number of 16-bit numbers on each side of the quotient that may be the scale of rounded products. First in the dtype of
# the weights, then in the other 16-bit dtype: float32 weights with float16 scales may be written as bfloat16.
_NEIGHBOURS, _FAR_NEIGHBOURS = 2, 8
_FEW_ROWS = 4  # tried first: most matrices that are asked about are on no grid, and fail in them


def grid_of(pattern: Pattern) -> Grid | None:
    """The grid of a pattern; None if its values are free."""
    if isinstance(pattern, SparseGrid):
        return pattern.grid
    return pattern if isinstance(pattern, Grid) else None


def by_channel(pattern: Pattern, columns: int, kernel: int) -> Tensor | None:
    """The order of the columns of an unfolded convolution in which groups of N:M are neighbours; None: as they are.

    The columns are (input channels, positions of the kernel). Sparse tensor cores read groups of input channels at one
    position, so there the channels run fastest. The columns stay as they are under a grid whose scales divide a row,
    and where the groups do not divide the channels, as of patches of three colours.

    Args:
        pattern: of the layer.
        columns: of the matrix.
        kernel: positions of the kernel; 1 for a linear layer.
    """
    grid, entries = grid_of(pattern), entries_of(pattern)
    if kernel == 1 or not isinstance(entries, NM) or columns // kernel % entries.of:
        return None
    if grid is not None and grid.scales(columns) > 1:
        return None
    return torch.arange(columns).view(-1, kernel).T.flatten()


def entries_of(pattern: Pattern) -> Pattern:
    """The pattern without its grid or rate; a pattern that keeps all entries if it has no zeros."""
    if isinstance(pattern, SparseGrid):
        return pattern.pattern
    if isinstance(pattern, Rate) and pattern.zeros is not None:
        return pattern.zeros
    return Unstructured(0.0) if isinstance(pattern, (Grid, Rate)) else pattern


def on_grid_of(pattern: Pattern, entries: Pattern) -> Pattern:
    """Other entries with values on the grid of a pattern, if it has one."""
    grid = grid_of(pattern)
    return entries if grid is None else entries & grid


def over_columns(scales: Tensor, grid: Grid, columns: int) -> Tensor:
    """Scale of every entry, (rows, columns), from one for every group of columns, (rows, groups)."""
    return scales.repeat_interleave(grid.width(columns), 1)[:, :columns]


def in_16_bits(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales rounded to 16 bits, in their own dtype.

    Args:
        scales: positive, floating.
        dtype: of the weights. A 16-bit dtype is that of the scales, too.
    """
    if dtype in (torch.float16, torch.bfloat16):
        return scales.to(dtype).to(scales.dtype)
    small, large = torch.finfo(torch.float16).smallest_normal, torch.finfo(torch.float16).max
    fits = bool(((scales >= small) & (scales <= large)).all())
    return scales.to(torch.float16 if fits else torch.bfloat16).to(scales.dtype)


def snapped(weight: Tensor, scales: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """Weights with the same codes, scales of 16 bits, and values of a dtype.

    Args:
        weight: (rows, columns), codes times scales.
        scales: (rows, groups).
        grid: the grid.
        dtype: of the stored weights.

    Returns:
        (rows, columns), in the dtype.
    """
    codes = (weight / over_columns(scales, grid, weight.shape[1])).round() + 0.0  # as codes have no negative zero
    wide = torch.promote_types(dtype, torch.float32)
    spread = over_columns(in_16_bits(scales, dtype), grid, weight.shape[1])
    return (codes.to(wide) * spread.to(wide)).to(dtype)


def codes_and_scales(weight: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Codes and scales with which weights are exactly codes times scales.

    Products are rounded to the narrowest dtype that holds all weights: a model that is stored in 16 bits may be loaded
    in 32. Of several pairs for a group of columns the one with the largest codes is returned.

    Args:
        weight: (rows, columns), floating.
        grid: the grid.

    Returns:
        Codes (rows, columns), int8, and scales (rows, groups), float32 numbers of at most 16 bits; 1 where all weights
        of a group are zero.

    Raises:
        PatternError: a group is not on the grid; names its row and its columns.
    """
    rows, columns = weight.shape
    if rows > _FEW_ROWS:
        codes_and_scales(weight[:_FEW_ROWS], grid)
    dtype, groups = _narrowest(weight), grid.scales(columns)
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(rows, groups, device=weight.device)
    for part in slices(weight.shape):
        padded = torch.nn.functional.pad(weight[part].to(dtype), (0, groups * grid.width(columns) - columns))
        codes_of_part, scales_of_part = _of_groups(
            padded.reshape(-1, grid.width(columns)), grid, part.start * groups, columns
        )
        codes[part] = codes_of_part.reshape(len(padded), -1)[:, :columns]
        scales[part] = scales_of_part.reshape(len(padded), groups)
    return codes, scales


def _of_groups(table: Tensor, grid: Grid, before: int, columns: int) -> tuple[Tensor, Tensor]:
    """Codes, (groups, width) int8, and scales, (groups,) float32, of groups of weights.

    Args:
        table: (groups, width).
        grid: the grid.
        before: number of groups of the matrix before these.
        columns: of the matrix.

    Raises:
        PatternError: as `codes_and_scales`.
    """
    codes = torch.zeros_like(table, dtype=torch.int8)
    scales = torch.ones(len(table), device=table.device)
    remaining = table.any(1).nonzero()[:, 0]
    halves = sorted((torch.float16, torch.bfloat16), key=lambda half: half is not table.dtype)
    ways = [(half, shift) for half in halves for shift in _shifts(half, table.dtype)]
    # The first group says for all levels at once whether it is on the grid.
    levels = torch.arange(grid.levels, 0, -1, device=table.device)[:, None]
    if len(remaining) and not any(bool(_divided(table[remaining[:1]], levels, *way, grid)[2].any()) for way in ways):
        raise _off_grid(before + int(remaining[0]), grid, columns)
    for level, (half, shift) in itertools.product(range(grid.levels, 0, -1), ways):
        if not len(remaining):
            break
        quotients, scale, exact = _divided(table[remaining], level, half, shift, grid)
        done = remaining[exact]
        codes[done], scales[done] = quotients[exact].to(torch.int8), scale[exact, 0].float()
        remaining = remaining[~exact]
    if len(remaining):
        raise _off_grid(before + int(remaining[0]), grid, columns)
    return codes, scales


def _divided(
    values: Tensor, level: Tensor | int, half: torch.dtype, shift: int, grid: Grid
) -> tuple[Tensor, Tensor, Tensor]:
    """Groups of values over the scale that gives the largest of them a level.

    Args:
        values: (groups, width).
        level: of the largest value; or (levels, 1), for one group.
        half: 16-bit dtype of the scale.
        shift: steps from the scale to another number of this dtype.
        grid: the grid.

    Returns:
        Rounded quotients, (groups, width); scales, (groups, 1); and True where the group is on the grid, (groups,).
    """
    wide = torch.promote_types(values.dtype, torch.float32)
    scale = _shifted((values.abs().amax(1, keepdim=True).to(wide) / level).to(half), shift).to(wide)
    quotients = (values.to(wide) / scale).round_()
    exact = ((quotients * scale).to(values.dtype) == values).all(1)
    return quotients, scale, exact & (quotients.abs().amax(1) <= grid.levels)


def _off_grid(place: int, grid: Grid, columns: int) -> PatternError:
    """The error for the group at a place, counted along the rows of a matrix of some columns."""
    row, group = divmod(place, grid.scales(columns))
    first, last = group * grid.group, min((group + 1) * grid.group, columns) - 1
    return PatternError(f"The weights of row {row}, columns {first} to {last}, are not on the grid {grid}.")


def _narrowest(weight: Tensor) -> torch.dtype:
    """The dtype of the fewest significant bits that holds all weights."""
    halves = (torch.bfloat16, torch.float16) if weight.dtype.itemsize > 2 else ()
    return next((half for half in halves if is_exact(weight, half)), weight.dtype)


def _shifts(half: torch.dtype, dtype: torch.dtype) -> list[int]:
    """Steps from the quotient to try, the nearest first: none if products in the dtype are exact."""
    if dtype.itemsize > 2:
        return [0]
    reach = _NEIGHBOURS if half is dtype else _FAR_NEIGHBOURS
    return sorted(range(-reach, reach + 1), key=abs)


def _shifted(values: Tensor, steps: int) -> Tensor:
    """The positive 16-bit numbers that lie some steps above or below; the least number instead of none."""
    return (values.view(torch.int16) + steps).clamp_(min=1).view(values.dtype)


def stored_bits(pattern: Pattern, shape: tuple[int, int]) -> int | None:
    """Bits of a matrix on a grid: values of the kept entries, a mask of one bit an entry, and scales of 16 bits.

    A matrix that keeps all entries needs no mask. None if the values are not on a grid.
    """
    grid = grid_of(pattern)
    if grid is None:
        return None
    groups = pattern.groups(shape)
    entries, kept = groups.count * groups.size, groups.count * groups.keep
    mask = entries if kept < entries else 0
    return kept * grid.bits + mask + shape[0] * grid.scales(shape[1]) * SCALE_BITS
