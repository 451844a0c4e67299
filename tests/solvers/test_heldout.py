import pytest
import torch

import iobs
from iobs.core.quadratic import Quadratic, relative_error
from iobs.errors import ProblemError
from iobs.solvers.heldout import solve_by_held_out


def gram(samples):
    return samples.T @ samples / len(samples)


def test_the_damping_with_the_least_held_out_error_wins():
    mixing = torch.randn(24, 24, dtype=torch.float64)
    calibration, held_out = (gram(torch.randn(n, 24, dtype=torch.float64) @ mixing) for n in (26, 4000))
    problem = iobs.Quadratic.at(torch.randn(8, 24, dtype=torch.float64), calibration)
    dampings = (1e-4, 1e-2, 1.0)
    found = solve_by_held_out(problem, iobs.Unstructured(0.5), held_out, dampings=dampings)
    other = Quadratic.at(problem.centre(), held_out)
    errors = {
        damping: relative_error(other, iobs.solve(problem, iobs.Unstructured(0.5), damping=damping).weight)
        for damping in dampings
    }
    assert found.stats["held_out_errors"] == pytest.approx(errors)
    assert found.stats["damping"] == min(errors, key=errors.get) != 1e-4


def test_nothing_to_try():
    with pytest.raises(ProblemError):
        solve_by_held_out(
            iobs.Quadratic.at(torch.ones(1, 2), torch.eye(2)), iobs.Unstructured(0.5), torch.eye(2), dampings=()
        )


def test_dampings_may_be_an_array_and_come_twice():
    problem, other = iobs.Quadratic.at(torch.randn(3, 6), gram(torch.randn(9, 6))), gram(torch.randn(99, 6))
    tried = torch.tensor([0.01, 0.01, 0.1]).numpy()
    found = solve_by_held_out(problem, iobs.Unstructured(0.5), other, dampings=tried)
    assert len(found.stats["held_out_errors"]) == 2
