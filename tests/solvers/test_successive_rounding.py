"""Successive rounding to a number of coded bits, against the definition and the solvers of grids."""

import pytest
import torch

import iobs
from iobs.core.integers import Integers, short
from iobs.errors import PatternError, ProblemError
from iobs.solvers.successive_rounding import SuccessiveRounding


def layer(rows=96, columns=40, seed=0):
    """A problem whose inputs differ in size and are correlated."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    inputs = torch.randn(500, columns, generator=generator, dtype=torch.float64) @ mix
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return iobs.Quadratic.at(weight, inputs.T @ inputs / 500)


def rounded_slowly(problem, error, significant):
    """Column after column: the integer nearest to the entry whose error the columns before can take."""
    lower = torch.linalg.cholesky(problem.matrix)
    centre, weight = problem.centre(), torch.zeros_like(problem.centre())
    for j in reversed(range(weight.shape[1])):
        pushed = (weight - centre)[:, j + 1 :] @ lower[j + 1 :, j] / lower[j, j]
        step = short((error / lower[j, j])[None].float(), significant).double()
        weight[:, j] = ((centre[:, j] - pushed) / step).round() * step
    return weight


def test_rounding_is_its_definition():
    problem = layer()
    lower = torch.linalg.cholesky(problem.matrix)
    half = SuccessiveRounding(torch.bfloat16)  # its steps are not fitted to the integers
    found = half._rounded((problem.centre() @ lower).float(), lower.float(), 0.25, torch.ones(96, 40, dtype=torch.bool))
    assert torch.allclose(found.weight(torch.float32).double(), rounded_slowly(problem, torch.tensor(0.25), 1))


def factor_of_rows(rows, seed=3):
    """A factor K of the metric of rows: lower triangular with a diagonal of 1."""
    factor = torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    lower = torch.linalg.cholesky(factor @ factor.T + 0.3 * torch.eye(rows, dtype=torch.float64))
    return lower / lower.diagonal()


def rounded_in_both_directions(problem, rows, kept, error):
    """Entry after entry from the last: its error in K^T (V - C) L is what its step leaves."""
    lower = torch.linalg.cholesky(problem.matrix)
    change = torch.zeros_like(problem.centre())
    for j in reversed(range(change.shape[1])):
        step = short((error / lower[j, j])[None].float(), 1).double()
        for i in reversed(range(change.shape[0])):
            left = (rows[i:, i] @ change[i:, j:] @ lower[j:, j]) / lower[j, j]
            code = ((problem.centre()[i, j] - left) / step).round() if kept[i, j] else 0.0
            change[i, j] = code * step - problem.centre()[i, j]
    return problem.centre() + change


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_errors_are_carried_from_row_to_row_and_from_column_to_column(share):
    problem, rows = layer(30, 20), factor_of_rows(30)
    lower = torch.linalg.cholesky(problem.matrix)
    kept = torch.rand(30, 20, generator=torch.Generator().manual_seed(1)) < share
    target = (rows.T @ problem.centre() @ lower).float()
    half = SuccessiveRounding(torch.float16, rows)  # its steps are not fitted to the integers
    found = half._rounded(target, lower.float(), 0.25, kept)
    expected = rounded_in_both_directions(problem, rows, kept, torch.tensor(0.25))
    assert torch.allclose(found.weight(torch.float32).double(), expected)


def test_rows_that_share_nothing_are_rounded_as_without_a_metric():
    problem, alone = layer(), torch.eye(96)
    found = [iobs.solve(problem, iobs.Rate(3.0), SuccessiveRounding(rows=rows)) for rows in (None, alone)]
    assert torch.equal(found[0].weight, found[1].weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [1.5, 3.0])
def test_carried_errors_cost_less_at_equal_bits(bits, dtype):
    problem, rows = layer(200, 60), factor_of_rows(200)
    errors = []
    for solver in (SuccessiveRounding(dtype), SuccessiveRounding(dtype, rows)):
        solution = iobs.solve(problem, iobs.Rate(bits), solver)
        assert 0.96 * bits <= solution.stats["bits"] <= bits
        assert torch.equal(solution.weight.to(dtype).double(), solution.weight.to(torch.float32).double())
        change = rows.T @ (solution.weight - problem.centre())
        errors.append(float((change @ problem.matrix * change).sum()))
    assert errors[1] < 0.7 * errors[0], errors


@pytest.mark.parametrize("bits", [2.0, 3.0])
def test_bits_are_met_from_below_and_errors_lie_below_those_of_grids(bits):
    problem = layer(256, 64)
    rate = bits + 16 / 64  # scales of the grid count, too
    solution = iobs.solve(problem, iobs.Rate(rate))
    integers = Integers.of(solution.weight)
    assert 0.98 * rate <= solution.stats["bits"] <= rate
    assert integers.bits() <= 1.01 * rate * solution.weight.numel()
    grid = iobs.solve(problem, iobs.Grid(round(bits), group=64), "gptq")
    changes = [found.weight - problem.centre() for found in (solution, grid)]
    errors = [float(((change @ problem.matrix) * change).sum()) for change in changes]
    assert errors[0] < 0.7 * errors[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_of_16_bits_are_exact(dtype):
    solution = iobs.solve(layer(), iobs.Rate(4.0), SuccessiveRounding(dtype))
    assert torch.equal(solution.weight.to(dtype).double(), solution.weight)


def test_a_dead_column_costs_no_integers():
    problem = layer()
    hessian = problem.matrix.clone()
    hessian[5], hessian[:, 5] = 0, 0
    solution = iobs.solve(iobs.Quadratic.at(problem.centre(), hessian), iobs.Rate(4.0), damping=0.01)
    assert not solution.weight[:, 5].any()


def test_wrong_patterns_and_solvers_are_refused():
    with pytest.raises(PatternError, match="less than the steps and tables"):
        iobs.solve(layer(4, 40), iobs.Rate(0.5))
    with pytest.raises(ProblemError, match="is for other patterns"):
        iobs.solve(layer(), iobs.Unstructured(0.5), SuccessiveRounding())
    with pytest.raises(PatternError, match=r"iobs\.Rate"):
        SuccessiveRounding()(layer(), iobs.Unstructured(0.5))
    with pytest.raises(ProblemError, match="rounding"):
        iobs.solve(layer(), iobs.Rate(3.0), "sparsegpt")
    for bits in (0, -1, 13, "3", True, float("nan")):
        with pytest.raises(PatternError, match="A rate has"):
            iobs.Rate(bits)
    for zeros in (iobs.Grid(4), iobs.Structured(0.3), iobs.Unstructured(0.5) & iobs.Rate(3.0)):
        with pytest.raises(PatternError):
            zeros & iobs.Rate(3.0)
    with pytest.raises(PatternError, match="takes no zeros besides"):
        iobs.NM(2, 4) & iobs.Budget(megabytes=3)


@pytest.mark.parametrize("zeros", [iobs.Unstructured(0.5), iobs.NM(2, 4)])
def test_integers_have_the_zeros_of_a_pattern(zeros):
    """The error is at most that of the zeros and of the integers, each alone, together."""
    problem, rate = layer(96, 64), iobs.Rate(3.0)
    both = iobs.solve(problem, zeros & rate, damping=0.01)
    assert zeros & rate == rate & zeros
    assert int((both.weight == 0).sum()) >= both.weight.numel() // 2
    assert not both.weight[~both.mask].any()
    assert torch.equal(iobs.solve(problem, zeros, damping=0.01).mask, both.mask)
    assert Integers.of(both.weight).bits() <= 1.002 * 3.0 * both.weight.numel()
    least = problem.loss(problem.centre()).sum()
    alone = [float(iobs.solve(problem, pattern, damping=0.01).loss.sum() - least) for pattern in (zeros, rate)]
    assert max(alone) < float(both.loss.sum() - least) < 1.5 * sum(alone)


def test_codes_stay_small_enough_to_be_exact():
    problem = layer(64, 16)
    scales = torch.ones(16, dtype=torch.float64)
    scales[3] = 2.0**16  # its integers would have 20 bits
    wide = iobs.Quadratic.at(problem.centre() * scales, problem.matrix)
    solution = iobs.solve(wide, iobs.Rate(8.0))
    assert Integers.of(solution.weight).codes.abs().max() < 2**13


def test_a_problem_of_16_bits_has_its_bits():
    problem = layer().to(torch.bfloat16)
    solution = iobs.solve(problem, iobs.Rate(4.0), damping=0.01)
    assert Integers.of(solution.weight).bits() <= 1.02 * 4.0 * solution.weight.numel()
