import math

import pytest
import torch

from iobs.core import linalg
from iobs.errors import NotPositiveDefiniteError


def definite(d, *, condition=100.0, dtype=torch.float64):
    basis = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64)).Q
    spectrum = torch.linspace(1, condition, d, dtype=torch.float64)
    return ((basis * spectrum) @ basis.T).to(dtype)


def random_masks(rows, d):
    mask = torch.rand(rows, d) > 0.5
    mask[0] = False
    mask[1] = True
    return mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cholesky_factors_multiply_to_the_matrix(dtype):
    matrix = definite(20, dtype=dtype)
    tolerance = 100 * 20 * torch.finfo(dtype).eps
    lower, upper = linalg.cholesky(matrix), linalg.upper_factor(matrix)
    torch.testing.assert_close(lower @ lower.T, matrix, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(upper @ upper.T, matrix, rtol=tolerance, atol=tolerance)
    assert torch.equal(upper, upper.triu())
    published = torch.linalg.cholesky(torch.linalg.inv(matrix), upper=True)
    torch.testing.assert_close(torch.linalg.inv(upper), published, rtol=100 * tolerance, atol=tolerance)
    torch.testing.assert_close(linalg.inverse(matrix) @ matrix, torch.eye(20, dtype=dtype), rtol=0, atol=tolerance)


@pytest.mark.parametrize("bad", [torch.diag(torch.tensor([1.0, 0.0])), -torch.eye(3), torch.full((2, 2), torch.nan)])
def test_factorisations_raise_if_not_positive_definite(bad):
    for function in (linalg.cholesky, linalg.upper_factor, linalg.inverse):
        with pytest.raises(NotPositiveDefiniteError, match="damping"):
            function(bad)


@pytest.mark.parametrize("share", [0.0, 0.7])
def test_inverse_is_refused_if_columns_depend_on_each_other(share):
    """Rounding makes the pivot of such a column positive about every other time."""
    for seed in range(40):
        columns = torch.randn(40, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        columns[:, 5] = (1 - share) * columns[:, 1] + share * columns[:, 3]
        with pytest.raises(NotPositiveDefiniteError, match="damping"):
            linalg.inverse(columns.T @ columns)


@pytest.mark.parametrize("rows", [2, 50])
def test_solve_on_support_equals_dense_solves(rows):
    matrix, linear, mask = definite(24), torch.randn(rows, 24, dtype=torch.float64), random_masks(rows, 24)
    solution = linalg.solve_on_support(matrix, linear, mask)
    for row in range(rows):
        index = mask[row].nonzero().flatten()
        torch.testing.assert_close(
            solution[row, index], torch.linalg.solve(matrix[index][:, index], linear[row, index])
        )
    assert (solution[~mask] == 0).all()


@pytest.mark.parametrize("condition", [1e2, 1e7])  # conjugate gradients do not converge at 1e7
def test_solve_on_support_is_accurate_if_supports_are_long(condition):
    basis = torch.linalg.qr(torch.randn(800, 800, dtype=torch.float64)).Q
    matrix = (basis * torch.logspace(0, math.log10(condition), 800, dtype=torch.float64)) @ basis.T
    linear = torch.randn(3, 800, dtype=torch.float64)
    mask = torch.rand(3, 800) > 0.01
    solution = linalg.solve_on_support(matrix, linear, mask)
    for row, kept in enumerate(mask):
        assert (solution[row, kept] @ matrix[kept][:, kept] - linear[row, kept]).norm() < 1e-6 * linear[row].norm()
        assert not solution[row, ~kept].any()


@pytest.mark.parametrize("size", [700, 800])  # 800 is solved by conjugate gradients
def test_solve_on_support_raises_only_if_zero_column_is_kept(size):
    matrix, linear = definite(size + 2), torch.randn(2, size + 2, dtype=torch.float64)
    matrix[7], matrix[:, 7] = 0, 0
    mask = torch.ones(2, size + 2, dtype=torch.bool)
    mask[:, 7] = False
    solution = linalg.solve_on_support(matrix, linear, mask)
    torch.testing.assert_close(solution @ matrix, linear * mask, rtol=0, atol=1e-7)
    mask[1, 7] = True
    with pytest.raises(NotPositiveDefiniteError):
        linalg.solve_on_support(matrix, linear, mask)


def test_conjugate_gradients_use_start_and_tolerance():
    matrix, linear, mask = definite(24), torch.randn(6, 24, dtype=torch.float64), random_masks(6, 24)
    exact = linalg.solve_on_support(matrix, linear, mask)
    solution, residual = linalg.masked_conjugate_gradients(matrix, linear, mask, iterations=200, tolerance=1e-12)
    torch.testing.assert_close(solution, exact)
    assert (residual <= 1e-12).all()
    again, residual = linalg.masked_conjugate_gradients(matrix, linear, mask, exact, iterations=0)
    assert torch.equal(again, exact)
    assert (residual <= 1e-12).all()


def test_conjugate_gradients_in_float32_keep_converged_and_empty_rows():
    matrix, linear, mask = definite(24).float(), torch.randn(40, 24), random_masks(40, 24)
    mask[0] = False
    exact = linalg.solve_on_support(matrix, linear, mask).float()
    for start in (None, torch.randn(40, 24) * mask, exact):
        weight, _ = linalg.masked_conjugate_gradients(matrix, linear, mask, start, iterations=60)
        torch.testing.assert_close(weight, exact, rtol=1e-3, atol=1e-3)
        assert not weight[~mask].any()


def test_solve_on_support_raises_if_support_is_singular():
    matrix = torch.ones(4, 4, dtype=torch.float64)
    with pytest.raises(NotPositiveDefiniteError):
        linalg.solve_on_support(matrix, torch.ones(1, 4), torch.ones(1, 4, dtype=torch.bool))


@pytest.mark.parametrize("d", [5, 384, 385, 900])
def test_shifted_inverse_equals_a_dense_inverse(d):
    samples = torch.randn(2 * d, d)
    hessian = samples.T @ samples / d
    expected = torch.linalg.inv(hessian.double() + 0.2 * torch.eye(d, dtype=torch.float64))
    torch.testing.assert_close(linalg.shifted_inverse(hessian, 0.2).double(), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(NotPositiveDefiniteError):
        linalg.shifted_inverse(hessian - 10 * torch.eye(d), 0.2)
