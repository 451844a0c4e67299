"""Numba kernels compared with their torch forms, or with brute force."""

import pytest
import torch
from solver_problems import dependent_problem, random_problem

import iobs
from iobs.core import linalg
from iobs.solvers import obc, sparsegpt, swap
from iobs.solvers.kernels import project

DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("keep", [1, 2, 500, 999, 1000])
@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "tiny"])
def test_threshold_is_that_of_the_sorted_magnitudes(kind, keep):
    values = torch.randn(10, 100)
    if kind == "ties":
        values = (values * 3).round()
    if kind == "zeros":
        values[:, 20:] = 0
    if kind == "tiny":
        values *= 1e-42  # subnormal numbers
    magnitudes = values.abs()
    value = magnitudes.flatten().sort(descending=True).values[keep - 1]
    wanted = project.Threshold(float(value), int((magnitudes > value).sum()), int((magnitudes == value).sum()))
    assert project.threshold(values, keep) == wanted


@pytest.mark.parametrize("dtype", DTYPES)
def test_eliminate_numba_equals_torch(dtype):
    factor = linalg.cholesky(random_problem(1, 24).matrix).T.contiguous().to(dtype)
    current, mask = torch.randn(40, 24, dtype=dtype), torch.rand(40, 24) > 0.5
    other, other_mask = current.clone(), mask.clone()
    sparsegpt.eliminate_torch(current, factor, mask)
    sparsegpt.eliminate(other, factor, other_mask)
    torch.testing.assert_close(other, current)
    current, other = torch.randn(40, 24, dtype=dtype), None
    other = current.clone()
    sparsegpt.eliminate_groups_torch(current, factor, mask, 3, 8)
    sparsegpt.eliminate_groups(other, factor, other_mask, 3, 8)
    assert torch.equal(mask, other_mask)
    torch.testing.assert_close(other, current)


@pytest.mark.parametrize(("of", "quota"), [(16, 16), (4, 2), (8, 3)])
def test_greedy_removals_numba_equals_torch(of, quota):
    problem = random_problem(20, 16)
    inverse = linalg.inverse(problem.matrix).contiguous()
    steps = torch.arange(20) % (16 // of * quota + 1)
    numba = obc.greedy_removals(inverse, problem.centre(), steps, of, quota)
    plain = [torch.full_like(numba[0], -1), torch.full_like(numba[1], torch.inf)]
    obc._torch(inverse, problem.centre(), steps, of, quota, *plain)
    assert torch.equal(numba[0], plain[0])
    torch.testing.assert_close(numba[1], plain[1])


def loss_on(hessian, linear, support):
    """The least loss on a support."""
    return -0.5 * linear[support] @ torch.linalg.solve(hessian[support][:, support], linear[support])


@pytest.mark.parametrize(("inside", "outside"), [(8, 8), (2, 2), (1, 1)])
def test_swaps_are_the_best_ones_and_leave_the_state_of_their_support(inside, outside):
    problem = random_problem(6, 16, condition=1e3)
    hessian, mask = problem.matrix, (torch.arange(16) % (inside + outside)) < inside
    groups = torch.arange(16) // (inside + outside)
    for row in problem.linear:
        supports = [
            torch.tensor([*({*mask.nonzero().flatten().tolist(), j} - {i})])
            for i in mask.nonzero().flatten().tolist()
            for j in (~mask & (groups == groups[i])).nonzero().flatten().tolist()
        ]
        best = min(loss_on(hessian, row, support) for support in supports)
        state = swap.RowState.build(hessian, row, mask)
        assert swap.swap_until_optimal(state, hessian, inside, outside, 1e-9, 1) == 1
        torch.testing.assert_close(loss_on(hessian, row, state.support), best)
        swap.swap_until_optimal(state, hessian, inside, outside, 1e-9, 5)
        fresh = swap.RowState.build(hessian, row, torch.zeros(16).bool().index_fill(0, state.support, True))
        order, rest = state.support.argsort(), state.rest.argsort()
        torch.testing.assert_close(state.weight[order], fresh.weight)
        torch.testing.assert_close(state.schur[rest], fresh.schur)
        torch.testing.assert_close(state.gradient[rest], fresh.gradient)
        torch.testing.assert_close(state.spread[rest][:, order], fresh.spread)
        torch.testing.assert_close(state.inverse[order][:, order], fresh.inverse)


@pytest.mark.parametrize(
    ("kind", "seed", "first"), [("copy", 1, 4), ("copy", 2, 0), ("scaled", 1, 4), ("scaled", 18, 0)]
)
def test_swaps_lower_the_loss_if_inputs_depend_on_each_other(kind, seed, first):
    problem = dependent_problem(kind, seed)
    scale = problem.matrix.diagonal().sqrt()
    hessian, linear = problem.matrix / scale / scale[:, None], (problem.linear / scale)[0]
    mask = torch.zeros(7, dtype=torch.bool)
    mask[first : first + 3] = True
    state = swap.RowState.build(hessian, linear, mask)

    def loss():
        block = hessian[state.support][:, state.support]
        return float(0.5 * state.weight @ block @ state.weight - linear[state.support] @ state.weight)

    before = loss()
    assert swap.swap_until_optimal(state, hessian, 3, 4, -1e-10 * before, 64) < 64
    assert loss() <= before
    fresh = swap.RowState.build(hessian, linear, torch.zeros(7, dtype=torch.bool).scatter(0, state.support, True))
    order = state.support.argsort()
    torch.testing.assert_close(state.weight[order], fresh.weight, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "pattern", [iobs.Unstructured(0.6), iobs.Unstructured(0.6, per="row"), iobs.NM(2, 4), iobs.NM(5, 20)], ids=str
)
def test_project_numba_equals_torch(pattern):
    groups = pattern.groups((40, 60))
    dense, target, linear = (torch.randn(40, 60) for _ in range(3))
    mask = torch.rand(40, 60) > 0.5
    plain, numba = ([tensor.clone() for tensor in (dense, target, mask)] for _ in range(2))
    project.project_torch(*plain, linear, groups, 0.7, 1.3)
    project.project(*numba, linear, groups, 0.7, 1.3)
    # The numba form interpolates the layer-wide threshold, so entries near the threshold may differ.
    agree = plain[2] == numba[2]
    assert agree.double().mean() >= (0.998 if groups.count == 1 else 1)
    torch.testing.assert_close(numba[1], plain[1])
    torch.testing.assert_close(numba[0][agree], plain[0][agree])
    for tensors, form in ((plain, project.restart_torch), (numba, project.restart)):
        form(tensors[0], tensors[1], mask, linear, 0.5, 1.4)
    torch.testing.assert_close(numba[1], plain[1])
    torch.testing.assert_close(numba[0], plain[0])
