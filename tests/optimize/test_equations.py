"""Sparse equations against enumeration, with constraints, and in pysindy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import iobs
from iobs.errors import ProblemError


def _system(rng, n=60):
    """Terms (n, 5) and two noisy left-hand sides with two terms each."""
    X = rng.standard_normal((n, 5)) + 0.5 * rng.standard_normal((n, 1))
    truth = np.array([[1.0, 0, -2.0, 0, 0], [0, 2.0, 0, 0, 0.5]])
    return X, X @ truth.T + 0.3 * rng.standard_normal((n, 2))


def _best(X, Y, total, left, right):
    """The least loss of all supports of `total` coefficients with C w = d, by the equations of Lagrange."""
    d = X.shape[1] * Y.shape[1]
    hessian, linear, best = np.kron(np.eye(Y.shape[1]), X.T @ X), (X.T @ Y).T.ravel(), np.inf
    for chosen in itertools.combinations(range(d), total):
        chosen = list(chosen)
        part = left[:, chosen]
        system = np.block([[hessian[np.ix_(chosen, chosen)], part.T], [part, np.zeros((len(right),) * 2)]])
        theta = np.linalg.lstsq(system, np.concatenate([linear[chosen], right]), rcond=None)[0][:total]
        if np.abs(part @ theta - right).max(initial=0.0) < 1e-8:
            whole = np.zeros(d)
            whole[chosen] = theta
            best = min(best, 0.5 * ((Y - X @ whole.reshape(Y.shape[1], -1).T) ** 2).sum())
    return best


def _loss(found, X, Y):
    return 0.5 * ((Y - found.predict(X)) ** 2).sum()


def test_each_equation_has_its_best_terms(rng):
    X, Y = _system(rng)
    found = iobs.SparseEquations([2, 1]).fit(X, Y)
    none = np.zeros((0, 5)), np.zeros(0)
    assert _loss(found, X, Y) == pytest.approx(sum(_best(X, Y[:, [i]], 2 - i, *none) for i in range(2)))
    assert found.support_.sum(axis=1).tolist() == [2, 1]
    assert found.complexity == 3
    assert found.gap_ <= 1e-6


@pytest.mark.parametrize("seed", range(4))
def test_equations_with_constraints_equal_enumeration(seed):
    rng = np.random.default_rng(seed)
    X, Y = _system(rng)
    left = rng.choice([-1.0, 0.0, 1.0], (2, 10)) if seed else np.zeros((0, 10))
    right = np.array([0.0, 0.5]) if seed else np.zeros(0)
    settings = {"constraint_lhs": left, "constraint_rhs": right} if seed else {}
    found = iobs.SparseEquations(total=4, **settings).fit(X, Y)
    assert _loss(found, X, Y) == pytest.approx(_best(X, Y, 4, left, right), rel=1e-6)
    assert found.complexity <= 4
    assert found.gap_ <= 1e-3
    np.testing.assert_allclose(left @ found.coef_.ravel(), right, atol=1e-7)


def test_rows_with_nan_are_left_out(rng):
    X, Y = _system(rng)
    Y[3, 1] = np.nan
    kept = np.arange(60) != 3
    np.testing.assert_array_equal(
        iobs.SparseEquations(2).fit(X, Y).coef_, iobs.SparseEquations(2).fit(X[kept], Y[kept]).coef_
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "either k"),
        ({"k": 1, "total": 2}, "either k"),
        ({"k": 1, "constraint_lhs": np.ones((1, 10)), "constraint_rhs": [1.0]}, "give total"),
        ({"total": 2, "constraint_lhs": np.ones((1, 9)), "constraint_rhs": [1.0]}, "must have the shape"),
        ({"total": 2, "constraint_lhs": np.ones((1, 10))}, "both sides"),
        ({"k": [1, 1, 1]}, "3 numbers for 2"),
        ({"k": 1, "ridge": -1.0}, "ridge must"),
        ({"total": 1, "constraint_lhs": np.eye(10)[:2], "constraint_rhs": [1.0, 1.0]}, "raise total"),
    ],
)
def test_invalid_settings_are_refused(settings, message, rng):
    with pytest.raises(ProblemError, match=message):
        iobs.SparseEquations(**settings).fit(*_system(rng))


def test_pysindy_finds_the_lorenz_system():
    pysindy = pytest.importorskip("pysindy", reason="pysindy is not installed")
    times = np.linspace(0, 4, 2001)
    states = np.empty((times.size, 3))
    states[0] = -8, 7, 27
    for i in range(1, times.size):  # explicit midpoint rule

        def slope(s):
            return np.array([10 * (s[1] - s[0]), s[0] * (28 - s[2]) - s[1], s[0] * s[1] - 8 / 3 * s[2]])

        step = times[i] - times[i - 1]
        states[i] = states[i - 1] + step * slope(states[i - 1] + 0.5 * step * slope(states[i - 1]))
    model = pysindy.SINDy(
        optimizer=iobs.SparseEquations([2, 3, 2]), feature_library=pysindy.PolynomialLibrary(degree=2)
    )
    model.fit(states, t=times)
    coefficients = model.coefficients()
    assert model.complexity == 7
    expected = [[-10, 10], [28, -1, -1], [-8 / 3, 1]]
    for row, values in zip(coefficients, expected, strict=True):
        np.testing.assert_allclose(row[row != 0], values, rtol=0.02)
