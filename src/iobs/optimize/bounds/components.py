"""Coordinates of a large, nearly block-diagonal quadratic that a best support may have.

H = B + E. B holds the blocks of the connected components of the entries above a threshold, E the other entries. Let r_j
be the sum of the k - 1 largest |E_ij| of column j. For a vector v with at most k non-zeros

    |v^T E v| <= sum_ij |E_ij| (v_i^2 + v_j^2) / 2 <= sum_j r_j v_j^2,

because column j meets at most k - 1 other non-zeros. So f(v) is at least f(0) plus the sum over components b of

    q_b = min over v_b of 1/2 v_b^T (H_b - diag(r_b)) v_b - c_b^T v_b,

over the components that v touches, at most k. Let f(0) + q_b + (the k - 1 least q of the others) be above the value of
a known fit. Then component b is in no better support. All the others are left to branch and bound. Only blocks of H are
stored, so there may be many more coordinates than H as a whole would allow.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.sparse.csgraph import connected_components

from iobs.errors import ProblemError
from iobs.optimize.objectives.design import Array, CentredDesign, Indices, SparseDesign, add_to_diagonal
from iobs.optimize.objectives.linear import LeastSquares
from iobs.optimize.problem import Problem

_CHUNK = 256  # columns of H that are computed at once
_KEPT = 2_000_000  # most entries of H, expected from a sample of columns, that are kept one by one
_SAMPLE = 64
_LARGEST = 400  # most coordinates of one component
_THRESHOLDS = (1e-12, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)  # of |H_ij| / sqrt(H_ii H_jj)
_ROUNDING = 1e-9  # of f(0): values of f this close are not told apart


@dataclass(frozen=True)
class Screened:
    """The result of `screened`.

    Attributes:
        coordinates: sorted coordinates that a support at least as good as the known one may have.
        lower: a lower bound on f over all vectors with at most k non-zeros.
        components: number of components.
        largest: size of the largest component.
    """

    coordinates: Indices
    lower: float
    components: int
    largest: int


def screened(problem: Problem, upper: float, deadline: float) -> Screened:
    """Find the coordinates that some support of k coordinates with a value of at most `upper` may have.

    Args:
        problem: least squares without forced coordinates.
        upper: value of a known fit.
        deadline: on `time.perf_counter`.

    Raises:
        ProblemError: forced coordinates, or the deadline passes before all columns of H are seen.
    """
    objective = problem.objective
    if not isinstance(objective, LeastSquares) or problem.forced.size:
        raise ProblemError("A certificate of so many coordinates needs least squares without forced coordinates.")
    graph = _CouplingGraph.of(problem, deadline)
    number, labels = graph.components()
    rest = graph.outside(labels)
    start, gradient = problem.at_zero
    minima = _minima(graph, labels, number, rest, -gradient)
    order = np.sort(minima)
    count = min(problem.size, number)
    lower = start + float(order[:count].sum())
    # With component b in the support, the others are the k - 1 least; b itself may be one of them.
    others = float(order[: count - 1].sum())
    among = minima <= (order[count - 2] if count > 1 else -np.inf)
    with_it = np.where(among, lower, start + others + minima)
    kept = with_it <= upper + _ROUNDING * abs(start)
    coordinates = graph.usable[kept[labels]]
    sizes = np.bincount(labels, minlength=number)
    return Screened(coordinates, lower, number, int(sizes.max()))


@dataclass(frozen=True)
class _CouplingGraph:
    """Large entries of H among the usable coordinates, and bounds on the small ones.

    Attributes:
        usable: sorted coordinates (m,).
        diagonal: of H (m,).
        entries: H without its diagonal, entries of at least the base threshold (m, m).
        dropped: of every column the k - 1 largest absolute entries below it (k - 1, m).
        base: the threshold, relative to the diagonal.
    """

    usable: Indices
    diagonal: Array
    entries: sparse.csr_array
    dropped: Array
    base: float

    @classmethod
    def of(cls, problem: Problem, deadline: float) -> _CouplingGraph:
        """The graph of a problem, by chunks of the columns of H."""
        usable = np.flatnonzero(problem.candidates).astype(np.int64)
        diagonal = problem.scale[usable] ** 2
        sample = usable[:: max(1, usable.size // _SAMPLE)]
        base = _base(_columns(problem, usable, sample), problem.scale[usable], problem.scale[sample], usable.size)
        most = min(max(problem.size - 1, 0), usable.size)
        dropped = np.zeros((most, usable.size))
        rows, columns, values = [], [], []
        for begin in range(0, usable.size, _CHUNK):
            if time.perf_counter() > deadline:
                raise ProblemError(
                    f"The time limit passed after {begin:,} of {usable.size:,} columns of the Hessian; raise seconds."
                )
            part = np.arange(begin, min(begin + _CHUNK, usable.size))
            block = np.ascontiguousarray(_columns(problem, usable, usable[part]).T)  # a row for each column of H
            block[part - begin, part] = 0.0
            size = np.abs(block)
            large = size > base * np.outer(problem.scale[usable[part]], problem.scale[usable])
            column, row = np.nonzero(large)
            rows.append(row)
            columns.append(column + begin)
            values.append(block[column, row])
            size[column, row] = 0.0
            if most and size.any():
                dropped[:, part] = np.partition(size, usable.size - most, axis=1)[:, usable.size - most :].T
        shape = (usable.size, usable.size)
        places = (np.concatenate(rows), np.concatenate(columns))
        entries = sparse.csr_array((np.concatenate(values), places), shape=shape)
        return cls(usable, diagonal, entries, dropped, base)

    def components(self) -> tuple[int, Indices]:
        """The number of components and the component of every coordinate (m,), at the least threshold that is fine."""
        entries = sparse.coo_array(self.entries)
        scale = np.sqrt(self.diagonal)
        relative = np.abs(entries.data) / (scale[entries.row] * scale[entries.col])
        for threshold in [step for step in _THRESHOLDS if step >= self.base] + [np.inf]:
            edges = relative > threshold
            graph = sparse.coo_array((edges[edges], (entries.row[edges], entries.col[edges])), shape=entries.shape)
            number, labels = connected_components(graph, directed=False)
            if np.bincount(labels).max() <= _LARGEST:
                break
        return int(number), np.asarray(labels, dtype=np.int64)

    def outside(self, labels: Indices) -> Array:
        """r (m,): of every column the sum of the k - 1 largest absolute entries outside its component."""
        most = len(self.dropped)
        rest = np.asarray(self.dropped.sum(axis=0))
        entries = sparse.csc_array(self.entries)
        for j in np.flatnonzero(np.diff(entries.indptr)):
            place = slice(entries.indptr[j], entries.indptr[j + 1])
            away = np.abs(entries.data[place][labels[entries.indices[place]] != labels[j]])
            if away.size and most:
                both = np.concatenate([away, self.dropped[:, j]])
                rest[j] = np.partition(both, both.size - most)[both.size - most :].sum()
        return rest


def _columns(problem: Problem, usable: Indices, chosen: Indices) -> Array:
    """Columns of H, (m, s); by a sparse product if the design is sparse, without the ridge on the diagonal then."""
    objective = problem.objective
    assert isinstance(objective, LeastSquares)
    design = objective.design
    inner = design.inner if isinstance(design, CentredDesign) else design
    if not isinstance(inner, SparseDesign):
        return np.asarray(objective.hessian_columns(np.zeros(problem.dimension), chosen)[usable], dtype=np.float64)
    block = np.asarray((inner.matrix[:, usable].T @ inner.matrix[:, chosen]).toarray(), dtype=np.float64)
    if isinstance(design, CentredDesign):  # X^T u = u^T u m, as m is the weighted mean
        block -= float(design.level @ design.level) * np.outer(design.mean[usable], design.mean[chosen])
    return block


def _base(block: Array, scale: Array, sample_scale: Array, size: int) -> float:
    """The least threshold above which H has few enough entries, from a sample of its columns (m, s)."""
    relative = np.abs(block) / np.outer(scale, sample_scale)
    for threshold in _THRESHOLDS:
        if (relative > threshold).sum(axis=0).mean() * size <= _KEPT:
            return threshold
    return _THRESHOLDS[-1]


def _minima(graph: _CouplingGraph, labels: Indices, number: int, rest: Array, linear: Array) -> Array:
    """q_b of every component (number,); -inf where H_b - diag(r_b) is not definite."""
    minima = np.full(number, -np.inf)
    diagonal, linear = graph.diagonal - rest, linear[graph.usable]
    sizes = np.bincount(labels, minlength=number)
    alone = sizes[labels] == 1
    definite = alone & (diagonal > 0)
    minima[labels[definite]] = -0.5 * linear[definite] ** 2 / diagonal[definite]
    order = np.argsort(labels, kind="stable")
    ends = np.cumsum(sizes)
    for b in np.flatnonzero(sizes > 1):
        members = order[ends[b] - sizes[b] : ends[b]]
        block = graph.entries[members][:, members].toarray()
        block = 0.5 * (block + block.T)
        add_to_diagonal(block, diagonal[members])
        values = np.linalg.eigvalsh(block)
        if values[0] > 1e-9 * values[-1]:
            minima[b] = -0.5 * float(linear[members] @ np.linalg.solve(block, linear[members]))
    return minima
