"""Stability selection against its definition and its bound; sample splitting against coverage."""

from __future__ import annotations

import numpy as np
import pytest

from iobs import (
    SparseClassifier,
    SparseCox,
    SparseInteractions,
    SparseMultiTaskRegressor,
    SparseRegressor,
    knockoff_filter,
    split_inference,
    stability_selection,
)
from iobs.errors import ProblemError
from iobs.optimize.estimators.stability import _halves


def _data(rng, n=120, d=15):
    X = rng.standard_normal((n, d))
    return X, 2 * X[:, 1] - 2 * X[:, 6] + rng.standard_normal(n)


def test_stability_selection_counts_the_supports_of_the_path(rng):
    X, y = _data(rng)
    found = stability_selection(SparseRegressor(), X, y, max_k=3, pairs=4, seed=7)
    order, expected, union = np.random.default_rng(7), np.zeros((3, 15)), np.zeros(15)
    for _ in range(4):
        for half in _halves(y, order, False):
            supports = [SparseRegressor(k, thorough=False).fit(X[half], y[half]).support_ for k in (1, 2, 3)]
            for row, support in zip(expected, supports, strict=True):
                row[support] += 1 / 8
            union[np.unique(np.concatenate(supports))] += 1 / 8
    assert np.allclose(found.path, expected)
    assert np.allclose(found.frequencies, union)
    assert found.chosen == pytest.approx(union.sum())
    assert found.false_bound == pytest.approx(union.sum() ** 2 / (0.5 * 15))
    assert found.support.tolist() == [1, 6]


def test_halves_are_complementary_and_keep_classes(rng):
    y = rng.permutation(np.repeat([0, 1], [30, 11]))
    for classes in (False, True):
        one, other = _halves(y, rng, classes)
        assert np.array_equal(np.sort(np.concatenate([one, other])), np.arange(41))
    assert abs(int(y[one].sum()) - int(y[other].sum())) <= 1


def test_false_features_stay_below_the_bound(rng):
    false, bounds = [], []
    for _ in range(12):
        X = rng.standard_normal((60, 20))
        found = stability_selection(SparseRegressor(), X, rng.standard_normal(60), max_k=2, pairs=10, threshold=0.6)
        false.append(found.support.size)
        bounds.append(found.false_bound)
    assert np.mean(false) <= np.mean(bounds)


def test_max_false_gives_the_threshold_of_the_bound(rng):
    X, y = _data(rng, d=40)
    found = stability_selection(SparseRegressor(), X, y, max_k=3, max_false=1.0, pairs=5)
    assert found.false_bound == pytest.approx(1.0)
    assert 0.5 < found.threshold <= 1
    assert {1, 6} <= set(found.support.tolist())
    with pytest.raises(ProblemError, match="Lower max_k"):
        stability_selection(SparseRegressor(), X, y, max_k=8, max_false=0.1, pairs=5)


def test_groups_and_forced_features_are_counted_as_such(rng):
    X, y = _data(rng)
    labels = np.arange(15) // 3
    found = stability_selection(SparseRegressor(groups=labels, forced=[0]), X, y, max_k=2, pairs=3)
    assert (found.frequencies[:3] == 1).all()
    assert {6, 7, 8} <= set(found.support.tolist())
    assert found.chosen <= 4


def test_classes_are_taken(rng):
    X, y = _data(rng)
    found = stability_selection(SparseClassifier(), X, np.where(y > 0, "yes", "no"), max_k=2, pairs=3)
    assert found.support.tolist() == [1, 6]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"threshold": 0.5}, "above 1/2"),
        ({"threshold": 0.7, "max_false": 1.0}, "not both"),
        ({"max_k": 99}, "at most the 15"),
        ({"pairs": 0}, "at least 1"),
        ({"max_false": 0.0}, "positive"),
    ],
)
def test_stability_selection_refuses_limits_out_of_range(limits, words, rng):
    with pytest.raises(ProblemError, match=words):
        stability_selection(SparseRegressor(), *_data(rng), **{"max_k": 2, **limits})


