"""The estimators: scikit-learn's checks, known answers, and errors."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from sklearn.datasets import load_diabetes, load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.utils.estimator_checks import check_estimator
from sparse_problems import correlated_design, sparse_signal

from iobs.errors import ProblemError
from iobs.optimize.estimators import SparseClassifier, SparseMultiTaskRegressor, SparseRegressor
from iobs.optimize.minimize import minimize
from iobs.optimize.objectives.families import Logistic, Poisson
from iobs.optimize.objectives.linear import LeastSquares
from iobs.optimize.objectives.tabled import Multinomial
from iobs.optimize.refit.newton import refit
from iobs.optimize.search.path import information, standard_errors


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "estimator",
    [
        SparseRegressor(),
        SparseRegressor(k=1),
        SparseRegressor(k="cv", cv=2),
        SparseRegressor(loss="poisson", ridge=0.1, k=1),
        SparseMultiTaskRegressor(k=1),
        pytest.param(SparseClassifier(), marks=pytest.mark.slow),
        pytest.param(SparseClassifier(max_k=2), marks=pytest.mark.slow),
        pytest.param(SparseClassifier(k="cv", cv=3), marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
    ids=str,
)
def test_estimators_pass_scikit_learns_checks(estimator):
    # Repeated rows fall into other cross-validation folds than weighted rows; scikit-learn exempts its own *CV too.
    # A Poisson regression cannot have the negative targets that the generic checks draw.
    weights = "sample weights and repeated rows fall into different folds"
    expected = {f"check_sample_weight_equivalence_on_{kind}_data": weights for kind in ("dense", "sparse")}
    expected = expected if estimator.k == "cv" else {}
    if getattr(estimator, "loss", "") == "poisson":
        results = check_estimator(estimator, on_fail=None)
        failed = [result for result in results if result["status"] == "failed"]
        assert all("non-negative" in str(result["exception"]) for result in failed), failed
        return
    check_estimator(estimator, expected_failed_checks=expected)


@pytest.mark.parametrize("k", ["cv", "bic", "ebic", 4])
@pytest.mark.parametrize("convert", [np.asarray, sp.csr_array, sp.csc_array])
def test_regressor_recovers_the_support(k, convert, rng):
    X = correlated_design(rng, 120, 30, 0.5)
    truth = sparse_signal(rng, 30, 4)
    y = X @ truth + 3.0 + 0.1 * rng.standard_normal(120)
    model = SparseRegressor(k=k).fit(convert(X), y)
    assert set(np.flatnonzero(truth)) <= set(model.support_)
    assert model.k_ <= {"cv": 8, "bic": 6}.get(k, 4)
    assert model.intercept_ == pytest.approx(3.0, abs=0.1)
    assert model.score(convert(X), y) > 0.99


def test_regressor_path_losses_fall_with_k():
    X, y = load_diabetes(return_X_y=True)
    model = SparseRegressor(k="bic", max_k=10).fit(X, y)
    losses = [entry["loss"] for entry in model.path_]
    assert losses == sorted(losses, reverse=True)
    assert [entry["k"] for entry in model.path_] == list(range(11))
    assert set(model.support_) == {1, 2, 3, 6, 8} or model.k_ == 5
    assert model.coef_[0] == 0


def test_classifier_equals_scikit_learn_for_two_classes(rng):
    X = correlated_design(rng, 200, 5, 0.3)
    X /= X.std(axis=0)  # our ridge is per standard deviation
    y = np.where(rng.random(200) < 1 / (1 + np.exp(-X[:, 0] + X[:, 2])), "yes", "no")
    ours = SparseClassifier(k=5, ridge=2.0).fit(X, y)
    theirs = LogisticRegression(C=0.5, tol=1e-10, max_iter=1000).fit(X, y)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-4)
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), atol=1e-5)
    assert set(SparseClassifier(k=2).fit(X, y).support_) == {0, 2}


def test_classifier_equals_scikit_learn_for_more_classes():
    X, y = load_iris(return_X_y=True)
    X /= X.std(axis=0)
    ours = SparseClassifier(k=4, ridge=1.0).fit(X, y)
    theirs = LogisticRegression(C=1.0, tol=1e-10, max_iter=5000).fit(X, y)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-4, atol=1e-5)
    two = SparseClassifier(k=2).fit(X, y)
    assert set(two.support_) == {2, 3}
    assert (two.coef_ != 0).any(axis=0).sum() == 2
    assert two.score(X, y) > 0.93
    np.testing.assert_allclose(two.predict_proba(X).sum(axis=1), 1.0)


def test_estimators_keep_groups_together_and_forced_features(rng):
    X = rng.standard_normal((150, 24))
    labels = np.arange(24) // 3
    truth = np.where(np.isin(labels, [1, 6]), rng.uniform(0.5, 1, 24), 0.0)
    y = X @ truth + 0.1 * rng.standard_normal(150)
    model = SparseRegressor(k=2, groups=labels).fit(X, y)
    np.testing.assert_array_equal(model.support_, np.flatnonzero(truth))
    assert SparseRegressor(k="bic", groups=labels).fit(X, y).k_ == 2
    forced = SparseRegressor(k=2, groups=labels, forced=[0]).fit(X, y)
    assert set(forced.support_) == {0, 1, 2} | set(np.flatnonzero(truth))
    single = SparseRegressor(k=6, forced=[0]).fit(X, y)
    assert 0 in single.support_
    assert single.support_.size == 7
    classes = SparseClassifier(k=2, groups=labels).fit(X, np.digitize(y, [-1, 1]))
    np.testing.assert_array_equal(classes.support_, np.flatnonzero(truth))


def test_classifier_is_finite_if_classes_are_separable(rng):
    X = rng.standard_normal((50, 6))
    for y in (X[:, 1] > 0, np.digitize(X[:, 1], [-0.5, 0.5])):
        model = SparseClassifier(k=1).fit(X, y)
        assert np.isfinite(model.coef_).all()
        np.testing.assert_array_equal(model.support_, [1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda X, y: SparseRegressor(k=7).fit(X, y), "between 0 and the 5"),
        (lambda X, y: SparseRegressor(k="best").fit(X, y), "integer"),
        (lambda X, y: SparseRegressor(loss="huber").fit(X, y), "squared"),
        (lambda X, y: SparseRegressor(loss="poisson").fit(X, y - 10), "non-negative"),
        (lambda X, y: SparseRegressor(k=1, groups=[0, 1]).fit(X, y), "one label"),
        (lambda X, y: SparseRegressor(k=1, forced=[9]).fit(X, y), "Forced"),
        (lambda X, y: SparseClassifier().fit(X, np.ones(20)), "one class"),
        (lambda X, y: SparseRegressor().fit(np.full_like(X, np.nan), y), "NaN"),
        (lambda X, y: SparseRegressor().fit(np.full_like(X, np.inf), y), "infinity"),
        (lambda X, y: SparseRegressor().fit(np.array([["a"]] * 20), y), "convert"),
    ],
)
def test_estimators_raise_if_arguments_are_invalid(make, message, rng):
    with pytest.raises((ProblemError, ValueError), match=message):
        make(rng.standard_normal((20, 5)), rng.standard_normal(20))


def logistic_data(rng, n=400):
    X = rng.standard_normal((n, 6))
    return X, (rng.random(n) < 1 / (1 + np.exp(-2 * X[:, 0] + 1.5 * X[:, 1]))).astype(int)


def test_information_criteria_differ_by_their_penalties(rng):
    X, y = logistic_data(rng)
    objective = Logistic(X, y)
    fit = refit(objective, np.array([0, 1]))
    aic, bic, ebic = (information(objective, fit, name, 400, 6, 2) for name in ("aic", "bic", "ebic"))
    assert aic == pytest.approx(2 * fit.value + 2 * 2)
    assert bic - aic == pytest.approx(2 * (np.log(400) - 2))
    assert ebic - bic == pytest.approx(2 * np.log(15))
    assert 2 <= SparseClassifier(k="aic").fit(X, y).k_ <= 6


@pytest.mark.parametrize("origin", [1e5, 1e9])
@pytest.mark.parametrize("classes", [2, 3])
def test_classifier_does_not_depend_on_column_origins(rng, origin, classes):
    X, y = logistic_data(rng)
    y = y if classes == 2 else np.digitize(2 * X[:, 0] + rng.standard_normal(400), [-1, 1])
    moved = X.copy()
    moved[:, 0] += origin
    plain, found = (SparseClassifier(k=2).fit(values, y) for values in (X, moved))
    np.testing.assert_array_equal(found.support_, plain.support_)
    np.testing.assert_allclose(found.coef_, plain.coef_, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.predict_proba(moved), plain.predict_proba(X), atol=1e-4)


@pytest.mark.parametrize("store", [np.asarray, sp.csr_array, torch.from_numpy], ids=["numpy", "csr", "torch"])
@pytest.mark.parametrize("kind", [LeastSquares, Logistic, Poisson])
def test_objectives_keep_columns_far_from_zero(rng, kind, store):
    X, y = logistic_data(rng)
    X[:, 0] += 1e7
    X[:, 5] = 3.7e5  # a constant column
    found = minimize(kind(store(X), y, intercept=True), 2)
    assert set(found.support) == {0, 1}
    np.testing.assert_array_equal(kind(store(X), y, intercept=True).constant_coordinates(), [5])


@pytest.mark.parametrize("classes", [2, 3])
def test_classifier_does_not_depend_on_column_units(rng, classes):
    X, y = logistic_data(rng, 200)
    y = y if classes == 2 else np.digitize(2 * X[:, 0] + rng.standard_normal(200), [-1, 1])
    units = np.array([1e-6, 1e3, 1.0, 1e9, 1.0, 1e-9])
    for k in (2, "ebic", "cv"):
        plain, found = (SparseClassifier(k=k, ridge=0.5, max_k=2, cv=3).fit(values, y) for values in (X, X * units))
        np.testing.assert_array_equal(found.support_, plain.support_)
        np.testing.assert_allclose(found.coef_ * units, plain.coef_, rtol=1e-5, atol=1e-8)


def test_regressor_uses_only_ratios_of_fractional_weights(rng):
    X = rng.standard_normal((100, 20))
    y = 2 * X[:, 0] + 3 * X[:, 1] - X[:, 2] + rng.standard_normal(100)
    weights = 0.5 + rng.random(100)
    chosen = [SparseRegressor().fit(X, y, sample_weight=weights * scale).support_ for scale in (1e-3, 1.0, 1e3)]
    for support in chosen:
        np.testing.assert_array_equal(support, [0, 1, 2])
    counts = rng.integers(1, 4, 100)
    weighted, repeated = (
        SparseRegressor().fit(X, y, counts),
        SparseRegressor().fit(X.repeat(counts, 0), y.repeat(counts)),
    )
    np.testing.assert_allclose(weighted.coef_, repeated.coef_, rtol=1e-8)
    assert weighted.path_[3]["score"] == pytest.approx(repeated.path_[3]["score"])


def test_information_counts_no_parameter_for_unseen_classes(rng):
    """A multinomial model of two classes has the criterion of the binary model."""
    X, y = logistic_data(rng)
    model = Multinomial(X, y, 2, ridge=1e-9)
    support = np.concatenate([*(model.groups[j] for j in (0, 1)), model.forced])
    two = information(model, refit(model, support), "bic", 400, 6, 2)
    plain = Logistic(X, y, intercept=True)
    assert two == pytest.approx(information(plain, refit(plain, np.array([0, 1, 6])), "bic", 400, 6, 2), rel=1e-6)


def test_estimators_take_forced_features_as_indices_or_mask(rng):
    X, y = logistic_data(rng)
    three = np.digitize(X[:, 0], [-1, 1])
    mask = np.arange(6) == 4
    for model, target in ((SparseRegressor(k=1, forced=mask), y), (SparseClassifier(k=1, forced=mask), three)):
        assert 4 in model.fit(X, target).support_
    for number in (4, np.array([4.0])):
        assert 4 in SparseRegressor(k=1, forced=number).fit(X, y).support_
    for wrong in ([99], [-1], [1.5], ["a"], [True, False]):
        for kind, target in ((SparseRegressor, y), (SparseClassifier, y), (SparseClassifier, three)):
            with pytest.raises(ProblemError, match="Forced features"):
                kind(k=1, forced=wrong).fit(X, target)
    for settings in ({"ridge": -1.0}, {"ridge": np.nan}, {"max_k": -1}, {"max_k": 2.5}):
        with pytest.raises(ProblemError):
            SparseClassifier(**settings).fit(X, three)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_objectives_accept_half_precision_designs(rng, dtype):
    X, y = logistic_data(rng)
    X[:, 5] = 3.0
    for kind in (LeastSquares, Logistic):
        objective = kind(torch.from_numpy(X).to(dtype), y, intercept=True)
        np.testing.assert_array_equal(objective.constant_coordinates(), [5])
        assert set(minimize(objective, 2).support) == {0, 1}


def test_standard_errors_noise_excludes_the_ridge(rng):
    X = rng.standard_normal((200, 3))
    y = X @ [1.0, 2.0, 3.0] + 0.5 * rng.standard_normal(200)
    objective = LeastSquares(X, y, ridge=100.0)
    fit = refit(objective, np.arange(3))
    rest = y - X @ fit.theta
    assert standard_errors(objective, fit, 200, False).noise == pytest.approx(np.sqrt(rest @ rest / 197))


def test_estimators_raise_if_weights_or_targets_are_invalid(rng):
    X, y = rng.standard_normal((40, 4)), np.arange(40) % 3
    with pytest.raises(ProblemError, match="must not be negative"):
        SparseClassifier(2).fit(X, y, sample_weight=np.where(np.arange(40) < 9, -1.0, 1.0))
    with pytest.raises(ProblemError, match="too large to square"):
        SparseRegressor(2).fit(X, 1e200 * (1 + y))
    with pytest.raises(ProblemError, match="zero in fold 1"):
        SparseRegressor("cv").fit(X, y, sample_weight=(np.arange(40) > 32).astype(float))
