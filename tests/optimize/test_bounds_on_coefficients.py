"""Bounds on the coefficients against scipy on every support, and against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.optimize import lsq_linear
from scipy.optimize import minimize as scipy_minimize
from sparse_problems import correlated_design, sparse_signal

from iobs import SparseClassifier, SparseCox, SparseMultiTaskRegressor, SparseRegressor, minimize
from iobs.errors import ProblemError
from iobs.optimize.objectives.families import Logistic, Poisson
from iobs.optimize.objectives.linear import LeastSquares
from iobs.optimize.refit.newton import refit
from iobs.optimize.refit.within import Bounds

BOXES = [(0.0, np.inf), (-0.4, 0.4), (-np.inf, 0.0), (0.0, 0.7)]


def _data(seed, n=60, d=7, rho=0.6):
    rng = np.random.default_rng(seed)
    design = correlated_design(rng, n, d, rho)
    signal = design @ sparse_signal(rng, d, 4)
    return design, signal + rng.standard_normal(n), rng


def _supports(d, k):
    return [np.array(chosen, dtype=np.int64) for chosen in itertools.combinations(range(d), k)]


def _by_lsq_linear(design, y, support, low, high):
    """The best residual on the centred data."""
    found = lsq_linear(design[:, support], y, (low, high), method="bvls", tol=1e-14)
    return 0.5 * float(((design[:, support] @ found.x - y) ** 2).sum()), found.x


@pytest.mark.parametrize(("low", "high"), BOXES)
@pytest.mark.parametrize("size", [1, 3, 6])
def test_refit_equals_lsq_linear_on_every_support(low, high, size):
    design, y, _ = _data(1)
    bounds = Bounds(np.full(7, low), np.full(7, high))
    for support in _supports(7, size):
        fit = refit(LeastSquares(design, y), support, bounds=bounds)
        value, theta = _by_lsq_linear(design, y, support, low, high)
        assert fit.value == pytest.approx(value, rel=1e-10)
        assert fit.theta[support] == pytest.approx(theta, abs=1e-7)


@pytest.mark.parametrize(("low", "high"), BOXES)
@pytest.mark.parametrize("family", [Logistic, Poisson])
def test_refit_equals_l_bfgs_b_on_every_support(low, high, family):
    design, y, _ = _data(2, d=6)
    target = (y > 0).astype(float) if family is Logistic else np.floor(np.exp(np.clip(y, -3, 3)))
    objective = family(design, target, ridge=0.1)
    bounds = Bounds(np.full(6, low), np.full(6, high))
    for support in _supports(6, 3):
        fit = refit(objective, support, bounds=bounds)
        part = objective.restricted(support)
        found = scipy_minimize(
            part.value_and_gradient, np.zeros(3), jac=True, method="L-BFGS-B", bounds=[(low, high)] * 3,
            options={"ftol": 1e-15, "gtol": 1e-11, "maxiter": 2000},
        )  # fmt: skip
        assert fit.value <= found.fun * (1 + 1e-12)
        assert fit.value == pytest.approx(found.fun, rel=1e-9)
        assert fit.theta[support] == pytest.approx(found.x, abs=1e-4)


@pytest.mark.parametrize(("low", "high"), BOXES)
@pytest.mark.parametrize("intercept", [True, False])
def test_minimize_finds_the_best_of_all_supports_within_bounds(low, high, intercept):
    for seed in range(3):
        design, y, _ = _data(seed, d=8, rho=0.8)
        centred = (design - design.mean(axis=0), y - y.mean()) if intercept else (design, y)
        best = min(_by_lsq_linear(*centred, support, low, high)[0] for support in _supports(8, 3))
        result = minimize(LeastSquares(design, y, intercept=intercept), 3, lower=low, upper=high)
        assert result.loss == pytest.approx(best, rel=1e-9)
        assert result.support.size <= 3
        assert result.theta.min() >= low
        assert result.theta.max() <= high
        assert result.message.startswith("1-swap optimal")


def test_minimize_finds_the_best_logistic_model_within_bounds():
    design, y, _ = _data(5, d=8)
    objective = Logistic(design, (y > 0).astype(float), intercept=True, ridge=0.05)
    bounds = Bounds.of(0.0, None, 8).extended(9)
    best = min(refit(objective, np.append(support, 8), bounds=bounds).value for support in _supports(8, 3))
    result = minimize(objective, 3, lower=0)
    assert result.loss == pytest.approx(best, rel=1e-9)
    assert result.theta.min() >= 0


def test_bounds_far_away_change_nothing():
    design, y, _ = _data(6, n=100, d=15)
    objective = LeastSquares(design, y, intercept=True)
    free, bounded = minimize(objective, 5), minimize(objective, 5, lower=-100, upper=np.full(15, 100.0))
    assert bounded.support.tolist() == free.support.tolist()
    assert bounded.theta == pytest.approx(free.theta, rel=1e-9)
    assert bounded.intercept == pytest.approx(free.intercept)


def test_own_bounds_of_every_coefficient_and_forced_columns_hold():
    design, y, rng = _data(7, n=100, d=20)
    low, high = -rng.uniform(0, 0.3, 20), rng.uniform(0, 0.3, 20)
    result = minimize(LeastSquares(design, y, forced=[3]), 4, lower=low, upper=high)
    assert (result.theta >= low).all()
    assert (result.theta <= high).all()
    assert np.count_nonzero(np.delete(result.theta, 3)) <= 4
    assert 3 in result.support


def test_a_start_is_improved_within_bounds():
    design, y, _ = _data(8, d=20)
    start = np.zeros(20)
    start[:3] = -1.0
    result = minimize(LeastSquares(design, y), 3, lower=0, theta0=start)
    assert result.loss <= minimize(LeastSquares(design, y), 3, lower=0).loss * (1 + 1e-12)


def test_a_model_whose_bounds_allow_nothing_is_empty():
    design, y, _ = _data(9)
    result = minimize(LeastSquares(design, y), 3, lower=0, upper=0)
    assert not result.theta.any()
    assert result.loss == pytest.approx(0.5 * float(y @ y))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lower": 0.5}, "lower must be at most 0"),
        ({"upper": np.full(7, -1.0)}, "upper at least 0"),
        ({"lower": np.zeros(3)}, "length 7"),
        ({"upper": np.nan}, "NaN"),
        ({"lower": 0, "method": "iht"}, "auto"),
    ],
)
def test_wrong_bounds_are_named(settings, said):
    design, y, _ = _data(10)
    with pytest.raises(ProblemError, match=said):
        minimize(LeastSquares(design, y), 2, **settings)


@pytest.mark.parametrize("choice", [3, "ebic", "cv"])
def test_regressor_holds_its_bounds(choice):
    design, y, _ = _data(11, n=120, d=12)
    model = SparseRegressor(choice, lower=0, upper=0.8, max_k=None if choice == 3 else 5).fit(design, y)
    assert model.coef_.min() >= 0
    assert model.coef_.max() <= 0.8
    at_bound = model.coef_ == 0.8
    assert np.isnan(model.standard_errors_[at_bound]).all()
    assert np.isfinite(model.standard_errors_[(model.coef_ > 0) & ~at_bound]).all()
    if choice == 3:
        best = min(
            _by_lsq_linear(design - design.mean(axis=0), y - y.mean(), support, 0, 0.8)[0]
            for support in _supports(12, 3)
        )
        assert model.path_[0]["loss"] == pytest.approx(best, rel=1e-9)


def test_classifier_and_cox_hold_their_bounds():
    design, y, rng = _data(12, n=150, d=10)
    model = SparseClassifier(3, lower=0).fit(design, np.where(y > 0, "yes", "no"))
    assert model.coef_.min() >= 0
    times = np.column_stack([rng.exponential(np.exp(-0.3 * y)), rng.uniform(size=150) < 0.7])
    assert SparseCox(3, upper=0).fit(design, times).coef_.max() <= 0


@pytest.mark.parametrize(("lower", "upper"), [(0, None), (-0.3, 0.4)])
def test_groups_within_bounds_are_the_best_of_all(lower, upper):
    labels = np.array([0, 0, 0, 1, 1, 2, 3, 3, 4, 4, 5, 5])
    for seed in range(5):
        design, y, _ = _data(20 + seed, n=80, d=12)
        model = SparseRegressor(2, groups=labels, lower=lower, upper=upper).fit(design, y)
        low, high = -np.inf if lower is None else lower, np.inf if upper is None else upper
        centred, answers = design - design.mean(axis=0), y - y.mean()
        values = [
            _by_lsq_linear(centred, answers, np.flatnonzero(np.isin(labels, pair)), low, high)[0]
            for pair in itertools.combinations(range(6), 2)
        ]
        assert model.path_[0]["loss"] == pytest.approx(min(values), rel=1e-8)
        assert model.coef_.min() >= low - 1e-12
        assert model.coef_.max() <= high + 1e-12
        assert np.unique(labels[model.support_]).size <= 2


def test_several_responses_hold_the_bounds_of_their_features():
    design, y, rng = _data(31, n=100, d=6)
    responses = np.column_stack([y, -y + 0.3 * rng.standard_normal(100)])
    lower, upper = np.full(6, -0.2), np.full(6, 0.5)
    lower[2], upper[2] = 0.0, np.inf
    model = SparseMultiTaskRegressor(2, lower=lower, upper=upper).fit(design, responses)
    assert (model.coef_ >= lower - 1e-12).all()
    assert (model.coef_ <= upper + 1e-12).all()
    centred = design - design.mean(axis=0)
    best = min(
        sum(
            lsq_linear(centred[:, pair], each - each.mean(), (lower[list(pair)], upper[list(pair)])).cost
            for each in responses.T
        )
        for pair in itertools.combinations(range(6), 2)
    )
    assert model.path_[0]["loss"] == pytest.approx(best, rel=1e-8)


def test_bounds_without_a_meaning_are_refused_with_the_reason():
    design, y, _ = _data(13)
    with pytest.raises(ProblemError, match="changes no probability"):
        SparseClassifier(2, lower=0).fit(design, np.digitize(y, [-1, 1]))
