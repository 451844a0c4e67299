"""SparseGPT (Frantar and Alistarh, 2023): one pass over the columns that spreads each error over later columns.

The published form inverts H, factorises the inverse as R^T R, and after every block updates all columns to its right.
Here H = U U^T is factorised once, so R = U^-1. With D the change of the columns before block b, the current weights
of the block are W_b + D U[:, b] R_bb. Only the triangles U_bb of the blocks are inverted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core import linalg
from iobs.core.partition import Partition
from iobs.core.patterns import Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.solvers.kernels import over_rows
from iobs.solvers.kernels.project import largest
from iobs.solvers.protocols import require_whole

_ACCURATE = 2048  # columns up to which H is factorised in float64: float32 changes masks of ill-conditioned layers
_PANEL = 4  # blocks whose products with earlier columns are computed together: wide products run faster


@dataclass(frozen=True)
class SparseGPT:
    """Block-wise one-shot pruning with the optimal update of the columns to the right.

    Args:
        block: columns whose mask is chosen together. For N:M it shrinks to a multiple of the group size. Unstructured
            blocks get cumulative counts that sum exactly to the count of the pattern.

    Raises:
        ProblemError: `block` is not a positive whole number.
    """

    block: int = 128

    def __post_init__(self) -> None:
        require_whole("block", self.block, 1, "128 columns are usual")

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Prune in the dtype of the linear term; up to 2,048 columns H is factorised in float64."""
        groups = pattern.groups(problem.shape)
        centre = problem.centre()
        upper = problem.factors.get(("upper", centre.dtype), lambda: _upper(problem.matrix, centre.dtype))
        weight, mask = _prune(centre, upper, groups, _blocks(problem.shape[1], self.block, groups))
        return Solution.of(problem, weight, mask)


def _upper(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    accurate = torch.float64 if len(matrix) <= _ACCURATE else dtype
    return linalg.upper_factor(matrix.to(accurate)).to(dtype)


def _blocks(columns: int, block: int, groups: Partition) -> list[slice]:
    if groups.size < columns:
        block = max(groups.size, block - block % groups.size)
    return [slice(first, min(first + block, columns)) for first in range(0, columns, block)]


def _prune(centre: Tensor, upper: Tensor, groups: Partition, blocks: list[slice]) -> tuple[Tensor, Tensor]:
    weight = torch.empty_like(centre)
    change = torch.empty_like(centre)  # centre minus weight, for finished columns
    mask = torch.zeros_like(centre, dtype=torch.bool)
    for first in range(0, len(blocks), _PANEL):
        panel = blocks[first : first + _PANEL]
        begin, end = panel[0].start, panel[-1].stop
        carried = change[:, :begin] @ upper[:begin, begin:end]
        for block in panel:
            pushed = carried[:, block.start - begin : block.stop - begin]
            if block.start > begin:
                pushed = pushed + change[:, begin : block.start] @ upper[begin : block.start, block]
            identity = torch.eye(block.stop - block.start, dtype=upper.dtype, device=upper.device)
            factor = torch.linalg.solve_triangular(upper[block, block], identity, upper=True).contiguous()
            current = torch.addmm(centre[:, block], pushed, factor)
            mask[:, block] = _remove(current, factor, upper.diagonal()[block], groups, block, centre.shape)
            weight[:, block] = current
            torch.sub(centre[:, block], current, out=change[:, block])
    return weight, mask


def _remove(
    current: Tensor, factor: Tensor, scale: Tensor, groups: Partition, block: slice, shape: torch.Size
) -> Tensor:
    """Prune the weights of one block in place and return its mask; the saliency is (w / R_ii)^2 = (w U_ii)^2."""
    if groups.size < shape[1]:
        mask = torch.empty_like(current, dtype=torch.bool)
        eliminate_groups(current, factor, mask, groups.keep, groups.size)
        return mask
    mask = largest(current * scale, groups.in_columns(block, shape[1]))
    eliminate(current, factor, mask)
    return mask


# ---- Inside one block, in the two forms of a kernel: remove entries from left to right, spread each error to the right


def eliminate(current: Tensor, factor: Tensor, mask: Tensor) -> None:
    """Remove every entry outside the mask, one column at a time, in place.

    Removing entry i of a row adds -(current_i / R_ii) R_i to the row. R is the upper Cholesky factor of the inverse
    Hessian of the columns of the block, for fixed earlier columns and free later columns.

    Args:
        current: (rows, n) contiguous weights, changed in place.
        factor: (n, n) upper triangular R, contiguous.
        mask: boolean (rows, n), contiguous, True where an entry is kept.
    """
    if current.device.type != "cpu":
        eliminate_torch(current, factor, mask)
        return
    from iobs.solvers.kernels import eliminate_numba as kernel

    arrays = current.numpy(), factor.numpy(), mask.numpy()
    over_rows(lambda start, stop: kernel.eliminate(start, stop, *arrays), len(current))


def eliminate_groups(current: Tensor, factor: Tensor, mask: Tensor, keep: int, of: int) -> None:
    """`eliminate` with an N:M mask chosen on the way: the `keep` entries of largest saliency in each group.

    The mask of a group is chosen when its first column is reached.

    Args:
        current: (rows, n) contiguous weights, changed in place; n is a multiple of `of`.
        factor: (n, n) upper triangular R, contiguous.
        mask: boolean (rows, n), contiguous, overwritten.
        keep: entries kept in each group.
        of: columns in each group.
    """
    if current.device.type != "cpu":
        eliminate_groups_torch(current, factor, mask, keep, of)
        return
    from iobs.solvers.kernels import eliminate_numba as kernel

    arrays = current.numpy(), factor.numpy(), mask.numpy()
    over_rows(lambda start, stop: kernel.eliminate_groups(start, stop, *arrays, keep, of), len(current))


def eliminate_torch(current: Tensor, factor: Tensor, mask: Tensor) -> None:
    """Torch form of `eliminate`."""
    for i in range(current.shape[1]):
        _remove_column(current, factor, mask[:, i], i)


def eliminate_groups_torch(current: Tensor, factor: Tensor, mask: Tensor, keep: int, of: int) -> None:
    """Torch form of `eliminate_groups`."""
    for first in range(0, current.shape[1], of):
        group = slice(first, first + of)
        saliency = (current[:, group] / factor.diagonal()[group]).abs()
        order = saliency.sort(dim=1, descending=True, stable=True).indices[:, :keep]
        mask[:, group] = torch.zeros_like(mask[:, group]).scatter_(1, order, True)
        for i in range(first, first + of):
            _remove_column(current, factor, mask[:, i], i)


def _remove_column(current: Tensor, factor: Tensor, kept: Tensor, i: int) -> None:
    error = torch.where(kept, torch.zeros_like(current[:, i]), current[:, i] / factor[i, i])
    current[:, i + 1 :].addr_(error, factor[i, i + 1 :], alpha=-1)
    current[:, i] *= kept
