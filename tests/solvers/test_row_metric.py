"""Weights on a support in a metric that couples rows: against one large system of all entries."""

import pytest
import torch

from iobs.core import linalg
from iobs.core.quadratic import Quadratic
from iobs.solvers import row_metric
from iobs.solvers.row_metric import RowMetric, coupled_weight


def problem_of(seed, rows=7, columns=11, rank=3):
    torch.manual_seed(seed)
    inputs = torch.randn(columns, 40, dtype=torch.float64)
    weight = torch.randn(rows, columns, dtype=torch.float64)
    problem = Quadratic.at(weight, inputs @ inputs.T / 40)
    mask = torch.rand(rows, columns) > 0.5
    factor = torch.randn(rows, rank, dtype=torch.float64)
    metric = RowMetric(factor.square().sum(1) + 0.3, 2 * factor @ factor.T, 0.5)
    return problem, linalg.solve_on_support(problem.matrix, problem.linear, mask), mask, metric


def matrix_of(metric):
    coupling = metric.scale * metric.moment
    return coupling - torch.diag(coupling.diagonal()) + torch.diag(metric.diagonal)


def error(problem, weight, metric):
    change = weight - problem.centre()
    return float((matrix_of(metric) @ change @ problem.matrix * change).sum())


@pytest.mark.parametrize("seed", range(3))
def test_the_weights_solve_the_system_of_all_kept_entries(seed, monkeypatch):
    monkeypatch.setattr(row_metric, "_ITERATIONS", 300)
    problem, weight, mask, metric = problem_of(seed)
    found = coupled_weight(problem.matrix, problem.linear, weight, mask, metric, 0.0)
    kept, system = mask.flatten(), torch.kron(matrix_of(metric), problem.matrix)
    expected = torch.zeros(mask.numel(), dtype=torch.float64)
    right = (matrix_of(metric) @ problem.linear).flatten()[kept]
    expected[kept] = torch.linalg.solve(system[kept][:, kept], right)
    torch.testing.assert_close(found.flatten(), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("damping", [0.0, 0.01, 1.0])
def test_a_few_iterations_lower_the_error_and_keep_the_zeros(damping):
    problem, weight, mask, metric = problem_of(5, rows=40, columns=60)
    found = coupled_weight(problem.matrix, problem.linear, weight, mask, metric, damping)
    assert not found[~mask].any()
    assert error(problem, found, metric) < 0.9 * error(problem, weight, metric)


def test_dead_columns_and_a_moment_of_zeros_change_nothing():
    problem, _, mask, metric = problem_of(1)
    dead = problem.matrix.clone()
    dead[3] = dead[:, 3] = 0
    problem = Quadratic.at(problem.centre(), dead)
    mask[:, 3] = False
    weight = linalg.solve_on_support(problem.matrix, problem.linear, mask)
    alone = RowMetric(metric.diagonal, torch.zeros_like(metric.moment))
    torch.testing.assert_close(
        coupled_weight(problem.matrix, problem.linear, weight, mask, alone, 0.0), weight, rtol=1e-9, atol=1e-11
    )
    assert coupled_weight(problem.matrix, problem.linear, weight, mask, metric, 0.0).isfinite().all()
