"""Weight matrices as whole numbers times scales, in groups of columns. A zero weight always has the code 0."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from iobs.core.grids import codes_and_scales, over_columns
from iobs.core.patterns import Grid
from iobs.errors import PatternError

_LEAST, _MOST = 2.0**-24, 65504.0  # positive float16 numbers: scales of all formats fit into them
_FACTORS = 16  # scales that are tried for 4 bits
_GROUP = 32  # columns that share a scale where weights are rounded to 4 bits
_GRIDS = (128, 64, _GROUP)  # groups of grids that are looked for
_FEW_ROWS = 4  # tried first: a matrix that is not on the grid fails in them


@dataclass(frozen=True)
class Codes:
    """A matrix of whole numbers times scales.

    Attributes:
        codes: (rows, columns), int8, from -(2^(bits-1) - 1) to 2^(bits-1) - 1.
        scales: (rows, groups), float32, representable in float16.
        group: neighbouring columns that share a scale; the last group may be shorter.
        bits: of a code.
        exact: the products are the weights; otherwise the weights were rounded.
    """

    codes: Tensor
    scales: Tensor
    group: int
    bits: int
    exact: bool

    @property
    def weight(self) -> Tensor:
        """The products, (rows, columns), float32."""
        return self.codes.float() * over_columns(self.scales, Grid(self.bits, self.group), self.codes.shape[1])


def codes_of(weight: Tensor, bits: int, group: int) -> Codes:
    """The codes of a matrix: its own if it lies on such a grid, otherwise the nearest codes.

    Args:
        weight: (rows, columns), floating, finite.
        bits: 2 to 8.
        group: columns that share a scale.
    """
    return exact_codes(weight, bits, group) or nearest_codes(weight, bits, group)


def choose_codes(matrix: Tensor, bits: int | None, whole: bool = False) -> Codes | None:
    """The codes of a matrix for formats with any group: its own, or the nearest ones if bits are given.

    Args:
        matrix: (rows, columns), floating, finite.
        bits: 8 gets one scale a row, 4 one for 32 columns; None: None is returned for a matrix on no grid.
        whole: groups must divide the number of columns; a row is a group where none does.
    """
    columns = matrix.shape[1]
    groups = [group for group in _GRIDS if group < columns and not (whole and columns % group)]
    for count in (4, 8) if bits is None else (bits,):
        for group in (columns, *groups):
            codes = exact_codes(matrix, count, group)
            if codes is not None:
                return codes
    if bits is None:
        return None
    return nearest_codes(matrix, bits, columns if bits == 8 or groups[-1:] != [_GROUP] else _GROUP)


def exact_codes(weight: Tensor, bits: int, group: int) -> Codes | None:
    """The codes of a matrix on a grid, with scales in float16; None if the matrix is on no such grid."""
    grid = Grid(bits, group)
    try:
        codes_and_scales(weight[:_FEW_ROWS], grid)
        codes, scales = codes_and_scales(weight, grid)
    except PatternError:
        return None
    return Codes(codes, scales, group, bits, True) if torch.equal(scales.half().float(), scales) else None


def nearest_codes(weight: Tensor, bits: int, group: int) -> Codes:
    """The nearest codes for scales of least squared error among some, one for each row and group of columns."""
    grid = Grid(bits, group)
    rows, columns = weight.shape
    groups = grid.scales(columns)
    table = torch.nn.functional.pad(weight.float(), (0, groups * group - columns)).reshape(rows * groups, group)
    largest = table.abs().amax(1, keepdim=True) / grid.levels
    best, error = _half(largest), torch.full_like(largest, torch.inf)
    for step in range(_FACTORS if bits <= 4 else 1):
        scale = _half(largest * (1 - 0.5 * step / _FACTORS))
        squares = (_codes(table, scale, grid) * scale - table).square().sum(1, keepdim=True)
        best, error = torch.where(squares < error, scale, best), torch.minimum(squares, error)
    codes = _codes(table, best, grid).to(torch.int8).reshape(rows, -1)[:, :columns].contiguous()
    return Codes(codes, best.reshape(rows, groups), group, bits, False)


def _half(scale: Tensor) -> Tensor:
    """Scales as float16 numbers, none of them zero or infinite."""
    return scale.clamp(_LEAST, _MOST).half().float()


def _codes(table: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    return (table / scale).round_().clamp_(-grid.levels, grid.levels)


def in_pairs(codes: Tensor) -> npt.NDArray[np.uint8]:
    """The int8 codes of 4 bits as bytes, ceil(entries / 2); two codes share a byte, the first one in its lower half."""
    values: npt.NDArray[np.uint8] = codes.contiguous().numpy().reshape(-1).view(np.uint8) & np.uint8(15)
    values = np.append(values, np.zeros(len(values) % 2, np.uint8))
    return values[::2] | (values[1::2] << np.uint8(4))
