import pytest
import torch

import iobs
from iobs.core import quadratic
from iobs.core.quadratic import Quadratic, Solution
from iobs.errors import NonFiniteError, ProblemError


@pytest.fixture
def hessian():
    samples = torch.randn(40, 8, dtype=torch.float64)
    return samples.T @ samples


@pytest.fixture
def centre():
    return torch.randn(3, 8, dtype=torch.float64)


def test_centre_of_a_large_problem_comes_part_by_part(hessian, centre, monkeypatch):
    expected = Quadratic(hessian, centre @ hessian).centre()
    monkeypatch.setattr(quadratic, "_LARGE", 8)
    monkeypatch.setattr(quadratic, "_ROWS", 2)
    problem = Quadratic(hessian, centre @ hessian)
    kept = hessian.clone()
    torch.testing.assert_close(problem.centre(), expected)
    assert torch.equal(hessian, kept)  # the factorisation in place is one of a copy


def test_quadratic_loss_gradient_and_centre_are_consistent(hessian, centre):
    problem = Quadratic.at(centre, hessian)
    point = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    expected = 0.5 * ((point @ hessian) * point).sum(1) - (problem.linear * point).sum(1)
    torch.testing.assert_close(problem.loss(point.detach()), expected.detach())
    (gradient,) = torch.autograd.grad(expected.sum(), point)
    torch.testing.assert_close(problem.gradient(point.detach()), gradient)
    assert problem.gradient(problem.centre()).abs().max() < 1e-10
    same = Quadratic(hessian, centre @ hessian)
    torch.testing.assert_close(same.centre(), centre)
    torch.testing.assert_close(same.loss(centre), problem.loss(centre))


def test_newton_centre_is_the_newton_point(hessian, centre):
    gradient = torch.randn(3, 8, dtype=torch.float64)
    problem = Quadratic.newton(centre, gradient, hessian)
    torch.testing.assert_close(problem.centre(), centre - gradient @ torch.linalg.inv(hessian))
    torch.testing.assert_close(problem.gradient(centre), gradient)


@pytest.mark.parametrize("centred", [True, False])
def test_damped_adds_a_proximal_term_to_the_anchor(hessian, centre, centred):
    anchor = centre if centred else torch.randn_like(centre)
    problem = Quadratic.at(centre, hessian) if centred else Quadratic(hessian, centre @ hessian, anchor)
    point = torch.randn_like(centre)
    rise = problem.damped(0.3).loss(point) - problem.loss(point)
    # Equal to 0.15 |v - anchor|^2 up to a constant.
    torch.testing.assert_close(rise, 0.15 * (point - anchor).square().sum(1) - 0.15 * anchor.square().sum(1))
    assert problem.damped(0.0) is problem


def test_centre_has_least_scaled_norm_if_hessian_is_singular():
    samples = torch.randn(4, 8, dtype=torch.float64)
    hessian = samples.T @ samples
    linear = torch.randn(2, 4, dtype=torch.float64) @ samples
    centre = Quadratic(hessian, linear).centre()
    scale = hessian.diagonal().sqrt()
    torch.testing.assert_close(centre * scale, linear / scale @ torch.linalg.pinv(hessian / scale / scale[:, None]))
    torch.testing.assert_close(centre @ hessian, linear)


def test_centre_stays_small_if_float32_gram_is_singular():
    """Rounding turns a zero pivot positive. A solve with such a pivot gives enormous weights."""
    inputs, weight = torch.randn(20, 64), torch.randn(3, 64)
    gram = inputs.T @ inputs
    found = Quadratic(gram, weight @ gram).centre()
    assert found.norm() < weight.norm()
    torch.testing.assert_close(found @ inputs.T, weight @ inputs.T, rtol=0, atol=1e-3)


def test_centre_is_accurate_if_one_input_is_large():
    """Two nearly equal columns need the pseudo-inverse. A third column is 1,000 times as large as the others."""
    inputs, weight = torch.randn(400, 64), torch.randn(3, 64)
    inputs[:, 1] = inputs[:, 0] + 1e-4 * inputs[:, 1]
    inputs[:, 2] *= 1e3
    gram = inputs.T @ inputs
    found = Quadratic(gram, weight @ gram).centre()
    torch.testing.assert_close(found[:, 3:], weight[:, 3:], rtol=0, atol=2e-2)


def test_rows_shares_the_hessian_and_to_changes_the_dtype(hessian, centre):
    problem = Quadratic.at(centre, hessian)
    part = problem.rows(slice(1, 3))
    assert part.hessian is problem.hessian
    torch.testing.assert_close(part.linear, problem.linear[1:])
    single = problem.to(torch.float32)
    assert (single.dtype, single.matrix.dtype, single.linear.dtype) == (torch.float32,) * 3
    assert problem.to(torch.float64) is problem


def test_solution_has_exact_zeros_and_its_own_loss(hessian, centre):
    problem = Quadratic.at(centre, hessian)
    mask = torch.rand(3, 8) > 0.5
    solution = Solution.of(problem, centre, mask, swaps=3)
    assert torch.equal(solution.weight, centre * mask)
    torch.testing.assert_close(solution.loss, problem.loss(centre * mask))
    assert solution.stats == {"swaps": 3}


def test_quadratic_raises_if_malformed(hessian, centre):
    for error, make in (
        (ProblemError, lambda: Quadratic(hessian, None)),
        (ProblemError, lambda: Quadratic(hessian.numpy(), centre)),
        (ProblemError, lambda: Quadratic(hessian, centre.numpy())),
        (ProblemError, lambda: Quadratic.at(centre.numpy(), hessian)),
        (ProblemError, lambda: Quadratic.at(centre, hessian.tolist())),
        (ProblemError, lambda: Quadratic.newton(centre, centre.tolist(), hessian)),
        (ProblemError, lambda: Quadratic(hessian, centre[0])),
        (ProblemError, lambda: Quadratic(hessian[:, :4], centre)),
        (ProblemError, lambda: Quadratic(hessian[0, 0], centre)),
        (ProblemError, lambda: Quadratic(hessian, centre, centre[:1])),
        (ProblemError, lambda: Quadratic(torch.eye(2, dtype=torch.int64), torch.ones(1, 2))),
        (ProblemError, lambda: Quadratic(hessian.float(), centre)),
        (ProblemError, lambda: Quadratic(hessian.bfloat16(), centre.float())),
        (ProblemError, lambda: Quadratic(hessian, centre, centre.float())),
        (NonFiniteError, lambda: Quadratic(hessian, centre * torch.inf)),
        (NonFiniteError, lambda: Quadratic.at(centre, hessian * torch.nan)),
    ):
        with pytest.raises(error):
            make()


def test_quadratic_accepts_values_whose_sum_overflows():
    huge = torch.full((2, 4), 3e38)
    assert Quadratic(torch.eye(4), huge).shape == (2, 4)


def test_solve_returns_no_gradient_if_given_parameters(hessian, centre):
    weight = torch.nn.Parameter(centre.clone())
    inputs = torch.randn(8, len(hessian), dtype=hessian.dtype, requires_grad=True)
    gram = hessian + inputs.T @ inputs
    solution = iobs.solve(iobs.Quadratic(gram, weight @ gram, weight), iobs.Unstructured(0.5))
    assert not solution.weight.requires_grad
