"""Solvers compared with slow transcriptions of their definitions."""

import inspect
import math
import sys
from itertools import combinations

import pytest
import torch
from solver_problems import (
    best_on,
    dependent_problem,
    enumerated_optimum,
    losses_of_masks,
    random_problem,
    row_masks,
    swapped_masks,
)

import iobs
from iobs.core import linalg
from iobs.core.masks import top_mask
from iobs.core.quadratic import Solution
from iobs.solvers.screened_swap import ScreenedSwap
from iobs.solvers.sparsegpt import _blocks


def published_sparsegpt(problem, pattern, block):
    """Frantar and Alistarh, Algorithm 1, entry by entry, with exact counts for the blocks."""
    weight = problem.centre().double().clone()
    rows, columns = weight.shape
    groups = pattern.groups(problem.shape)
    factor = torch.linalg.cholesky(torch.linalg.inv(problem.matrix.double()), upper=True)
    kept = torch.zeros(rows, columns, dtype=torch.bool)
    for first in range(0, columns, block):
        last = min(first + block, columns)
        saliency = weight[:, first:last].square() / factor.diagonal()[first:last].square()
        if groups.size >= columns:
            keep = round(last * groups.keep / columns) - round(first * groups.keep / columns)
            per = "layer" if groups.count == 1 else "row"
            kept[:, first:last] = top_mask(saliency, iobs.Unstructured(keep=keep, per=per))
        for i in range(first, last):
            if groups.size < columns and i % groups.size == 0:
                group = slice(i, i + groups.size)
                kept[:, group] = top_mask(weight[:, group].square() / factor.diagonal()[group].square(), pattern)
            for row in range(rows):
                if not kept[row, i]:
                    weight[row, i:] -= weight[row, i].clone() / factor[i, i] * factor[i, i:]
                    weight[row, i] = 0
    return weight, kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "pattern", [iobs.Unstructured(0.6), iobs.Unstructured(0.5, per="row"), iobs.NM(2, 4), iobs.NM(4, 8)], ids=str
)
@pytest.mark.parametrize("columns", [8, 32, 88])
def test_sparsegpt_equals_the_published_algorithm(columns, pattern, dtype):
    problem = random_problem(5, columns, dtype=dtype)
    weight, mask = published_sparsegpt(problem, pattern, 16)
    solution = iobs.solve(problem, pattern, "sparsegpt", block=16)
    assert torch.equal(solution.mask, mask)
    # Condition 50: the factor amplifies rounding at most 50 times.
    tolerance = 50 * columns * torch.finfo(dtype).eps
    torch.testing.assert_close(solution.weight.double(), weight, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("columns", [132, 258])
def test_sparsegpt_never_cuts_a_group_of_3_6(columns):
    """6 does not divide the default block of 128 columns: blocks shrink to 126."""
    pattern, problem = iobs.NM(3, 6), random_problem(3, columns)
    blocks = _blocks(columns, 128, pattern.groups((3, columns)))
    assert [(block.start, block.stop) for block in blocks[:2]] == [(0, 126), (126, min(252, columns))]
    assert blocks[-1].stop == columns
    weight, mask = published_sparsegpt(problem, pattern, columns)
    solution = iobs.solve(problem, pattern, "sparsegpt")
    assert torch.equal(solution.mask, mask)
    tolerance = 50 * columns * torch.finfo(torch.float64).eps
    torch.testing.assert_close(solution.weight, weight, rtol=tolerance, atol=tolerance)


def test_sparsegpt_block_grows_to_the_group_size():
    problem = random_problem(3, 32)
    weight, mask = published_sparsegpt(problem, iobs.NM(4, 8), 8)
    solution = iobs.solve(problem, iobs.NM(4, 8), "sparsegpt", block=4)
    assert torch.equal(solution.mask, mask)
    torch.testing.assert_close(solution.weight, weight)


def greedy(problem, pattern):
    """Repeat the cheapest of all allowed single removals, each tried by a dense solve."""
    groups = pattern.groups(problem.shape)
    mask = torch.ones(problem.shape, dtype=torch.bool)
    while (mask.reshape(groups.count, groups.size).sum(1) > groups.keep).any():
        open_groups = mask.reshape(groups.count, groups.size).sum(1, keepdim=True) > groups.keep
        allowed = (mask.reshape(groups.count, groups.size) & open_groups).reshape(mask.shape)
        # Rows are independent, so only the loss of the changed row is computed.
        base = problem.loss(best_on(problem, mask))
        best = (torch.inf, 0, 0)
        for row, column in allowed.nonzero().tolist():
            trial = mask[row : row + 1].clone()
            trial[0, column] = False
            part = problem.rows(slice(row, row + 1))
            rise = float(part.loss(best_on(part, trial))[0] - base[row])
            best = min(best, (rise, row, column))
        mask[best[1], best[2]] = False
    return mask


@pytest.mark.parametrize(
    "pattern", [iobs.Unstructured(0.5), iobs.Unstructured(0.6, per="row"), iobs.NM(2, 4), iobs.NM(1, 4)], ids=str
)
def test_obc_equals_brute_force_greedy_removal(pattern):
    problem = random_problem(3, 12)
    assert torch.equal(iobs.solve(problem, pattern, "obc").mask, greedy(problem, pattern))


def test_obc_empties_rows_of_small_weights():
    problem = random_problem(8, 16)
    scale = torch.tensor([1e-3] * 4 + [1.0] * 4, dtype=torch.float64)[:, None]
    problem = iobs.Quadratic.at(problem.centre() * scale, problem.matrix)
    pattern = iobs.Unstructured(0.5)
    mask = iobs.solve(problem, pattern, "obc").mask
    assert torch.equal(mask, greedy(problem, pattern))
    assert int(mask[:4].sum()) == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "pattern",
    [iobs.Unstructured(0.5), iobs.Unstructured(0.6, per="row"), iobs.NM(2, 4), iobs.Unstructured(keep=5)],
    ids=str,
)
def test_exact_equals_enumeration(pattern, seed):
    problem = random_problem(3, 8, seed=seed, condition=1e3)
    found = float(iobs.solve(problem, pattern, "exact").loss.sum())
    assert found == pytest.approx(enumerated_optimum(problem, pattern), rel=1e-10)


