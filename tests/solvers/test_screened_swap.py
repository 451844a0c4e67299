"""Screened swaps: optimal among candidates, never worse, equal for any number of threads."""

from itertools import product

import pytest
import torch
from solver_problems import best_on, random_problem, swapped_masks

import iobs
from iobs.core.masks import top_mask
from iobs.core.quadratic import Solution
from iobs.solvers import screened_swap
from iobs.solvers.refit import scaled
from iobs.solvers.screened_swap import ScreenedSwap, candidate_columns

PATTERNS = [iobs.Unstructured(0.5), iobs.Unstructured(0.6, per="row"), iobs.NM(2, 4), iobs.NM(3, 8)]


def by_magnitude(problem, pattern):
    mask = top_mask(problem.centre().abs(), pattern)
    return Solution.of(problem, best_on(problem.to(torch.float64), mask).to(problem.dtype), mask)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_rows_are_optimal_among_their_candidates_and_give_their_prices(pattern):
    problem = random_problem(12, 32, dtype=torch.float32)
    groups, mask = pattern.groups((12, 32)), top_mask(torch.rand(12, 32), pattern)
    hessian, linear, _ = scaled(problem)
    exact = iobs.Quadratic(hessian.double(), linear.double())
    rows = screened_swap.Rows.of(mask.clone(), best_on(exact, mask).float())
    slots = candidate_columns(hessian, linear, rows, groups, 6)
    screened_swap.swap_rows(rows, hessian, linear, slots, groups, 1e-5, 30)
    assert int(rows.swaps.sum()) > 0
    # Condition 50 times the rounding of float32, and the rounding of the updates of swaps.
    torch.testing.assert_close(rows.weight, best_on(exact, rows.mask).float(), rtol=1e-3, atol=1e-3)
    least = exact.loss(best_on(exact, rows.mask))
    for row, columns in enumerate(slots):
        columns = columns[columns >= 0]
        cost, gain = {}, {}
        for column in columns.tolist():
            other = rows.mask.clone()
            other[row, column] ^= True
            change = float((exact.loss(best_on(exact, other)) - least)[row])
            (cost if rows.mask[row, column] else gain)[column] = abs(change)
        for leave, enter in product(cost, gain):
            if groups.size >= 32 or leave // groups.size == enter // groups.size:
                other = rows.mask.clone()
                other[row, leave], other[row, enter] = False, True
                assert float(exact.loss(best_on(exact, other))[row]) >= float(least[row]) - 1e-4 * abs(least[row])
        removal, admission = rows.names[row].tolist()
        assert cost[removal] == pytest.approx(min(cost.values()), rel=1e-2, abs=1e-3)
        assert gain[admission] == pytest.approx(max(gain.values()), rel=1e-2, abs=1e-3)
        prices = [2 * cost[removal], 2 * gain[admission]]
        assert rows.prices[row, :2].tolist() == pytest.approx(prices, rel=1e-2, abs=1e-3)


def test_swap_rows_leaves_a_row_if_members_are_singular():
    hessian = torch.eye(6)
    hessian[0, 1] = hessian[1, 0] = 1 + 1e-6
    mask = torch.tensor([[True, True, True, False, False, False]])
    rows = screened_swap.Rows.of(mask.clone(), mask.float())
    slots = torch.tensor([[2, 3, 4, 5]])
    screened_swap.swap_rows(
        rows, hessian, torch.ones(1, 6), slots, iobs.Unstructured(0.5, per="row").groups((1, 6)), 1e-6, 64
    )
    assert torch.equal(rows.mask, mask)
    assert torch.equal(rows.weight, mask.float())
    assert int(rows.swaps) == 0


@pytest.mark.parametrize("pattern", PATTERNS[1:], ids=str)
def test_screened_swap_is_optimal_if_all_columns_are_candidates(pattern):
    problem = random_problem(3, 16, dtype=torch.float32)
    start = by_magnitude(problem, pattern)
    found = ScreenedSwap(candidates=16)(problem, pattern, start)
    assert found.stats["swaps"] > 0
    exact = problem.to(torch.float64)
    least = exact.loss(best_on(exact, found.mask)).sum()
    assert found.loss.sum() < start.loss.sum()
    for mask in swapped_masks(found.mask, pattern):
        assert exact.loss(best_on(exact, mask)).sum() >= least - 1e-5 * least.abs()


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_screened_swap_keeps_counts_and_is_never_worse(pattern):
    problem = random_problem(24, 48, dtype=torch.float32, condition=1e4)
    start = by_magnitude(problem, pattern)
    found = ScreenedSwap(candidates=4)(problem, pattern, start)
    assert found.loss.sum() <= start.loss.sum()
    groups = pattern.groups((24, 48))
    assert (found.mask.reshape(groups.count, -1).sum(1) == groups.keep).all()


def test_screened_swap_handles_empty_and_full_rows():
    problem = random_problem(4, 16, dtype=torch.float32)
    mask = torch.zeros(4, 16, dtype=torch.bool)
    mask[0], mask[1, :3] = True, True
    start = Solution.of(problem, best_on(problem.to(torch.float64), mask).float(), mask)
    found = ScreenedSwap()(problem, iobs.Unstructured(keep=19), start)
    assert int(found.mask.sum()) == 19
    assert found.stats["exchanges"] > 0
    assert found.loss.sum() < start.loss.sum()


@pytest.mark.parametrize("pattern", PATTERNS[:3], ids=str)
def test_best_budget_gives_equal_bits_on_1_and_2_threads(pattern):
    problem = random_problem(96, 64, dtype=torch.float32)  # large enough for screened swaps
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(iobs.solve(problem, pattern, budget="best", damping=0.01))
    finally:
        torch.set_num_threads(threads)
    assert (found[0].mask == found[1].mask).double().mean() >= 0.9999
    assert torch.equal(found[0].weight, found[1].weight)
