"""Every objective against automatic differentiation of its formula, in every kind of storage."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from iobs.errors import NonFiniteError, ProblemError
from iobs.optimize import objectives
from iobs.optimize.objectives.autodiff import from_torch
from iobs.optimize.objectives.design import SparseDesign
from iobs.optimize.objectives.families import Logistic, Poisson
from iobs.optimize.objectives.linear import LeastSquares

N, D = 17, 6


def _data(seed=0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((N, D)) * (rng.random((N, D)) < 0.7)
    return X, rng.random(N), rng.random(N) + 0.5, rng.standard_normal(D)


def _formula(kind, X, y, weights, ridge, intercept):
    X, y, weights = (torch.from_numpy(np.asarray(a, dtype=np.float64)) for a in (X, y, weights))

    def function(theta):
        margin = X @ theta[:D] + (theta[D] if intercept else 0.0)
        if kind is Logistic:
            losses = torch.nn.functional.softplus(margin) - y * margin
        elif kind is Poisson:
            losses = margin.exp() - y * margin
        else:
            losses = 0.5 * (y - margin) ** 2
        return (weights * losses).sum() + 0.5 * ridge * (theta[:D] ** 2).sum()

    return from_torch(function, D + intercept)


STORAGE = {
    "numpy": lambda X: X,
    "fortran": np.asfortranarray,
    "float32": lambda X: X.astype(np.float32),
    "csr": sp.csr_array,
    "csc_matrix": sp.csc_matrix,
    "torch": torch.from_numpy,
}


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("kind", [Logistic, Poisson])
def test_linear_models_equal_their_formula(kind, intercept, storage):
    X, y, weights, theta = _data()
    theta = np.append(theta, 0.3) if intercept else theta
    model = kind(STORAGE[storage](X), y, ridge=0.4, intercept=intercept, sample_weight=weights)
    centred = X - weights @ X / weights.sum() if intercept else X
    reference = _formula(kind, centred, y, weights, 0.4, intercept)
    _check_equal(model, reference, theta, 1e-3 if storage == "float32" else 1e-11)
    if intercept:
        coefficients, constant = model.split(theta)
        np.testing.assert_allclose(X @ coefficients + constant, model.margin(theta), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("weighted", [False, True])
def test_least_squares_equals_its_formula(storage, weighted):
    X, y, weights, theta = _data()
    weights = weights if weighted else np.ones(N)
    model = LeastSquares(STORAGE[storage](X), y, ridge=0.4, sample_weight=weights if weighted else None)
    _check_equal(
        model, _formula(LeastSquares, X, y, weights, 0.4, False), theta, 1e-3 if storage == "float32" else 1e-11
    )


@pytest.mark.parametrize("storage", STORAGE)
def test_least_squares_intercept_is_optimal(storage):
    X, y, weights, theta = _data()
    model = LeastSquares(STORAGE[storage](X), y, intercept=True, sample_weight=weights)
    best = float(weights @ (y - X @ theta) / weights.sum())
    reference = _formula(LeastSquares, X, y, weights, 0.0, True)
    tolerance = 1e-3 if storage == "float32" else 1e-11
    assert model.split(theta)[1] == pytest.approx(best, rel=tolerance)
    value, gradient = model.value_and_gradient(theta)
    expected, expected_gradient = reference.value_and_gradient(np.append(theta, best))
    assert value == pytest.approx(expected, rel=tolerance)
    np.testing.assert_allclose(gradient, expected_gradient[:D], atol=10 * tolerance)


def _check_equal(model, reference, theta, tolerance):
    offset = model.value(theta) - reference.value(theta)  # losses are shifted by a constant of the data
    moved = theta * 0.5
    assert model.value(moved) - reference.value(moved) == pytest.approx(offset, abs=10 * tolerance)
    value, gradient = model.value_and_gradient(theta)
    assert value == model.value(theta)
    np.testing.assert_allclose(gradient, reference.value_and_gradient(theta)[1], atol=10 * tolerance)
    everything = np.arange(len(theta))
    hessian = reference.hessian_block(theta, everything)
    support = np.array([4, 1, 5])
    close = {"rtol": tolerance, "atol": 100 * tolerance}
    np.testing.assert_allclose(model.hessian_block(theta, support), hessian[np.ix_(support, support)], **close)
    np.testing.assert_allclose(model.hessian_columns(theta, support), hessian[:, support], **close)
    rows = np.array([0, 1])
    np.testing.assert_allclose(model.hessian_columns(theta, support, rows), hessian[np.ix_(rows, support)], **close)
    np.testing.assert_allclose(model.hessian_diagonal(theta), hessian.diagonal(), **close)
    np.testing.assert_allclose(reference.hessian_diagonal(theta), hessian.diagonal(), rtol=1e-10)
    np.testing.assert_allclose(reference.hessian_columns(theta, support), hessian[:, support], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(model.hessian_product(theta, moved), hessian @ moved, **close)
    part = model.restricted(support)
    embedded = np.zeros(len(theta))
    embedded[support] = theta[support]
    assert part.value(theta[support]) == pytest.approx(model.value(embedded), rel=10 * tolerance)
    np.testing.assert_allclose(
        part.value_and_gradient(theta[support])[1], model.value_and_gradient(embedded)[1][support], **close
    )


@pytest.mark.parametrize("intercept", [False, True])
def test_rows_of_the_hessian_of_a_sparse_design_leave_its_columns_sparse(intercept, monkeypatch):
    X, y, _, theta = _data()
    model = LeastSquares(sp.csc_array(X), y, intercept=intercept)
    expected = LeastSquares(X, y, intercept=intercept).hessian_columns(theta, np.array([1, 4]), np.array([0, 2, 5]))
    read = []
    columns = SparseDesign.columns
    monkeypatch.setattr(SparseDesign, "columns", lambda self, which: read.extend(which) or columns(self, which))
    found = model.hessian_columns(theta, np.array([1, 4]), np.array([0, 2, 5]))
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert read == [1, 4]


@pytest.mark.parametrize("storage", [np.asarray, np.asfortranarray, sp.csr_array, torch.from_numpy])
def test_column_means_are_exact_for_many_float32_rows(storage):
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.integers(1990, 2021, 200_000), rng.standard_normal(200_000)]).astype(np.float32)
    exact = X.mean(axis=0, dtype=np.float64)
    for weights in (None, np.ones(len(X))):
        model = LeastSquares(storage(X), X[:, 1], intercept=True, sample_weight=weights)
        np.testing.assert_allclose(model.mean, exact, rtol=1e-9)
    logistic = Logistic(storage(X), X[:, 1] > 0, intercept=True)
    np.testing.assert_allclose(logistic.mean, exact, rtol=1e-9)


def test_torch_objective_restricts_with_its_derivatives():
    function = from_torch(lambda t: (t**4).sum() + t[0] * t[1], 4)
    part = function.restricted(np.array([1, 2]))
    assert part.value(np.array([1.0, 2.0])) == 17
    np.testing.assert_allclose(part.hessian_block(np.array([1.0, 2.0]), np.arange(2)), np.diag([12.0, 48.0]))


def test_torch_objective_of_a_linear_function_has_no_curvature():
    linear = from_torch(lambda t: 3 * t.sum(), 3)
    assert not linear.hessian_product(np.ones(3), np.ones(3)).any()
    constant = from_torch(lambda t: torch.tensor(2.0), 3)
    assert constant.value_and_gradient(np.ones(3))[0] == 2


def test_logistic_loss_reaches_zero_without_overflow():
    X = np.eye(3) * 2000.0
    model = Logistic(X, np.array([0.0, 0.5, 1.0]))
    assert model.value(np.array([-1.0, 0.0, 1.0])) == 0.0
    assert np.isfinite(model.value(np.ones(3)))
    assert Poisson(X, np.ones(3)).value(np.ones(3)) == np.inf


@pytest.mark.parametrize("storage", ["numpy", "csr", "torch"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kind", [LeastSquares, Logistic, Poisson])
def test_objectives_raise_with_the_column_of_bad_entries(kind, bad, storage):
    X, y, *_ = _data()
    X[3, 2] = bad
    for intercept in (False, True):
        with pytest.raises(NonFiniteError, match="Column 2"):
            kind(STORAGE[storage](X), y, intercept=intercept)
    X[3, 2] = 0
    y[1] = bad
    with pytest.raises(NonFiniteError, match="target"):
        kind(STORAGE[storage](X), y)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda X, y: LeastSquares(X[:, 0], y), "two-dimensional"),
        (lambda X, y: LeastSquares(torch.ones(3), y), "two-dimensional"),
        (lambda X, y: LeastSquares(X, y[:-1]), "length 17"),
        (lambda X, y: LeastSquares(X[:0], y[:0]), "empty"),
        (lambda X, y: LeastSquares(X.astype(str) + "a", y), "not a number"),
        (lambda X, y: LeastSquares(X, y, ridge=-1.0), "ridge"),
        (lambda X, y: LeastSquares(X, y, sample_weight=-np.ones(N)), "negative"),
        (lambda X, y: Logistic(X, 2 * y + 3), "labels"),
        (lambda X, y: Poisson(X, -y), "non-negative"),
        (lambda X, y: from_torch(lambda t: t, 3).value(np.ones(3)), "one number"),
        (lambda X, y: from_torch(lambda t: t.sum(), 0), "at least one"),
    ],
)
def test_objectives_raise_if_arguments_are_invalid(make, message):
    X, y, *_ = _data()
    with pytest.raises(ProblemError, match=message):
        make(X, y)


def test_objectives_take_signs_and_find_constant_columns():
    X, y, *_ = _data()
    signs = np.where(y > 0.5, 1.0, -1.0)
    assert Logistic(X, signs).value(np.ones(D)) == Logistic(X, signs > 0).value(np.ones(D))
    X[:, 2], X[:, 4] = 0.0, 0.1
    for storage in STORAGE:
        np.testing.assert_array_equal(LeastSquares(STORAGE[storage](X), y).constant_coordinates(), [2])
        np.testing.assert_array_equal(
            LeastSquares(STORAGE[storage](X), y, intercept=True).constant_coordinates(), [2, 4]
        )
    assert isinstance(objectives.LeastSquares(X, y).restricted(np.array([1])), LeastSquares)
