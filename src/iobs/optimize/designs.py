"""Design matrices: the few products of X that sparse optimisation needs, whatever X is stored as.

Dense NumPy, scipy.sparse and torch (any device) matrices all become a `Design`, whose vectors are float64 NumPy arrays.
The heavy products run in the matrix's own dtype, library and device; only vectors and a few columns cross over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
import torch

from iobs.errors import NonFiniteError, ProblemError

Array: TypeAlias = npt.NDArray[np.float64]
Indices: TypeAlias = npt.NDArray[np.int64]
Booleans: TypeAlias = npt.NDArray[np.bool_]

_BLOCK_ELEMENTS = 1 << 22  # entries of a temporary block


class Design(Protocol):
    """An (n, d) matrix X that is multiplied with, and whose columns are read a few at a time."""

    @property
    def shape(self) -> tuple[int, int]:
        """(n, d)."""
        ...

    def matvec(self, vector: Array) -> Array:
        """X v, (n,)."""
        ...

    def rmatvec(self, vector: Array) -> Array:
        """X^T r, (d,)."""
        ...

    def rmatmat(self, matrix: Array) -> Array:
        """X^T A for A of shape (n, m): (d, m)."""
        ...

    def columns(self, support: Indices) -> Array:
        """Some columns, dense (n, k) in float64."""
        ...

    def squares(self, weights: Array) -> Array:
        """sum_i w_i X_ij^2 of every column j, (d,)."""
        ...


@dataclass(frozen=True)
class DenseDesign:
    """A NumPy array, float32 or float64, in any memory order; never copied."""

    matrix: npt.NDArray[Any]

    @property
    def shape(self) -> tuple[int, int]:
        """(n, d)."""
        return self.matrix.shape[0], self.matrix.shape[1]

    def matvec(self, vector: Array) -> Array:
        """X v; a sparse v reads only the columns that it needs."""
        support = np.flatnonzero(vector)
        if support.size * 4 < vector.size:
            return np.asarray(self.columns(support) @ vector[support])
        return _double(self.matrix @ vector.astype(self.matrix.dtype, copy=False))

    def rmatvec(self, vector: Array) -> Array:
        """X^T r."""
        return _double(self.matrix.T @ vector.astype(self.matrix.dtype, copy=False))

    def rmatmat(self, matrix: Array) -> Array:
        """X^T A."""
        return _double(self.matrix.T @ matrix.astype(self.matrix.dtype, copy=False))

    def columns(self, support: Indices) -> Array:
        """Some columns; the matrix itself, not a copy, where all are asked for in order."""
        if support.size == self.shape[1] and support[0] == 0 and (np.diff(support) == 1).all():
            return _double(self.matrix)
        return _double(self.matrix[:, support])

    def squares(self, weights: Array) -> Array:
        """Weighted sums of squares of the columns."""
        total = np.zeros(self.shape[1])
        rows = max(1, _BLOCK_ELEMENTS // max(1, self.shape[1]))
        for start in range(0, self.shape[0], rows):
            block = self.matrix[start : start + rows]
            total += np.einsum("i,ij,ij->j", weights[start : start + rows], block, block, dtype=np.float64)
        return total


class SparseDesign:
    """A scipy.sparse matrix, kept by columns."""

    def __init__(self, matrix: Any) -> None:
        self.matrix = sp.csc_array(matrix)
        if not self.matrix.has_canonical_format:  # an entry in two pieces has no square of its own
            self.matrix = self.matrix.copy()
            self.matrix.sum_duplicates()
        self._rows = self.matrix.T  # a view by rows of X^T: products with it walk the columns of X

    @property
    def shape(self) -> tuple[int, int]:
        """(n, d)."""
        return self.matrix.shape[0], self.matrix.shape[1]

    def matvec(self, vector: Array) -> Array:
        """X v; a sparse v reads only the columns that it needs."""
        support = np.flatnonzero(vector)
        if support.size * 4 < vector.size:
            return _double(self.matrix[:, support] @ vector[support])
        return _double(self.matrix @ vector)

    def rmatvec(self, vector: Array) -> Array:
        """X^T r."""
        return _double(self._rows @ vector)

    def rmatmat(self, matrix: Array) -> Array:
        """X^T A."""
        return _double(self._rows @ matrix)

    def columns(self, support: Indices) -> Array:
        """Some columns, dense."""
        return _double(self.matrix[:, support].toarray())

    def squares(self, weights: Array) -> Array:
        """Weighted sums of squares of the columns."""
        values = self.matrix.data.astype(np.float64) ** 2
        return self._column_sums(values * weights[self.matrix.indices])

    def moments(self, weights: Array, level: Array, mean: Array) -> tuple[Array, Array]:
        """sum_i w_i u_i (X_ij - u_i m_j) and sum_i w_i (X_ij - u_i m_j)^2 of every column j, both (d,)."""
        rows, there = self.matrix.indices, np.repeat(mean, np.diff(self.matrix.indptr))
        centred = self.matrix.data.astype(np.float64) - level[rows] * there
        mass = (weights * level**2).sum() - self._column_sums((weights * level**2)[rows])  # of the zeros
        first = self._column_sums((weights * level)[rows] * centred) - mean * mass
        return first, self._column_sums(weights[rows] * centred**2) + mean**2 * mass

    def _column_sums(self, values: Array) -> Array:
        columns = np.repeat(np.arange(self.shape[1]), np.diff(self.matrix.indptr))
        return _double(np.bincount(columns, weights=values, minlength=self.shape[1]))


@dataclass(frozen=True)
class TorchDesign:
    """A torch tensor on any device; products run there, vectors come back as NumPy."""

    matrix: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(n, d)."""
        return self.matrix.shape[0], self.matrix.shape[1]

    def _there(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.matrix.device, self.matrix.dtype)

    def matvec(self, vector: Array) -> Array:
        """X v."""
        return _host(self.matrix @ self._there(vector))

    def rmatvec(self, vector: Array) -> Array:
        """X^T r."""
        return _host(self.matrix.T @ self._there(vector))

    def rmatmat(self, matrix: Array) -> Array:
        """X^T A."""
        return _host(self.matrix.T @ self._there(matrix))

    def columns(self, support: Indices) -> Array:
        """Some columns."""
        return _host(self.matrix[:, torch.from_numpy(support).to(self.matrix.device)])

    def squares(self, weights: Array) -> Array:
        """Weighted sums of squares of the columns."""
        total = np.zeros(self.shape[1])
        rows = max(1, _BLOCK_ELEMENTS // max(1, self.shape[1]))
        for start in range(0, self.shape[0], rows):
            block = self.matrix[start : start + rows].double()
            there = torch.from_numpy(weights[start : start + rows]).to(block.device)
            total += _host((block * block).T @ there)
        return total

    def moments(self, weights: Array, level: Array, mean: Array) -> tuple[Array, Array]:
        """As those of a `SparseDesign`."""
        first, second = np.zeros(self.shape[1]), np.zeros(self.shape[1])
        rows = max(1, _BLOCK_ELEMENTS // max(1, self.shape[1]))
        centre = torch.from_numpy(mean).to(self.matrix.device)
        for start in range(0, self.shape[0], rows):
            part = slice(start, start + rows)
            weight, height = (torch.from_numpy(values[part]).to(centre.device) for values in (weights, level))
            block = self.matrix[part].double() - height[:, None] * centre
            first += _host(block.T @ (weight * height))
            second += _host((block * block).T @ weight)
        return first, second


@dataclass(frozen=True)
class CentredDesign:
    """X - u m^T without forming it: an intercept that is solved for, on a sparse or remote X."""

    inner: SparseDesign | TorchDesign
    level: Array  # u: (n,), square roots of the sample weights
    mean: Array  # m: (d,)

    @property
    def shape(self) -> tuple[int, int]:
        """(n, d)."""
        return self.inner.shape

    def matvec(self, vector: Array) -> Array:
        """(X - u m^T) v."""
        return self.inner.matvec(vector) - self.level * float(self.mean @ vector)

    def rmatvec(self, vector: Array) -> Array:
        """(X - u m^T)^T r."""
        return self.inner.rmatvec(vector) - self.mean * float(self.level @ vector)

    def rmatmat(self, matrix: Array) -> Array:
        """(X - u m^T)^T A."""
        return self.inner.rmatmat(matrix) - np.outer(self.mean, self.level @ matrix)

    def columns(self, support: Indices) -> Array:
        """Some columns, centred."""
        return self.inner.columns(support) - np.outer(self.level, self.mean[support])

    def squares(self, weights: Array) -> Array:
        """Weighted sums of squares of the centred columns; exactly 0 for a constant one."""
        first, second = self.inner.moments(weights, self.level, self.mean)
        spread = second - first**2 / max(float((weights * self.level**2).sum()), 1e-300)  # less the mean's own rounding
        finfo = torch.finfo if isinstance(self.inner, TorchDesign) else np.finfo
        rounding = 64 * float(finfo(self.inner.matrix.dtype).eps)
        constant = (self.mean != 0) & (spread <= rounding**2 * self.inner.squares(weights))
        return np.where(constant, 0.0, second)


def as_design(matrix: Any) -> Design:
    """Any supported matrix as a `Design`; integers and booleans become float64.

    Raises:
        ProblemError: not a two-dimensional numeric matrix, or an empty one.
    """
    design = _wrap(matrix)
    n, d = design.shape
    if n == 0 or d == 0:
        raise ProblemError(
            f"The design matrix is empty, of shape ({n}, {d}); it needs at least one row and one column."
        )
    return design


def _wrap(matrix: Any) -> Design:
    if isinstance(matrix, (DenseDesign, SparseDesign, TorchDesign, CentredDesign)):
        return matrix
    if isinstance(matrix, torch.Tensor):
        if matrix.ndim != 2:
            raise ProblemError(f"The design matrix must be two-dimensional, got shape {tuple(matrix.shape)}.")
        return TorchDesign(matrix.detach() if matrix.is_floating_point() else matrix.detach().double())
    if sp.issparse(matrix):
        return SparseDesign(matrix.astype(np.float64) if matrix.dtype.kind != "f" else matrix)
    try:
        array = np.asarray(matrix)
        array = array if array.dtype in (np.float32, np.float64) else array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ProblemError(f"The design matrix holds something that is not a number ({error}).") from None
    if array.ndim != 2:
        raise ProblemError(
            f"The design matrix must be two-dimensional, got shape {array.shape}; one column is X[:, None]."
        )
    return DenseDesign(array)


def as_vector(values: Any, name: str, length: int | None = None) -> Array:
    """A vector as float64 NumPy.

    Raises:
        ProblemError: wrong shape or no numbers.
        NonFiniteError: NaN or infinity in it.
    """
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    try:
        vector = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ProblemError(f"The {name} holds something that is not a number ({error}).") from None
    if vector.ndim != 1 or (length is not None and vector.size != length):
        wanted = "a vector" if length is None else f"a vector of length {length}"
        raise ProblemError(f"The {name} must be {wanted}, got shape {vector.shape}.")
    if not np.isfinite(vector).all():
        raise NonFiniteError(f"The {name} holds NaN or infinity; remove or impute those rows first.")
    return vector


def scale_rows(design: Design, factors: Array) -> Design:
    """diag(factors) X, as a new matrix."""
    if isinstance(design, DenseDesign):
        return DenseDesign(design.matrix * factors.astype(design.matrix.dtype)[:, None])
    if isinstance(design, SparseDesign):
        return SparseDesign(sp.diags_array(factors) @ design.matrix)
    assert isinstance(design, TorchDesign)
    there = torch.from_numpy(factors).to(design.matrix.device, design.matrix.dtype)
    return TorchDesign(design.matrix * there[:, None])


def centre(design: Design, level: Array, mean: Array) -> Design:
    """X - u m^T: a new array where X is a dense host array, implicit elsewhere."""
    if isinstance(design, DenseDesign):
        centred = design.matrix - np.outer(level, mean).astype(design.matrix.dtype)
        # A constant column must become exactly zero, not rounding noise that could be scaled up.
        size = np.abs(design.matrix).max(axis=0)
        centred[:, np.abs(centred).max(axis=0) <= 64 * np.finfo(design.matrix.dtype).eps * size] = 0
        return DenseDesign(centred)
    assert isinstance(design, (SparseDesign, TorchDesign))
    return CentredDesign(design, level, mean)


def column_means(design: Design, weights: Array, total: float) -> Array:
    """sum_i w_i X_ij / total of every column j, (d,).

    Raises:
        NonFiniteError: X holds NaN or infinity.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        mean = _double(_column_sums(design, weights) / total)
    require_finite_columns(mean)
    return mean


def _column_sums(design: Design, weights: Array) -> Array:
    """X^T w in float64: summed in the design's own float32, a column far from zero loses its mean among many rows."""
    if not isinstance(design, (DenseDesign, TorchDesign)) or design.matrix.dtype in (np.float64, torch.float64):
        return design.rmatvec(weights)
    total = np.zeros(design.shape[1])
    rows = max(1, _BLOCK_ELEMENTS // max(1, design.shape[1]))
    for start in range(0, design.shape[0], rows):
        block = design.matrix[start : start + rows]
        wide = TorchDesign(block.double()) if isinstance(block, torch.Tensor) else DenseDesign(_double(block))
        total += wide.rmatvec(weights[start : start + rows])
    return total


def with_intercept(design: Design, weights: Array) -> tuple[Design, Array]:
    """[X - 1 m^T, 1] and the weighted means m, (d,): the intercept as a last column, all others about their means.

    Raises:
        NonFiniteError: X holds NaN or infinity.
    """
    mean = column_means(design, weights, weights.sum())
    return centre(append_ones(design), np.ones(design.shape[0]), np.append(mean, 0.0)), mean


def variances(matrix: Any, weights: Array, centred: bool) -> Array:
    """Weighted mean squares of the columns (d,), about their means or about zero.

    Raises:
        NonFiniteError: the matrix holds NaN or infinity.
    """
    design = as_design(matrix)
    if not centred:
        return _double(design.squares(weights) / weights.sum())
    mean = column_means(design, weights, weights.sum())
    return _double(centre(design, np.ones(design.shape[0]), mean).squares(weights) / weights.sum())


def require_finite_columns(values: Array) -> None:
    """Sums over the columns of a design tell whether it is finite.

    Raises:
        NonFiniteError: names the first column that is not.
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


def _double(array: Any) -> Array:
    return np.asarray(array, dtype=np.float64)


def _host(tensor: torch.Tensor) -> Array:
    return np.asarray(tensor.detach().double().cpu().numpy())
