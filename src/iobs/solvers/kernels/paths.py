"""Rounding with error feedback along several paths: of all roundings of a row the best few prefixes go on.

Let U U^T = H, U upper triangular. The loss of a row v above the loss of its centre c is ||(v - c) U||^2 / 2. This is a
sum over columns, and its term j depends on the columns up to j alone. Each path takes the two grid points around the
value that cancels its term. The paths of least sum survive: the M-algorithm, or K-best decoding. One path is Babai's
nearest plane algorithm, the feedback of GPTQ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.solvers.kernels.threads import over_rows


@dataclass(frozen=True)
class Lattice:
    """Rows that are to be rounded.

    Attributes:
        centre: (rows, n) contiguous.
        lower: U^T, (rows, n, n) contiguous, or (1, n, n) for all rows.
        scales: (rows, n) contiguous, distance of the grid points of each entry.
        counts: (rows,) int64, entries of each row that are rounded, from the first on.
        levels: largest multiple of the scale.
    """

    centre: Tensor
    lower: Tensor
    scales: Tensor
    counts: Tensor
    levels: int


def round_along_paths(lattice: Lattice, paths: int) -> Tensor:
    """Rounded rows, (rows, n); zero after the entries that are rounded.

    Args:
        lattice: the rows.
        paths: prefixes of a row that are kept.
    """
    return (round_numba if lattice.centre.device.type == "cpu" else round_torch)(lattice, paths)


def round_torch(lattice: Lattice, paths: int) -> Tensor:
    """Torch form of `round_along_paths`, with all rows at once."""
    centre, lower, scales = lattice.centre, lattice.lower, lattice.scales
    rows, n = centre.shape
    error = centre.new_zeros(rows, 1, n)
    cost = centre.new_zeros(rows, 1)
    for j in range(n):
        pivot, scale = lower[:, j, j][:, None], scales[:, j][:, None]
        value = centre[:, j][:, None] - (error[:, :, :j] @ lower[:, j, :j, None])[:, :, 0] / pivot
        below = (value / scale).floor_().clamp_(-lattice.levels, lattice.levels - 1)
        points = torch.stack([below, below + 1], 2) * scale[:, :, None]
        costs = cost[:, :, None] + ((points - value[:, :, None]) * pivot[:, :, None]).square()
        real = (lattice.counts > j)[:, None]
        # A row that has ended keeps its paths: each has one continuation, without an error.
        ended = torch.stack([cost, torch.full_like(cost, torch.inf)], 2)
        costs = torch.where(real[:, :, None], costs, ended).flatten(1)
        kept = costs.sort(dim=1, stable=True).indices[:, :paths]
        cost = costs.gather(1, kept)
        error = error.gather(1, (kept // 2)[:, :, None].expand(-1, -1, n))
        new = points.flatten(1).gather(1, kept) - centre[:, j][:, None]
        error[:, :, j] = torch.where(real, new, torch.zeros_like(new))
    best = cost.argmin(1)
    values = centre + error[torch.arange(rows, device=centre.device), best]
    real = torch.arange(n, device=centre.device) < lattice.counts[:, None]
    return torch.where(real, values, torch.zeros_like(values))


def round_numba(lattice: Lattice, paths: int) -> Tensor:
    """Numba form of `round_along_paths`, row by row."""
    from iobs.solvers.kernels import paths_numba as kernel

    result = torch.zeros_like(lattice.centre)
    tensors = lattice.centre, lattice.lower, lattice.scales, lattice.counts, result
    arrays = [tensor.numpy() for tensor in tensors]
    loop: Callable[..., None] = kernel.rounded
    over_rows(lambda start, stop: loop(start, stop, *arrays, lattice.levels, paths), len(result))
    return result
