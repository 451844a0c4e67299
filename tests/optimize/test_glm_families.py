"""Families of generalised linear models and Cox regression: derivatives, and agreement with statsmodels."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from iobs.errors import ProblemError
from iobs.optimize.minimize import minimize
from iobs.optimize.objectives import (
    Cox,
    Gamma,
    LeastSquares,
    Logistic,
    MultiResponse,
    NegativeBinomial,
    Poisson,
    Tweedie,
)
from iobs.optimize.objectives.autodiff import from_torch
from iobs.optimize.objectives.tabled import Multinomial
from iobs.optimize.refit.newton import refit
from iobs.optimize.search.path import information, standard_errors

_N, _D = 120, 6
_SUPPORT = np.array([0, 2, 3])
_FAMILIES = {
    "squared": (LeastSquares, {}),
    "logistic": (Logistic, {}),
    "poisson": (Poisson, {}),
    "gamma": (Gamma, {}),
    "tweedie": (Tweedie, {"power": 1.4}),
    "negative binomial": (NegativeBinomial, {"alpha": 0.7}),
}


def _data(family, rng):
    """(X, y, offset, integer weights) drawn from the family."""
    X = rng.standard_normal((_N, _D)) + 0.5 * rng.standard_normal((_N, 1))
    offset = 0.3 * rng.standard_normal(_N)
    mean = np.exp(0.3 + 0.5 * X[:, 0] - 0.4 * X[:, 3] + offset)
    y = {
        "squared": lambda: np.log(mean) + rng.standard_normal(_N),
        "logistic": lambda: (rng.random(_N) < mean / (1 + mean)).astype(float),
        "poisson": lambda: rng.poisson(mean).astype(float),
        "gamma": lambda: rng.gamma(2.0, mean / 2),
        "tweedie": lambda: rng.poisson(mean) * rng.gamma(2.0, 0.5, _N),
        "negative binomial": lambda: rng.poisson(rng.gamma(1 / 0.7, 0.7 * mean)).astype(float),
    }[family]()
    return X, y, offset, rng.integers(1, 4, _N).astype(float)


def _statsmodels_family(sm, family):
    log = sm.families.links.Log()
    return {
        "squared": lambda: sm.families.Gaussian(),
        "logistic": lambda: sm.families.Binomial(),
        "poisson": lambda: sm.families.Poisson(),
        "gamma": lambda: sm.families.Gamma(link=log),
        "tweedie": lambda: sm.families.Tweedie(link=log, var_power=1.4),
        "negative binomial": lambda: sm.families.NegativeBinomial(link=log, alpha=0.7),
    }[family]()


@pytest.mark.parametrize("weighted", [False, True], ids=["equal weights", "weights"])
@pytest.mark.parametrize("family", _FAMILIES)
def test_fit_on_the_support_agrees_with_statsmodels(family, weighted, rng):
    sm = pytest.importorskip("statsmodels.api")
    X, y, offset, weights = _data(family, rng)
    kind, options = _FAMILIES[family]
    objective = kind(X, y, intercept=True, offset=offset, sample_weight=weights if weighted else None, **options)
    support = _SUPPORT if family == "squared" else np.append(_SUPPORT, _D)
    fit = refit(objective, support)
    model = sm.GLM(
        y,
        sm.add_constant(X[:, _SUPPORT]),
        family=_statsmodels_family(sm, family),
        offset=offset,
        freq_weights=weights if weighted else None,
    ).fit(tol=1e-13, maxiter=200)
    coefficients, intercept = objective.split(fit.theta)
    assert np.allclose([intercept, *coefficients[_SUPPORT]], model.params, rtol=1e-6, atol=1e-8)
    assert 2 * fit.value == pytest.approx(model.deviance, rel=1e-6)
    errors = standard_errors(objective, fit, float(weights.sum()) if weighted else _N, True)
    assert np.allclose(errors.errors[: _SUPPORT.size], model.bse[1:], rtol=1e-6)
    assert errors.noise**2 == pytest.approx(model.scale, rel=1e-6)


def test_several_classes_agree_with_statsmodels(rng):
    sm = pytest.importorskip("statsmodels.api")
    X = rng.standard_normal((400, _D))
    margins = X[:, [0, 2]] @ np.array([[0.8, -0.5, 0.2], [0.0, 0.6, -0.7]]) + [0.2, 0.0, -0.1]
    y = (margins + rng.gumbel(size=margins.shape)).argmax(1)
    objective = Multinomial(X, y, 3, ridge=1e-9)
    support = np.concatenate([np.arange(0, 3), np.arange(6, 9), objective.forced])
    fit = refit(objective, support)
    theta, intercepts = objective.table(fit.theta)
    model = sm.MNLogit(y, sm.add_constant(X[:, [0, 2]])).fit(disp=False, method="newton", tol=1e-14, maxiter=100)
    found = np.vstack([intercepts, theta[:, [0, 2]].T])
    assert np.allclose(found[:, 1:] - found[:, :1], model.params, rtol=1e-6, atol=1e-7)
    assert fit.value == pytest.approx(-model.llf, rel=1e-6)
    # statsmodels: differences to the first class; ours: differences to the mean over the classes.
    centring = (np.eye(3) - 1 / 3)[:, 1:]
    covariance = np.asarray(model.cov_params())
    errors = standard_errors(objective, fit, len(y), True).errors[:6]
    for feature in (0, 1):
        places = [number * 3 + 1 + feature for number in range(2)]
        expected = np.sqrt(np.diag(centring @ covariance[np.ix_(places, places)] @ centring.T))
        assert np.allclose(errors[3 * feature : 3 * feature + 3], expected, rtol=1e-6)


_OBJECTIVES = {
    **{name: lambda data, name=name: _family(name, *data) for name in _FAMILIES},
    "classes": lambda data: Multinomial(data[0], np.arange(_N) % 3, 3, ridge=0.2, sample_weight=data[3]),
    "responses": lambda data: MultiResponse(data[0], data[0][:, :2] + 1, ridge=0.2, sample_weight=data[3]),
    "torch": lambda data: _differentiated(*data),
    "cox, efron": lambda data: _times(data, "efron"),
    "cox, breslow": lambda data: _times(data, "breslow"),
}


def _family(name, X, y, offset, weights):
    kind, options = _FAMILIES[name]
    return kind(X, y, offset=offset, sample_weight=weights, ridge=0.1, intercept=True, **options)


def _differentiated(X, y, offset, weights):
    """The Poisson model as a torch function, which has the value of the family up to a constant."""
    design, target, known, mass = (torch.from_numpy(each) for each in (X, y, offset, weights))

    def function(theta):
        margin = design @ theta + known
        return (mass * (margin.exp() - target * margin)).sum() + 0.05 * (theta**2).sum()

    objective, family = from_torch(function, _D), Poisson(X, y, offset=offset, sample_weight=weights, ridge=0.1)
    theta = np.full(_D, 0.1)
    change = [each.value(theta) - each.value(0 * theta) for each in (objective, family)]
    assert change[0] == pytest.approx(change[1])
    return objective


def _times(data, ties):
    X, y, _, weights = data
    return Cox(X, np.ceil(y), np.arange(_N) % 3 > 0, ties=ties, sample_weight=weights, ridge=0.1)


@pytest.mark.parametrize("name", _OBJECTIVES)
def test_derivatives_agree_with_differences(name, rng):
    _check_derivatives(_OBJECTIVES[name](_data(name if name in _FAMILIES else "gamma", rng)), rng)


@pytest.mark.parametrize("family", _FAMILIES)
def test_minimize_finds_the_drawn_columns_with_an_offset(family, rng):
    X, y, offset, _ = _data(family, np.random.default_rng(3))
    kind, options = _FAMILIES[family]
    found = minimize(kind(X, y, intercept=True, offset=offset, **options), 2)
    assert found.support.tolist() == [0, 3]


def test_poisson_offset_is_the_log_of_the_exposure(rng):
    X, exposure = rng.standard_normal((80, 3)), rng.integers(1, 9, 80).astype(float)
    y = rng.poisson(exposure * np.exp(0.5 * X[:, 0])).astype(float)
    counts = minimize(Poisson(X, y, intercept=True, offset=np.log(exposure)), 2)
    rates = minimize(Poisson(X, y / exposure, intercept=True, sample_weight=exposure), 2)
    assert np.allclose(counts.theta, rates.theta, rtol=1e-8)
    assert counts.intercept == pytest.approx(rates.intercept, rel=1e-8)


def test_gamma_criterion_is_the_likelihood_at_the_best_shape(rng):
    from scipy.optimize import minimize_scalar
    from scipy.stats import gamma

    X, y, *_ = _data("gamma", rng)
    objective = Gamma(X, y, intercept=True)
    known = []
    for support in ([0, 3, _D], [0, _D]):
        fit = refit(objective, np.array(support))
        mean = np.exp(objective.margin(fit.theta))
        best = minimize_scalar(lambda log, mean=mean: -gamma.logpdf(y, np.exp(log), scale=mean / np.exp(log)).sum())
        known.append(2 * best.fun - information(objective, fit, "aic", _N, _D, len(support) - 1) + 2 * len(support))
    assert known[0] == pytest.approx(known[1], abs=1e-5)


def _survival(rng, n=_N, tied=True):
    X = rng.standard_normal((n, _D))
    times = rng.exponential(np.exp(-0.8 * X[:, 1] + 0.6 * X[:, 4]))
    censored = rng.exponential(2.0, n)
    events = (times <= censored).astype(float)
    times = np.minimum(times, censored)
    return X, np.ceil(8 * times) if tied else times, events


@pytest.mark.parametrize("ties", ["efron", "breslow"])
@pytest.mark.parametrize("tied", [False, True], ids=["distinct times", "tied times"])
def test_cox_agrees_with_statsmodels(ties, tied, rng):
    sm = pytest.importorskip("statsmodels.api")
    X, times, events = _survival(rng, tied=tied)
    offset = 0.2 * rng.standard_normal(_N)
    objective = Cox(X, times, events, ties=ties, offset=offset)
    support = np.array([1, 3, 4])
    fit = refit(objective, support)
    model = sm.PHReg(times, X[:, support], status=events, ties=ties, offset=offset).fit(tol=1e-14, maxiter=100)
    assert np.allclose(fit.theta[support], model.params, rtol=1e-6, atol=1e-8)
    assert fit.value == pytest.approx(-model.llf, rel=1e-6)
    assert np.allclose(standard_errors(objective, fit, _N, False).errors, model.bse, rtol=1e-6)


def test_cox_equals_its_definition_without_ties(rng):
    X, times, events = _survival(rng, 30, tied=False)
    theta = rng.standard_normal(_D)
    margin = X @ theta
    expected = sum(math.log(np.exp(margin[times >= times[i]]).sum()) - margin[i] for i in np.flatnonzero(events))
    assert Cox(X, times, events).value(theta) == pytest.approx(expected, rel=1e-12)


def test_cox_weights_by_breslow_equal_repeated_rows(rng):
    X, times, events = _survival(rng)
    weights = rng.integers(0, 4, _N)
    weighted = refit(Cox(X, times, events, ties="breslow", sample_weight=weights), _SUPPORT)
    repeated = Cox(X.repeat(weights, 0), times.repeat(weights), events.repeat(weights), ties="breslow")
    assert np.allclose(weighted.theta, refit(repeated, _SUPPORT).theta, rtol=1e-8, atol=1e-10)


def test_cox_does_not_depend_on_the_origin_of_columns_and_never_underflows_to_a_minimum(rng):
    X, times, events = _survival(rng)
    moved = minimize(Cox(X + 100.0, times, events), 2)
    assert moved.support.tolist() == [1, 4]
    assert np.allclose(moved.theta, minimize(Cox(X, times, events), 2).theta, rtol=1e-6)
    assert Cox(X, times, events).value(np.full(_D, 300.0)) > 1000
    assert np.isfinite(Cox(X, times, events).value(np.full(_D, 30.0)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda X, y: Gamma(X, y - y.min()), "positive"),
        (lambda X, y: Tweedie(X, y, power=2.0), "between 1 and 2"),
        (lambda X, y: Tweedie(X, -y), "non-negative"),
        (lambda X, y: NegativeBinomial(X, y, alpha=0.0), "alpha"),
        (lambda X, y: NegativeBinomial(X, -y), "non-negative"),
        (lambda X, y: Poisson(X, y, offset=y[:3]), "offset"),
        (lambda X, y: Cox(X, y, 2 * np.ones(len(y))), "events"),
        (lambda X, y: Cox(X, y, np.zeros(len(y))), "events"),
        (lambda X, y: Cox(X, y, np.ones(len(y)), ties="exact"), "ties"),
    ],
)
def test_families_refuse_what_they_do_not_have(make, words, rng):
    with pytest.raises(ProblemError, match=words):
        make(rng.standard_normal((10, 2)), rng.random(10) + 0.1)


def _check_derivatives(objective, rng):
    """Gradient, Hessian, its parts, and the restriction to a support, at a random point."""
    d = objective.dimension
    theta = 0.3 * rng.standard_normal(d)
    everything = np.arange(d)
    gradient = objective.value_and_gradient(theta)[1]
    hessian = objective.hessian_block(theta, everything)
    step = 1e-5
    for j in range(d):
        move = np.zeros(d)
        move[j] = step
        slope = (objective.value(theta + move) - objective.value(theta - move)) / (2 * step)
        assert slope == pytest.approx(gradient[j], rel=1e-6, abs=1e-6)
        change = objective.value_and_gradient(theta + move)[1] - objective.value_and_gradient(theta - move)[1]
        assert np.allclose(change / (2 * step), hessian[j], rtol=1e-5, atol=1e-5)
    vector = rng.standard_normal(d)
    assert np.allclose(objective.hessian_product(theta, vector), hessian @ vector)
    assert np.allclose(objective.hessian_diagonal(theta), hessian.diagonal())
    outputs = getattr(objective, "outputs", 1)
    support = np.arange(outputs, 2 * outputs) if outputs > 1 else np.array([1, 3])
    rows = np.array([0, 3, 4])
    assert np.allclose(objective.hessian_columns(theta, support), hessian[:, support])
    assert np.allclose(objective.hessian_columns(theta, support, rows), hessian[np.ix_(rows, support)])
    sparse = np.zeros(d)
    sparse[support] = theta[support]
    assert objective.restricted(support).value(theta[support]) == pytest.approx(objective.value(sparse), rel=1e-12)


@pytest.mark.parametrize("family", [*_FAMILIES, "cox", "classes"])
def test_samples_of_weight_zero_count_as_left_out_however_far_away(family, rng):
    X, y, offset, weights = _data(family if family in _FAMILIES else "gamma", rng)
    X[[7, 8]], weights[[7, 8]] = [[1e5], [-1e5]], 0.0  # exp of these margins is no number near the minimiser

    def fitted(rows):
        if family == "cox":
            objective = Cox(X[rows], y[rows], np.ones(rows.sum()), sample_weight=weights[rows], offset=offset[rows])
        elif family == "classes":
            objective = Multinomial(X[rows], np.arange(_N)[rows] % 3, 3, sample_weight=weights[rows])
        else:
            make, extra = _FAMILIES[family]
            options = {"sample_weight": weights[rows], "offset": offset[rows], "intercept": True, **extra}
            objective = make(X[rows], y[rows], **options)
        return refit(objective, np.arange(objective.dimension))

    found, left = fitted(weights >= 0), fitted(weights > 0)
    assert found.value == pytest.approx(left.value, rel=1e-9)
    np.testing.assert_allclose(found.theta, left.theta, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("family", "scale"), [(Gamma, 1e-12), (Gamma, 1e-20), (Poisson, 1e13), (Poisson, 1e20)])
def test_targets_of_any_scale_are_fitted(family, scale, rng):
    X = rng.standard_normal((60, 2))
    objective = family(X, scale * np.exp(0.5 * X[:, 0] - 0.3 * X[:, 1]), intercept=True)
    theta, constant = objective.split(refit(objective, np.arange(3)).theta)
    assert theta == pytest.approx([0.5, -0.3], rel=1e-6)
    assert constant == pytest.approx(math.log(scale), rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_counts_with_large_exposures_are_fitted_to_the_end(seed):
    rng = np.random.default_rng(seed)
    X, exposure = rng.standard_normal((150, 8)), 1e8 * np.exp(rng.standard_normal(150))
    y = rng.poisson(1e-7 * exposure * np.exp(0.8 * X[:, 1] - 0.6 * X[:, 4])).astype(float)
    objective = Poisson(X, y, intercept=True, offset=np.log(exposure))  # H is about 1e7 times as large at zero
    found = minimize(objective, 2)
    assert found.support.tolist() == [1, 4]
    assert "global" not in found.message
    assert found.theta[[1, 4]] == pytest.approx(refit(objective, np.array([1, 4, 8])).theta[[1, 4]], rel=1e-6)


@pytest.mark.parametrize("family", ["logistic", "poisson"])
def test_an_intercept_of_exactly_zero_counts_as_a_parameter(family, rng):
    X, y = rng.standard_normal((100, 3)), np.arange(100) % 2 * (1.0 if family == "logistic" else 2.0)
    objective = _FAMILIES[family][0](X, y, intercept=True)
    empty = refit(objective, objective.forced)
    assert empty.theta[-1] == 0  # equal classes, or a mean of one
    fits = [refit(objective, np.array(columns)) for columns in ([3], [0, 3])]
    scores = [information(objective, fit, "bic", 100, 3, size) for size, fit in enumerate(fits)]
    deviances = [2 * fit.value for fit in fits]
    assert np.subtract(scores, deviances) == pytest.approx([math.log(100), 2 * math.log(100)])
