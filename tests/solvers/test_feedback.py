"""Rounding with feedback along several paths, against GPTQ, enumeration and the smaller problems of supports."""

from itertools import product

import pytest
import torch
from solver_problems import random_problem
from test_grid import slow_gptq

import iobs
from iobs.core import linalg
from iobs.core.grids import over_columns
from iobs.solvers.gridded import feedback
from iobs.solvers.gridded.feedback import (
    Lattice,
    feedback_order,
    round_along_paths,
    round_torch,
    round_with_feedback,
)
from iobs.solvers.gridded.lattice import search_scales

NATURAL = torch.arange(12)


def scales_of(problem, grid):
    every = torch.ones(problem.shape, dtype=torch.bool)
    scales = search_scales(problem.centre(), every, problem.matrix.diagonal(), grid, problem.dtype)
    return over_columns(scales, grid, problem.shape[1])


def lattice_of(problem, counts, step=0.5, own=False):
    lower = linalg.upper_factor(problem.matrix).T[None]
    if own:  # a factor for every row
        lower = lower * torch.linspace(1, 2, len(counts), dtype=problem.dtype)[:, None, None]
    scales = torch.full_like(problem.centre(), step)
    return Lattice(problem.centre().contiguous(), lower.contiguous(), scales, torch.tensor(counts), 3)


def test_one_path_in_natural_order_is_gptq_with_fixed_scales():
    problem, grid = random_problem(5, 12, condition=1e3), iobs.Grid(4)
    every = torch.ones(5, 12, dtype=torch.bool)
    found = round_with_feedback(problem, every, scales_of(problem, grid), 7, NATURAL, 1)
    torch.testing.assert_close(found, slow_gptq(problem.centre(), problem.matrix, grid))


def test_many_columns_are_rounded_in_blocks_with_the_same_result(monkeypatch):
    problem, grid = random_problem(5, 12, condition=1e3), iobs.Grid(4)
    every, order = torch.ones(5, 12, dtype=torch.bool), feedback_order(problem.matrix)
    spread = scales_of(problem, grid)
    expected = round_with_feedback(problem, every, spread, 7, order, 1)
    monkeypatch.setattr(feedback, "_AFFORDABLE_PATHS", 0)
    monkeypatch.setattr(feedback, "BLOCK", 5)
    torch.testing.assert_close(round_with_feedback(problem, every, spread, 7, order, 8), expected)


@pytest.mark.parametrize("paths", [1, 6])
@pytest.mark.parametrize("long", [0, 512])
def test_feedback_on_a_support_equals_feedback_in_the_smaller_problem(paths, long, monkeypatch):
    monkeypatch.setattr(feedback, "_LONG", long)
    problem = random_problem(5, 12, condition=1e3)
    mask = torch.rand(5, 12) > 0.5
    mask[4] = False
    spread = torch.full((5, 12), 0.3, dtype=torch.float64)
    order = torch.randperm(12)
    found = round_with_feedback(problem, mask, spread, 3, order, paths)
    assert not found[4].any()
    for row in range(4):
        index = order[mask[row][order]]
        smaller = iobs.Quadratic(problem.matrix[index][:, index], problem.linear[row : row + 1, index])
        own = torch.ones(1, len(index), dtype=torch.bool)
        alone = round_with_feedback(smaller, own, spread[:1, index], 3, torch.arange(len(index)), paths)
        torch.testing.assert_close(found[row, index], alone[0], rtol=1e-6, atol=1e-6)
        assert not found[row][~mask[row]].any()


def test_an_ill_conditioned_support_is_factorised_in_its_own_dtype(monkeypatch):
    problem, mask = random_problem(4, 12, condition=1e12), torch.rand(4, 12) > 0.2
    spread = torch.full((4, 12), 0.3, dtype=torch.float64)
    monkeypatch.setattr(feedback, "_LONG", 0)
    assert torch.isfinite(round_with_feedback(problem, mask, spread, 3, NATURAL, 4)).all()


@pytest.mark.parametrize("paths", [1, 2, 5, 16])
@pytest.mark.parametrize("own", [False, True])
def test_paths_numba_equals_torch(paths, own):
    problem = random_problem(20, 24, condition=1e3)
    lattice = lattice_of(problem, [24, 0, 1, 17] * 5, own=own)
    plain = round_torch(lattice, paths)
    torch.testing.assert_close(round_along_paths(lattice, paths), plain)
    assert not plain[1].any()
    assert not plain[2, 1:].any()


def tree(factor, centre, scale, levels, error=()):
    """Least sum of squares over both neighbours in every column, by recursion."""
    j = len(error)
    if j == len(centre):
        return 0.0
    own = factor[j][j]
    value = centre[j] - sum(e * factor[j][i] for i, e in enumerate(error)) / own
    below = min(max(value // scale, -levels), levels - 1)
    points = [(below + up) * scale for up in (0, 1)]
    return min(
        ((point - value) * own) ** 2 + tree(factor, centre, scale, levels, (*error, point - centre[j]))
        for point in points
    )


@pytest.mark.parametrize("seed", range(4))
def test_all_paths_find_the_best_leaf_of_the_tree(seed):
    problem = random_problem(3, 7, seed=seed, condition=1e3)
    lattice = lattice_of(problem, [7] * 3)
    factor = lattice.lower[0].tolist()
    least = [tree(factor, row.tolist(), 0.5, 3) for row in problem.centre()]
    errors = {}
    for paths in (1, 4, 128):
        found = round_along_paths(lattice, paths) - problem.centre()
        errors[paths] = ((found @ problem.matrix) * found).sum(1)
    torch.testing.assert_close(errors[128], torch.tensor(least, dtype=torch.float64))
    assert (errors[128] <= errors[4] + 1e-9).all()
    assert (errors[128] <= errors[1] + 1e-9).all()


@pytest.mark.parametrize("pending", [3, 64])
def test_order_takes_the_largest_curvature_with_later_columns_free(pending, monkeypatch):
    monkeypatch.setattr(feedback, "_PENDING", pending)
    matrix = random_problem(1, 12, condition=1e2).matrix
    left, expected = list(range(12)), []
    while left:
        inverse = torch.linalg.inv(matrix[left][:, left])
        expected.append(left.pop(int(inverse.diagonal().argmin())))
    assert feedback_order(matrix).tolist() == expected


def test_the_order_lowers_the_error_of_feedback():
    sums = {"natural": 0.0, "ordered": 0.0}
    for seed, name in product(range(5), sums):
        problem = random_problem(40, 12, seed=seed, condition=1e3)
        order = NATURAL if name == "natural" else feedback_order(problem.matrix)
        every = torch.ones(40, 12, dtype=torch.bool)
        found = round_with_feedback(problem, every, torch.full((40, 12), 0.4, dtype=torch.float64), 7, order, 1)
        sums[name] += float((problem.loss(found) - problem.loss(problem.centre())).sum())
    assert sums["ordered"] < sums["natural"]
