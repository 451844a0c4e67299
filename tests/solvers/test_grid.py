"""Solvers on a grid, against brute force and slow transcriptions of the published methods."""

from itertools import product

import pytest
import torch
from solver_problems import GRIDS as PATTERNS
from solver_problems import random_problem, require_on_grid, row_masks

import iobs
from iobs.core.grids import over_columns
from iobs.core.patterns import parse
from iobs.errors import PatternError, ProblemError
from iobs.solvers.families import GRID_SOLVERS
from iobs.solvers.gridded.lattice import refit_scales, rounded, search_scales

EVERY_SOLVER = sorted(GRID_SOLVERS)


@pytest.mark.parametrize("solver", EVERY_SOLVER)
def test_weights_that_no_scale_is_small_enough_for_become_zero(solver):
    weight = torch.randn(6, 16)
    weight[1] = 1e-45
    solution = iobs.solve(iobs.Quadratic.at(weight, random_problem(6, 16).hessian.float()), iobs.Grid(4, 8), solver)
    assert (solution.stats["scales"] > 0).all()
    require_on_grid(solution, iobs.Grid(4, 8))
    assert solution.weight[1].abs().max() <= 7 * torch.finfo(torch.float32).tiny


def slow_gptq(weight, hessian, grid):
    """GPTQ as published: upper Cholesky factor of the inverse Hessian, and all later columns updated after each."""
    weight = weight.clone()
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    result = torch.zeros_like(weight)
    for j in range(weight.shape[1]):
        if j % grid.group == 0:
            part = slice(j, j + grid.group)
            every = torch.ones_like(weight[:, part], dtype=torch.bool)
            scale = search_scales(weight[:, part], every, hessian.diagonal()[part], grid, weight.dtype)[:, 0]
        result[:, j] = scale * (weight[:, j] / scale).round().clamp(-grid.levels, grid.levels)
        error = (weight[:, j] - result[:, j]) / factor[j, j]
        weight[:, j:] -= error[:, None] * factor[j, j:]
    return result


@pytest.mark.parametrize("grid", [iobs.Grid(4, 8), iobs.Grid(3, 16), iobs.Grid(2, 5), iobs.Grid(8, 128)], ids=str)
def test_gptq_equals_the_published_algorithm(grid):
    problem = random_problem(7, 20, condition=1e3)
    expected = slow_gptq(problem.centre(), problem.matrix, grid)
    torch.testing.assert_close(iobs.solve(problem, grid, "gptq").weight, expected)
    torch.testing.assert_close(iobs.solve(problem, grid, "sparsegpt", block=grid.group).weight, expected)


def slow_joint(weight, hessian, grid, sparsity):
    """SparseGPT's joint pass as published: mask of a block by (w / R_jj)^2, then pruning, rounding and one update."""
    weight = weight.clone()
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    result = torch.zeros_like(weight)
    for first in range(0, weight.shape[1], grid.group):
        part = slice(first, first + grid.group)
        saliency = (weight[:, part] / factor.diagonal()[part]).square()
        keep = round(saliency.numel() * (1 - sparsity))
        mask = torch.zeros(saliency.numel(), dtype=torch.bool)
        mask[saliency.flatten().topk(keep).indices] = True
        mask = mask.reshape(saliency.shape)
        scale = search_scales(weight[:, part], mask, hessian.diagonal()[part], grid, weight.dtype)[:, 0]
        for j in range(saliency.shape[1]):
            column = first + j
            code = (weight[:, column] / scale).round().clamp(-grid.levels, grid.levels)
            result[:, column] = scale * code * mask[:, j]
            error = (weight[:, column] - result[:, column]) / factor[column, column]
            weight[:, column:] -= error[:, None] * factor[column, column:]
    return result


def test_joint_pass_equals_the_published_algorithm():
    problem, grid = random_problem(8, 24, condition=1e3), iobs.Grid(4, 8)
    found = iobs.solve(problem, iobs.Unstructured(0.5) & grid, "sparsegpt", block=8)
    torch.testing.assert_close(found.weight, slow_joint(problem.centre(), problem.matrix, grid, 0.5))


def best_on_grid(problem, scales, pattern, levels):
    """Least loss of one row with fixed scales, by enumeration of all masks and values."""
    columns = problem.shape[1]
    masks = row_masks(columns, pattern)
    codes = torch.tensor(list(product(range(-levels, levels + 1), repeat=columns)), dtype=torch.float64)
    allowed = torch.stack([~((codes != 0) & ~mask).any(1) for mask in masks]).any(0)
    values = codes[allowed] * scales
    row = iobs.Quadratic(problem.matrix, problem.linear.expand(len(values), -1).contiguous())
    return float(row.loss(values).min())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("sparse", [iobs.Unstructured(0.5, per="row"), iobs.NM(1, 2), iobs.NM(2, 4)], ids=str)
def test_search_is_close_to_brute_force_on_tiny_rows(sparse, seed):
    problem = random_problem(1, 4 if sparse != iobs.Unstructured(0.5, per="row") else 6, seed=seed)
    found = iobs.solve(problem, sparse & iobs.Grid(3), budget="best")
    least = best_on_grid(problem, float(found.stats["scales"]), sparse, 3)
    dense = float(problem.loss(problem.centre()))
    assert float(found.loss) - dense >= (least - dense) * (1 - 1e-9)
    assert float(found.loss) - dense <= 1.3 * (least - dense)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_search_has_at_most_the_loss_of_the_published_methods(pattern):
    problem = random_problem(32, 24 if pattern != PATTERNS[-1] else 48, seed=1, condition=1e3)
    losses = {
        solver: float(iobs.solve(problem, pattern, solver).loss.sum())
        for solver in EVERY_SOLVER
        if solver != "gptq" or isinstance(pattern, iobs.Grid)
    }
    assert losses["admm"] == min(losses.values())


