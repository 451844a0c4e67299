"""Screening of large, nearly block-diagonal problems before a certificate."""

from __future__ import annotations

import functools
import itertools
import time

import numpy as np
import pytest
import scipy.sparse as sp
from sparse_problems import correlated_design

from iobs.errors import ProblemError
from iobs.optimize.bounds import branch_and_bound, components
from iobs.optimize.bounds.branch_and_bound import certify
from iobs.optimize.objectives.linear import LeastSquares
from iobs.optimize.problem import Problem
from iobs.optimize.refit.newton import refit


def _blocks(rng, count, size, rows=40, rho=0.7):
    return sp.csc_array(sp.block_diag([correlated_design(rng, rows, size, rho) for _ in range(count)]))


def _problem(rng, X, k, noise, **settings):
    theta = np.zeros(X.shape[1])
    theta[rng.choice(X.shape[1], k, replace=False)] = rng.choice([-3, 3], k)
    return LeastSquares(X, X @ theta + noise * rng.standard_normal(X.shape[0]), **settings)


@functools.cache
def _enumerated(seed, coupling, settings):
    """Five blocks of three columns, a target, and the least value of each support of 3 columns.

    The values are those of the dense matrix, for both ways to store the same numbers.
    """
    rng = np.random.default_rng(seed)
    X = _blocks(rng, 5, 3)
    if coupling:
        X = sp.csc_array(X + coupling * rng.standard_normal(X.shape))
    objective = _problem(rng, X.toarray(), 3, 0.3, **dict(settings))
    supports = itertools.combinations(range(15), 3)
    return X, objective.target, {support: refit(objective, np.array(support)).value for support in supports}


@pytest.mark.parametrize("settings", [(), (("intercept", True),), (("ridge", 0.5),)], ids=dict)
@pytest.mark.parametrize("coupling", [0.0, 0.02])
@pytest.mark.parametrize("storage", ["sparse", "dense"])
def test_screening_keeps_every_support_that_is_as_good(settings, coupling, storage, monkeypatch):
    monkeypatch.setattr(components, "_LARGEST", 3)
    removed = 0
    for seed in range(3):
        X, target, values = _enumerated(seed, coupling, settings)
        objective = LeastSquares(X if storage == "sparse" else X.toarray(), target, **dict(settings))
        upper = 1.02 * min(values.values())
        found = components.screened(Problem(objective, 3), upper, time.perf_counter() + 60)
        for support, value in values.items():
            if value <= upper:
                assert np.isin(support, found.coordinates).all()
        assert found.lower <= min(values.values()) * (1 + 1e-9)
        removed += 15 - found.coordinates.size
    assert removed > 0


def test_certificate_of_many_coordinates_equals_that_of_the_stored_hessian(rng, monkeypatch):
    objective = _problem(rng, _blocks(rng, 60, 4), 5, 0.5, intercept=True)
    whole = certify(objective, 5, gap=0.0)
    monkeypatch.setattr(branch_and_bound, "DENSE_LIMIT", 100)
    monkeypatch.setattr(components, "_LARGEST", 20)
    screened = certify(objective, 5, gap=0.0)
    assert whole.closed
    assert screened.closed
    assert screened.fit.support.tolist() == whole.fit.support.tolist()
    assert screened.upper == pytest.approx(whole.upper, rel=1e-9)
    assert "screening of 60 components" in screened.message


def test_many_coordinates_of_a_separable_design_are_proved(rng):
    objective = _problem(rng, _blocks(rng, 1250, 4, rows=12), 8, 0.3)
    found = certify(objective, 8, seconds=600)
    assert objective.dimension == 5000
    assert found.closed
    assert found.gap <= 1e-4


@pytest.mark.parametrize(("columns", "k"), [(np.zeros((20, 5000)), 2), (np.ones((20, 5000)), 0)])
def test_nothing_to_choose_is_proved_at_once(columns, k, rng):
    found = certify(LeastSquares(columns, rng.standard_normal(20)), k)
    assert found.closed
    assert found.lower == found.upper
    assert found.message.startswith("a global minimiser")


def test_what_cannot_be_screened_is_said(rng, monkeypatch):
    monkeypatch.setattr(branch_and_bound, "DENSE_LIMIT", 20)
    monkeypatch.setattr(branch_and_bound, "_BOX_LIMIT", 10)
    dense = _problem(rng, correlated_design(rng, 60, 40, 0.9), 3, 1.0)
    found = certify(dense, 3)
    assert not found.closed
    assert "left 40 of 40" in found.message
    assert found.lower <= found.upper
    assert certify(dense, 3, gap=np.inf).message.startswith("within")
    with pytest.raises(ProblemError, match="raise seconds"):
        certify(dense, 3, seconds=0.0)
    forced = _problem(rng, correlated_design(rng, 60, 40, 0.5), 3, 1.0, forced=[2])
    with pytest.raises(ProblemError, match="forced"):
        certify(forced, 3)
