"""Rounding from left to right with error feedback: each error is made good by the columns that are still free.

With H = U U^T, U upper triangular, the loss of v is ||(v - c) U||^2 / 2, and entry j of (v - c) U holds only the errors
up to column j. Later columns can cancel all later entries. So v_j is rounded from the value that cancels entry j. This
is GPTQ (Frantar et al., 2023) without an inverse, and Babai's nearest plane algorithm.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from iobs.core import linalg
from iobs.core.grids import over_columns
from iobs.core.patterns import Grid
from iobs.solvers.gridded.lattice import rounded

_BATCH = 1 << 24  # entries of a batch of factors of supports
BLOCK = 128  # columns whose earlier errors are added by one matrix product

Rounding = Callable[[Tensor, int], Tensor]


def feed_back(centre: Tensor, upper: Tensor, begin_block: Callable[[Tensor, slice], Rounding], block: int) -> Tensor:
    """Round all columns, block after block.

    Args:
        centre: (rows, d), values without rounding.
        upper: (d, d), U.
        begin_block: called with the current values (rows, n) and the columns of a block; returns the rounding of the
            block's columns, called with the values (rows,) and the position in the block.
        block: columns of a block.

    Returns:
        (rows, d), rounded.
    """
    weight, error = torch.empty_like(centre), torch.zeros_like(centre)
    diagonal = upper.diagonal()
    for first in range(0, centre.shape[1], block):
        own = slice(first, min(first + block, centre.shape[1]))
        carried = error[:, :first] @ upper[:first, own]
        identity = torch.eye(own.stop - first, dtype=upper.dtype, device=upper.device)
        inverse = torch.linalg.solve_triangular(upper[own, own], identity, upper=True)
        rounding = begin_block(centre[:, own] - carried @ inverse, own)
        for j in range(first, own.stop):
            pushed = carried[:, j - first] + error[:, first:j] @ upper[first:j, j]
            weight[:, j] = rounding(centre[:, j] - pushed / diagonal[j], j - first)
            error[:, j] = weight[:, j] - centre[:, j]
    return weight


def feed_back_on_support(centre: Tensor, hessian: Tensor, mask: Tensor, scales: Tensor, grid: Grid) -> Tensor:
    """Round the kept entries of every row, with feedback through the Hessian of the row's own support.

    Args:
        centre: (rows, d), the minimiser on the mask.
        hessian: (d, d).
        mask: boolean (rows, d).
        scales: (rows, groups).
        grid: the grid.

    Returns:
        (rows, d), rounded, zero outside the mask.

    Raises:
        NotPositiveDefiniteError: the Hessian of a support is singular.
    """
    weight = torch.zeros_like(centre)
    spread = over_columns(scales, grid, centre.shape[1])
    counts = mask.sum(1)
    order = counts.argsort()
    size = max(1, int(counts.max()))
    for rows in torch.split(order, max(1, _BATCH // (size * size))):
        most = int(counts[rows].max())
        if most == 0:
            continue
        index = (~mask[rows]).to(torch.int8).sort(dim=1, stable=True).indices[:, :most]
        real = mask[rows].gather(1, index)
        systems = hessian[index[:, :, None], index[:, None, :]] * (real[:, :, None] & real[:, None, :])
        systems.diagonal(dim1=1, dim2=2).add_((~real).to(hessian.dtype))
        upper = linalg.cholesky(systems.flip(1, 2)).flip(1, 2)
        own, step = centre[rows].gather(1, index), spread[rows].gather(1, index)
        error = torch.zeros_like(own)
        for j in range(most):
            pushed = (error[:, :j] * upper[:, :j, j]).sum(1) / upper[:, j, j]
            error[:, j] = rounded(own[:, j] - pushed, step[:, j], grid.levels) - own[:, j]
        weight[rows] = torch.zeros_like(centre[rows]).scatter_(1, index, (own + error) * real)
    return weight
