"""Curvatures: the damping of each against its definition."""

from __future__ import annotations

import numpy as np
import pytest

from iobs.optimize.curvature import EmpiricalFisher, FullHessian
from iobs.optimize.objectives.linear import LeastSquares
from iobs.optimize.problem import Problem

D = 8


def _case(rng, n=40):
    """A least squares problem with columns of very different units, its Hessian, a point and the gradient there."""
    X = rng.standard_normal((n, D)) * 10.0 ** np.arange(-3, D - 3)
    objective, theta = LeastSquares(X, rng.standard_normal(n)), rng.standard_normal(D)
    return objective, X.T @ X, theta, objective.value_and_gradient(theta)[1]


@pytest.mark.parametrize(("own", "asked"), [(0.1, None), (None, 0.1), (0.1, 7.0), (0.0, 7.0)])
def test_full_hessian_damping_is_relative_to_mean_diagonal(own, asked, rng):
    objective, hessian, theta, gradient = _case(rng)
    problem = Problem(objective, 3, damping=asked)
    amount = (asked if own is None else own) * np.trace(hessian) / D
    expected = hessian + amount * np.eye(D)
    model = FullHessian(own).model(problem, theta, gradient)
    products = FullHessian(own).products(problem, theta, gradient)
    np.testing.assert_allclose(model.matrix, expected, rtol=1e-12)
    assert products.damping == pytest.approx(amount, rel=1e-12)
    for found in (model, products):
        np.testing.assert_allclose(found.value_and_gradient(theta)[1], gradient, rtol=1e-9)


def test_full_hessian_is_damped_by_default_only_if_singular(rng):
    objective, hessian, theta, gradient = _case(rng)
    np.testing.assert_allclose(FullHessian().model(Problem(objective, 3), theta, gradient).matrix, hessian, rtol=1e-12)
    objective, hessian, theta, gradient = _case(rng, n=4)
    added = FullHessian().model(Problem(objective, 3), theta, gradient).matrix - hessian
    largest = np.linalg.eigvalsh(hessian)[-1]
    np.testing.assert_allclose(added, 1e-2 * largest * np.eye(D), rtol=1e-2, atol=1e-8 * largest)


@pytest.mark.parametrize("asked", [None, 0.2])
def test_empirical_fisher_damping_is_relative_to_mean_diagonal(asked, rng):
    objective, _, theta, gradient = _case(rng)
    slopes = objective.design.matrix @ theta - objective.target
    jacobian = slopes[:, None] * objective.design.matrix
    fisher = jacobian.T @ jacobian
    expected = fisher + (1e-3 if asked is None else asked) * np.trace(fisher) / D * np.eye(D)
    np.testing.assert_allclose(
        EmpiricalFisher().model(Problem(objective, 3, damping=asked), theta, gradient).matrix, expected, rtol=1e-10
    )
