"""Published methods on a grid: rounding to nearest, GPTQ, SparseGPT's joint pass, and OBR's order of steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core import linalg
from iobs.core.grids import over_columns
from iobs.core.partition import Partition
from iobs.core.patterns import Grid, Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.errors import PatternError
from iobs.solvers.gridded.feedback import BLOCK, Rounding, feed_back
from iobs.solvers.gridded.lattice import on_grid, parts, rounded, search_scales, working_dtype
from iobs.solvers.kernels.project import largest
from iobs.solvers.magnitude import Wanda
from iobs.solvers.protocols import require_whole


@dataclass(frozen=True)
class RoundToNearest:
    """Keep the entries of largest magnitude and round them, without an update."""

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Round the centre to the grid."""
        sparse, grid = parts(pattern)
        centre = problem.centre()
        mask = largest(centre, sparse.groups(problem.shape))
        scales = search_scales(centre, mask, problem.matrix.diagonal(), grid, problem.dtype)
        return on_grid(problem, codes_of(centre * mask, scales, grid), scales, mask, grid)


@dataclass(frozen=True)
class GPTQ:
    """GPTQ (Frantar et al., 2023) with a symmetric grid and the columns in their own order, for dense weights.

    The scales of a group are chosen when its first column is reached, from the current values.
    """

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Round all weights with error feedback."""
        if not isinstance(pattern, Grid):
            raise PatternError(f'GPTQ rounds dense weights: use "sparsegpt" for the pattern {pattern}.')
        return _one_pass(problem, pattern, Partition(1, 1, 1), pattern.group)


@dataclass(frozen=True)
class JointSparseGPT:
    """SparseGPT (Frantar and Alistarh, 2023) with quantisation: mask, rounding and feedback in one pass.

    Args:
        block: columns whose mask is chosen together, also that of N:M groups.

    Raises:
        ProblemError: `block` is not a positive whole number.
    """

    block: int = BLOCK

    def __post_init__(self) -> None:
        require_whole("block", self.block, 1, "128 columns are usual")

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Prune and round in one pass."""
        sparse, grid = parts(pattern)
        return _one_pass(problem, grid, sparse.groups(problem.shape), self.block)


def _one_pass(problem: Quadratic, grid: Grid, groups: Partition, block: int) -> Solution:
    """One pass over the columns that prunes and rounds."""
    dtype = working_dtype(problem)
    upper = linalg.upper_factor(problem.matrix.to(dtype))
    centre = problem.centre().to(dtype)
    scales = torch.ones(len(centre), grid.scales(centre.shape[1]), dtype=dtype, device=centre.device)
    mask = torch.ones_like(centre, dtype=torch.bool)
    diagonal = problem.matrix.diagonal().to(dtype)
    # Whole groups of both kinds begin and end with a block.
    unit = groups.size if groups.size < centre.shape[1] else 1
    block = math.lcm(grid.group * max(1, block // grid.group), unit)

    def begin_block(current: Tensor, span: slice) -> Rounding:
        if groups.keep < groups.size:
            mask[:, span] = _block_mask(current * upper.diagonal()[span], span, centre.shape[1], groups)
        for group in range(span.start // grid.group, -(-span.stop // grid.group)):
            part = slice(group * grid.group - span.start, min((group + 1) * grid.group, span.stop) - span.start)
            kept = mask[:, span][:, part]
            best_scales = search_scales(current[:, part], kept, diagonal[span][part], grid, problem.dtype)
            scales[:, group] = best_scales[:, 0]
        spread = over_columns(scales, grid, centre.shape[1])[:, span]
        return lambda values, j: rounded(values, spread[:, j], grid.levels) * mask[:, span.start + j]

    weight = feed_back(centre, upper, begin_block, block)
    return on_grid(problem, codes_of(weight, scales, grid), scales, mask, grid)


def _block_mask(saliency: Tensor, span: slice, columns: int, groups: Partition) -> Tensor:
    """Mask of one block with cumulative counts that add up to the count of the layer."""
    if groups.size < columns:
        return largest(saliency, Partition(saliency.numel() // groups.size, groups.size, groups.keep))
    return largest(saliency, groups.in_columns(span, columns))


def codes_of(weight: Tensor, scales: Tensor, grid: Grid) -> Tensor:
    """Whole numbers of the grid nearest to the weights, (rows, columns)."""
    spread = over_columns(scales, grid, weight.shape[1])
    return (weight / spread).round_().clamp_(-grid.levels, grid.levels)


@dataclass(frozen=True)
class OBROrder:
    """Order of steps of OBR (Guo et al., 2025), without its rotations: Wanda's mask, exact weights, rounding in halves.

    The first half of the columns is rounded to nearest and its error solved into the second half. The second half is
    rounded with the feedback of the dense Hessian, whose updates of pruned entries are lost.
    """

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Prune, refit, and round the two halves one after the other."""
        sparse, grid = parts(pattern)
        dtype = working_dtype(problem)
        mask = Wanda()(problem, sparse).mask
        hessian = problem.matrix.to(dtype)
        centre = linalg.solve_on_support(hessian, problem.linear.to(dtype), mask).to(dtype)
        scales = search_scales(centre, mask, hessian.diagonal(), grid, problem.dtype)
        spread = over_columns(scales, grid, centre.shape[1])
        half = centre.shape[1] // 2
        weight = rounded(centre, spread, grid.levels)
        if half:
            fixed = (weight - centre)[:, :half]
            kept = mask[:, half:]
            rest = hessian[half:, half:]
            moved = linalg.solve_on_support(rest, -fixed @ hessian[:half, half:], kept).to(dtype)
            centre[:, half:] += moved

        def begin_block(_: Tensor, span: slice) -> Rounding:
            step, kept = spread[:, half:][:, span], mask[:, half:][:, span]
            return lambda values, j: rounded(values, step[:, j], grid.levels) * kept[:, j]

        upper = linalg.upper_factor(hessian[half:, half:])
        weight[:, half:] = feed_back(centre[:, half:], upper, begin_block, BLOCK)
        return on_grid(problem, codes_of(weight * mask, scales, grid), scales, mask, grid)
