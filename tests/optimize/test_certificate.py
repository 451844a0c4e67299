"""Certificates against enumeration."""

from __future__ import annotations

import functools
import itertools
import time

import numpy as np
import pytest
import torch
from sparse_problems import correlated_design, sparse_signal

import iobs
from iobs.core.quadratic import Quadratic
from iobs.errors import NotPositiveDefiniteError, ProblemError
from iobs.optimize.bounds import branch_and_bound
from iobs.optimize.bounds.branch_and_bound import certify
from iobs.optimize.bounds.tangents import Boxes
from iobs.optimize.curvature import QuadraticObjective
from iobs.optimize.estimators.knockoffs import knockoff_filter
from iobs.optimize.minimize import minimize
from iobs.optimize.objectives.linear import LeastSquares
from iobs.optimize.refit.newton import refit


def _ranked(objective, k):
    """All fits of k free coordinates and the forced ones by value, the best first."""
    free = np.setdiff1d(np.arange(objective.dimension), objective.forced)
    supports = (np.union1d(chosen, objective.forced) for chosen in itertools.combinations(free, k))
    return sorted((refit(objective, support.astype(np.int64)) for support in supports), key=lambda fit: fit.value)


def _small(seed):
    rng = np.random.default_rng(seed)
    d = int(rng.integers(3, 9))
    n = int(d * rng.choice([1.5, 3, 10])) + 1
    X = rng.standard_normal((n, d)) @ (np.eye(d) + rng.choice([0, 0.5]) * rng.standard_normal((d, d)))
    y = X @ (rng.standard_normal(d) * (rng.random(d) < 0.5)) + rng.choice([0.1, 1]) * rng.standard_normal(n)
    ridge = float(rng.choice([0.0, 0.1]))
    return LeastSquares(X, y, ridge=ridge, forced=[0] if rng.random() < 0.3 else []), int(rng.integers(1, d - 1))


# All 5,000 seeds in batches, each within the time limit of a test.
_BATCHES = [pytest.param(range(start, start + 500), marks=pytest.mark.slow) for start in range(0, 5000, 500)]


@pytest.mark.parametrize("seeds", [range(60), *_BATCHES], ids=lambda seeds: f"{seeds.start}-{seeds.stop}")
def test_certify_agrees_with_enumeration(seeds):
    for seed in seeds:
        objective, k = _small(seed)
        ranked = _ranked(objective, k)
        best = ranked[0].value
        for fit in (None, ranked[-1]):
            found = certify(objective, k, fit=fit, seconds=600)
            assert found.closed, seed
            assert found.lower - found.margin <= best <= found.upper + found.margin, seed
            assert found.upper <= best * (1 + 1e-4) + found.margin, seed


def test_certify_closes_or_reports_the_gap_at_a_limit():
    rng = np.random.default_rng(3)
    X = correlated_design(rng, 300, 80, 0.5)
    margin = X @ sparse_signal(rng, 80, 8)
    objective = LeastSquares(X, margin + np.sqrt(margin.var() / 5) * rng.standard_normal(300))
    closed = certify(objective, 8)
    assert closed.closed
    assert "global minimiser" in closed.message or "within" in closed.message
    poor = LeastSquares(X[:100], rng.standard_normal(100))
    cut = certify(poor, 8, max_nodes=3)
    assert not cut.closed
    assert 0 < cut.gap <= 1
    assert "not closed" in cut.message
    assert cut.gap_explained > 0


def _bound(objective, k, upper):
    """The bound by tangents alone and its margin; `upper` is the ceiling of its targets."""
    everything = np.arange(objective.dimension)
    hessian = objective.hessian_block(np.zeros(objective.dimension), everything)
    value, gradient = objective.value_and_gradient(np.zeros(objective.dimension))
    boxes = Boxes(hessian, -gradient, value, k)
    return boxes.lower(-np.inf, upper, time.perf_counter() + 120)


def _any_shape(seed):
    """A random problem, possibly with fewer samples than columns, with columns of any units."""
    rng = np.random.default_rng(seed)
    d, k = int(rng.integers(4, 10)), int(rng.integers(1, 4))
    n = int(rng.integers(3, 30))
    X = correlated_design(rng, n, d, float(rng.choice([0, 0.7]))) * 10.0 ** rng.uniform(-2, 2, d)
    y = X @ (sparse_signal(rng, d, min(k, d)) / X.std(axis=0)) + rng.choice([0.0, 0.1, 1, 5]) * rng.standard_normal(n)
    return LeastSquares(X, y, ridge=float(rng.choice([0.0, 0.0, 0.1]))), k


