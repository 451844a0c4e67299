"""Rounding from left to right with error feedback: the columns that are still free compensate each error.

With H = U U^T, U upper triangular, the loss of v is ||(v - c) U||^2 / 2. Entry j of (v - c) U holds only the errors up
to column j. Later columns can cancel all later entries. So v_j is rounded from the value that cancels entry j. This is
GPTQ (Frantar et al., 2023) without an inverse, and Babai's nearest plane algorithm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core import linalg
from iobs.core.quadratic import Quadratic
from iobs.errors import NotPositiveDefiniteError
from iobs.solvers.gridded.lattice import rounded
from iobs.solvers.kernels import over_rows

_BATCH = 1 << 24  # entries of a batch of factors of supports
# Sum over rows of (kept entries)^3 up to which each row gets feedback through its own support.
_AFFORDABLE = 1 << 38
_AFFORDABLE_PATHS = 1 << 36  # rows x columns^2 x paths up to which dense rows have several paths
_LONG = 512  # kept entries of a row above which its factor is computed in float32
_PENDING = 64  # columns whose elimination waits for one matrix product
BLOCK = 128  # columns whose earlier errors are added by one matrix product

Rounding = Callable[[Tensor, int], Tensor]


def feed_back(centre: Tensor, upper: Tensor, begin_block: Callable[[Tensor, slice], Rounding], block: int) -> Tensor:
    """Round all columns, block after block.

    Args:
        centre: (rows, d), values without rounding.
        upper: (d, d), U.
        begin_block: called with the current values (rows, n) and the columns of a block. It returns the rounding of the
            block's columns, which is called with the values (rows,) and the position in the block.
        block: columns of a block.

    Returns:
        (rows, d), rounded.
    """
    weight, error = torch.empty_like(centre), torch.zeros_like(centre)
    diagonal = upper.diagonal()
    for first in range(0, centre.shape[1], block):
        span = slice(first, min(first + block, centre.shape[1]))
        carried = error[:, :first] @ upper[:first, span]
        identity = torch.eye(span.stop - first, dtype=upper.dtype, device=upper.device)
        inverse = torch.linalg.solve_triangular(upper[span, span], identity, upper=True)
        rounding = begin_block(centre[:, span] - carried @ inverse, span)
        for j in range(first, span.stop):
            pushed = carried[:, j - first] + error[:, first:j] @ upper[first:j, j]
            weight[:, j] = rounding(centre[:, j] - pushed / diagonal[j], j - first)
            error[:, j] = weight[:, j] - centre[:, j]
    return weight


def is_affordable(mask: Tensor) -> bool:
    """True if rounding with feedback through the support of each row takes little time."""
    return bool(mask.all()) or float(mask.sum(1).double().pow(3).sum()) <= _AFFORDABLE


def round_with_feedback(
    problem: Quadratic, mask: Tensor, spread: Tensor, levels: int, order: Tensor, paths: int
) -> Tensor:
    """Round the best weights on a mask, with feedback through the Hessian of each row's own support.

    Args:
        problem: the quadratic, (rows, d).
        mask: boolean (rows, d).
        spread: (rows, d), scale of every entry, in the dtype of the problem.
        levels: largest multiple of a scale.
        order: (d,), columns in the order of rounding.
        paths: roundings of a row that are carried along, see `round_along_paths`.

    Returns:
        (rows, d), rounded, zero outside the mask.

    Raises:
        NotPositiveDefiniteError: the Hessian of a support is singular.
    """
    if not bool(mask.all()):
        return _round_on_supports(problem, mask, spread, levels, order, paths)
    rows, columns = mask.shape
    centre, steps = problem.centre()[:, order].contiguous(), spread[:, order].contiguous()
    upper = linalg.upper_factor(problem.matrix[order][:, order])
    if rows * columns * columns * paths <= _AFFORDABLE_PATHS:
        weight = round_along_paths(Lattice(centre, upper.T.contiguous()[None], steps, mask.sum(1), levels), paths)
    else:

        def begin_block(_: Tensor, span: slice) -> Rounding:
            return lambda values, j: rounded(values, steps[:, span.start + j], levels)

        weight = feed_back(centre, upper, begin_block, BLOCK)
    return torch.empty_like(weight).index_copy_(1, order, weight)


def _round_on_supports(
    problem: Quadratic, mask: Tensor, spread: Tensor, levels: int, order: Tensor, paths: int
) -> Tensor:
    weight = torch.zeros_like(problem.linear)
    counts = mask.sum(1)
    ordered = (~mask[:, order]).to(torch.int8)
    dtype = torch.float32 if int(counts.max()) > _LONG else problem.dtype
    hessian, linear, spread = problem.matrix.to(dtype), problem.linear.to(dtype), spread.to(dtype)
    for rows in _batches(counts):
        most = int(counts[rows].max())
        if most == 0:
            continue
        # Columns of the support come first, in their order, then padding.
        index = order[ordered[rows].sort(dim=1, stable=True).indices[:, :most]]
        real = mask[rows].gather(1, index)
        upper = _factors(hessian, index, real, problem.matrix)
        lower = upper.transpose(1, 2).contiguous()
        right = (linear[rows].gather(1, index) * real)[:, :, None]
        half = torch.linalg.solve_triangular(upper, right, upper=True)
        centre = torch.linalg.solve_triangular(lower, half, upper=False)[:, :, 0].contiguous()
        points = round_along_paths(Lattice(centre, lower, spread[rows].gather(1, index), counts[rows], levels), paths)
        weight[rows] = torch.zeros_like(weight[rows]).scatter_(1, index, points.to(weight.dtype))
    return weight


def _factors(hessian: Tensor, index: Tensor, real: Tensor, exact: Tensor) -> Tensor:
    """Upper factors of the Hessians of some supports, (rows, n, n); padded entries are rows of the identity.

    They are computed in the dtype of `hessian`, or in that of `exact` if a support is too ill-conditioned.
    """
    for matrix in (hessian, exact):
        systems = linalg.padded_systems(matrix, index, real)
        try:
            return linalg.cholesky(systems.flip(1, 2)).flip(1, 2).to(hessian.dtype)
        except NotPositiveDefiniteError:
            if matrix is exact:
                raise
    raise AssertionError("unreachable")


def _batches(counts: Tensor) -> list[Tensor]:
    """Rows in batches whose supports have similar sizes, and whose systems fit the memory."""
    order, batches = counts.argsort(descending=True), []
    while len(order):
        size = max(1, int(counts[order[0]]))
        count = max(1, _BATCH // (size * size))
        batches.append(order[:count])
        order = order[count:]
    return batches


def feedback_order(hessian: Tensor) -> Tensor:
    """Columns in the order of best feedback, (d,): the next one has the largest curvature with later columns free.

    That curvature is 1 / [P]_jj, P the inverse Hessian of the columns that are left. Errors are then spread evenly over
    the columns. This is the order of V-BLAST detection (Wolniansky et al., 1998), and a pivoted Cholesky factorisation
    of H^-1 with the least pivots first.

    Args:
        hessian: (d, d).

    Raises:
        NotPositiveDefiniteError: the Hessian is singular.
    """
    inverse = linalg.inverse(hessian)
    columns = len(inverse)
    diagonal = inverse.diagonal().clone()
    order = torch.empty(columns, dtype=torch.long, device=hessian.device)
    for first in range(0, columns, _PENDING):
        last = min(first + _PENDING, columns)
        factor = inverse.new_zeros(columns, last - first)
        for made in range(last - first):
            chosen = diagonal.argmin()
            order[first + made] = chosen
            column = inverse[:, chosen] - factor[:, :made] @ factor[chosen, :made]
            factor[:, made] = column / column[chosen].clamp_min(torch.finfo(column.dtype).tiny).sqrt()
            diagonal -= factor[:, made].square()
            diagonal[chosen] = torch.inf
        if last < columns:
            inverse.addmm_(factor, factor.T, alpha=-1)
    return order


# ---- Rounding with error feedback along several paths: of all roundings of a row the best few prefixes go on
# Let U U^T = H, U upper triangular. The loss of a row v above that of its centre c is ||(v - c) U||^2 / 2. This is a
# sum over columns, and its term j depends on the columns up to j alone. Each path takes the two grid points around the
# value that cancels its term. The paths of least sum survive: the M-algorithm, or K-best decoding. One path is Babai's
# nearest plane algorithm, the feedback of GPTQ.


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
    if lattice.centre.device.type != "cpu":
        return round_torch(lattice, paths)
    from iobs.solvers.kernels import descend_numba as kernel

    centre, lower, scales = lattice.centre.numpy(), lattice.lower.numpy(), lattice.scales.numpy()
    arrays = kernel.LatticeArrays(centre, lower, scales, lattice.counts.numpy(), lattice.levels)
    result = torch.zeros_like(lattice.centre)
    over_rows(lambda start, stop: kernel.rounded(start, stop, arrays, paths, result.numpy()), len(result))
    return result


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
