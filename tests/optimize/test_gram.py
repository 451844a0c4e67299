"""Least squares by its Gram matrix: equal to the objective on the data, row by row and as a whole."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from sparse_problems import correlated_design, sparse_signal

from iobs.optimize.minimize import minimize
from iobs.optimize.objectives import gram
from iobs.optimize.objectives.gram import by_gram
from iobs.optimize.objectives.linear import LeastSquares
from iobs.optimize.problem import Problem
from iobs.optimize.refit.newton import refit
from iobs.optimize.search.auto import _stages
from iobs.optimize.search.path import path


@pytest.fixture(params=["whole", "row by row"])
def storage(request, monkeypatch):
    if request.param == "row by row":
        monkeypatch.setattr(gram, "_WHOLE_WORK", 0)
        monkeypatch.setattr(gram, "_AHEAD", 3)
    return request.param


def _problem(rng, n=120, d=40, k=5):
    X = correlated_design(rng, n, d, 0.6) * 10.0 ** rng.uniform(-1, 1, d)
    return X, X @ (sparse_signal(rng, d, k) / X.std(axis=0)) + rng.standard_normal(n)


def test_search_by_gram_finds_what_the_search_on_data_finds(storage):
    for seed in range(6):
        X, y = _problem(np.random.default_rng(seed))
        objective = LeastSquares(X, y)
        on_the_data = list(_stages(Problem(objective, 5, rng=np.random.default_rng(0)), None, 18, None))[-1].fit
        found = minimize(objective, 5)
        assert found.support.tolist() == on_the_data.support.tolist()
        assert found.loss == pytest.approx(on_the_data.value, rel=1e-12)


def test_path_by_gram_is_exact_on_the_data(storage, rng):
    X, y = _problem(rng)
    objective = LeastSquares(X, y, intercept=True)
    for fit, rough in zip(path(objective, range(8)), path(objective, range(8), exact=False), strict=True):
        exact = refit(objective, fit.support)
        assert rough.support.tolist() == fit.support.tolist()
        assert fit.value == pytest.approx(exact.value, rel=1e-13)
        np.testing.assert_allclose(fit.theta, exact.theta, rtol=1e-9)


def test_gram_form_does_not_keep_the_data_alive(rng):
    X, y = _problem(rng)
    objective = LeastSquares(X, y, intercept=True)
    by_gram(objective)
    matrix = weakref.ref(objective.design.matrix)
    gc.disable()  # without a collector, memory is free as soon as nothing refers to it
    try:
        del objective
        assert matrix() is None
    finally:
        gc.enable()