_TANGENT_BATCHES = [pytest.param(range(start, start + 50), marks=pytest.mark.slow) for start in range(0, 300, 50)]


@pytest.mark.parametrize("seeds", [range(5, 8), *_TANGENT_BATCHES], ids=lambda seeds: f"{seeds.start}-{seeds.stop}")
def test_tangents_bound_every_support_from_below(seeds):
    shown = []
    for seed in seeds:
        objective, k = _any_shape(seed)
        best = _ranked(objective, k)[0].value
        for upper in (best, 3 * best):  # a ceiling above the optimum would reveal an unsound bound
            lower, margin = _bound(objective, k, upper)
            assert lower - margin <= best, seed
        shown.append(lower > 0.05 * best > 0)
    assert np.mean(shown) > 0.2


def test_tangents_bound_if_hessian_is_singular():
    rng = np.random.default_rng(8)
    X = correlated_design(rng, 60, 60, 0.5)
    margin = X @ sparse_signal(rng, 60, 4)
    y = margin + np.sqrt(margin.var() / 5) * rng.standard_normal(60)
    best = minimize(LeastSquares(X, y), 4).loss
    lower, margin = _bound(LeastSquares(X, y), 4, 2 * best)
    assert 0.3 * best < lower - margin <= best
    scaled, margin = _bound(LeastSquares(X * 10.0 ** rng.uniform(-2, 2, 60), y), 4, best)
    assert 0.3 * best < scaled - margin <= best


def test_certify_raises_or_reports_no_bound(rng, monkeypatch):
    X = rng.standard_normal((20, 30))
    singular = certify(LeastSquares(X, rng.standard_normal(20)), 12, seconds=0.2)
    assert not singular.closed
    assert 0 <= singular.lower < singular.upper
    assert singular.reason == "the time limit of 0.2 s was reached"
    assert certify(LeastSquares(X, rng.standard_normal(20), ridge=30.0), 2).gap <= 1
    with pytest.raises(NotPositiveDefiniteError, match="negative eigenvalue"):
        certify(QuadraticObjective(np.eye(3) + 2 * np.ones((3, 3)) - 2 * np.eye(3), np.ones(3), constant=1.0), 1)
    monkeypatch.setattr(branch_and_bound, "DENSE_LIMIT", 2048)  # a larger problem is screened first
    coupled = certify(LeastSquares(rng.standard_normal((3, 2100)), np.ones(3)), 2)
    assert not coupled.closed
    assert "at most 2,048 can be searched" in coupled.reason


def test_certify_is_sound_if_hessian_is_nearly_singular(rng):
    vectors = np.linalg.qr(rng.standard_normal((6, 6)))[0]
    matrix = (vectors * [5e-14, 1, 1, 1, 1, 2]) @ vectors.T
    linear = vectors @ [1e-6, 0.9, 0.5, 0.3, 0, 0]
    objective = QuadraticObjective(0.5 * (matrix + matrix.T), linear)
    best = _ranked(objective, 5)[0].value
    found = certify(objective, 5, seconds=2)
    assert found.lower - found.margin <= best
    assert "global" not in found.message


def test_certify_takes_quadratics_and_constant_columns(rng):
    X = rng.standard_normal((30, 5))
    objective = LeastSquares(X, X @ [1, 0, 2, 0, 0] + 0.1 * rng.standard_normal(30))
    hessian, linear = torch.from_numpy(X.T @ X), torch.from_numpy(X.T @ objective.target)[None]
    found = certify(Quadratic(hessian, linear), 2)
    assert found.fit.support.tolist() == certify(objective, 2).fit.support.tolist() == [0, 2]
    constant = certify(LeastSquares(np.ones((9, 2)), rng.standard_normal(9), intercept=True), 1)
    assert constant.closed
    assert constant.lower == constant.upper


def test_certify_raises_if_fit_or_k_is_invalid(rng):
    objective = LeastSquares(rng.standard_normal((20, 6)), rng.standard_normal(20))
    with pytest.raises(ProblemError, match="6 coordinates, which is more than k = 2"):
        certify(objective, 2, fit=refit(objective, np.arange(6)))
    with pytest.raises(ProblemError, match="give refit"):
        certify(objective, 2, fit=minimize(objective, 2))
    with pytest.raises(ProblemError, match="integer"):
        certify(objective, 2.0)
    for limit in ({"gap": -1.0}, {"gap": np.nan}, {"seconds": -1}, {"max_nodes": -1}):
        with pytest.raises(ProblemError, match="must not be negative"):
            certify(objective, 2, **limit)


