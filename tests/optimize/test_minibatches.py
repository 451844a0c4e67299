"""Minibatch estimates: gradient, curvature and lambda of stochastic I-OBS against their formulas."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from sparse_problems import correlated_design, sparse_signal

from iobs import minimize
from iobs.optimize.curvature import FullHessian, SampledHessian
from iobs.optimize.methods.gradient import StochasticIOBS, estimated_smoothness, stochastic_length
from iobs.optimize.objectives.families import Logistic, Poisson
from iobs.optimize.objectives.linear import LeastSquares
from iobs.optimize.problem import Problem

N, D, K = 60, 8, 3
STORAGES = {"numpy": np.asarray, "sparse": sp.csr_array, "torch": torch.from_numpy}


def _objective(kind, rng, storage="numpy", **options):
    X = correlated_design(rng, N, D, 0.5)
    return kind(STORAGES[storage](X), rng.random(N), ridge=0.3, **options)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("kind", [LeastSquares, Logistic, Poisson])
def test_minibatches_of_a_partition_add_up_to_the_objective(kind, intercept, storage, rng):
    weights = rng.random(N) + 0.5
    objective = _objective(kind, rng, storage, intercept=intercept, sample_weight=weights, offset=rng.random(N))
    theta = rng.standard_normal(objective.dimension)
    parts = [objective.minibatch(rows) for rows in np.array_split(rng.permutation(N), 7)]
    value, gradient = objective.value_and_gradient(theta)
    assert sum(part.value(theta) for part in parts) == pytest.approx(value)
    np.testing.assert_allclose(sum(part.value_and_gradient(theta)[1] for part in parts), gradient)
    everything = np.arange(objective.dimension)
    blocks = sum(part.hessian_block(theta, everything) for part in parts)
    np.testing.assert_allclose(blocks, objective.hessian_block(theta, everything), atol=1e-10)
    np.testing.assert_allclose(sum(part.hessian_diagonal(theta) for part in parts), objective.hessian_diagonal(theta))


@pytest.mark.parametrize("kind", [LeastSquares, Logistic])
def test_smoothness_is_the_least_lambda_of_the_appendix(kind, rng):
    objective, batch = _objective(kind, rng), 4
    theta = rng.standard_normal(D)
    found = estimated_smoothness(Problem(objective, K, rng=np.random.default_rng(5)), theta, batch)
    rows = np.random.default_rng(5).integers(0, N, (8, batch))
    gradients = [objective.sampled_gradient(theta, chosen) for chosen in rows]
    outer = sum(np.outer(g, g) / np.linalg.norm(g) for g in gradients) / 8
    hessian = N / rows.size * objective.minibatch(rows.ravel()).hessian_block(theta, np.arange(D))
    floor = 0.1 * np.linalg.eigvalsh(hessian)[-1]
    assert found == pytest.approx(max(floor, np.linalg.eigvalsh(hessian - outer)[-1]), rel=1e-3)
    slack = found * np.eye(D) + outer - hessian
    assert np.linalg.eigvalsh(slack)[0] > -1e-3 * found
    assert found <= np.linalg.eigvalsh(hessian)[-1] * (1 + 1e-6)


@pytest.mark.parametrize("mask", ["support", "top"])
def test_step_makes_its_updates_by_the_formula(mask, rng):
    objective = _objective(Logistic, rng)
    method = StochasticIOBS(None, 5, updates=4, mask=mask)
    theta = rng.standard_normal(D)  # dense: the paper's mask and the top mask differ
    problem = Problem(objective, K, rng=np.random.default_rng(7))
    found = method.step(problem, method.begin(problem, theta))
    same = Problem(objective, K, rng=np.random.default_rng(7))
    smoothness = estimated_smoothness(same, theta, 5)
    for _ in range(4):
        gradient = objective.sampled_gradient(theta, same.rng.integers(0, N, 5))
        if mask == "support":
            moved = theta - stochastic_length(theta, gradient, theta != 0, smoothness) * gradient
            chosen = np.argsort(-np.abs(moved))[:K]
        else:
            chosen = np.argsort(-np.abs(theta - gradient / smoothness))[:K]
            inside = np.isin(np.arange(D), chosen)
            moved = theta - stochastic_length(theta, gradient, inside, smoothness) * gradient
        theta = np.where(np.isin(np.arange(D), chosen), moved, 0.0)
    np.testing.assert_allclose(found.theta, theta, rtol=1e-9, atol=1e-12)
    assert found.value == pytest.approx(objective.value(theta))


def test_stochastic_iobs_recovers_the_support_of_many_samples(rng):
    X = rng.standard_normal((20_000, 30))
    truth = sparse_signal(rng, 30, 4)
    objective = LeastSquares(X, X @ truth + rng.standard_normal(20_000))
    found = minimize(objective, 4, method="stochastic_iobs", max_steps=6)
    assert set(found.support) == set(np.flatnonzero(truth))
    np.testing.assert_allclose(found.theta, truth, atol=0.1)


def test_sampled_hessian_estimates_the_hessian_of_all_samples(rng):
    objective = _objective(Logistic, rng)
    problem = Problem(objective, K, rng=np.random.default_rng(3))
    theta = rng.standard_normal(D)
    gradient = objective.value_and_gradient(theta)[1]
    exact = FullHessian().model(problem, theta, gradient)
    models = [SampledHessian(samples=20).model(problem, theta, gradient) for _ in range(400)]
    mean = sum(model.matrix for model in models) / len(models)
    assert np.linalg.norm(mean - exact.matrix) < 0.05 * np.linalg.norm(exact.matrix)
    for model in models[:3]:
        np.testing.assert_allclose(model.value_and_gradient(theta)[1], gradient, atol=1e-9)
    np.testing.assert_allclose(SampledHessian(samples=N).model(problem, theta, gradient).matrix, exact.matrix)


def test_sampled_iobs_finds_the_support_and_refits_by_its_fixed_points(rng):
    X = rng.standard_normal((20_000, 30))
    truth = sparse_signal(rng, 30, 4)
    objective = Logistic(X, (rng.random(20_000) < 1 / (1 + np.exp(-X @ truth))).astype(float))
    found, exact = (minimize(objective, 4, method=method, max_steps=30) for method in ("sampled_iobs", "iobs"))
    assert set(found.support) == set(exact.support)
    np.testing.assert_allclose(found.theta, exact.theta, rtol=1e-4)
