"""Design matrices: the products with X that sparse optimisation needs, for every storage of X; checked arguments.

Dense NumPy, scipy.sparse and torch (any device) matrices all become a `Design`, whose vectors are float64 NumPy arrays.
Large products run in the matrix's own dtype, library and device; only vectors and a few columns are transferred.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
from threadpoolctl import ThreadpoolController

from iobs.core.late import is_tensor, torch
from iobs.core.slices import slices
from iobs.errors import NonFiniteError, ProblemError

Array: TypeAlias = npt.NDArray[np.float64]
Indices: TypeAlias = npt.NDArray[np.int64]
Booleans: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.float32 | np.float64]
VectorLike: TypeAlias = "npt.ArrayLike | torch.Tensor"
MatrixLike: TypeAlias = "npt.ArrayLike | torch.Tensor | sp.sparray | sp.spmatrix"

BLOCK_ELEMENTS = 1 << 22  # number of entries of a temporary block
_ONE_THREAD = 4_000_000  # most entries of a design for which linear algebra uses a single thread


class Design(Protocol):
    """An (n, d) matrix X with products, and access to a few columns at a time."""

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

    def rmatmat(self, matrix: Array, rows: Indices | None = None) -> Array:
        """X^T A for A of shape (n, m): (d, m), or only the rows in `rows`."""
        ...

    def columns(self, support: Indices) -> Array:
        """The columns in `support`, dense (n, k) in float64."""
        ...

    def squares(self, weights: Array) -> Array:
        """sum_i w_i X_ij^2 of every column j, (d,)."""
        ...

    def samples(self, rows: Indices) -> Design:
        """The rows of X in `rows`, with repetitions."""
        ...


class StoredDesign:
    """A design whose entries are stored: `matrix` is X (n, d)."""

    matrix: Any

    @property
    def shape(self) -> tuple[int, int]:
        """(n, d)."""
        return self.matrix.shape[0], self.matrix.shape[1]


@dataclass(frozen=True)
class DenseDesign(StoredDesign):
    """A NumPy array, float32 or float64, in any memory order; never copied.

    Attributes:
        matrix: X (n, d).
        known_squares: sums of squares of the columns (d,), if computed before.
    """

    matrix: Floats
    known_squares: Array | None = None

    def matvec(self, vector: Array) -> Array:
        """X v; for a sparse v only the columns that it needs are read."""
        support = np.flatnonzero(vector)
        if support.size * 4 < vector.size:
            return np.asarray(self.columns(support) @ vector[support])
        return double(self.matrix @ vector.astype(self.matrix.dtype, copy=False))

    def rmatvec(self, vector: Array) -> Array:
        """X^T r."""
        return double(self.matrix.T @ vector.astype(self.matrix.dtype, copy=False))

    def rmatmat(self, matrix: Array, rows: Indices | None = None) -> Array:
        """X^T A."""
        if rows is not None:
            return double(self.columns(rows).T @ matrix)
        return double(self.matrix.T @ matrix.astype(self.matrix.dtype, copy=False))

    def columns(self, support: Indices) -> Array:
        """The columns in `support`; the matrix itself, not a copy, if they are all columns in order."""
        size = self.shape[1]
        if support.size == size and (support == np.arange(size)).all():
            return double(self.matrix)
        return double(self.matrix[:, support])

    def squares(self, weights: Array) -> Array:
        """Weighted sums of squares of the columns."""
        equal = bool((weights == 1).all())
        if equal and self.known_squares is not None:
            return self.known_squares
        total = np.zeros(self.shape[1])
        parts = slices(self.shape, BLOCK_ELEMENTS)
        if equal and len(parts) <= 1:
            return double(np.einsum("ij,ij->j", self.matrix, self.matrix, dtype=np.float64))
        for part in parts:
            block = self.matrix[part]
            total += np.einsum("i,ij,ij->j", weights[part], block, block, dtype=np.float64)
        return total

    def samples(self, rows: Indices) -> DenseDesign:
        """The rows of X in `rows`."""
        return DenseDesign(self.matrix[rows])


class SparseDesign(StoredDesign):
    """A scipy.sparse matrix, stored by columns."""

    def __init__(self, matrix: sp.sparray | sp.spmatrix) -> None:
        self.matrix = sp.csc_array(matrix)
        if not self.matrix.has_canonical_format:  # duplicate entries must be summed before squaring
            self.matrix = self.matrix.copy()
            self.matrix.sum_duplicates()
        self._rows = self.matrix.T  # X^T by rows, a view: products with it read the columns of X

    def matvec(self, vector: Array) -> Array:
        """X v; for a sparse v only the columns that it needs are read."""
        support = np.flatnonzero(vector)
        if support.size * 4 < vector.size:
            return double(self.matrix[:, support] @ vector[support])
        return double(self.matrix @ vector)

    def rmatvec(self, vector: Array) -> Array:
        """X^T r."""
        return double(self._rows @ vector)

    def rmatmat(self, matrix: Array, rows: Indices | None = None) -> Array:
        """X^T A; the columns of X stay sparse."""
        return double((self._rows if rows is None else self.matrix[:, rows].T) @ matrix)

    def columns(self, support: Indices) -> Array:
        """The columns in `support`, dense."""
        return double(self.matrix[:, support].toarray())

    def squares(self, weights: Array) -> Array:
        """Weighted sums of squares of the columns."""
        values = self.matrix.data.astype(np.float64) ** 2
        return self._column_sums(values * weights[self.matrix.indices])

    def samples(self, rows: Indices) -> SparseDesign:
        """The rows of X in `rows`."""
        return SparseDesign(self.matrix[rows])

    def moments(self, weights: Array, level: Array, mean: Array) -> tuple[Array, Array]:
        """sum_i w_i u_i (X_ij - u_i m_j) and sum_i w_i (X_ij - u_i m_j)^2 of every column j, both (d,)."""
        rows, there = self.matrix.indices, np.repeat(mean, np.diff(self.matrix.indptr))
        centred = self.matrix.data.astype(np.float64) - level[rows] * there
        mass = (weights * level**2).sum() - self._column_sums((weights * level**2)[rows])  # of the zero entries
        first = self._column_sums((weights * level)[rows] * centred) - mean * mass
        return first, self._column_sums(weights[rows] * centred**2) + mean**2 * mass

    def _column_sums(self, values: Array) -> Array:
        columns = np.repeat(np.arange(self.shape[1]), np.diff(self.matrix.indptr))
        return double(np.bincount(columns, weights=values, minlength=self.shape[1]))


@dataclass(frozen=True)
class TorchDesign(StoredDesign):
    """A torch tensor on any device; products run there, vectors are returned as NumPy arrays."""

    matrix: torch.Tensor

    def _there(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.matrix.device, self.matrix.dtype)

    def matvec(self, vector: Array) -> Array:
        """X v."""
        return on_host(self.matrix @ self._there(vector))

    def rmatvec(self, vector: Array) -> Array:
        """X^T r."""
        return on_host(self.matrix.T @ self._there(vector))

    def rmatmat(self, matrix: Array, rows: Indices | None = None) -> Array:
        """X^T A."""
        if rows is not None:
            return double(self.columns(rows).T @ matrix)
        return on_host(self.matrix.T @ self._there(matrix))

    def columns(self, support: Indices) -> Array:
        """The columns in `support`."""
        return on_host(self.matrix[:, torch.from_numpy(support).to(self.matrix.device)])

    def squares(self, weights: Array) -> Array:
        """Weighted sums of squares of the columns."""
        total = np.zeros(self.shape[1])
        for part in slices(self.shape, BLOCK_ELEMENTS):
            block = self.matrix[part].double()
            there = torch.from_numpy(weights[part]).to(block.device)
            total += on_host((block * block).T @ there)
        return total

    def samples(self, rows: Indices) -> TorchDesign:
        """The rows of X in `rows`."""
        return TorchDesign(self.matrix[torch.from_numpy(rows).to(self.matrix.device)])

    def moments(self, weights: Array, level: Array, mean: Array) -> tuple[Array, Array]:
        """See `SparseDesign.moments`."""
        first, second = np.zeros(self.shape[1]), np.zeros(self.shape[1])
        centre = torch.from_numpy(mean).to(self.matrix.device)
        for part in slices(self.shape, BLOCK_ELEMENTS):
            weight, height = (torch.from_numpy(values[part]).to(centre.device) for values in (weights, level))
            block = self.matrix[part].double() - height[:, None] * centre
            first += on_host(block.T @ (weight * height))
            second += on_host((block * block).T @ weight)
        return first, second


@dataclass(frozen=True)
class CentredDesign:
    """X - u m^T without forming it: a sparse or remote X with its columns about their means."""

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

    def rmatmat(self, matrix: Array, rows: Indices | None = None) -> Array:
        """(X - u m^T)^T A."""
        mean = self.mean if rows is None else self.mean[rows]
        return self.inner.rmatmat(matrix, rows) - np.outer(mean, self.level @ matrix)

    def columns(self, support: Indices) -> Array:
        """The columns in `support`, centred."""
        return self.inner.columns(support) - np.outer(self.level, self.mean[support])

    def squares(self, weights: Array) -> Array:
        """Weighted sums of squares of the centred columns; exactly 0 for a constant column."""
        first, second = self.inner.moments(weights, self.level, self.mean)
        mass = max(float((weights * self.level**2).sum()), 1e-300)
        spread = second - first**2 / mass  # without the rounding error of the mean
        finfo = torch.finfo if isinstance(self.inner, TorchDesign) else np.finfo
        rounding = 64 * float(finfo(self.inner.matrix.dtype).eps)
        constant = (self.mean != 0) & (spread <= rounding**2 * self.inner.squares(weights))
        return np.where(constant, 0.0, second)

    def samples(self, rows: Indices) -> CentredDesign:
        """The rows of X in `rows`, about the means of all rows."""
        return CentredDesign(self.inner.samples(rows), self.level[rows], self.mean)


def as_design(matrix: MatrixLike | Design) -> Design:
    """Convert a supported matrix to a `Design`; integers and booleans become float64.

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


