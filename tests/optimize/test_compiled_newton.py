"""The compiled Newton method against the general one, on logistic and Poisson models."""

from __future__ import annotations

import numpy as np
import pytest

from iobs.optimize.objectives.families import Logistic, Poisson
from iobs.optimize.refit import newton

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


def test_singular_or_unbounded_models_are_left_to_the_general_form(rng):
    column = rng.standard_normal((40, 1))
    doubled = np.hstack([column, column])
    assert newton._compiled(Logistic(doubled, (column[:, 0] > 0.3).astype(float)), np.zeros(2), 50) is None
    far = np.full(2, 1e6)
    assert newton._compiled(Poisson(doubled, np.ones(40)), far, 50) is None
    fit = newton.refit(Poisson(doubled, np.ones(40), ridge=0.1), np.arange(2), far)
    assert fit.theta == pytest.approx(np.zeros(2), abs=0.2)
