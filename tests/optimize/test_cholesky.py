"""Compiled Cholesky factors against LAPACK."""

from __future__ import annotations

import numpy as np
import pytest

from iobs.optimize.refit import kernels


@pytest.mark.parametrize("k", [1, 2, 7, 20])
def test_factor_solution_and_inverse_equal_lapack(k, rng):
    half = rng.standard_normal((2 * k, k))
    matrix, right = half.T @ half, rng.standard_normal(k)
    factor, solution = matrix.copy(), right.copy()
    assert kernels.factorise(factor)
    kernels.solve(factor, solution)
    np.testing.assert_allclose(np.tril(factor), np.linalg.cholesky(matrix), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(solution, np.linalg.solve(matrix, right), rtol=1e-8)
    np.testing.assert_allclose(kernels.inverse(factor), np.linalg.inv(matrix), rtol=1e-8, atol=1e-12)
    # The same functions without compilation.
    plain = matrix.copy()
    assert kernels.factorise.py_func(plain)
    np.testing.assert_allclose(plain, factor, rtol=1e-12)
    np.testing.assert_allclose(kernels.inverse.py_func(factor), kernels.inverse(factor), rtol=1e-9, atol=1e-15)


def test_factor_refuses_a_matrix_that_is_singular_up_to_rounding(rng):
    column = rng.standard_normal((9, 1))
    design = np.hstack([column, column + 1e-9 * rng.standard_normal((9, 1))])
    assert not kernels.factorise(design.T @ design)
    assert not kernels.factorise(-np.eye(2))
    assert not kernels.factorise(np.full((2, 2), np.nan))
