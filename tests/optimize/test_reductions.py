"""The special cases that the paper claims equal their published formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import iobs
from iobs.core.patterns import Unstructured
from iobs.optimize.curvature import (
    DiagonalHessian,
    EmpiricalFisher,
    FullHessian,
    QuadraticObjective,
    gradient_step,
    largest_eigenvalue,
)
from iobs.optimize.methods import subproblem
from iobs.optimize.methods.gradient import HardThresholding, stochastic_length
from iobs.optimize.methods.sparse_newton import SparseNewton
from iobs.optimize.minimize import minimize
from iobs.optimize.objectives.autodiff import from_torch
from iobs.optimize.objectives.families import Logistic
from iobs.optimize.objectives.linear import LeastSquares
from iobs.optimize.problem import Problem

D = 12


@pytest.fixture
def least_squares(rng):
    X = rng.standard_normal((40, D)) @ rng.standard_normal((D, D))
    return LeastSquares(X, X @ rng.standard_normal(D) + rng.standard_normal(40))


def _dense(objective):
    return np.linalg.solve(
        objective.hessian_block(np.zeros(D), np.arange(D)), -objective.value_and_gradient(np.zeros(D))[1]
    )


class _StoredIdentity:
    """H = I / step as a stored matrix."""

    def model(self, problem, theta, gradient):
        curvature = 1.0 / gradient_step(problem, theta)
        return QuadraticObjective(curvature * np.eye(problem.dimension), curvature * theta - gradient)


def test_iht_is_the_scaled_identity_with_truncation(least_squares):
    identity = minimize(least_squares, 4, method=SparseNewton(_StoredIdentity(), subproblem.Truncate()), max_steps=30)
    iht = minimize(least_squares, 4, method="iht", max_steps=30)
    np.testing.assert_allclose(identity.theta, iht.theta, rtol=1e-9, atol=1e-12)


def test_iht_step_is_one_over_the_largest_eigenvalue(least_squares):
    matrix = least_squares.hessian_block(np.zeros(D), np.arange(D))
    assert largest_eigenvalue(least_squares, np.zeros(D)) == pytest.approx(np.linalg.eigvalsh(matrix)[-1], rel=1e-10)
    step = minimize(least_squares, 4, method=HardThresholding(0.01), max_steps=1, tol=0).theta
    expected = -0.01 * least_squares.value_and_gradient(np.zeros(D))[1]
    expected[np.argsort(-np.abs(expected))[4:]] = 0
    np.testing.assert_allclose(step, expected)


def test_topk_iobs_is_magnitude_of_the_newton_point(least_squares):
    centre = torch.from_numpy(_dense(least_squares))
    hessian = torch.from_numpy(least_squares.hessian_block(np.zeros(D), np.arange(D)))
    solution = iobs.solve(iobs.Quadratic.at(centre[None], hessian), Unstructured(keep=4), "magnitude")
    ours = minimize(least_squares, 4, method="topk_iobs", max_steps=1)
    np.testing.assert_allclose(ours.theta, solution.weight[0].numpy(), rtol=1e-8)


def test_iobs_exact_is_the_papers_formula(least_squares):
    hessian = least_squares.hessian_block(np.zeros(D), np.arange(D))
    newton, inverse = _dense(least_squares), np.linalg.inv(hessian)
    ours = minimize(least_squares, 4, method="iobs_exact", max_steps=1)
    removed = np.setdiff1d(np.arange(D), ours.support)
    h_s = np.zeros((D, D))
    h_s[np.ix_(removed, removed)] = np.linalg.inv(inverse[np.ix_(removed, removed)])
    np.testing.assert_allclose(ours.theta, newton - inverse @ h_s @ newton, atol=1e-8)
    assert minimize(least_squares, 4, method="iobs").loss >= ours.loss - 1e-9


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("kind", [LeastSquares, Logistic])
def test_fisher_treats_integer_weights_as_repeated_rows(kind, intercept, rng):
    X, y, weights = rng.standard_normal((40, D)), (rng.random(40) < 0.5).astype(float), rng.integers(0, 4, 40)
    repeated = kind(np.repeat(X, weights, axis=0), np.repeat(y, weights), intercept=intercept)
    weighted = kind(X, y, sample_weight=weights, intercept=intercept)
    theta = rng.standard_normal(weighted.dimension)
    matrices = [EmpiricalFisher().model(Problem(f, 4), theta, theta).matrix for f in (repeated, weighted)]
    np.testing.assert_allclose(*matrices, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["Truncate", "TruncateAndRefit", "Greedy", "Enumerate", "BestSupport"])
@pytest.mark.parametrize(("count", "allowed"), [(2, [0, 1, 2]), (5, [0, 1, 2, 3, 4, 6])])
def test_subproblem_solvers_respect_count_and_allowed(name, count, allowed, least_squares):
    problem = Problem(least_squares, 3)
    model = FullHessian().model(problem, np.zeros(D), problem.at_zero[1])
    support = np.flatnonzero(getattr(subproblem, name)()(problem, model, count, np.isin(np.arange(D), allowed)))
    assert support.size == count
    assert set(support) <= set(allowed)


def test_woodfisher_is_one_removal_without_the_gradient(rng):
    X = rng.standard_normal((60, D))
    objective = Logistic(X, (rng.random(60) < 0.5).astype(float), ridge=0.1)
    theta = rng.standard_normal(D)
    for curvature in (EmpiricalFisher(), FullHessian(0.0)):
        inverse = np.linalg.inv(curvature.model(Problem(objective, D - 1), theta, np.zeros(D)).matrix)
        saliency = theta**2 / inverse.diagonal()
        i = int(saliency.argmin())
        expected = theta - theta[i] / inverse[i, i] * inverse[i]  # WoodFisher, eq. 10 and 11
        for choice in (subproblem.Greedy(), subproblem.Enumerate()):
            method = SparseNewton(curvature, choice, stationary=True)
            ours = minimize(objective, D - 1, method=method, theta0=theta, max_steps=1)
            assert i not in ours.support
            np.testing.assert_allclose(ours.theta, expected, rtol=1e-8, atol=1e-9)


def test_woodtaylor_is_one_removal_with_the_gradient(rng):
    X = rng.standard_normal((60, D))
    objective = Logistic(X, (rng.random(60) < 0.5).astype(float), ridge=0.1)
    theta = rng.standard_normal(D)
    gradient = objective.value_and_gradient(theta)[1]
    inverse = np.linalg.inv(EmpiricalFisher().model(Problem(objective, D - 1), theta, gradient).matrix)
    newton = theta - inverse @ gradient
    i = int((newton**2 / inverse.diagonal()).argmin())
    ours = minimize(objective, D - 1, method="woodtaylor", theta0=theta, max_steps=1)
    np.testing.assert_allclose(ours.theta, newton - newton[i] / inverse[i, i] * inverse[i], rtol=1e-7, atol=1e-9)


def test_obc_is_nested_rounds_of_one_removal(least_squares):
    rounds = minimize(least_squares, 5, method="obc")
    assert len(rounds.history) == D - 5 + 1
    model = FullHessian(0.0).model(Problem(least_squares, 5), *_point(least_squares, _dense(least_squares)))
    at_once = subproblem.Greedy()(Problem(least_squares, 5), model, 5, np.ones(D, dtype=bool))
    np.testing.assert_allclose(rounds.theta, at_once, rtol=1e-7)
    # Without nested supports, repeating k = d - 1 stays at one zero.
    literal = minimize(least_squares, D - 1, method=SparseNewton(FullHessian(), subproblem.Enumerate()), max_steps=5)
    assert literal.support.size == D - 1


def test_obc_equals_the_layer_solver(least_squares):
    model = FullHessian(0.0).model(Problem(least_squares, 5), *_point(least_squares, _dense(least_squares)))
    quadratic = iobs.Quadratic(torch.from_numpy(model.matrix), torch.from_numpy(model.linear)[None])
    solution = iobs.solve(quadratic, Unstructured(keep=5), "obc")
    np.testing.assert_allclose(solution.weight[0].numpy(), minimize(least_squares, 5, method="obc").theta, rtol=1e-7)


def test_obd_is_the_diagonal_saliency(least_squares):
    theta = _dense(least_squares)
    saliency = theta**2 * DiagonalHessian().model(Problem(least_squares, 5), theta, theta).matrix.diagonal()
    ours = minimize(least_squares, 5, method="obd")
    assert set(ours.support) == set(np.argsort(-saliency)[:5])
    np.testing.assert_allclose(ours.theta[ours.support], theta[ours.support], rtol=1e-8)


def test_stochastic_length_minimises_the_model_on_any_mask(rng):
    for _ in range(20):
        d, lam = 7, float(rng.random()) + 0.1
        theta, gradient = rng.standard_normal(d), rng.standard_normal(d)
        mask = rng.random(d) < 0.6
        hessian = np.outer(gradient, gradient) / np.linalg.norm(gradient) + lam * np.eye(d)
        model = QuadraticObjective(hessian, hessian @ theta - gradient)
        support = np.flatnonzero(mask)
        expected = np.zeros(d)
        expected[support] = np.linalg.solve(hessian[np.ix_(support, support)], model.linear[support])
        eta = stochastic_length(theta, gradient, mask, lam)
        np.testing.assert_allclose(np.where(mask, theta - eta * gradient, 0.0), expected, atol=1e-10)
    assert stochastic_length(theta, 0 * gradient, mask, 0.5) == 2.0
    inside = np.where(mask, theta, 0.0)
    paper = 1 / (lam + (gradient[mask] ** 2).sum() / np.linalg.norm(gradient))
    assert stochastic_length(inside, gradient, mask, lam) == pytest.approx(paper)


@pytest.mark.parametrize("seed", range(3))
def test_topk_iobs_needs_one_step_where_iht_needs_hundreds(seed):
    """Section 4.1: d 128, k* 16, n 256, k 64; g and H belong to the same f, with either factor."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((256, 128)) / 16
    truth = np.where(np.isin(np.arange(128), rng.choice(128, 16, replace=False)), rng.standard_normal(128), 0.0)
    target = X @ truth
    tensor, y = torch.from_numpy(X), torch.from_numpy(target)
    doubled = from_torch(lambda t: ((y - tensor @ t) ** 2).sum(), 128)
    for objective in (LeastSquares(X, target), doubled):
        newton = minimize(objective, 64, method="topk_iobs", max_steps=1)
        assert np.linalg.norm(newton.theta - truth) <= 1e-12 * np.linalg.norm(truth)
    thresholding = minimize(LeastSquares(X, target), 64, method="iht", max_steps=200)
    assert np.linalg.norm(thresholding.theta - truth) > 1e-12 * np.linalg.norm(truth)


def test_topk_iobs_cycles_if_gradient_and_hessian_differ(rng):
    """With the gradient of norm(y - X theta)^2 and the Hessian X^T X the iterates are 0, 2 theta*, 0, 2 theta*, ..."""
    X = rng.standard_normal((60, D))
    truth = np.where(np.arange(D) < 3, 1.0, 0.0)
    objective = LeastSquares(X, X @ truth)

    class Mixed:
        def model(self, problem, theta, gradient):
            return FullHessian(0.0).model(problem, theta, 2 * gradient)

    result = minimize(objective, 6, method=SparseNewton(Mixed(), subproblem.Truncate()), max_steps=50)
    assert not result.converged
    steps = [record.step_norm for record in result.history[1:]]
    np.testing.assert_allclose(steps, 2 * np.linalg.norm(truth), rtol=1e-6)


def _point(objective, theta):
    return theta, objective.value_and_gradient(theta)[1]