def _wrap(matrix: MatrixLike | Design) -> Design:
    if type(matrix) is np.ndarray and matrix.ndim == 2 and matrix.dtype in (np.float32, np.float64):
        return DenseDesign(matrix)  # the most frequent case; the checks below take longer than a small fit's algebra
    if isinstance(matrix, (DenseDesign, SparseDesign, TorchDesign, CentredDesign)):
        return matrix
    if is_tensor(matrix) or isinstance(matrix, sp.sparray | sp.spmatrix):
        _require_real(matrix.dtype, "design matrix")
    if is_tensor(matrix):
        if matrix.ndim != 2:
            raise ProblemError(f"The design matrix must be two-dimensional, got shape {tuple(matrix.shape)}.")
        return TorchDesign(matrix.detach() if matrix.is_floating_point() else matrix.detach().double())
    if isinstance(matrix, (sp.sparray, sp.spmatrix)):
        return SparseDesign(matrix.astype(np.float64) if matrix.dtype.kind != "f" else matrix)
    try:
        array = np.asarray(matrix)
        _require_real(array.dtype, "design matrix")
        array = array if array.dtype in (np.float32, np.float64) else array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ProblemError(f"The design matrix holds something that is not a number ({error}).") from None
    if array.ndim != 2:
        raise ProblemError(
            f"The design matrix must be two-dimensional, got shape {array.shape}; one column is X[:, None]."
        )
    return DenseDesign(array)


