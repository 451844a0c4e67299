"""Search and swaps against brute force: compiled on Gram matrices, and in general."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from sparse_problems import correlated_design, sparse_signal

from iobs import minimize
from iobs.optimize.objectives.families import Logistic, Poisson
from iobs.optimize.objectives.gram import by_gram
from iobs.optimize.objectives.linear import LeastSquares
from iobs.optimize.problem import Problem
from iobs.optimize.refit.newton import refit
from iobs.optimize.search import auto, gram_search
from iobs.optimize.search import path as paths
from iobs.optimize.search.swaps import Swapper


def _objective(seed, n=80, d=12, k=4, rho=0.5, **settings):
    rng = np.random.default_rng(seed)
    design = correlated_design(rng, n, d, rho)
    return LeastSquares(design, design @ sparse_signal(rng, d, k) + rng.standard_normal(n), intercept=True, **settings)


@pytest.mark.parametrize("forced", [(), (3,)])
@pytest.mark.parametrize("ridge", [0.0, 2.0])
def test_search_finds_the_best_of_all_supports(forced, ridge):
    for seed in range(4):
        objective = _objective(seed, d=10, rho=0.8, forced=forced, ridge=ridge)
        gram = by_gram(objective)
        fit = gram_search.best_fit(Problem(gram, 4), gram, 18)
        free = np.setdiff1d(np.arange(10), forced)
        values = [
            refit(objective, np.union1d(np.array(chosen, int), forced).astype(int)).value
            for chosen in itertools.combinations(free, 4)
        ]
        assert fit.value == pytest.approx(min(values), rel=1e-9)
        assert set(forced) <= set(fit.support.tolist())


def test_no_exchange_improves_a_compiled_fit():
    objective = _objective(5, n=150, d=40, k=8, rho=0.9)
    gram = by_gram(objective)
    fit = gram_search.best_fit(Problem(gram, 8), gram, 0)
    for leaving, entering in itertools.product(fit.support, np.setdiff1d(np.arange(40), fit.support)):
        support = np.sort(np.append(np.setdiff1d(fit.support, leaving), entering))
        assert refit(objective, support).value >= fit.value * (1 - 1e-9)


def test_compiled_and_general_searches_are_equally_good():
    compiled_total, general_total, equal = 0.0, 0.0, 0
    for seed in range(12):
        gram = by_gram(_objective(seed, n=150, d=60, k=10, rho=0.9))
        ours = gram_search.best_fit(Problem(gram, 10), gram, 18).value
        general = list(auto._stages(Problem(gram, 10), None, 18, None))[-1].fit.value
        compiled_total, general_total = compiled_total + ours, general_total + general
        equal += ours == pytest.approx(general, rel=1e-9)
    assert equal >= 9
    assert compiled_total <= general_total * 1.002


@pytest.mark.parametrize("forced", [(), (0, 7)])
@pytest.mark.parametrize("exact", [True, False])
def test_compiled_path_equals_the_general_path(forced, exact, monkeypatch):
    objective = _objective(3, n=150, d=40, k=8, rho=0.9, forced=forced)
    sizes = [0, 1, 2, 3, 5, 8, 13, 30]
    found = paths.path(objective, sizes, exact=exact)
    monkeypatch.setattr(gram_search, "path_fits", lambda *arguments: None)
    for ours, general in zip(found, paths.path(objective, sizes, exact=exact), strict=True):
        assert ours.support.tolist() == general.support.tolist()
        assert ours.theta == pytest.approx(general.theta, rel=1e-8, abs=1e-10)
        assert ours.value == pytest.approx(general.value, rel=1e-9)


def test_dependent_columns_are_left_to_the_general_search():
    rng = np.random.default_rng(0)
    design = rng.standard_normal((30, 4))
    objective = LeastSquares(np.hstack([design, design]), design.sum(axis=1) + 0.1 * rng.standard_normal(30))
    gram = by_gram(objective)
    assert gram_search.path_fits(Problem(gram, 8), gram, [8]) is None
    result = minimize(objective, 4)
    assert {j % 4 for j in result.support.tolist()} == {0, 1, 2, 3}


def test_a_noiseless_model_is_found_and_called_optimal():
    rng = np.random.default_rng(1)
    design = correlated_design(rng, 200, 50, 0.5)
    theta = sparse_signal(rng, 50, 5)
    result = minimize(LeastSquares(design, design @ theta), 5)
    assert result.theta == pytest.approx(theta, abs=1e-10)
    assert result.message == auto.GLOBAL


def _margins(seed, n, d, k):
    rng = np.random.default_rng(seed)
    design = correlated_design(rng, n, d, 0.9)
    return rng, design, design @ sparse_signal(rng, d, k)


@pytest.mark.parametrize("family", [Logistic, Poisson])
def test_search_with_second_order_models_is_rarely_worse_than_the_path(family):
    worse = 0
    for seed in range(8):
        rng, design, margin = _margins(seed, 250, 60, 8)
        if family is Poisson:
            target = rng.poisson(np.exp(0.3 * margin)).astype(float)
        else:
            target = (rng.random(250) < 1 / (1 + np.exp(-margin))).astype(float)
        objective = family(design, target, intercept=True)
        found = list(auto.stages(Problem(objective, 8)))
        assert "second-order model" in [stage.name for stage in found]
        worse += found[-1].fit.value > paths.path(objective, range(9))[-1].value * (1 + 1e-9)
    assert worse <= 1


def test_model_without_a_minimiser_is_no_agreement():
    rng, design, margin = _margins(0, 40, 60, 5)  # more columns than samples
    objective = Logistic(design, (margin + rng.standard_normal(40) > 0).astype(float), ridge=0.0)
    names = [stage.name for stage in auto.stages(Problem(objective, 3))]
    assert "second-order model" not in names
    assert "kick" in names


def test_swapper_finds_pairs_outside_the_block(rng, monkeypatch):
    X = correlated_design(rng, 120, 150, 0.7)
    objective = Logistic(X, (X[:, 40] - X[:, 90] > 0).astype(float), ridge=0.1)
    monkeypatch.setattr(Swapper, "members", lambda self, fit: fit.support)  # a block without candidates
    start = refit(objective, np.arange(2))
    assert Swapper(Problem(objective, 2)).improve(start).value < 0.9 * start.value


def test_swapper_in_blocks_ends_at_a_one_swap_optimum(rng, monkeypatch):
    """A swapper that forms only a block and then scans in chunks ends where one with the whole Hessian ends."""
    X = correlated_design(rng, 120, 150, 0.7)
    objective = LeastSquares(X, X @ sparse_signal(rng, 150, 6) + rng.standard_normal(120))
    problem = Problem(objective, 6)
    start = refit(objective, np.arange(6))
    whole = Swapper(problem).improve(start)
    monkeypatch.setattr("iobs.optimize.search.swaps.GRAM_LIMIT", 1)
    monkeypatch.setattr("iobs.optimize.search.swaps._CHUNK", 64)
    pieces = Swapper(problem).improve(start)
    assert not Swapper(problem).best_pairs(pieces)
    for fit in (whole, pieces):
        for i, j in itertools.product(range(6), np.setdiff1d(np.arange(150), fit.support)):
            trial = refit(objective, np.sort(np.append(np.delete(fit.support, i), j)))
            assert trial.value >= fit.value * (1 - 1e-8)
