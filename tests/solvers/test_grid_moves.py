"""Moves of single values and of two entries on a grid, and the descent that they make."""

from itertools import product

import pytest
import torch
from solver_problems import random_problem

import iobs
from iobs.core.grids import over_columns
from iobs.solvers.gridded.lattice import rounded, search_scales
from iobs.solvers.kernels import descend
from iobs.solvers.kernels.descend import GridRows


def rows_for(seed, dtype=torch.float64, columns=24):
    problem = random_problem(40, columns, seed=seed, condition=1e3)
    grid = iobs.Grid(3, 7)
    mask = torch.arange(columns) % 4 < 2
    mask = mask.expand(40, -1).contiguous()
    scales = search_scales(problem.centre(), mask, problem.matrix.diagonal(), grid, dtype)
    weight = rounded(problem.centre(), over_columns(scales, grid, columns), grid.levels) * mask
    tensors = weight, problem.gradient(weight), mask, scales, problem.matrix
    tensors = [one if one.dtype == torch.bool else one.to(dtype).contiguous() for one in tensors]
    return problem, [GridRows(*(one.clone() for one in tensors), 7, grid.levels) for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("descend_values", (5,)),
        ("exchange_entries", (24, 6, 9)),
        ("exchange_entries", (24, 100, 3)),
        ("exchange_entries", (4, 6, 9)),
        ("step_pairs", (8, 9)),
        ("step_pairs", (100, 2)),
    ],
)
def test_moves_on_a_grid_numba_equals_torch(name, arguments, dtype):
    problem, (plain, numba) = rows_for(0, dtype)
    before = plain.weight.clone()
    getattr(descend, f"{name}_torch")(plain, *arguments)
    getattr(descend, name)(numba, *arguments)
    assert not torch.equal(plain.weight, before)
    torch.testing.assert_close(numba.weight, plain.weight)
    assert torch.equal(numba.mask, plain.mask)
    slack = 1e-3 if dtype == torch.float32 else 1e-9
    torch.testing.assert_close(numba.gradient, plain.gradient, rtol=slack, atol=slack)
    exact = problem.gradient(plain.weight.double()).to(dtype)
    torch.testing.assert_close(plain.gradient, exact, rtol=slack, atol=slack)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sweeps_in_blocks_of_columns_equal_sweeps_column_by_column(monkeypatch, dtype):
    monkeypatch.setattr(descend, "_WIDE", 1)
    monkeypatch.setattr(descend, "_BLOCK", 10)
    problem, (plain, blocks) = rows_for(2, dtype)
    before = plain.weight.clone()
    descend.descend_values_torch(plain, 4)
    descend.descend_values(blocks, 4)
    assert not torch.equal(plain.weight, before)
    torch.testing.assert_close(blocks.weight, plain.weight)
    exact = problem.gradient(blocks.weight.double()).to(dtype)
    slack = 1e-3 if dtype == torch.float32 else 1e-9
    torch.testing.assert_close(blocks.gradient, exact, rtol=slack, atol=slack)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_settle(dtype):
    # A value computed in a wider dtype never equals the stored one, and each sweep would change it again.
    _, (rows, _) = rows_for(3, dtype)
    assert ((rows.weight.abs() / rows.spread()).round() == rows.levels).any()
    descend.descend_values(rows, 200)
    settled = rows.weight.clone(), rows.gradient.clone()
    descend._sweep_in_blocks(rows)
    assert torch.equal(rows.weight, settled[0])
    assert torch.equal(rows.gradient, settled[1])


@pytest.mark.parametrize("seed", range(3))
def test_each_move_lowers_the_loss_and_keeps_the_counts(seed):
    problem, (rows, _) = rows_for(seed)
    loss = problem.loss(rows.weight)
    for name, arguments in (("descend_values", (9,)), ("exchange_entries", (4, 9, 9)), ("step_pairs", (40, 9))):
        getattr(descend, name)(rows, *arguments)
        now = problem.loss(rows.weight)
        assert (now <= loss + 1e-9).all()
        loss = now
    assert (rows.mask.reshape(40, 6, 4).sum(2) == 2).all()
    assert not rows.weight[~rows.mask].any()


def test_no_single_value_exchange_or_pair_of_steps_is_left():
    problem, (rows, _) = rows_for(1)
    for _ in range(20):
        descend.descend_values(rows, 50)
        descend.exchange_entries(rows, 24, 24, 99)
        descend.step_pairs(rows, 48, 99)
    loss, spread = problem.loss(rows.weight), rows.spread()
    for i, j in product(range(24), range(24)):
        for first, second in product((-1, 1), (-1, 0, 1)):
            if i != j:
                moved = rows.weight.clone()
                moved[:, i] += first * spread[:, i]
                moved[:, j] += second * spread[:, j]
                allowed = rows.mask[:, i] & rows.mask[:, j]
                allowed &= (moved.abs() <= (rows.levels + 0.5) * spread).all(1)
                assert (problem.loss(moved)[allowed] >= loss[allowed] - 1e-9).all()
