"""Cox regression: minus the log partial likelihood of right-censored times, ties by Breslow or Efron.

    f(theta) = sum_t w_t [log S_t - m_t] + 1/2 ridge norm(theta)^2,     m_i = x_i^T theta + offset_i

A term t belongs to an event. S_t sums w_i exp(m_i) over the samples at risk, whose time is not before the event's.
Efron's method has D terms for D events at one time. Term number l takes the share l / D of these D events out of S_t.
With C the matrix of these shares, S = C (w exp(m)). Products with C and C^T are cumulative sums over the sorted times.
So f, its gradient and products with its Hessian cost O(n) beyond products with X.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from iobs.errors import ProblemError
from iobs.optimize.objectives import centring
from iobs.optimize.objectives import design as designs
from iobs.optimize.objectives.base import DesignObjective
from iobs.optimize.objectives.design import BLOCK_ELEMENTS, Array, Indices, MatrixLike, VectorLike

_UNDERFLOW = 1e-290  # sums of hazards relative to the largest hazard, below which f counts as infinite


class RiskSets:
    """The matrix C of the terms, by the sorted times.

    Args:
        times: (n,) times.
        events: (n,) true where the event happened at that time, false where the sample was censored.
        efron: take shares of tied events out of the sums.

    Attributes:
        order: the samples by descending time (n,); products below use this order.
        event: (n,) in the sorted order.
        group: for each term the number of its time.
        ends: for each term the position of the last sample at risk.
        share: for each term the share of the tied events that is taken out.
        starts: the position of the first sample of every time.
        times: for each sample the number of its time (n,).
    """

    def __init__(self, times: Array, events: npt.NDArray[np.bool_], efron: bool) -> None:
        self.order = np.argsort(-times, kind="stable")
        sorted_times, self.event = times[self.order], events[self.order]
        _, starts, counts = np.unique(-sorted_times, return_index=True, return_counts=True)
        group = np.repeat(np.arange(starts.size), counts)
        self.group = group[self.event]  # the time of every term
        deaths = np.bincount(self.group, minlength=starts.size)
        self.ends = (starts + counts - 1)[self.group]
        self.starts, self.times = starts, group
        number = np.arange(self.group.size) - np.searchsorted(self.group, self.group)  # l within a time
        self.share = number / np.maximum(deaths, 1)[self.group] if efron else np.zeros(self.group.size)

    def sums(self, values: Array) -> Array:
        """C v for the rows of v (n, c), sorted: (terms, c)."""
        total = np.cumsum(values, axis=0)[self.ends]
        if not self.share.any():
            return np.asarray(total)
        tied = np.add.reduceat(values * self.event[:, None], self.starts, axis=0)
        return np.asarray(total - self.share[:, None] * tied[self.group])

    def spread(self, values: Array) -> Array:
        """C^T u for u (terms, c): (n, c), sorted."""
        at_time = np.zeros((self.starts.size, values.shape[1]))
        np.add.at(at_time, self.group, values)
        later = np.cumsum(at_time[::-1], axis=0)[::-1]
        result = later[self.times]
        if self.share.any():
            taken = np.zeros((self.starts.size, values.shape[1]))
            np.add.at(taken, self.group, self.share[:, None] * values)
            result = result - self.event[:, None] * taken[self.times]
        return np.asarray(result)

    def term_weights(self, weights: Array) -> Array:
        """The mean weight of the events at a term's time, from the sorted weights of the samples (n,)."""
        event_weights = weights[self.event]
        deaths = np.bincount(self.group, minlength=self.starts.size)
        total = np.bincount(self.group, event_weights, self.starts.size)
        return np.asarray(total / np.maximum(deaths, 1))[self.group]


