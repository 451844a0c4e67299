"""SparseGPT (Frantar and Alistarh, 2023): one pass over the columns, errors spread over those not yet seen.

The published form inverts H, factorises the inverse as R^T R, and after every block updates all columns to its right.
Here H = U U^T is factorised once, from the bottom right; then R = U^-1, and with D the change made to the columns
before block b, the block's current weights are W_b + D U[:, b] R_bb: only the small triangles are ever inverted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core import linalg
from iobs.core.patterns import Groups, Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.errors import ProblemError
from iobs.solvers.kernels.eliminate import eliminate, eliminate_groups
from iobs.solvers.kernels.select import largest

_ACCURATE = 2048  # columns up to which H is factorised in float64: ill-conditioned layers get other masks otherwise
_PANEL = 4  # blocks whose share of earlier columns is multiplied out together: wide products run faster


@dataclass(frozen=True)
class SparseGPT:
    """Block-wise one-shot pruning with the optimal update of the columns that are still to come.

    Args:
        block: columns whose mask is chosen together. A group of N:M is never cut: blocks shrink to a multiple of it.
            Unstructured blocks get cumulative budgets that sum to the pattern's count exactly.
    """

    block: int = 128

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ProblemError(f"block must be at least 1 column, got {self.block}; 128 is usual.")

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Arithmetic is in the dtype of the linear term; H, where it is not too wide, is factorised in float64."""
        groups = pattern.groups(problem.shape)
        centre = problem.centre()
        upper = problem.factors.get(("upper", centre.dtype), lambda: _upper(problem.matrix, centre.dtype))
        weight, mask = _prune(centre, upper, groups, _blocks(problem.shape[1], self.block, groups))
        return Solution.of(problem, weight, mask)


def _upper(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    accurate = torch.float64 if len(matrix) <= _ACCURATE else dtype
    return linalg.upper_factor(matrix.to(accurate)).to(dtype)


def _blocks(columns: int, block: int, groups: Groups) -> list[slice]:
    if groups.size < columns:
        block = max(groups.size, block - block % groups.size)
    return [slice(first, min(first + block, columns)) for first in range(0, columns, block)]


def _prune(centre: Tensor, upper: Tensor, groups: Groups, blocks: list[slice]) -> tuple[Tensor, Tensor]:
    weight = torch.empty_like(centre)
    change = torch.empty_like(centre)  # centre minus weight, for the columns already done
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


def _remove(current: Tensor, factor: Tensor, scale: Tensor, groups: Groups, block: slice, shape: torch.Size) -> Tensor:
    """Prune one block's current weights in place; the saliency of an entry is its square over R_ii^2 = (w U_ii)^2."""
    if groups.size < shape[1]:
        mask = torch.empty_like(current, dtype=torch.bool)
        eliminate_groups(current, factor, mask, groups.keep, groups.size)
        return mask
    per_column = groups.keep / shape[1]
    keep = round(block.stop * per_column) - round(block.start * per_column)
    mask = largest(current * scale, Groups(groups.count, current.numel() // groups.count, keep))
    eliminate(current, factor, mask)
    return mask
