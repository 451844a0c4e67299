"""Certificates of singular, duplicated and collinear designs, against every support tried by least squares."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from iobs.optimize.bounds import branch_and_bound
from iobs.optimize.bounds.branch_and_bound import certify
from iobs.optimize.bounds.enumeration import enumerate_supports
from iobs.optimize.bounds.tree import QuadraticArrays
from iobs.optimize.curvature import QuadraticObjective
from iobs.optimize.objectives.linear import LeastSquares
from iobs.optimize.problem import Problem
from iobs.optimize.refit.newton import refit


def _singular(seed):
    """A design with fewer rows than columns, equal columns, dummy columns of a factor, or sums of columns."""
    rng = np.random.default_rng(seed)
    kind, n = seed % 4, int(rng.integers(6, 30))
    X = rng.standard_normal((n, int(rng.integers(3, 6))))
    if kind == 0:
        X = rng.standard_normal((int(rng.integers(3, 6)), 8))
    elif kind == 1:
        X = np.column_stack([X, X[:, :2] * 10.0 ** rng.integers(-2, 3, 2), -X[:, 0]])
    elif kind == 2:
        X = np.column_stack([X, np.eye(3)[rng.integers(0, 3, n)], np.ones(n)])
    else:
        X = np.column_stack([X, X[:, 0] + X[:, 1], X[:, 1] - 2 * X[:, 2]])
    y = X[:, 0] + 2 * X[:, -1] + rng.choice([0.1, 1.0, 3.0]) * rng.standard_normal(len(X))
    forced = [int(rng.integers(0, X.shape[1]))] if rng.random() < 0.4 else []
    return X, y, forced, int(rng.integers(1, 4)), bool(rng.random() < 0.5)


def _best(X, y, forced, k, intercept):
    """The smallest loss of any support, by an orthogonal least-squares solver on the data."""
    free = np.setdiff1d(np.arange(X.shape[1]), forced)
    losses = []
    for chosen in itertools.combinations(free, k):
        design = X[:, np.union1d(chosen, forced).astype(int)]
        if intercept:
            design = np.column_stack([design, np.ones(len(y))])
        losses.append(0.5 * float(((y - design @ np.linalg.lstsq(design, y, rcond=1e-10)[0]) ** 2).sum()))
    return min(losses)


@pytest.mark.parametrize("how", ["enumeration", "ties"])
@pytest.mark.parametrize("seeds", [range(0, 40), range(40, 80)], ids=["first", "second"])
def test_certify_closes_singular_designs_at_the_best_support(how, seeds, monkeypatch):
    if how == "ties":
        monkeypatch.setattr(branch_and_bound, "enumerable", lambda *_: False)
    for seed in seeds:
        X, y, forced, k, intercept = _singular(seed)
        objective = LeastSquares(X, y, forced=forced, intercept=intercept)
        best = _best(X, y, forced, k, intercept)
        free = np.setdiff1d(np.arange(X.shape[1]), forced)
        poor = refit(objective, np.union1d(free[:k], forced).astype(np.int64))
        for fit in (None, poor):
            found = certify(objective, k, fit=fit, seconds=20)
            assert found.lower - found.margin <= best * (1 + 1e-9) + 1e-12, seed
            assert found.upper >= best * (1 - 1e-9) - 1e-12, seed
            if best > 1e-8 * objective.value(np.zeros(objective.dimension)):
                assert found.closed, (seed, found.message)
                assert found.upper <= best * (1 + 1e-4) + found.margin, seed


def test_certify_merges_equal_columns():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((60, 12))
    y = X[:, :3].sum(1) + 0.5 * rng.standard_normal(60)
    doubled = np.column_stack([X, 3 * X, -X])
    plain, merged = certify(LeastSquares(X, y), 4), certify(LeastSquares(doubled, y), 4)
    assert merged.closed
    assert merged.upper == pytest.approx(plain.upper, rel=1e-9)
    assert merged.nodes == plain.nodes
    nearly = np.column_stack([X, X + 1e-5 * rng.standard_normal(X.shape)])  # equal but for what the data can tell apart
    kept = QuadraticArrays(Problem(LeastSquares(nearly, y), 4)).usable
    assert kept.size == 24
    assert QuadraticArrays(Problem(LeastSquares(doubled, y, forced=[13, 25]), 4)).usable.tolist() == [
        0, *range(2, 12), 13
    ]  # fmt: skip


def test_enumeration_equals_trying_every_support_of_a_definite_problem():
    rng = np.random.default_rng(1)
    X = rng.standard_normal((40, 9))
    objective = LeastSquares(X, X[:, 2] + rng.standard_normal(40), forced=[5], ridge=0.2)
    for k in range(5):
        supports = itertools.combinations(np.delete(np.arange(9), 5), k)
        fits = [refit(objective, np.union1d(chosen, [5]).astype(np.int64)) for chosen in supports]
        best = min(fits, key=lambda fit: fit.value)
        found = enumerate_supports(QuadraticArrays(Problem(objective, k)))
        assert found.supports == len(fits)
        assert found.support.tolist() == best.support.tolist()
        assert found.value == pytest.approx(best.value, rel=1e-12)


def test_certify_says_why_it_ends():
    rng = np.random.default_rng(2)
    wide = LeastSquares(rng.standard_normal((20, 60)), rng.standard_normal(20))
    assert certify(wide, 2).reason == "all 1,770 supports were tried"
    assert certify(wide, 12, seconds=0.2).reason == "the time limit of 0.2 s was reached"
    assert certify(wide, 12, max_nodes=3).reason == "the limit of 3 nodes was reached"
    assert certify(wide, 0).reason == "all 1 supports were tried"
    tall = LeastSquares(rng.standard_normal((200, 6)), rng.standard_normal(200))
    assert certify(tall, 2).reason == "no part of the search tree is left"
    assert "unbounded" in certify(QuadraticObjective(np.ones((2, 2)), np.array([1.0, 0.0])), 1).reason
    for found in (certify(wide, 2), certify(tall, 2)):
        assert found.message.endswith(found.reason)


def test_certify_uses_ties_where_supports_are_too_many():
    """A factor whose dummy columns sum to a constant, and too many supports to try them all."""
    rng = np.random.default_rng(3)
    X = np.column_stack([rng.standard_normal((200, 30)), np.eye(4)[rng.integers(0, 4, 200)]])
    y = X[:, :6] @ np.array([2, -2, 3, 2, 1.5, 2]) + 2 * X[:, 31] + rng.standard_normal(200)
    found = certify(LeastSquares(X, y, intercept=True), 7, seconds=60, max_nodes=20_000)
    assert found.closed
    assert "tried" not in found.reason
    assert 31 in found.fit.support
