"""The choice of k, families and offsets of the estimators."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from sklearn.model_selection import GroupKFold, KFold, RepeatedKFold, ShuffleSplit, StratifiedGroupKFold

from iobs import SparseClassifier, SparseRegressor, minimize
from iobs.errors import ProblemError
from iobs.optimize.objectives import LeastSquares, Logistic, Tweedie


def _linear(rng, n=120, d=8, noise=1.5):
    X = rng.standard_normal((n, d))
    return X, X[:, 0] - 0.8 * X[:, 3] + 0.25 * X[:, 5] + noise * rng.standard_normal(n)


@pytest.mark.parametrize("estimator", [SparseRegressor, SparseClassifier])
def test_one_standard_error_rule_takes_the_smallest_k_within_it(estimator, rng):
    X, y = _linear(rng)
    y = y if estimator is SparseRegressor else (y > 0).astype(int)
    least, rule = estimator("cv").fit(X, y), estimator("cv-1se").fit(X, y)
    scores = [entry["score"] for entry in rule.path_]
    assert scores == [entry["score"] for entry in least.path_]
    best = int(np.argmin(scores))
    limit = scores[best] + rule.path_[best]["score_error"]
    assert rule.k_ == next(entry["k"] for entry in rule.path_ if entry["score"] <= limit)
    assert rule.k_ <= least.k_


def test_repeated_cross_validation_does_not_count_repeats_as_samples(rng):
    X, y = _linear(rng)
    once = SparseRegressor("cv", cv=KFold(5, shuffle=True, random_state=0)).fit(X, y)
    often = SparseRegressor("cv", cv=RepeatedKFold(n_splits=5, n_repeats=8, random_state=0)).fit(X, y)
    errors = [np.array([entry["score_error"] for entry in fit.path_]) for fit in (once, often)]
    ratio = errors[1] / errors[0]
    assert (ratio > 0.4).all()
    assert (ratio < 2.5).all()  # counted as samples, the errors would be smaller by sqrt(8)


def test_one_standard_error_rule_needs_two_folds(rng):
    with pytest.raises(ProblemError, match="at least two folds"):
        SparseRegressor("cv-1se", cv=ShuffleSplit(1, random_state=0)).fit(*_linear(rng))


@pytest.mark.parametrize(("cv", "count"), [(4, 4), (None, 5)])
@pytest.mark.parametrize("estimator", [SparseRegressor, SparseClassifier])
def test_samples_of_one_group_are_in_one_fold(estimator, cv, count, rng):
    X, y = _linear(rng)
    y = y if estimator is SparseRegressor else (y > 0).astype(int)
    people = rng.integers(0, 12, len(y))
    grouped = estimator("cv", cv=cv).fit(X, y, sample_groups=people)
    kind = GroupKFold if estimator is SparseRegressor else StratifiedGroupKFold
    folds = list(kind(count).split(X, y, people))
    given = estimator("cv", cv=folds).fit(X, y)
    assert [entry["score"] for entry in grouped.path_] == [entry["score"] for entry in given.path_]


@pytest.mark.parametrize("people", [np.arange(60) % 3, np.array([None, *range(59)], dtype=object)])
def test_groups_that_make_no_folds_are_refused(people, rng):
    X = rng.standard_normal((60, 2))
    with pytest.raises(ProblemError, match="cannot be divided into folds"):
        SparseRegressor("cv").fit(X, X[:, 0], sample_groups=people)


@pytest.mark.parametrize("loss", ["gamma", "tweedie", "negative_binomial", partial(Tweedie, power=1.2)])
@pytest.mark.parametrize("k", ["bic", "cv"])
def test_families_choose_the_drawn_columns(loss, k):
    rng = np.random.default_rng(3)
    X, exposure = rng.standard_normal((200, 6)), rng.integers(1, 9, 200).astype(float)
    mean = exposure * np.exp(0.8 * X[:, 1] - 0.6 * X[:, 4])
    y = rng.gamma(3.0, mean / 3) if loss == "gamma" else rng.poisson(mean).astype(float)
    model = SparseRegressor(k, loss=loss).fit(X, y, offset=np.log(exposure))
    assert {1, 4} <= set(model.support_.tolist())
    assert model.support_.size <= 4
    assert np.allclose(model.coef_[[1, 4]], [0.8, -0.6], atol=0.15)
    ratio = model.predict(X, offset=np.log(exposure)) / model.predict(X)
    assert np.allclose(ratio, exposure)
    assert np.isfinite(model.standard_errors_[model.support_]).all()


@pytest.mark.parametrize("family", [LeastSquares, Logistic])
def test_a_family_without_a_log_link_is_refused(family, rng):
    X, y = _linear(rng)
    with pytest.raises(ProblemError, match=f"needs a log link, {family.__name__} has none"):
        SparseRegressor(1, loss=family).fit(X, (y > 0).astype(float))


def test_offset_of_least_squares_is_subtracted_from_the_target(rng):
    X, y = _linear(rng)
    offset = rng.standard_normal(len(y))
    with_offset, without = SparseRegressor(2).fit(X, y, offset=offset), SparseRegressor(2).fit(X, y - offset)
    assert np.allclose(with_offset.coef_, without.coef_, rtol=1e-12)
    assert with_offset.intercept_ == pytest.approx(without.intercept_, rel=1e-9)


def test_offset_must_have_one_number_per_sample(rng):
    X, y = _linear(rng)
    with pytest.raises(ProblemError, match="offset"):
        SparseRegressor(2).fit(X, y, offset=y[:5])
    with pytest.raises(ProblemError, match="negative_binomial"):
        SparseRegressor(2, loss="cauchy").fit(X, y)


@pytest.mark.parametrize("k", [2, "bic", "cv"])
def test_offset_of_a_classifier_is_known_log_odds(k):
    rng = np.random.default_rng(4)
    X, offset = rng.standard_normal((400, 6)), 2.0 * rng.standard_normal(400)
    margin = X[:, 1] - 1.5 * X[:, 4] + offset
    y = np.where(rng.random(400) < 1 / (1 + np.exp(-margin)), "yes", "no")
    model = SparseClassifier(k, ridge=0.0).fit(X, y, offset=offset)
    assert {1, 4} <= set(model.support_.tolist())
    exact = minimize(Logistic(X, (y == "yes").astype(float), intercept=True, offset=offset), model.k_)
    np.testing.assert_allclose(model.coef_[0], exact.theta, rtol=1e-6, atol=1e-9)
    shifted = model.decision_function(X, offset=offset) - model.decision_function(X)
    np.testing.assert_allclose(shifted, offset, atol=1e-12)
    assert np.mean(model.predict(X, offset=offset) == y) > np.mean(model.predict(X) == y)
    np.testing.assert_allclose(model.predict_proba(X, offset=offset).sum(axis=1), 1)


def test_offset_of_several_classes_is_refused(rng):
    X = rng.standard_normal((30, 4))
    with pytest.raises(ProblemError, match="two classes"):
        SparseClassifier(2).fit(X, np.arange(30) % 3, offset=np.zeros(30))
    model = SparseClassifier(2).fit(X, np.arange(30) % 3)
    for predict in (model.decision_function, model.predict_proba, model.predict):
        with pytest.raises(ProblemError, match="two classes"):
            predict(X, offset=np.ones(30))
