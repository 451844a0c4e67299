"""Starts at saddles and maxima are left by every method, or the result says that it is no minimum."""

import numpy as np
import pytest
import torch

from iobs import minimize
from iobs.optimize.objectives import LeastSquares, from_torch
from iobs.optimize.problem import Problem
from iobs.optimize.search import auto
from iobs.optimize.search.saddles import NO_MINIMUM, lower_point

W = torch.randn(60, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = 2 * torch.tanh(W @ torch.tensor([1.0, 0, 0, -2, 0], dtype=torch.float64))
SADDLE = from_torch(lambda v: (v[0] * v[1] - 1) ** 2 + v[2] ** 2, 3)
MAXIMUM = from_torch(lambda v: torch.cos(v).sum(), 3)
NETWORK = from_torch(lambda v: ((v[5] * torch.tanh(W @ v[:5]) - Y) ** 2).mean(), 6)
WIDE = from_torch(lambda v: (v[:300] @ v[300:] - 1) ** 2 + (v[5:295] ** 2).sum() + (v[300:590] ** 2).sum(), 600)


@pytest.mark.parametrize(
    ("objective", "k", "best"),
    [(SADDLE, 2, 0.0), (MAXIMUM, 2, -1.0), (NETWORK, 3, 0.0), (WIDE, 2, 0.0)],
    ids=["saddle", "maximum", "network", "wide"],
)
def test_zero_is_left_where_it_is_no_minimum(objective, k, best):
    result = minimize(objective, k)
    assert result.loss == pytest.approx(best, abs=1e-9)
    assert result.support.size == k
    assert result.message != auto.GLOBAL


@pytest.mark.parametrize(
    ("function", "k", "least"),
    [
        (lambda v: v[0] ** 3 - 3 * v[0] * v[1] ** 2 + (v**4).sum(), 2, -0.5),
        (lambda v: (v[0] * v[1] * v[2] - 1) ** 2, 3, 1e-9),
        (lambda v: (v**6 - v**4).sum(), 1, -4 / 27 + 1e-9),
    ],
    ids=["monkey saddle", "product of three", "fourth power"],
)
def test_zero_is_left_where_the_hessian_vanishes(function, k, least):
    assert minimize(from_torch(function, 4), k).loss <= least


@pytest.mark.parametrize("method", ["iht", "topk_iobs", "iobs", "htp"])
def test_other_methods_leave_it_too(method):
    assert minimize(MAXIMUM, 2, method=method, max_steps=300).loss < 0


def test_a_given_start_at_a_saddle_is_left():
    assert minimize(MAXIMUM, 1, theta0=np.array([2 * np.pi, 0, 0])).loss == pytest.approx(1.0)


def test_where_no_sparse_direction_falls_zero_stays():
    result = minimize(SADDLE, 1)  # one factor alone changes nothing
    assert result.loss == 1.0
    assert lower_point(Problem(SADDLE, 1), np.zeros(3)) is None


def test_a_result_on_a_saddle_says_so(monkeypatch):
    monkeypatch.setattr("iobs.optimize.minimize._leave", lambda *_: None)
    assert minimize(SADDLE, 2).message == NO_MINIMUM


def test_convex_functions_are_not_examined(rng):
    X = rng.standard_normal((20, 4))
    assert lower_point(Problem(LeastSquares(X, X[:, 0]), 2), np.zeros(4)) is None
    assert minimize(from_torch(lambda v: ((v - 1) ** 2).sum(), 3), 3).message == auto.FLAT