@pytest.mark.filterwarnings("ignore::iobs.errors.DampingWarning")
@pytest.mark.parametrize("kind", ["copy", "scaled", "sum"])
def test_exact_is_optimal_if_inputs_depend_on_each_other(kind):
    for seed in range(12):
        problem = dependent_problem(kind, seed)
        inputs, target = torch.linalg.cholesky(problem.matrix + 1e-9 * torch.eye(7)).T, problem.centre()[0]
        found = iobs.solve(problem, iobs.Unstructured(keep=3, per="row"), "exact").weight[0]
        best = math.inf
        for chosen in combinations(range(7), 3):
            part = inputs[:, chosen]
            best = min(best, float((part @ torch.linalg.pinv(part) @ inputs @ target - inputs @ target).norm()))
        assert float((inputs @ (found - target)).norm()) <= best + 1e-4 * float((inputs @ target).norm())


def test_exact_refuses_more_columns_than_a_path_can_hold_before_any_work(monkeypatch):
    monkeypatch.setattr("iobs.solvers.exact.best_support", lambda *_: pytest.fail("the work began"))
    problem = iobs.Quadratic.at(torch.ones(1, 1025), torch.eye(1025))
    with pytest.raises(iobs.errors.ProblemError, match=r'1,025 columns.*at most 1,024.*budget="best"'):
        iobs.solve(problem, iobs.Unstructured(0.5), "exact")


def test_exact_searches_deeper_than_calls_can_be_nested():
    """The first branch removes 250 of 300 variables."""
    problem, before = iobs.Quadratic.at(torch.randn(1, 300), torch.eye(300)), sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 150)
    try:
        with pytest.raises(iobs.errors.ProblemError, match="more than 400 nodes"):
            iobs.solve(problem, iobs.Unstructured(keep=50, per="row"), "exact", limit=400)
    finally:
        sys.setrecursionlimit(before)


def test_exact_raises_with_advice_if_limit_is_reached():
    with pytest.raises(iobs.errors.ProblemError, match="admm"):
        iobs.solve(random_problem(2, 30), iobs.Unstructured(0.5, per="row"), "exact", limit=10)


@pytest.mark.parametrize("start", ["magnitude", "sparsegpt", "admm"])
@pytest.mark.parametrize(
    "pattern", [iobs.Unstructured(0.5), iobs.Unstructured(0.6, per="row"), iobs.NM(2, 4), iobs.NM(1, 4)], ids=str
)
def test_swap_ends_in_a_1_swap_optimum(pattern, start):
    problem = random_problem(4, 12, condition=1e3)
    solution = iobs.solve(problem, pattern, start, refine="swap")
    assert solution.stats["certified"]
    loss = float(solution.loss.sum())
    best = min(float(problem.loss(best_on(problem, mask)).sum()) for mask in swapped_masks(solution.mask, pattern))
    scale = abs(float(problem.loss(problem.centre()).sum()))
    assert best >= loss - 1e-9 * scale


