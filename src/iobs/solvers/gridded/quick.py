"""Quick weights on a grid, for error curves of many sparsities and bits."""

from __future__ import annotations

from dataclasses import dataclass

from iobs.core.grids import over_columns
from iobs.core.patterns import Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.solvers.admm import ADMM
from iobs.solvers.gridded.baselines import GPTQ, codes_of
from iobs.solvers.gridded.lattice import on_grid, parts, rounded, search_scales, working_dtype
from iobs.solvers.kernels.descend import GridRows, descend_values

_SWEEPS = 10


@dataclass(frozen=True)
class QuickGrid:
    """Entries and weights of a short ADMM (GPTQ if all entries stay), rounding, then coordinate descent over values."""

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Weights on the grid with the exact counts of the pattern."""
        sparse, grid = parts(pattern)
        groups = sparse.groups(problem.shape)
        if groups.keep == groups.size:
            start = GPTQ()(problem, grid)
            scales = start.stats["scales"].to(working_dtype(problem))
        else:
            start = ADMM("fast")(problem, sparse)
            scales = search_scales(
                start.weight.to(working_dtype(problem)),
                start.mask,
                problem.operator.diagonal().to(working_dtype(problem)),
                grid,
                problem.dtype,
            )
        wide = problem.to(working_dtype(problem))
        weight = start.weight.to(wide.dtype)
        weight = (rounded(weight, over_columns(scales, grid, problem.shape[1]), grid.levels) * start.mask).contiguous()
        mask = start.mask.clone().contiguous()
        gradient, hessian = wide.gradient(weight).contiguous(), wide.matrix.contiguous()
        descend_values(GridRows(weight, gradient, mask, scales.contiguous(), hessian, grid.group, grid.levels), _SWEEPS)
        return on_grid(problem, codes_of(weight, scales, grid), scales, mask, grid)
