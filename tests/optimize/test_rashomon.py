"""The Rashomon set against enumeration of all supports, and its behaviour at limits."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes
from sparse_problems import correlated_design, sparse_signal

import iobs
from iobs.core.quadratic import Quadratic
from iobs.errors import ProblemError
from iobs.optimize.bounds.rashomon import rashomon_set
from iobs.optimize.objectives.linear import LeastSquares

_KINDS = ("plain", "duplicates", "dependent", "wide", "tied", "exact fit", "constant column")


def _design(kind, rng, p):
    """(X, y) of a kind: equal columns, dependent columns, n < p, equal losses, no residual, a constant column."""
    n = max(3, p // 2) if kind == "wide" else 3 * p
    X = rng.standard_normal((n, p)) + rng.choice([0.0, 1.0]) * rng.standard_normal((n, 1))
    if kind == "duplicates":
        for _ in range(3):
            a, b = rng.choice(p, 2, replace=False)
            X[:, a] = rng.choice([1.0, -2.0]) * X[:, b]
    if kind == "dependent":
        X[:, 0] = X[:, 1] + X[:, 2] - X[:, 3]
    if kind == "tied":  # orthogonal columns with equal products with y, up to rounding
        X = np.linalg.qr(rng.standard_normal((n, p)))[0]
    if kind == "constant column":
        X[:, int(rng.integers(p))] = 0.0
    signal = X @ (rng.choice([-1.0, 1.0], p) * (rng.random(p) < 0.3))
    noise = rng.standard_normal(n)
    if kind == "tied":
        return X, X @ rng.choice([1.0, 2.0], p) + 0.3 * (noise - X @ (X.T @ noise))
    return X, signal if kind == "exact fit" else signal + rng.choice([0.3, 1.0]) * noise


def _reference(X, y, ridge, forced, k, at_most):
    """Losses of all supports by QR of the data, by support."""
    usable = [j for j in range(X.shape[1]) if (ridge or X[:, j].any()) and j not in forced]
    losses = {}
    for size in range(0 if at_most else k, k + 1):
        for chosen in itertools.combinations(usable, size):
            support = np.array(sorted({*chosen, *forced}), dtype=np.int64)
            design = np.vstack([X[:, support], np.sqrt(ridge) * np.eye(support.size)])
            target = np.concatenate([y, np.zeros(support.size)])
            theta = np.linalg.lstsq(design, target, rcond=1e-10)[0] if support.size else np.zeros(0)
            losses[tuple(support)] = 0.5 * float(((target - design @ theta) ** 2).sum())
    return losses


def _check(seed):
    rng = np.random.default_rng(seed)
    kind = _KINDS[seed % len(_KINDS)]
    p = int(rng.integers(5, 21)) if seed % 3 else int(rng.integers(5, 11))
    k = int(rng.integers(1, 5 if p <= 12 else 4))
    X, y = _design(kind, rng, p)
    ridge = float(rng.choice([0.0, 0.0, 0.1]))
    forced = [int(rng.integers(1, p))] if rng.random() < 0.2 and kind != "constant column" else []
    at_most, gap = bool(rng.random() < 0.4), float(rng.choice([0.0, 0.02, 0.2, 1.0]))
    found = rashomon_set(LeastSquares(X, y, ridge=ridge, forced=forced), k, gap=gap, at_most=at_most, max_members=10**6)
    losses = _reference(X, y, ridge, forced, k, at_most)
    best, start = min(losses.values()), 0.5 * float(y @ y)
    assert found.complete, (seed, found.message)
    assert found.best == pytest.approx(best, rel=1e-8, abs=1e-12 * start), seed
    ceiling = (1 + gap) * best + 1e-9 * best + 1e-12 * start
    rounding = 1e-10 * best + 1e-13 * start  # no loss lies so near the ceiling, or this seed would test nothing there
    sure = {support for support, loss in losses.items() if loss <= ceiling - rounding}
    possible = {support for support, loss in losses.items() if loss <= ceiling + rounding}
    supports = [tuple(member.support.tolist()) for member in found]
    assert len(set(supports)) == len(supports), seed
    assert sure <= set(supports) <= possible, (seed, kind)
    for member in found:
        assert member.loss == pytest.approx(losses[tuple(member.support)], rel=1e-8, abs=1e-11 * start), seed


_BATCHES = [pytest.param(range(start, start + 30), marks=pytest.mark.slow) for start in range(0, 300, 30)]


@pytest.mark.parametrize("seeds", [range(28), *_BATCHES], ids=lambda seeds: f"{seeds.start}-{seeds.stop}")
def test_rashomon_set_equals_enumeration(seeds):
    for seed in seeds:
        _check(seed)


def test_equal_columns_stand_for_each_other_in_every_combination():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((40, 5))
    X[:, 3] = X[:, 1]
    found = rashomon_set(LeastSquares(X, X[:, 0] + X[:, 1] + 0.1 * rng.standard_normal(40)), 2, gap=0.0)
    assert [member.support.tolist() for member in found] == [[0, 1], [0, 3]]
    assert [row.presence for row in found.importance()] == ["all", "some", "some", "none", "none"]


def test_importance_equals_refits_without_a_variable():
    data = load_diabetes()
    objective = LeastSquares(data.data, data.target, intercept=True)
    found = rashomon_set(objective, 4, gap=0.03)
    assert len(found) > 1
    centred, target = data.data - data.data.mean(axis=0), data.target - data.target.mean()

    def loss(support):
        theta = np.linalg.lstsq(centred[:, support], target, rcond=None)[0]
        return 0.5 * float(((target - centred[:, support] @ theta) ** 2).sum())

    for row in found.importance():
        j = row.feature
        rises = [
            (loss([i for i in member.support if i != j]) - member.loss) / found.best if j in member.support else 0.0
            for member in found
        ]
        assert (row.least, row.most) == pytest.approx((min(rises), max(rises)), rel=1e-8, abs=1e-12)
        assert row.share == pytest.approx(np.mean([j in member.support for member in found]))
        others = [member.loss for member in found if j not in member.support]
        assert row.without == pytest.approx(min(others) / found.best - 1 if others else math.inf, abs=1e-12)


def test_members_predict_as_their_own_least_squares_fit():
    data = load_diabetes()
    found = rashomon_set(LeastSquares(data.data, data.target, intercept=True), 3, gap=0.02)
    for member in found:
        columns = np.column_stack([data.data[:, member.support], np.ones(len(data.target))])
        expected = np.linalg.lstsq(columns, data.target, rcond=None)[0]
        assert np.allclose([*member.coefficients, member.intercept], expected, rtol=1e-8)


def test_weighted_samples_equal_repeated_rows():
    rng = np.random.default_rng(4)
    X, weights = rng.standard_normal((30, 8)), rng.integers(0, 4, 30)
    y = X[:, 0] - X[:, 2] + rng.standard_normal(30)
    weighted = rashomon_set(LeastSquares(X, y, intercept=True, sample_weight=weights), 3, gap=0.2)
    repeated = rashomon_set(LeastSquares(X.repeat(weights, 0), y.repeat(weights), intercept=True), 3, gap=0.2)
    assert [m.support.tolist() for m in weighted] == [m.support.tolist() for m in repeated]


def test_a_quadratic_of_one_row_is_taken():
    rng = np.random.default_rng(1)
    X, y = rng.standard_normal((30, 6)), rng.standard_normal(30)
    gram, product = torch.from_numpy(X.T @ X), torch.from_numpy(X.T @ y)
    found = rashomon_set(Quadratic.at(torch.linalg.solve(gram, product)[None], gram), 2, gap=0.1)
    ceiling = found.best + 0.1 * abs(found.best)
    losses = {
        pair: float(
            -0.5 * product[list(pair)] @ torch.linalg.solve(gram[list(pair)][:, list(pair)], product[list(pair)])
        )
        for pair in itertools.combinations(range(6), 2)
    }
    least = min(losses.values())
    centred = found.best - least
    assert {tuple(m.support.tolist()) for m in found} == {
        pair for pair, loss in losses.items() if loss + centred <= ceiling
    }


@pytest.mark.parametrize(("limits", "words"), [({"seconds": 0.0}, "time limit"), ({"max_members": 2}, "more than 2")])
def test_a_limit_gives_an_incomplete_set_that_says_so(limits, words):
    rng = np.random.default_rng(2)
    X = correlated_design(rng, 100, 40, 0.7)
    y = X @ sparse_signal(rng, 40, 5) + 2 * rng.standard_normal(100)
    full = rashomon_set(LeastSquares(X, y), 4, gap=0.05)
    cut = rashomon_set(LeastSquares(X, y), 4, gap=0.05, **limits)
    assert full.complete
    assert not cut.complete
    assert "NOT complete" in cut.message
    assert words in cut.message
    known = {tuple(member.support) for member in cut}
    assert {tuple(m.support) for m in full if m.loss < cut.complete_below} <= known
    assert cut.complete_below < full.complete_below


def test_rashomon_set_refuses_what_it_cannot_prove():
    X, y = np.eye(4), np.array([0.0, 1.0, 0.0, 1.0])
    with pytest.raises(ProblemError, match="gap"):
        rashomon_set(LeastSquares(X, y), 2, gap=-1.0)
    with pytest.raises(ProblemError, match="4 names"):
        rashomon_set(LeastSquares(X, y), 2).table(["a"])
    assert rashomon_set(LeastSquares(X, y), 0).members[0].support.size == 0


def test_the_table_names_the_variables():
    data = load_diabetes()
    found = iobs.rashomon_set(LeastSquares(data.data, data.target, intercept=True), 4, gap=0.02)
    text = found.table(data.feature_names)
    assert "proved complete" in text
    assert "bmi" in text
    assert str(len(found)) in found.message