def test_swap_moves_entries_between_rows():
    problem = random_problem(8, 16)
    scale = torch.tensor([0.1] * 4 + [1.0] * 4, dtype=torch.float64)[:, None]
    problem = iobs.Quadratic.at(problem.centre() * scale, problem.matrix)
    even = iobs.solve(problem, iobs.Unstructured(0.5, per="row"), "obc")
    found = iobs.solvers.Swap()(problem, iobs.Unstructured(0.5), even)
    assert found.stats["exchanges"] > 0
    assert int(found.mask.sum()) == int(even.mask.sum())
    assert float(found.loss.sum()) < float(even.loss.sum())
    assert not iobs.solvers.Swap(rounds=0)(problem, iobs.Unstructured(0.5), even).stats["certified"]


@pytest.mark.parametrize("pattern", [iobs.Unstructured(0.5), iobs.NM(2, 4)], ids=str)
@pytest.mark.parametrize("refinement", [iobs.solvers.Swap(), ScreenedSwap(candidates=6)])
def test_swap_tolerance_is_relative_to_the_weights(refinement, pattern):
    """Scaling by a power of two changes no rounding, so small weights need the same swaps."""
    problem, unit = random_problem(8, 24, dtype=torch.float32), 2.0**-20
    small = iobs.Quadratic.at(problem.centre() * unit, problem.matrix)
    start = iobs.solve(problem, pattern, "magnitude")
    found = refinement(problem, pattern, start)
    other = refinement(small, pattern, Solution.of(small, start.weight * unit, start.mask))
    assert found.stats["swaps"] > 0
    assert found.stats["exchanges"] > 0 or pattern == iobs.NM(2, 4)
    assert other.stats.items() <= found.stats.items()  # the start of `found` also has the damping of `solve`
    assert torch.equal(other.weight, found.weight * unit)


def test_swap_is_unchanged_by_units_of_inputs():
    """Without unit curvatures, squares of entries of the inverse overflow if units differ by 2^600."""
    problem, pattern = random_problem(4, 12), iobs.Unstructured(0.5)
    units = 2.0 ** torch.linspace(-300, 300, 12, dtype=torch.float64).round()
    other = iobs.Quadratic.at(problem.centre() / units, problem.matrix * units * units[:, None])
    start = iobs.solve(problem, pattern, "magnitude")
    found = iobs.solvers.Swap()(problem, pattern, start)
    again = iobs.solvers.Swap()(other, pattern, Solution.of(other, start.weight / units, start.mask))
    assert found.stats["swaps"] > 0
    assert torch.equal(again.mask, found.mask)
    torch.testing.assert_close(again.weight * units, found.weight)


@pytest.mark.parametrize("rows", [8, pytest.param(160, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pattern", [iobs.Unstructured(0.5, per="row"), iobs.NM(2, 4)], ids=str)
def test_best_budget_finds_the_optimum_of_short_rows(pattern, rows):
    problem = random_problem(rows, 12, condition=1e3)
    found = iobs.solve(problem, pattern, "admm", budget="best")
    masks = row_masks(12, pattern)
    optima = [float(losses_of_masks(problem.matrix, row, masks).min()) for row in problem.linear]
    torch.testing.assert_close(found.loss, torch.tensor(optima, dtype=torch.float64), rtol=1e-9, atol=0)


@pytest.mark.parametrize("seed", range(4))
def test_best_budget_finds_the_optimum_of_a_small_layer(seed):
    problem = random_problem(3, 8, seed=seed)
    found = float(iobs.solve(problem, iobs.Unstructured(0.5), "admm", budget="best").loss.sum())
    assert found == pytest.approx(enumerated_optimum(problem, iobs.Unstructured(0.5)), rel=1e-9)


def test_refit_solves_every_row():
    problem = random_problem()
    solution = iobs.solve(problem, iobs.Unstructured(0.5), "sparsegpt", refine="refit")
    torch.testing.assert_close(solution.weight, best_on(problem, solution.mask))
    assert torch.equal(solution.weight, linalg.solve_on_support(problem.matrix, problem.linear, solution.mask))
