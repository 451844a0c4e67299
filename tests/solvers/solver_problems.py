"""Shared problems and slow references of the solver tests."""

from itertools import combinations, product

import torch

import iobs
from iobs.core.grids import entries_of, grid_of, over_columns
from iobs.solvers.families import family_of


def random_problem(rows=6, columns=16, *, seed=0, dtype=torch.float64, condition=50.0):
    """Random layer problem whose Hessian has eigenvalues from 1 to `condition`."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(columns, columns, generator=generator, dtype=torch.float64)).Q
    spectrum = torch.logspace(0, torch.log10(torch.tensor(condition)).item(), columns, dtype=torch.float64)
    hessian = (basis * spectrum) @ basis.T
    hessian = (hessian + hessian.T) / 2
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return iobs.Quadratic.at(weight.to(dtype), hessian.to(dtype))


def dependent_problem(kind, seed):
    """A row of 7 inputs, of which one is a duplicate, a multiple, or a sum of two others: "copy", "scaled", "sum"."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(7, 40, generator=generator, dtype=torch.float64)
    first, second, third = torch.randperm(7, generator=generator)[:3].tolist()
    inputs[first] = {
        "copy": inputs[second],
        "scaled": 3.7 * inputs[second],
        "sum": 0.3 * inputs[second] + 0.7 * inputs[third],
    }[kind]
    weight = torch.randn(1, 7, generator=generator, dtype=torch.float64)
    return iobs.Quadratic.at(weight, inputs @ inputs.T)


PATTERNS = [
    iobs.Unstructured(0.5),
    iobs.Unstructured(0.7, per="row"),
    iobs.Unstructured(keep=37),
    iobs.NM(2, 4),
    iobs.NM(3, 8),
    iobs.NM(1, 2),
]
GROUPS = [
    iobs.Groups(1, sparsity=0.5),
    iobs.Groups(3, 3),
    iobs.Groups.sizes((1, 4, 2, 3, 2), 2),
    iobs.Groups([3, 2, 1, 0] * 3, sparsity=0.25),
]
GRIDS = [
    iobs.Grid(4, 8),
    iobs.Grid(3, 5),
    iobs.Unstructured(0.5) & iobs.Grid(4, 8),
    iobs.Unstructured(0.4, per="row") & iobs.Grid(3),
    iobs.Unstructured(keep=37) & iobs.Grid(2, 6),
    iobs.NM(2, 4) & iobs.Grid(8, 8),
    iobs.NM(3, 8) & iobs.Grid(4, 6),
]


def solvers_of(pattern):
    """The names of the solvers that take a pattern: GPTQ rounds dense weights only."""
    return sorted(
        set(family_of(pattern).solvers) - ({"gptq"} if entries_of(pattern) != iobs.Unstructured(0.0) else set())
    )


def options_of(solver, pattern, columns=12):
    """Options that a solver of a pattern cannot do without."""
    return {"scores": torch.arange(float(pattern.count(columns)))} if solver == "scores" else {}


def require_pattern_of(solution, pattern):
    """Check that a solution has the exact counts of its pattern, zeros elsewhere, and values on its grid."""
    mask, weight = solution.mask, solution.weight
    assert (weight[~mask] == 0).all()
    if isinstance(pattern, iobs.Groups):
        labels = pattern.labels(mask.shape[1])
        kept = labels[mask[0]].unique()
        assert len(kept) == pattern.kept(mask.shape[1])
        assert torch.equal(mask, torch.isin(labels, kept).expand(mask.shape))
        return
    groups = pattern.groups(mask.shape)
    assert (mask.reshape(groups.count, groups.size).sum(1) == groups.keep).all()
    if grid_of(pattern) is not None:
        require_on_grid(solution, grid_of(pattern))


def require_on_grid(solution, grid):
    """Check that every weight is exactly a whole number times the scale of its group."""
    spread = over_columns(solution.stats["scales"], grid, solution.weight.shape[1])
    codes = (solution.weight.double() / spread.double()).round()
    assert codes.abs().max() <= grid.levels
    assert torch.equal(codes.to(solution.weight.dtype) * spread, solution.weight)


def best_on(problem, mask):
    """Exact minimiser on a mask, by one dense solve for each row."""
    weight = torch.zeros_like(problem.linear)
    for row, support in enumerate(mask):
        index = support.nonzero().flatten()
        weight[row, index] = torch.linalg.solve(problem.matrix[index][:, index], problem.linear[row, index])
    return weight


def row_masks(columns, pattern):
    """All masks of one row under a pattern with groups within rows."""
    groups = pattern.groups((1, columns))
    choices = [torch.zeros(groups.size, dtype=torch.bool) for _ in combinations(range(groups.size), groups.keep)]
    for mask, chosen in zip(choices, combinations(range(groups.size), groups.keep), strict=True):
        mask[list(chosen)] = True
    return torch.stack([torch.cat(parts) for parts in product(choices, repeat=groups.count)])


def losses_of_masks(hessian, linear, masks):
    """Least loss of one row on each mask, (masks,)."""
    problem = iobs.Quadratic(hessian, linear.expand(len(masks), -1).contiguous())
    systems = torch.where(masks[:, :, None] & masks[:, None, :], hessian, torch.zeros_like(hessian))
    systems = systems + torch.diag_embed((~masks).to(hessian.dtype))
    weight = torch.linalg.solve(systems, (linear * masks)[:, :, None])[:, :, 0]
    return problem.loss(weight)


def enumerated_optimum(problem, pattern):
    """Least total loss under a pattern, by enumeration of all masks."""
    columns = problem.shape[1]
    groups = pattern.groups(problem.shape)
    if groups.size <= columns:
        masks = row_masks(columns, pattern)
        return sum(float(losses_of_masks(problem.matrix, row, masks).min()) for row in problem.linear)
    best = {0: 0.0}  # least loss by the number of entries kept in the rows so far
    for row in problem.linear:
        options = [
            float(losses_of_masks(problem.matrix, row, row_masks(columns, iobs.Unstructured(keep=k))).min())
            for k in range(columns + 1)
        ]
        longer = {}
        for used, loss in best.items():
            for k, option in enumerate(options):
                longer[used + k] = min(longer.get(used + k, torch.inf), loss + option)
        best = longer
    return best[groups.keep]


def swapped_masks(mask, pattern):
    """All masks that differ from a mask by one swap and fit the pattern."""
    groups = pattern.groups(tuple(mask.shape))
    table = mask.reshape(groups.count, groups.size)
    for group in range(groups.count):
        for leave in table[group].nonzero().flatten():
            for enter in (~table[group]).nonzero().flatten():
                swapped = table.clone()
                swapped[group, leave] = False
                swapped[group, enter] = True
                yield swapped.reshape(mask.shape)