def _require_real(dtype: object, name: str) -> None:
    """Raise unless a dtype of NumPy or torch is real: a conversion would drop imaginary parts.

    Raises:
        ProblemError: it is complex.
    """
    if "complex" in str(dtype):
        raise ProblemError(f"The {name} holds complex numbers; give real ones.")


def as_vector(values: VectorLike, name: str, length: int | None = None) -> Array:
    """Convert a vector to float64 NumPy.

    Args:
        values: the vector, of any numeric type.
        name: the name of the vector in errors.
        length: the required length; any if not given.

    Raises:
        ProblemError: wrong shape, or not numeric.
        NonFiniteError: NaN or infinity in the vector.
    """
    if type(values) is not np.ndarray and is_tensor(values):
        values = values.detach().cpu().numpy()
    _require_real(getattr(values, "dtype", None), name)
    try:
        vector = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ProblemError(f"The {name} holds something that is not a number ({error}).") from None
    if vector.ndim != 1 or (length is not None and vector.size != length):
        expected = "a vector" if length is None else f"a vector of length {length}"
        raise ProblemError(f"The {name} must be {expected}, got shape {vector.shape}.")
    if not np.isfinite(vector).all():
        raise NonFiniteError(f"The {name} holds NaN or infinity; remove or impute those rows first.")
    return vector


def add_to_diagonal(matrix: Floats, values: Floats) -> None:
    """Add values (k,) to the diagonal of a matrix (k, k), in place."""
    diagonal = np.einsum("ii->i", matrix)  # a view
    diagonal += values


def double(array: npt.ArrayLike) -> Array:
    """An array as float64, copied only if its dtype differs."""
    return np.asarray(array, dtype=np.float64)


def on_host(tensor: torch.Tensor) -> Array:
    """A tensor as float64 in main memory."""
    return np.asarray(tensor.detach().double().cpu().numpy())


def prepare(X: MatrixLike, y: VectorLike, sample_weight: VectorLike | None) -> tuple[Design, Array, Array]:
    """The design (n, d), target (n,) and sample weights (n,), validated and converted.

    Raises:
        ProblemError: lengths differ, a weight is negative, all weights are zero, or the target is too large to square.
    """
    design = as_design(X)
    n = design.shape[0]
    target = as_vector(y, "target y", n)
    weights = np.ones(n) if sample_weight is None else weights_of(sample_weight, n)
    with np.errstate(over="ignore"):
        if not np.isfinite(weights @ target**2):
            raise ProblemError("The target y is too large to square; divide it by a constant.")
    return design, target, weights