@pytest.mark.parametrize("solver", EVERY_SOLVER)
def test_identity_hessian_needs_only_rounding(solver):
    centre = torch.randn(5, 8, dtype=torch.float64)
    problem = iobs.Quadratic.at(centre, torch.eye(8, dtype=torch.float64))
    found = iobs.solve(problem, iobs.Grid(4), solver)
    spread = over_columns(found.stats["scales"], iobs.Grid(4), 8)
    torch.testing.assert_close(found.weight, rounded(centre, spread, 7))


def test_more_bits_and_finer_groups_have_less_error():
    problem = random_problem(16, 64, condition=1e3)
    dense = problem.loss(problem.centre()).sum()
    errors = [float(iobs.solve(problem, iobs.Grid(bits)).loss.sum() - dense) for bits in (2, 3, 4, 6, 8)]
    assert errors == sorted(errors, reverse=True)
    assert iobs.solve(problem, iobs.Grid(3, 8)).loss.sum() < iobs.solve(problem, iobs.Grid(3, 64)).loss.sum()


def test_weights_on_the_grid_are_found_again():
    codes = torch.randint(-7, 8, (6, 16)).double()
    codes[:, 0], codes[:, 8] = 7, -7
    scales = torch.rand(6, 2, dtype=torch.float64) + 0.5
    weight = codes * over_columns(scales, iobs.Grid(4, 8), 16)
    problem = iobs.Quadratic.at(weight, random_problem(1, 16).matrix)
    torch.testing.assert_close(iobs.solve(problem, iobs.Grid(4, 8)).weight, weight)


def test_refitted_scales_are_optimal_for_their_codes():
    problem, grid = random_problem(4, 10), iobs.Grid(4, 4)
    codes = (3 * problem.centre()).round().clamp(-7, 7)
    codes[1, 4:8] = 0
    start = torch.ones(4, 3, dtype=torch.float64)
    scales = refit_scales(codes, start, problem, grid, torch.float64)
    weight = (codes * over_columns(scales, grid, 10)).requires_grad_()
    gradient = problem.gradient(weight.detach()) * codes
    slopes = torch.stack([gradient[:, part : part + 4].sum(1) for part in (0, 4, 8)], 1)
    kept = (scales == start).all(1)  # rows that would need a scale that is not positive
    assert not kept.all()
    torch.testing.assert_close(slopes[~kept], torch.zeros_like(slopes[~kept]), atol=1e-9, rtol=0)
    assert scales[1, 1] == 1


@pytest.mark.parametrize("solver", EVERY_SOLVER)
def test_a_group_wider_than_the_matrix_is_one_scale_for_each_row(solver):
    problem, wide = random_problem(6, 16), iobs.Grid(4, 2**40)
    found, expected = (iobs.solve(problem, grid, solver) for grid in (wide, iobs.Grid(4, 16)))
    assert torch.equal(found.weight, expected.weight)
    require_on_grid(found, wide)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    problem = random_problem(6, 16).to(torch.float32)
    half = iobs.Quadratic((problem.matrix / 16).to(dtype), (problem.linear / 16).to(dtype))
    found = iobs.solve(half, iobs.Grid(4))
    wide = iobs.solve(half.to(torch.float32), iobs.Grid(4))
    assert torch.equal(found.weight, wide.weight.to(dtype))
    spread = over_columns(found.stats["scales"], iobs.Grid(4), 16)
    codes = (found.weight.float() / spread).round()
    assert torch.equal((codes * spread).to(dtype), found.weight)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("int4", iobs.Grid(4)),
        ("int3/64", iobs.Grid(3, 64)),
        ("50%+int4", iobs.Unstructured(0.5) & iobs.Grid(4)),
        ("2:4+int8/32", iobs.NM(2, 4) & iobs.Grid(8, 32)),
    ],
)
def test_grids_are_read_from_text(text, pattern):
    assert parse(text) == pattern


@pytest.mark.parametrize("text", ["int", "int9", "int4/0", "x+int4", "int4/a", "point"])
def test_text_that_is_no_grid_is_refused(text):
    with pytest.raises(PatternError):
        parse(text)


def test_impossible_grids_are_refused():
    for bits in (1, 9, 2.5):
        with pytest.raises(PatternError, match="2 to 8 bits"):
            iobs.Grid(bits)
    with pytest.raises(PatternError, match="group"):
        iobs.Grid(4, 0)
    with pytest.raises(PatternError, match="combines"):
        iobs.Groups(2, 1) & iobs.Grid(4)
    with pytest.raises(PatternError, match="dense weights"):
        iobs.solve(random_problem(3, 8), iobs.NM(2, 4) & iobs.Grid(4), "gptq")
    with pytest.raises(ProblemError, match="choose one of admm, gptq"):
        iobs.solve(random_problem(3, 8), iobs.Grid(4), "obc")
    with pytest.raises(ProblemError, match="it has none"):
        iobs.solve(random_problem(3, 8), iobs.Grid(4), refine="swap")
    with pytest.raises(PatternError, match="divisible"):
        iobs.solve(random_problem(3, 7), iobs.NM(2, 4) & iobs.Grid(4))
