"""The compiled Newton method against the general one, on logistic and Poisson models."""

from __future__ import annotations

import numpy as np
import pytest

from iobs.optimize.objectives.families import Logistic, Poisson
from iobs.optimize.refit import kernels, newton

FAMILIES = [Logistic, Poisson]


def _problem(family, seed, n=120, k=5, **settings):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, k))
    margin = X @ rng.uniform(-0.8, 0.8, k)
    y = (rng.uniform(size=n) < 1 / (1 + np.exp(-margin))) if family is Logistic else rng.poisson(np.exp(margin))
    return family(X, y.astype(float), **settings), rng


def _general(objective, start, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(newton, "_COMPILED", {})
        return newton.refit(objective, np.arange(objective.dimension), start).theta


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("far", [0.0, 5.0])
def test_compiled_minimiser_equals_the_general_one(family, far, monkeypatch):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        known = {
            "sample_weight": rng.uniform(0, 2, 120),
            "offset": rng.standard_normal(120),
            "ridge": rng.uniform(0, 1),
        }
        for settings in ({}, known):
            objective, rng = _problem(family, seed, **settings)
            start = far * rng.standard_normal(5)
            found = newton._compiled(objective, start, 50)
            assert found is not None
            assert found == pytest.approx(_general(objective, start, monkeypatch), rel=1e-8, abs=1e-10)
            slope = objective.value_and_gradient(found)[1]
            assert np.abs(slope).max() <= 1e-8 * np.abs(objective.value_and_gradient(np.zeros(5))[1]).max()


@pytest.mark.parametrize("family", FAMILIES)
def test_intercept_and_exact_model_are_found(family, rng):
    X = rng.standard_normal((80, 3))
    margin = X @ np.array([1.0, -0.5, 0.3]) + 0.7
    share = 1 / (1 + np.exp(-margin)) if family is Logistic else np.exp(margin)
    objective = family(X, share, intercept=True)
    fit = newton.refit(objective, np.arange(4))
    theta, constant = objective.split(fit.theta)
    assert theta == pytest.approx([1.0, -0.5, 0.3], rel=1e-10)
    assert constant == pytest.approx(0.7, rel=1e-10)
    assert fit.value < 1e-12


def test_singular_or_unbounded_models_are_left_to_the_general_form(rng):
    column = rng.standard_normal((40, 1))
    doubled = np.hstack([column, column])
    assert newton._compiled(Logistic(doubled, (column[:, 0] > 0.3).astype(float)), np.zeros(2), 50) is None
    far = np.full(2, 1e6)
    assert newton._compiled(Poisson(doubled, np.ones(40)), far, 50) is None
    fit = newton.refit(Poisson(doubled, np.ones(40), ridge=0.1), np.arange(2), far)
    assert fit.theta == pytest.approx(np.zeros(2), abs=0.2)


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_form_equals_its_plain_form(family, monkeypatch):
    objective, _ = _problem(family, 3, n=40, k=3, ridge=0.2)
    fast = newton._compiled(objective, np.zeros(3), 50)
    for name in ("_evaluate", "factorise", "solve", "minimise"):
        monkeypatch.setattr(kernels, name, getattr(kernels, name).py_func)
    assert newton._compiled(objective, np.zeros(3), 50) == pytest.approx(fast, rel=1e-10)
