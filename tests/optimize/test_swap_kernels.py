"""The compiled kernels against refits by brute force and against plain forms."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from sparse_problems import correlated_design, sparse_signal

from iobs.optimize.curvature.models import QuadraticObjective
from iobs.optimize.objectives.families import Logistic
from iobs.optimize.objectives.linear import LeastSquares
from iobs.optimize.problem import Problem
from iobs.optimize.refit.newton import inverse_block, refit
from iobs.optimize.search import kernels, pursuits
from iobs.optimize.search.swaps import Swapper

M, K = 9, 4


def _state(rng, forced=()):
    factor = rng.standard_normal((20, M))
    objective = QuadraticObjective(factor.T @ factor, rng.standard_normal(M), forced=np.array(forced, np.int64))
    problem = Problem(objective, K)
    support = np.sort(np.concatenate([rng.choice(np.setdiff1d(np.arange(M), forced), K, False), forced])).astype(int)
    fit = refit(objective, support)
    return objective, fit, Swapper(problem).state(fit, np.arange(M))


def _arrays(state):
    return state.inverse, state.projection, state.schur, state.gradient, state.theta


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("forced", [(), (2,)])
def test_best_swap_agrees_with_all_refits(seed, forced):
    objective, fit, state = _state(np.random.default_rng(seed), forced)
    leaving, entering, change = kernels.best_swap(state, state.hessian.diagonal().copy())
    changes = {}
    for i, j in itertools.product(range(fit.support.size), np.setdiff1d(np.arange(M), fit.support)):
        if fit.support[i] not in forced:
            support = np.sort(np.append(np.delete(fit.support, i), j))
            changes[i, j] = refit(objective, support).value - fit.value
    best = min(changes, key=changes.get)
    if changes[best] < 0:
        assert (leaving, entering) == best
        assert change == pytest.approx(changes[best], rel=1e-9)
    else:
        assert leaving == -1


def test_exchange_updates_the_whole_state(rng):
    objective, _, state = _state(rng)
    for step in range(20):
        leaving = int(rng.integers(K))
        entering = int(rng.choice(np.setdiff1d(np.arange(M), state.support)))
        kernels.exchange(state, leaving, entering)
        order = np.argsort(state.support)
        fit = refit(objective, state.support[order])
        fresh = Swapper(Problem(objective, K)).state(fit, np.arange(M))
        fresh_inverse, fresh_projection, schur, gradient, theta = _arrays(fresh)
        np.testing.assert_allclose(state.inverse[np.ix_(order, order)], fresh_inverse, atol=1e-9, err_msg=str(step))
        np.testing.assert_allclose(state.projection[order], fresh_projection, atol=1e-9)
        np.testing.assert_allclose(state.schur, schur, atol=1e-8)
        np.testing.assert_allclose(state.gradient, gradient, atol=1e-8)
        np.testing.assert_allclose(state.theta[order], theta, atol=1e-9)


def test_remove_greedily_equals_the_plain_downdate(rng):
    objective, _, state = _state(rng)
    inverse = np.linalg.inv(state.hessian)
    centre = inverse @ objective.linear
    kept, plain, values = np.ones(M, bool), inverse.copy(), centre.copy()
    kernels.remove_greedily(np.ascontiguousarray(inverse), centre, np.zeros(M, bool), kept, 5)
    remaining = list(range(M))
    for _ in range(5):
        chosen = min(remaining, key=lambda i: values[i] ** 2 / plain[i, i])
        values = values - plain[chosen] / plain[chosen, chosen] * values[chosen]
        plain = plain - np.outer(plain[chosen], plain[chosen]) / plain[chosen, chosen]
        plain[chosen] = plain[:, chosen] = 0
        remaining.remove(chosen)
    np.testing.assert_array_equal(np.flatnonzero(kept), remaining)
    np.testing.assert_allclose(centre[remaining], values[remaining], rtol=1e-9)


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


def test_pursuits_by_scores_recover_sparse_signals(rng):
    columns = rng.standard_normal((100, 250))
    columns /= np.linalg.norm(columns, axis=0)
    truth = sparse_signal(rng, 250, 25)
    for propose in (pursuits.message_passing, pursuits.adaptive_damping):
        scores = propose(columns, columns @ truth, 25)
        np.testing.assert_array_equal(np.sort(np.argsort(-scores)[:25]), np.flatnonzero(truth))
    noisy = columns @ truth + 0.02 * rng.standard_normal(100)
    scores = pursuits.adaptive_damping(columns, noisy, 25, variance=4e-4)
    assert np.intersect1d(np.argsort(-scores)[:25], np.flatnonzero(truth)).size >= 24
    coherent = correlated_design(rng, 40, 100, 0.99)
    coherent /= np.linalg.norm(coherent, axis=0)
    assert np.isfinite(pursuits.message_passing(coherent, coherent[:, 0], 5)).all()


def test_inverse_block_is_finite_if_columns_repeat():
    block = np.ones((3, 3)) + np.diag([0.0, 0.0, 1.0])
    assert np.isfinite(inverse_block(block)).all()
    assert np.isfinite(inverse_block(np.zeros((2, 2)))).all()


def test_swapper_members_do_not_depend_on_column_units(rng):
    X = rng.standard_normal((60, 300))
    y, units = (rng.random(60) < 0.5).astype(float), 10.0 ** rng.uniform(-3, 3, 300)
    members = []
    for scale in (np.ones(300), units):
        objective = Logistic(X * scale, y)
        problem = Problem(objective, 3)
        members.append(Swapper(problem).members(refit(objective, np.arange(3))))
    assert 3 < members[0].size < 300
    np.testing.assert_array_equal(*members)