class Cox(DesignObjective):
    """Minus the log partial likelihood of Cox's proportional hazards model, + 1/2 ridge norm(theta)^2.

    There is no intercept: the baseline hazard takes it.

    Args:
        X: (n, d) design.
        times: (n,) times of the event or of censoring.
        events: (n,) true or 1 where the event happened, false or 0 where the sample was censored.
        ties: "efron" or "breslow".
        ridge: as `Logistic`.
        sample_weight: (n,) non-negative. A sample of weight zero counts as if it were left out. Whole numbers count
            rows, but not with Efron's ties: there tied events take their mean weight, as in R's survival, which is not
            the same as repeated rows, which are ties of their own.
        forced: columns that are always in the support and not counted in k.
        offset: (n,) known part of the margins; zero if not given.

    Raises:
        ProblemError: shapes do not fit, no event, events other than 0 and 1, or an unknown method for ties.
        NonFiniteError: NaN or infinity.
    """

    quadratic = False

    def __init__(
        self,
        X: MatrixLike,
        times: VectorLike,
        events: VectorLike,
        *,
        ties: Literal["efron", "breslow"] = "efron",
        ridge: float | VectorLike = 0.0,
        sample_weight: VectorLike | None = None,
        forced: npt.ArrayLike | None = (),
        offset: VectorLike | None = None,
    ) -> None:
        design, when, weights = designs.prepare(X, times, sample_weight)
        happened = designs.as_vector(events, "events", when.size)
        if not np.isin(happened, (0, 1)).all() or not (happened * weights).any():
            raise ProblemError("Cox needs events of 0 (censored) and 1, and at least one 1 of positive weight.")
        if ties not in ("efron", "breslow"):
            raise ProblemError(f'ties must be "efron" or "breslow", got {ties!r}.')
        self.offset = np.zeros(when.size) if offset is None else designs.as_vector(offset, "offset", when.size)
        rows = designs.weighted_rows(weights)
        if rows is not None:
            design, when, happened = design.samples(rows), when[rows], happened[rows]
            weights, self.offset = weights[rows], self.offset[rows]
        self.offset = self.offset - self.offset.mean()  # f does not depend on its origin, but rounding does
        ones = np.ones(when.size)
        self.design = centring.centre(design, ones, centring.column_means(design, weights, weights.sum()))
        self.weights = weights
        self.risk = RiskSets(when, happened == 1, ties == "efron")
        self.ridge = designs.ridge_vector(ridge, design.shape[1])
        self.forced = designs.forced_columns(forced, design.shape[1])
        self.dimension = design.shape[1]
        _ = self.squares

    def _at(self, theta: Array) -> tuple[float, Array, Array, Array]:
        """(f, w exp(m) sorted, S, weights of the terms)."""
        order, risk = self.risk.order, self.risk
        margin = (self.design.matvec(theta) + self.offset)[order]
        weights = self.weights[order]
        largest = float(margin.max())  # f does not change if all margins move by one number
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            mass = weights * np.exp(margin - largest)
            terms = risk.term_weights(weights)
            sums = risk.sums(mass[:, None])[:, 0]
            if not (sums > _UNDERFLOW).all():  # exp has underflowed: f is finite, but far from any minimiser
                return np.inf, mass, sums, terms
            logs = float(terms @ np.log(sums)) + largest * float(terms.sum())
            value = logs - float((weights * margin)[risk.event].sum()) + 0.5 * float(self.ridge @ theta**2)
        return value, mass, sums, terms

    def value_and_gradient(self, theta: Array) -> tuple[float, Array]:
        """f and its gradient, NaN where f is too large for numbers."""
        value, mass, sums, terms = self._at(theta)
        if not np.isfinite(value):
            return value, np.full(self.dimension, np.nan)
        slopes = mass * self._rates(sums, terms)
        slopes -= np.where(self.risk.event, self.weights[self.risk.order], 0.0)
        return value, self.design.rmatvec(self._unsorted(slopes)) + self.ridge * theta

    def _rates(self, sums: Array, terms: Array) -> Array:
        """Sum over the terms of a sample of weight / S, (n,) sorted."""
        return self.risk.spread((terms / sums)[:, None])[:, 0]

    def _unsorted(self, values: Array) -> Array:
        result = np.empty_like(values)
        result[self.risk.order] = values
        return result

    def _curved(self, theta: Array, columns: Array) -> Array:
        """The Hessian of the margins times columns (n, c)."""
        _, mass, sums, terms = self._at(theta)
        moved = mass[:, None] * columns[self.risk.order]
        means = self.risk.sums(moved) / sums[:, None] * (terms / sums)[:, None]  # sums**2 would underflow
        curved = self._rates(sums, terms)[:, None] * moved - mass[:, None] * self.risk.spread(means)
        return self._unsorted(curved)

    def hessian_product(self, theta: Array, vector: Array) -> Array:
        """H v."""
        curved = self._curved(theta, self.design.matvec(vector)[:, None])[:, 0]
        return self.design.rmatvec(curved) + self.ridge * vector

    def hessian_columns(self, theta: Array, support: Indices, rows: Indices | None = None) -> Array:
        """H_:Q, or only the rows in `rows`."""
        curved = self._curved(theta, self.design.columns(support).astype(np.float64))
        block = self.design.rmatmat(curved, None if rows is None or rows.size >= self.dimension else rows)
        return self.with_ridge(block, rows, support)

    def hessian_block(self, theta: Array, support: Indices) -> Array:
        """H_QQ."""
        block = self.hessian_columns(theta, support, support)
        return np.asarray(0.5 * (block + block.T))

    def hessian_diagonal(self, theta: Array) -> Array:
        """diag H, in blocks of columns."""
        _, mass, sums, terms = self._at(theta)
        rates = self._rates(sums, terms)
        diagonal = self.ridge.copy()
        width = max(1, BLOCK_ELEMENTS // self.design.shape[0])
        for start in range(0, self.dimension, width):
            part = np.arange(start, min(start + width, self.dimension))
            columns = self.design.columns(part)[self.risk.order]
            means = self.risk.sums(mass[:, None] * columns) / sums[:, None]
            diagonal[part] += (mass * rates) @ columns**2 - terms @ means**2
        return np.maximum(diagonal, 0.0)
