"""`solve_many`: shared factorisations, with the solutions of `solve`."""

import pytest
import torch
from solver_problems import random_problem

import iobs
from iobs.core import linalg
from iobs.core.quadratic import Factors
from iobs.errors import DampingWarning, ProblemError
from iobs.solvers import solve_many


@pytest.mark.parametrize("refine", [None, "swap"])
@pytest.mark.parametrize("solver", ["sparsegpt", "obc", "admm", "wanda"])
def test_solve_many_equals_solve(solver, refine):
    q = random_problem(6, 16)
    k = iobs.Quadratic.at(torch.randn(4, 16, dtype=torch.float64), q.hessian)
    patterns = [iobs.Unstructured(0.5), iobs.NM(2, 4), iobs.Unstructured(0.8, per="row")]
    problems = [q, k, q]
    together = solve_many(problems, patterns, solver, refine=refine, damping=0.01)
    for solution, problem, pattern in zip(together, problems, patterns, strict=True):
        alone = iobs.solve(problem, pattern, solver, refine=refine, damping=0.01)
        assert torch.equal(solution.mask, alone.mask)
        torch.testing.assert_close(solution.weight, alone.weight)
        torch.testing.assert_close(solution.loss, alone.loss)


@pytest.mark.parametrize(
    ("solver", "owner", "function", "dtype"),
    [
        ("sparsegpt", linalg, "upper_factor", torch.float64),
        ("sparsegpt", linalg, "upper_factor", torch.bfloat16),
        ("obc", linalg, "inverse", torch.float64),
        ("magnitude", torch.linalg, "cholesky_ex", torch.float64),
        ("wanda", torch.linalg, "cholesky_ex", torch.float64),
    ],
)
def test_solve_many_factorises_the_hessian_once(solver, owner, function, dtype, monkeypatch):
    calls, original = [], getattr(owner, function)
    monkeypatch.setattr(owner, function, lambda *matrices, **places: calls.append(1) or original(*matrices, **places))
    hessian = random_problem(4, 16, dtype=dtype).hessian
    problems = [iobs.Quadratic(hessian, torch.randn(3, 16).to(dtype)) for _ in range(3)]
    damping = 0.0 if owner is torch.linalg else 0.01
    solve_many(problems, [iobs.NM(2, 4)] * 3, solver, damping=damping)
    assert len(calls) == 1


def test_solve_many_mixes_problems_with_and_without_centre():
    centred = random_problem(4, 16)
    free = iobs.Quadratic(centred.hessian, torch.randn(3, 16, dtype=torch.float64))
    drifted = iobs.Quadratic(centred.hessian, torch.randn(3, 16, dtype=torch.float64), torch.randn(3, 16).double())
    together = solve_many([centred, free, drifted], [iobs.NM(2, 4)] * 3, damping=0.1)
    for solution, problem in zip(together, [centred, free, drifted], strict=True):
        alone = iobs.solve(problem, iobs.NM(2, 4), damping=0.1)
        torch.testing.assert_close(solution.weight, alone.weight)


def test_solve_many_raises_the_damping_of_all_problems():
    samples = torch.randn(8, 16, dtype=torch.float64)
    hessian = samples.T @ samples
    problems = [iobs.Quadratic.at(torch.randn(2, 16, dtype=torch.float64), hessian) for _ in range(2)]
    with pytest.warns(DampingWarning, match="Cholesky failed"):
        solutions = solve_many(problems, [iobs.Unstructured(0.5)] * 2, "obc")
    assert solutions[0].stats["damping"] == solutions[1].stats["damping"] > 0


def test_solve_many_raises_if_misused():
    first, second = random_problem(2, 8), random_problem(2, 8)
    assert solve_many([], []) == []
    with pytest.raises(ProblemError, match="same tensor"):
        solve_many([first, second], [iobs.NM(2, 4)] * 2)
    with pytest.raises(ProblemError, match="one pattern"):
        solve_many([first], [])


def test_factors_are_stored_only_if_keep_is_true():
    plain = Factors()
    assert [plain.get("a", lambda i=i: i) for i in range(2)] == [0, 1]
    kept = Factors(keep=True)
    assert [kept.get("a", lambda i=i: i) for i in range(2)] == [0, 0]


@pytest.mark.parametrize("solver", ["sparsegpt", "obc", "admm"])
@pytest.mark.parametrize("pattern", [iobs.NM(2, 4), iobs.Unstructured(0.6, per="row")], ids=str)
def test_solver_gives_equal_masks_if_rows_are_split(solver, pattern):
    problem = random_problem(64, 32, dtype=torch.float32)
    whole = iobs.solve(problem, pattern, solver, damping=0.01)
    halves = [iobs.solve(problem.rows(part), pattern, solver, damping=0.01) for part in (slice(0, 32), slice(32, 64))]
    agreement = (torch.cat([half.mask for half in halves]) == whole.mask).double().mean()
    assert agreement >= 0.9999