@pytest.mark.parametrize("seed", range(3))
def test_certify_ignores_forced_columns_without_curvature(seed):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((40, 10))
    y = X @ rng.standard_normal(10) + rng.standard_normal(40)
    X[:, 4] = 0
    ones = np.column_stack([X, np.ones(40)])
    for objective in (LeastSquares(X, y, forced=[4]), LeastSquares(ones, y, forced=[10], intercept=True)):
        best = _ranked(objective, 3)[0].value
        free = np.setdiff1d(np.arange(objective.dimension), objective.forced)
        for fit in (None, refit(objective, free[:3])):
            found = certify(objective, 3, fit=fit)
            assert found.closed
            assert np.setdiff1d(found.fit.support, objective.forced).size <= 3
            assert found.upper == pytest.approx(best, rel=1e-4)
            assert found.lower - found.margin <= best


@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.05])
@pytest.mark.parametrize("seed", range(4))
def test_certify_is_sound_if_its_bound_is_tight(seed, noise):
    """Nearly orthogonal columns, where the joint bound is (nearly) the exact cost of what is removed."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.standard_normal((20, 8)))[0] + noise * rng.standard_normal((20, 8))
    X = basis * 10.0 ** rng.uniform(-1, 1, 8)
    target = basis @ rng.uniform(0.9, 1.1, 8) + 0.1 * rng.standard_normal(20)
    objective = LeastSquares(X, target)
    ranked = _ranked(objective, 3)
    best = ranked[0].value
    for start in (ranked[1], ranked[5], ranked[-1]):  # a bound that is too high prunes supports better than the start
        for limit in (1, 1_000_000):
            found = certify(objective, 3, fit=start, gap=0.0, max_nodes=limit)
            assert found.lower - found.margin <= best
            if limit > 1:
                assert found.closed
                assert found.upper == pytest.approx(best, rel=1e-12)
                assert found.lower >= best - found.margin


@functools.cache
def _pairs(seed):
    """A problem of pairs of nearly equal columns, and all its fits of three."""
    rng = np.random.default_rng(seed)
    half = rng.standard_normal((30, 4))
    X = np.column_stack([half, half + 0.02 * rng.standard_normal((30, 4))])
    objective = LeastSquares(X, half @ rng.uniform(1, 2, 4) + rng.standard_normal(30))
    return objective, _ranked(objective, 3)


@pytest.mark.parametrize("limit", [1, 4, 1_000_000])
def test_certify_message_agrees_with_the_exact_gap(limit):
    """Pairs of nearly equal columns, so that many supports lie within 1e-3 of the best."""
    said = set()
    for seed in range(25):
        objective, ranked = _pairs(seed)
        best = ranked[0].value
        near = [fit for fit in ranked[1:] if 1e-7 * best < fit.value - best < 1e-3 * best]
        for start in [ranked[0], *near[:2], ranked[-1]]:
            found = certify(objective, 3, fit=start, gap=1e-3, max_nodes=limit)
            exact = (found.upper - best) / found.upper
            words = found.message.split()
            said.add(words[0])
            if words[:3] == ["a", "global", "minimiser"]:
                assert found.closed
                assert found.upper - best <= found.margin, seed
            elif words[0] == "within":
                assert found.closed
                assert exact <= float(words[1]) * 1.01 <= 1.01e-3, seed
            else:
                assert words[0] == "gap"
                assert not found.closed
                assert exact <= float(words[1]) * 1.01
                assert float(words[6].rstrip(",")) <= best * (1 + 1e-5)
                assert best <= float(words[9]) * (1 + 1e-5)
    assert said == ({"a", "within"} if limit > 4 else {"gap"})


@pytest.mark.parametrize("seed", [-1, 1.5, True, "a"])
def test_seeds_that_numpy_does_not_take_are_refused(rng, seed):
    X = rng.standard_normal((30, 4))
    objective = LeastSquares(X, X[:, 0])
    runs = [
        lambda: certify(objective, 2, seed=seed),
        lambda: iobs.minimize(objective, 2, seed=seed),
        lambda: iobs.rashomon_set(objective, 2, seed=seed),
        lambda: iobs.SparseRegressor(2, random_state=seed).fit(X, X[:, 0]),
        lambda: iobs.SparseRegressor("ebic", random_state=seed).fit(X, X[:, 0]),
        lambda: knockoff_filter(iobs.SparseRegressor(), X, X[:, 0], seed=seed),
    ]
    for run in runs:
        with pytest.raises(ProblemError, match="seed must be a whole number"):
            run()
