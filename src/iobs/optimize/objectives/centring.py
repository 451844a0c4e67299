"""Weighted and centred design matrices: sample weights, column means, intercepts, variances of columns."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

from iobs.core.late import is_tensor, torch
from iobs.core.slices import slices
from iobs.errors import NonFiniteError
from iobs.optimize.objectives.design import (
    BLOCK_ELEMENTS,
    Array,
    CentredDesign,
    DenseDesign,
    Design,
    Floats,
    MatrixLike,
    SparseDesign,
    TorchDesign,
    as_design,
    double,
)


def scale_rows(design: Design, factors: Array) -> Design:
    """diag(factors) X, as a new matrix; X itself if all factors are 1."""
    if (factors == 1).all():
        return design
    if isinstance(design, DenseDesign):
        return DenseDesign(design.matrix * factors.astype(design.matrix.dtype)[:, None])
    if isinstance(design, SparseDesign):
        return SparseDesign(sp.diags_array(factors) @ design.matrix)
    assert isinstance(design, TorchDesign)
    there = torch.from_numpy(factors).to(design.matrix.device, design.matrix.dtype)
    return TorchDesign(design.matrix * there[:, None])


def centre(design: Design, level: Array, mean: Array) -> Design:
    """X - u m^T: a new array for a dense NumPy X, implicit otherwise."""
    if isinstance(design, DenseDesign):
        dtype = design.matrix.dtype
        shift = mean.astype(dtype) if (level == 1).all() else np.outer(level, mean).astype(dtype)
        centred = design.matrix - shift
        # A constant column must become exactly zero, not rounding noise that later scaling would amplify.
        rounding = 64 * float(np.finfo(dtype).eps)
        squares = np.einsum("ij,ij->j", centred, centred, dtype=np.float64)
        if _may_be_constant(squares, level, mean, rounding):
            constant = _largest(centred) <= rounding * _largest(design.matrix)
            centred[:, constant], squares[constant] = 0, 0
        return DenseDesign(centred, squares)
    assert isinstance(design, (SparseDesign, TorchDesign))
    return CentredDesign(design, level, mean)


def _may_be_constant(squares: Array, level: Array, mean: Array, rounding: float) -> bool:
    """Bound by sums of squares (d,): False if no centred column can be as small as rounding of the original one."""
    original = 2 * (squares + mean**2 * float(level @ level))  # at least the squares before centring
    return not bool((squares > level.size * rounding**2 * original).all())


def _largest(matrix: Floats) -> Floats:
    """The largest absolute value of every column (d,)."""
    return np.asarray(np.maximum(matrix.max(axis=0), -matrix.min(axis=0)))


def column_means(design: Design, weights: Array, total: float) -> Array:
    """sum_i w_i X_ij / total of every column j, (d,).

    Raises:
        NonFiniteError: X holds NaN or infinity.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        mean = double(_column_sums(design, weights) / total)
    require_finite_columns(mean)
    return mean


def _is_double(design: DenseDesign | TorchDesign) -> bool:
    return design.matrix.dtype == (torch.float64 if isinstance(design, TorchDesign) else np.float64)


def _column_sums(design: Design, weights: Array) -> Array:
    """X^T w in float64: with many rows, a float32 sum loses the mean of a column far from zero."""
    if not isinstance(design, (DenseDesign, TorchDesign)) or _is_double(design):
        return design.rmatvec(weights)
    total = np.zeros(design.shape[1])
    for part in slices(design.shape, BLOCK_ELEMENTS):
        block = design.matrix[part]
        wide = TorchDesign(block.double()) if is_tensor(block) else DenseDesign(double(block))
        total += wide.rmatvec(weights[part])
    return total


def with_intercept(design: Design, weights: Array) -> tuple[Design, Array]:
    """([X - 1 m^T, 1], m): the columns about their weighted means m (d,), and the intercept as last column.

    Raises:
        NonFiniteError: X holds NaN or infinity.
    """
    mean = column_means(design, weights, weights.sum())
    return centre(append_ones(design), np.ones(design.shape[0]), np.append(mean, 0.0)), mean


def variances(matrix: MatrixLike | Design, weights: Array, centred: bool) -> Array:
    """Weighted mean squares of the columns (d,), about their means if `centred`, about zero otherwise.

    Raises:
        NonFiniteError: the matrix holds NaN or infinity.
    """
    design = as_design(matrix)
    if not centred:
        return double(design.squares(weights) / weights.sum())
    mean = column_means(design, weights, weights.sum())
    return double(centre(design, np.ones(design.shape[0]), mean).squares(weights) / weights.sum())


def require_finite_columns(values: Array) -> None:
    """Require finite sums over the columns of a design.

    Raises:
        NonFiniteError: with the first column whose sum is not finite.
    """
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise NonFiniteError(f"Column {bad[0]} of the design matrix holds NaN or infinity; remove or impute it first.")


def append_ones(design: Design) -> Design:
    """[X, 1]: the intercept as a last column."""
    if isinstance(design, DenseDesign):
        return DenseDesign(np.column_stack([design.matrix, np.ones(design.shape[0], design.matrix.dtype)]))
    if isinstance(design, SparseDesign):
        return SparseDesign(sp.hstack([design.matrix, sp.csc_array(np.ones((design.shape[0], 1)))], format="csc"))
    assert isinstance(design, TorchDesign)
    return TorchDesign(torch.cat([design.matrix, torch.ones_like(design.matrix[:, :1])], dim=1))
