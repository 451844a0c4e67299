"""The estimator of Cox's model: against the objective, by hand, and on tables it cannot fit."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.base import clone

import iobs
from iobs import SparseCox
from iobs.errors import ProblemError

EFFECTS = {1: 0.9, 4: -0.8}


@pytest.fixture
def table(rng):
    """Features (200, 8) in different units, and (200, 2) times with events; a third is censored."""
    X = rng.standard_normal((200, 8)) * np.array([1, 2, 5, 1, 0.5, 1, 1, 1])
    margin = sum(effect * X[:, j] / X[:, j].std() for j, effect in EFFECTS.items())
    times, censored = rng.exponential(np.exp(-margin)), rng.exponential(2.0, 200)
    return X, np.column_stack([np.minimum(times, censored).round(2) + 0.01, times <= censored]).astype(float)


@pytest.mark.parametrize("ties", ["efron", "breslow"])
@pytest.mark.parametrize("storage", [np.asarray, sp.csr_array])
def test_estimator_equals_the_objective(storage, ties, table):
    X, y = table
    model = SparseCox(2, ties=ties).fit(storage(X), y)
    objective = iobs.objectives.Cox(X, *y.T, ties=ties)
    direct = iobs.minimize(objective, 2)
    assert model.support_.tolist() == sorted(EFFECTS)
    np.testing.assert_allclose(model.coef_, direct.theta, rtol=1e-6)
    block = objective.hessian_block(direct.theta, model.support_)
    errors = np.sqrt(np.linalg.inv(block).diagonal())
    np.testing.assert_allclose(model.standard_errors_[model.support_], errors, rtol=1e-5)
    np.testing.assert_allclose(model.predict(storage(X)), X @ direct.theta, rtol=1e-6)
    assert "(intercept)" not in str(model.summary())


@pytest.mark.parametrize("k", ["aic", "bic", "ebic", "cv", "cv-1se"])
def test_choice_of_k_keeps_the_features_that_matter(k, table):
    model = SparseCox(k, max_k=4).fit(*table)
    assert set(EFFECTS) <= set(model.support_.tolist())
    if k in ("bic", "ebic"):
        assert model.k_ == 2
    assert [entry["k"] for entry in model.path_] == [0, 1, 2, 3, 4]


def test_bic_counts_events_not_samples(table):
    X, y = table
    model = SparseCox("bic", max_k=2, thorough=False).fit(X, y)
    scores = [entry["score"] - 2 * entry["loss"] for entry in model.path_]
    np.testing.assert_allclose(scores, np.arange(3) * np.log(y[:, 1].sum()), atol=1e-9)


def test_score_is_the_share_of_concordant_pairs(table):
    X, y = table
    X, y = X[:40], y[:40]
    model = SparseCox(2).fit(X, y)
    hazard, right, pairs = model.predict(X), 0.0, 0
    for i in range(40):
        for j in range(40):
            if y[i, 1] == 1 and (y[j, 0] > y[i, 0] or (y[j, 0] == y[i, 0] and y[j, 1] == 0)):
                pairs += 1
                right += 1.0 if hazard[i] > hazard[j] else 0.5 if hazard[i] == hazard[j] else 0.0
    assert model.score(X, y) == pytest.approx(right / pairs)
    assert 0.6 < model.score(X, y) <= 1


def test_survival_is_breslows_estimate(table):
    X, y = table
    model = SparseCox(2).fit(X, y)
    at = [0.0, 0.3, 1.0, 1e9]
    found = model.predict_survival(X[:5], at)
    hazards = np.exp(X @ model.coef_)
    for column, time in enumerate(at):
        events = [i for i in range(200) if y[i, 1] == 1 and y[i, 0] <= time]
        total = sum(1 / hazards[y[:, 0] >= y[i, 0]].sum() for i in events)
        np.testing.assert_allclose(found[:, column], np.exp(-hazards[:5] * total), rtol=1e-9)
    assert (found[:, 0] == 1).all()
    assert (np.diff(found, axis=1) <= 0).all()


def test_weights_and_offset_reach_the_objective(table, rng):
    X, y = table
    weights, offset = rng.integers(1, 3, 200).astype(float), 0.3 * rng.standard_normal(200)
    model = SparseCox(2).fit(X, y, weights, offset=offset)
    direct = iobs.minimize(iobs.objectives.Cox(X, *y.T, sample_weight=weights, offset=offset), 2)
    np.testing.assert_allclose(model.coef_, direct.theta, rtol=1e-6)
    np.testing.assert_allclose(model.predict(X, offset=offset), X @ direct.theta + offset)


@pytest.mark.parametrize("shift", [5000.0, -5000.0])
def test_survival_does_not_depend_on_the_zero_of_a_feature(shift, table):
    X, y = table
    moved = X + shift * (np.arange(8) == 1)  # exp of these margins is no number
    found = SparseCox(2).fit(moved, y).predict_survival(moved[:5], [0.0, 0.3, 1.0])
    np.testing.assert_allclose(found, SparseCox(2).fit(X, y).predict_survival(X[:5], [0.0, 0.3, 1.0]), rtol=1e-6)


def test_survival_takes_the_offset_of_new_samples(table):
    X, y = table
    model = SparseCox(2).fit(X, y)
    found = model.predict_survival(X[:5], [0.3, 1.0], offset=np.full(5, np.log(2)))  # twice the hazard
    np.testing.assert_allclose(found, model.predict_survival(X[:5], [0.3, 1.0]) ** 2, rtol=1e-9)


def test_samples_of_weight_zero_count_as_left_out(table):
    X, y = table
    y[np.argmax(y[:, 0]), 1] = 1
    weights = np.ones(200)
    weights[[np.argmax(y[:, 0]), *np.flatnonzero(y[:, 1])[:40]]] = 0  # the last event, and some with ties
    left, found = SparseCox(2).fit(X[weights > 0], y[weights > 0]), SparseCox(2).fit(X, y, weights)
    assert found.path_[0]["loss"] == pytest.approx(left.path_[0]["loss"], rel=1e-12)
    np.testing.assert_allclose(found.coef_, left.coef_, rtol=1e-6)
    np.testing.assert_array_equal(found.baseline_times_, left.baseline_times_)
    np.testing.assert_allclose(found.baseline_hazard_, left.baseline_hazard_, rtol=1e-6)


@pytest.mark.filterwarnings("ignore::iobs.errors.SeparationWarning")
def test_a_model_that_fits_all_events_has_no_overflow(table):
    X, y = table
    y[:, 1] = np.arange(200) == np.argmax(X[:, 2])  # one event, of the sample with the largest feature
    y[y[:, 1] == 1, 0] = 0.001
    assert SparseCox(1).fit(X, y).support_.size == 1
    objective = iobs.objectives.Cox(X, y[:, 0], np.ones(200))
    assert objective.value_and_gradient(np.full(8, 1e5))[0] == np.inf


def test_forced_features_and_groups_are_kept_together(table):
    X, y = table
    assert 6 in SparseCox(2, forced=[6]).fit(X, y).support_
    model = SparseCox(1, groups=[0, 1, 2, 3, 1, 5, 6, 7]).fit(X, y)
    assert model.support_.tolist() == [1, 4]
    assert clone(model).get_params() == model.get_params()


def test_what_cannot_be_fitted_is_refused(table):
    X, y = table
    with pytest.raises(ProblemError, match=r"shape \(n, 2\)"):
        SparseCox(2).fit(X, y[:, 0])
    with pytest.raises(ProblemError, match="at least one 1"):
        SparseCox(2).fit(X, y * [1, 0])
    with pytest.raises(ProblemError, match="k must"):
        SparseCox(99).fit(X, y)
    with pytest.raises(ProblemError, match=r"shape \(n, 2\)"):
        SparseCox(2).fit(X, y).score(X, y[:, 0])
