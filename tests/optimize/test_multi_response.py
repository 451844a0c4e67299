"""Several responses on one support: against enumeration, single responses and statsmodels."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.sparse as sp

import iobs
from iobs import SparseMultiTaskRegressor, SparseRegressor
from iobs.errors import NonFiniteError, ProblemError
from iobs.optimize.objectives import LeastSquares, MultiResponse
from iobs.optimize.objectives.tabled import Multinomial


def _data(rng, n=80, d=7, outputs=3):
    X = rng.standard_normal((n, d))
    table = np.zeros((d, outputs))
    table[[1, 4]] = rng.standard_normal((2, outputs)) + 1
    return X, X @ table + 2.0 + 0.5 * rng.standard_normal((n, outputs))


def test_value_gradient_and_hessian_are_sums_over_the_responses(rng):
    X, Y = _data(rng)
    weights = rng.random(80) + 0.5
    together = MultiResponse(X, Y, ridge=0.3, intercept=True, sample_weight=weights)
    theta = rng.standard_normal((7, 3))
    parts = [LeastSquares(X, y, ridge=0.3, intercept=True, sample_weight=weights) for y in Y.T]
    value, gradient = together.value_and_gradient(theta.reshape(-1))
    assert value == pytest.approx(sum(part.value(column) for part, column in zip(parts, theta.T, strict=True)))
    for j, part in enumerate(parts):
        assert np.allclose(gradient.reshape(7, 3)[:, j], part.value_and_gradient(theta[:, j])[1])
    everything = np.arange(21)
    hessian = together.hessian_block(theta.reshape(-1), everything)
    assert np.allclose(hessian, np.kron(parts[0].hessian_block(theta[:, 0], np.arange(7)), np.eye(3)))
    vector = rng.standard_normal(21)
    assert np.allclose(together.hessian_product(vector, vector), hessian @ vector)
    assert np.allclose(together.hessian_diagonal(vector), hessian.diagonal())


@pytest.mark.parametrize("make", [MultiResponse, lambda X, Y: Multinomial(X, Y.argmax(axis=1), 3)])
def test_restriction_to_some_features_has_their_diagonal(make, rng):
    X, Y = _data(rng)
    X[:, 4] = 0
    whole = make(X, Y)
    support = np.concatenate([whole.groups[1], whole.groups[4], whole.forced])
    part = whole.restricted(support)
    theta = rng.standard_normal(support.size)
    np.testing.assert_allclose(
        part.hessian_diagonal(theta), part.hessian_block(theta, np.arange(theta.size)).diagonal()
    )
    assert part.constant_coordinates().tolist() == [3, 4, 5]
    assert part.forced.tolist() == [6, 7, 8][: whole.forced.size]


@pytest.mark.parametrize("convert", [np.asarray, sp.csr_array])
def test_fit_is_the_best_of_all_supports(convert, rng):
    for _ in range(5):
        X, Y = _data(rng)
        model = SparseMultiTaskRegressor(2).fit(convert(X), Y)

        def loss(support, X=X, Y=Y):
            design = np.column_stack([X[:, support], np.ones(len(Y))])
            return ((Y - design @ np.linalg.lstsq(design, Y, rcond=None)[0]) ** 2).sum()

        best = min(itertools.combinations(range(7), 2), key=loss)
        assert tuple(model.support_) == best
        design = np.column_stack([X[:, best], np.ones(len(Y))])
        theta = np.linalg.lstsq(design, Y, rcond=None)[0]
        assert np.allclose(model.coef_[:, model.support_], theta[:-1].T)
        assert np.allclose(model.intercept_, theta[-1])
        assert np.allclose(model.predict(convert(X)), design @ theta)


@pytest.mark.parametrize("k", ["cv", "cv-1se", "bic", "ebic"])
def test_choice_of_k_finds_the_shared_features(k, rng):
    X, Y = _data(rng, n=150)
    model = SparseMultiTaskRegressor(k).fit(X, Y)
    assert {1, 4} <= set(model.support_.tolist())
    assert model.support_.size <= 4
    assert model.noise_ == pytest.approx(0.5, rel=0.15)
    assert "x1" in str(model.summary())
    assert model.summary().cells()[0][0] == "response"


def test_one_response_equals_the_regressor(rng):
    X, Y = _data(rng, outputs=1)
    many, single = SparseMultiTaskRegressor(3).fit(X, Y), SparseRegressor(3).fit(X, Y[:, 0])
    assert np.allclose(many.coef_[0], single.coef_)
    assert np.allclose(many.standard_errors_[0], single.standard_errors_, equal_nan=True)
    assert many.noise_ == pytest.approx(single.noise_)


def test_multi_response_refuses_what_it_cannot_fit(rng):
    X, Y = _data(rng)
    with pytest.raises(ProblemError, match="k must"):
        SparseMultiTaskRegressor(9).fit(X, Y)
    with pytest.raises(ProblemError, match="responses"):
        MultiResponse(X, Y[:, 0])
    with pytest.raises(NonFiniteError, match="responses"):
        MultiResponse(X, np.where(Y > 0, Y, np.nan))


@pytest.mark.parametrize("method", ["auto", "iht"])
def test_minimize_refers_to_the_estimators_that_count_features(method, rng):
    X, Y = _data(rng)
    with pytest.raises(ProblemError, match="SparseMultiTaskRegressor"):
        iobs.minimize(MultiResponse(X, Y), 3, method=method)
