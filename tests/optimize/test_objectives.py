"""Every objective against automatic differentiation of its formula, in every kind of storage."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from iobs.errors import NonFiniteError, ProblemError
from iobs.optimize import objectives
from iobs.optimize.objectives.autodiff import from_torch
from iobs.optimize.objectives.families import Logistic, Poisson
from iobs.optimize.objectives.linear import LeastSquares

N, D = 17, 6


def _data(seed=0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((N, D)) * (rng.random((N, D)) < 0.7)
    return X, rng.random(N), rng.random(N) + 0.5, rng.standard_normal(D)


STORAGE = {
    "numpy": lambda X: X,
    "fortran": np.asfortranarray,
    "float32": lambda X: X.astype(np.float32),
    "csr": sp.csr_array,
    "csc_matrix": sp.csc_matrix,
    "torch": torch.from_numpy,
}


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("options", [{}, {"ridge": 0.4}, {"intercept": True}], ids=str)
@pytest.mark.parametrize("kind", [LeastSquares, Logistic, Poisson])
def test_objectives_do_not_depend_on_the_storage(kind, options, storage):
    """`test_glm_families` checks the derivatives of the plain form; here all forms of storage agree with it."""
    X, y, weights, theta = _data()
    plain, stored = (kind(form, y, sample_weight=weights, **options) for form in (X, STORAGE[storage](X)))
    theta = np.append(theta, 0.3)[: plain.dimension]
    tolerance = 1e-3 if storage == "float32" else 1e-11
    close = {"rtol": tolerance, "atol": 10 * tolerance}
    support, rows = np.array([4, 1, 5]), np.array([0, 1])
    inside = np.zeros_like(theta)
    inside[support] = theta[support]
    for values in (
        lambda model: model.value(theta),
        lambda model: model.value_and_gradient(theta)[1],
        lambda model: model.hessian_block(theta, support),
        lambda model: model.hessian_columns(theta, support),
        lambda model: model.hessian_columns(theta, support, rows),
        lambda model: model.hessian_diagonal(theta),
        lambda model: model.hessian_product(theta, 0.5 * theta),
        lambda model: model.split(theta)[1],
    ):
        np.testing.assert_allclose(values(stored), values(plain), **close)
    part = stored.restricted(support)
    assert part.value(theta[support]) == pytest.approx(plain.value(inside), rel=10 * tolerance)
    slopes = plain.value_and_gradient(inside)[1][support]
    np.testing.assert_allclose(part.value_and_gradient(theta[support])[1], slopes, **close)


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
        (lambda X, y: LeastSquares(X + 1j, y), "design matrix holds complex"),
        (lambda X, y: LeastSquares(torch.tensor(X + 1j), y), "design matrix holds complex"),
        (lambda X, y: LeastSquares(X, y + 1j), "target y holds complex"),
        (lambda X, y: LeastSquares(X, y, ridge=-1.0), "ridge"),
        (lambda X, y: LeastSquares(X, y, sample_weight=-np.ones(N)), "negative"),
        (lambda X, y: Logistic(X, 2 * y + 3), "labels"),
        (lambda X, y: Poisson(X, -y), "non-negative"),
        (lambda X, y: from_torch(lambda t: t, 3).value(np.ones(3)), "one number"),
        (lambda X, y: from_torch(lambda t: t.sum(), 0), "at least one"),
        (lambda X, y: from_torch(lambda t: t.sum(), 2.5), "at least one"),
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