def test_split_intervals_cover_and_intervals_after_selection_do_not():
    rng = np.random.default_rng(0)
    honest, naive = [], []
    for _ in range(150):
        X = rng.standard_normal((60, 30))
        y = rng.standard_normal(60)  # every true coefficient is zero
        honest += [row.low <= 0 <= row.high for row in split_inference(SparseRegressor(2, thorough=False), X, y)]
        model = SparseRegressor(2, thorough=False).fit(X, y)
        errors = model.standard_errors_[model.support_]
        naive += (np.abs(model.coef_[model.support_]) <= 2 * errors).tolist()
    assert 0.91 < np.mean(honest) < 0.99
    assert np.mean(naive) < 0.5


def test_split_intervals_are_those_of_least_squares_on_the_other_part(rng):
    from sklearn.model_selection import train_test_split

    X, y = _data(rng)
    rows = split_inference(SparseRegressor(2), X, y, level=0.9, seed=3)
    assert [row.feature for row in rows] == [1, 6]
    other = train_test_split(np.arange(len(y)), train_size=0.5, random_state=3)[1]
    design = np.column_stack([X[other][:, [1, 6]], np.ones(other.size)])
    theta, rss = np.linalg.lstsq(design, y[other], rcond=None)[:2]
    error = np.sqrt(rss[0] / (other.size - 3) * np.linalg.inv(design.T @ design).diagonal())
    from scipy import stats

    width = stats.t(other.size - 3).ppf(0.95)
    for row, coefficient, size in zip(rows, theta, error, strict=False):
        assert (row.coefficient, row.error) == pytest.approx((coefficient, size), rel=1e-8)
        assert (row.low, row.high) == pytest.approx((coefficient - width * size, coefficient + width * size), rel=1e-8)
        assert row.p_value == pytest.approx(2 * stats.t(other.size - 3).sf(abs(coefficient) / size), rel=1e-6)


def test_samples_and_targets_that_do_not_pair_are_refused(rng):
    X, y = _data(rng)
    for bad in ({"y": y[:-9]}, {"y": y, "sample_weight": np.ones(len(y) + 1)}):  # the first rows would do
        with pytest.raises(ValueError, match="inconsistent numbers of samples"):
            stability_selection(SparseRegressor(), X, **bad, max_k=2, pairs=1)
        with pytest.raises(ValueError, match="inconsistent numbers of samples"):
            split_inference(SparseRegressor(2), X, **bad)


def test_split_inference_refuses_what_it_cannot_estimate(rng):
    X, y = _data(rng)
    with pytest.raises(ProblemError, match="between 0 and 1"):
        split_inference(SparseRegressor(2), X, y, level=1.0)
    with pytest.raises(ProblemError, match="two classes"):
        split_inference(SparseClassifier(2), X, np.arange(len(y)) % 3)
    with pytest.raises(ProblemError, match="too few"):
        split_inference(SparseRegressor(4), X, y, share=0.97)
    with pytest.raises(ProblemError, match="bounds"):
        split_inference(SparseRegressor(2, lower=0), X, y)
    with pytest.raises(ProblemError, match="one response"):
        split_inference(SparseMultiTaskRegressor(2), X, np.column_stack([y, y]))


@pytest.mark.parametrize("weight", [0.1, 10.5])
def test_split_intervals_depend_only_on_ratios_of_fractional_weights(weight, rng):
    X, y = _data(rng)
    plain = split_inference(SparseRegressor(2), X, y)
    weighted = split_inference(SparseRegressor(2), X, y, sample_weight=np.full(len(y), weight))
    for left, right in zip(plain, weighted, strict=True):
        assert (right.low, right.high, right.p_value) == pytest.approx((left.low, left.high, left.p_value), rel=1e-6)


def test_split_intervals_of_cox_have_normal_errors(rng):
    X = rng.standard_normal((300, 5))
    times = rng.exponential(np.exp(-X[:, 3]))
    (row,) = split_inference(SparseCox(1), X, np.column_stack([times, np.ones(300)]))
    assert row.feature == 3
    assert row.low < 1 < row.high
    assert row.high - row.coefficient == pytest.approx(1.959964 * row.error, rel=1e-5)


@pytest.mark.parametrize("function", [split_inference, knockoff_filter, lambda *a: stability_selection(*a, max_k=2)])
def test_estimators_of_interactions_are_refused(function, rng):
    X, y = _data(rng)
    with pytest.raises(ProblemError, match="terms are not features"):
        function(SparseInteractions(2), X, y)
