"""Single steps of the methods against their formulas."""

from __future__ import annotations

import numpy as np
import pytest
from sparse_problems import correlated_design, sparse_signal

from iobs.optimize.curvature import QuadraticObjective
from iobs.optimize.methods import subproblem
from iobs.optimize.methods.gradient import StochasticIOBS, estimated_smoothness
from iobs.optimize.minimize import minimize
from iobs.optimize.objectives.families import Logistic
from iobs.optimize.objectives.linear import LeastSquares
from iobs.optimize.problem import Problem
from iobs.optimize.refit.newton import refit
from iobs.optimize.search.swaps import Swapper

D, K = 10, 4


def _objective(kind, rng):
    X = correlated_design(rng, 40, D, 0.5)
    return kind(X, rng.random(40))


def _eta(theta, gradient, smoothness):
    """The paper's step length on the support of theta."""
    on_support = np.linalg.norm(gradient[theta != 0]) ** 2
    return 1 / (smoothness + on_support / np.linalg.norm(gradient))


def _truncated(theta, k):
    theta = theta.copy()
    theta[np.argsort(-np.abs(theta))[k:]] = 0
    return theta


@pytest.mark.parametrize("batch", [None, 5])
@pytest.mark.parametrize("smoothness", [None, 0.3, 40.0])
@pytest.mark.parametrize("kind", [LeastSquares, Logistic])
@pytest.mark.parametrize("start", ["sparse", "zero"])
def test_stochastic_iobs_step_is_the_papers_formula(start, kind, smoothness, batch, rng):
    objective = _objective(kind, rng)
    theta = sparse_signal(rng, D, K) if start == "sparse" else np.zeros(D)
    hessian = objective.hessian_block(theta, np.arange(D))
    bound = np.linalg.eigvalsh(hessian)[-1] if smoothness is None else smoothness
    gradient = objective.value_and_gradient(theta)[1]
    if batch is not None:
        same = Problem(objective, K, rng=np.random.default_rng(7))
        bound = estimated_smoothness(same, theta, batch) if smoothness is None else smoothness
        gradient = objective.sampled_gradient(theta, same.rng.integers(0, 40, batch))
    method = StochasticIOBS(smoothness, batch)
    problem = Problem(objective, K, rng=np.random.default_rng(7))
    new = method.step(problem, method.begin(problem, theta))
    expected = _truncated(theta - _eta(theta, gradient, bound) * gradient, K)
    np.testing.assert_allclose(new.theta, expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("seed", [0, 7, 49, 71, 416])  # seeds where the greedy mask, swapped, is worse than Top-k
def test_best_support_is_no_worse_than_top_k_and_its_swaps(seed):
    rng = np.random.default_rng(seed)
    X = correlated_design(rng, 16, 12, 0.9)
    model = QuadraticObjective(X.T @ X, X.T @ rng.standard_normal(16))
    problem, everything = Problem(model, K), np.ones(12, bool)
    greedy = np.flatnonzero(subproblem.Greedy()(problem, model, K, everything))
    top = np.sort(np.argsort(-np.abs(np.linalg.solve(model.matrix, model.linear)))[:K])
    alone = {support.tobytes(): Swapper(problem).improve(refit(model, support)).value for support in (greedy, top)}
    best = model.value(subproblem.BestSupport()(problem, model, K, everything))
    assert alone[greedy.tobytes()] > alone[top.tobytes()] + 1e-9
    assert best == pytest.approx(alone[top.tobytes()], rel=1e-9)
    assert best <= refit(model, top).value


def test_omp_without_columns_still_fits_the_intercept(rng):
    X, y = rng.standard_normal((40, 3)), (np.arange(40) % 4 == 0).astype(float)
    result = minimize(Logistic(X, y, intercept=True), 0, method="omp")
    assert result.support.size == 0
    assert result.intercept == pytest.approx(np.log(1 / 3))
