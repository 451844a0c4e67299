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


@pytest.mark.parametrize(("solver", "function"), [("sparsegpt", "upper_factor"), ("obc", "inverse")])
def test_solve_many_factorises_the_hessian_once(solver, function, monkeypatch):
    calls = []
    original = getattr(linalg, function)
    monkeypatch.setattr(linalg, function, lambda matrix: calls.append(1) or original(matrix))
    problem = random_problem(4, 16)
    solve_many([problem] * 3, [iobs.Unstructured(s) for s in (0.5, 0.6, 0.7)], solver, damping=0.01)
    assert len(calls) == 1


@pytest.mark.parametrize("solver", ["magnitude", "wanda"])
def test_solve_many_solves_centres_with_one_factor(solver, monkeypatch):
    calls = []
    original = torch.linalg.cholesky_ex

    def counted(*matrices, **places):
        calls.append(1)
        return original(*matrices, **places)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", counted)
    hessian = random_problem(4, 16).hessian
    problems = [iobs.Quadratic(hessian, torch.randn(3, 16, dtype=torch.float64)) for _ in range(3)]
    solve_many(problems, [iobs.NM(2, 4)] * 3, solver)
    assert len(calls) == 1


def test_solve_many_factorises_once_in_half_precision(monkeypatch):
    calls = []
    original = linalg.upper_factor
    monkeypatch.setattr(linalg, "upper_factor", lambda matrix: calls.append(1) or original(matrix))
    problem = random_problem(4, 16, dtype=torch.bfloat16)
    solve_many([problem] * 3, [iobs.NM(2, 4)] * 3, "sparsegpt", damping=0.01)
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