def weights_of(sample_weight: VectorLike, n: int, name: str = "sample weights") -> Array:
    """Sample weights (n,), validated and converted.

    Raises:
        ProblemError: the length is not n, a weight is negative, NaN or infinite, or all weights are zero.
    """
    weights = as_vector(sample_weight, name, n)
    if weights.min() < 0 or weights.sum() == 0:
        raise ProblemError(
            f"The {name} must not be negative and not all zero, got {weights.min():g} to {weights.max():g}."
        )
    return weights


_SAME, _SAME_SINGLE = 1e-12, 1e-5  # relative difference up to which centred columns are equal, by their dtype


def copies_of_columns(design: Design, squares: Array, order: Array) -> tuple[Indices, Array]:
    """For every column that is a multiple of one that stays the number of that, -1 for all that stay; and the factors.

    Columns of zeros are no copies. Both results are (d,); the factor of a column that stays is 1.

    Args:
        design: X (n, d).
        squares: sums of squares of its columns (d,), of any weights.
        order: of equal columns the one of the least number stays, the first of several (d,).
    """
    origins, factors = np.full(design.shape[1], -1, dtype=np.int64), np.ones(design.shape[1])
    usable = np.flatnonzero(squares > 0)
    shadow = np.random.default_rng(0).standard_normal(design.shape[0])
    length = np.abs(design.rmatvec(shadow)[usable]) / np.sqrt(squares[usable])  # of multiples equal
    by_length = np.argsort(length, kind="stable")
    stored = design.inner if isinstance(design, CentredDesign) else design
    tolerance = _SAME_SINGLE if str(stored.matrix.dtype).endswith("float32") else _SAME  # type: ignore[attr-defined]
    apart = np.diff(length[by_length]) > 1e3 * tolerance * length[by_length][1:]
    for likely in np.split(usable[by_length], np.flatnonzero(apart) + 1):
        if likely.size < 2:
            continue
        members = likely[np.lexsort((likely, order[likely]))]
        firsts: list[tuple[int, Array]] = []
        for member, column in zip(members, design.columns(members).T, strict=True):
            for number, first in firsts:
                factor = float(first @ column) / float(first @ first)
                if np.abs(column - factor * first).max() <= tolerance * np.abs(column).max():
                    origins[member], factors[member] = number, factor
                    break
            else:
                firsts.append((member, column))
    return origins, factors


def weighted_rows(weights: Array) -> Indices | None:
    """The samples of positive weight; None if that is all of them.

    A sample of weight zero is left out of f where its own loss may overflow: zero times infinity is no number.
    """
    return None if (weights > 0).all() else np.flatnonzero(weights).astype(np.int64)


def ridge_vector(ridge: float | VectorLike, dimension: int) -> Array:
    """The ridge of every coordinate (dimension,), from one number or from one per coordinate.

    Raises:
        ProblemError: a ridge is negative or not finite.
    """
    if type(ridge) is float and ridge == 0:
        return np.zeros(dimension)
    values = (
        np.full(dimension, float(np.asarray(ridge))) if np.ndim(ridge) == 0 else as_vector(ridge, "ridge", dimension)
    )
    if values.min() < 0 or not np.isfinite(values).all():
        raise ProblemError(
            f"The ridge must be finite and not negative, got values from {values.min()} to {values.max()}."
        )
    return values


def forced_columns(forced: npt.ArrayLike | None, features: int) -> Indices:
    """Sorted indices of the forced columns, from indices or from a boolean mask.

    Raises:
        ProblemError: neither indices nor a mask of the right length, or an index out of range.
    """
    chosen = np.atleast_1d(np.asarray([] if forced is None else forced))
    if not chosen.size and chosen.dtype != np.bool_:
        return np.zeros(0, np.int64)
    if chosen.dtype.kind == "f" and (chosen == np.round(chosen)).all():
        chosen = chosen.astype(np.int64)
    if chosen.dtype == np.bool_:
        if chosen.shape != (features,):
            raise ProblemError(f"Forced features as a mask need {features} entries, got shape {chosen.shape}.")
        return np.flatnonzero(chosen).astype(np.int64)
    if chosen.ndim != 1 or chosen.dtype.kind not in "iu":
        raise ProblemError(f"Forced features must be numbers or a boolean mask, got {forced!r}.")
    if not 0 <= int(chosen.min()) <= int(chosen.max()) < features:
        raise ProblemError(f"Forced features must lie in 0 ... {features - 1}, got {chosen.tolist()}.")
    return np.unique(chosen).astype(np.int64)


@cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


def few_threads(entries: int) -> AbstractContextManager[object]:
    """A context in which linear algebra uses one thread if a design has few entries.

    On small systems threads only wait for each other; on a busy machine they are a hundred times slower.
    """
    libraries = _blas().lib_controllers
    if entries > _ONE_THREAD or all(library.num_threads == 1 for library in libraries):
        return nullcontext()
    limited: AbstractContextManager[object] = _blas().limit(limits=1)
    return limited
