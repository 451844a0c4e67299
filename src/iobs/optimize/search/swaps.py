"""Exact swaps: improve a support by the best of all k (d - k) exchanges until none lowers f.

On a quadratic every swap is scored in closed form (`kernels`). On any other f the same search runs on the second-order
model at the refitted point. A new support is accepted only if the refit on it lowers f itself.

Only a block of the Hessian is formed: the support and the coordinates with the steepest gradient. Once no swap within
the block lowers f, all coordinates are scanned in chunks. So "1-swap optimal" holds for every pair.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from iobs.optimize.objectives.design import Array, Indices
from iobs.optimize.objectives.gram import GRAM_LIMIT, GramLeastSquares
from iobs.optimize.problem import Problem
from iobs.optimize.refit.newton import Fit, inverse_block, refit
from iobs.optimize.search import kernels
from iobs.optimize.search.kernels import SwapState
from iobs.optimize.search.pursuits import solved as vanishes

_LIMIT = 1000  # most supports that swaps go through from one fit
_CHUNK = 1 << 21  # number of entries in one chunk of the columns of the Hessian


@dataclass
class Swapper:
    """Improves fits of one problem; keeps the Hessian of a small quadratic between calls.

    Attributes:
        problem: f, k and the candidates.
        tolerance: least relative decrease of f that counts as an improvement.
        gram: the Hessian of a small quadratic, once computed.
        optimal: supports that no exchange improves, found earlier.
        latest: the theta of a fit and the whole Hessian there, computed last.
    """

    problem: Problem
    tolerance: float = 1e-10
    gram: Array | None = field(default=None, repr=False)
    optimal: set[bytes] = field(default_factory=set, repr=False)
    latest: tuple[Array, Array] | None = field(default=None, repr=False)

    def improve(self, fit: Fit) -> Fit:
        """Lower f by swaps until none helps, for at most 1,000 supports.

        The result is then 1-swap optimal, on the second-order model if f is not quadratic.
        """
        if fit.support.size == self.problem.forced.size or self.problem.size >= int(self.problem.candidates.sum()):
            return fit
        for _ in range(_LIMIT):
            if fit.support.tobytes() in self.optimal:
                return fit
            better = self._improve_in_block(fit)
            if better is None and self.members(fit).size < self.problem.dimension:
                better = self._improve_anywhere(fit)
            if better is None:
                self.optimal.add(fit.support.tobytes())
                return fit
            fit = better
            if vanishes(self.problem, fit):
                return fit
        return fit

    @property
    def whole(self) -> bool:
        """True if the whole Hessian is formed once: f is quadratic and small enough."""
        return self.problem.objective.quadratic and self.problem.dimension <= GRAM_LIMIT

    def _improve_in_block(self, fit: Fit) -> Fit | None:
        state = self.state(fit, self.members(fit))
        quadratic = self.problem.objective.quadratic
        allowance = _LIMIT if quadratic else max(2, fit.support.size // 2)
        while allowance >= 1:
            count = self._swap(state, self.tolerance * self._size(fit), allowance)
            if count == 0:
                return None
            better = self._accept(fit, state)
            if better is not None:
                return better
            # f fell less than the model predicted: make fewer swaps at once.
            allowance = min(count, allowance) // 2
            state = self.state(fit, state.members, state.hessian)
        return None

    def _swap(self, state: SwapState, tolerance: float, limit: int) -> int:
        """Make the best exchange until none lowers the model by more than `tolerance`; return the number made."""
        objective = self.problem.objective
        if not isinstance(objective, GramLeastSquares) or objective.complete:
            return int(kernels.swap_until_optimal(state, tolerance, limit))
        diagonal = state.hessian.diagonal().copy()
        for count in range(limit):
            leaving, entering, change = kernels.best_swap(state, diagonal)
            if leaving < 0 or not change < -tolerance or not np.isfinite(change):
                return count
            objective.know(np.array([entering]))  # an exchange reads the row of the entering coordinate
            kernels.exchange(state, leaving, entering)
        return limit

    def _size(self, fit: Fit) -> float:
        """The scale of changes of f: the larger of |f| and its decrease from its value at zero."""
        return max(abs(fit.value), abs(self.problem.at_zero[0] - fit.value), 1e-300)

    def _accept(self, fit: Fit, state: SwapState) -> Fit | None:
        start = np.zeros(self.problem.dimension)
        chosen = state.members[state.support]
        start[chosen] = state.theta
        order = np.argsort(chosen)
        positions = state.support[order]
        block = state.hessian[np.ix_(positions, positions)] if self.problem.expensive_columns else None
        trial = refit(self.problem.objective, chosen[order], start, block=block)
        gain = fit.value - trial.value
        return trial if gain > 0.5 * self.tolerance * self._size(fit) else None

    def members(self, fit: Fit) -> Indices:
        """The support and the coordinates with the steepest scaled gradient."""
        if self.whole:
            return np.arange(self.problem.dimension)
        outside = self.problem.candidates.copy()
        outside[fit.support] = False
        width = max(30, 2 * fit.support.size) if self.problem.expensive_columns else max(100, 3 * fit.support.size)
        count = min(int(outside.sum()), width)
        score = np.where(outside, np.abs(fit.gradient) / self.problem.scale, -1.0)
        best = np.argpartition(-score, count - 1)[:count] if count else np.zeros(0, np.int64)
        return np.sort(np.concatenate([fit.support, best])).astype(np.int64)

    def state(self, fit: Fit, members: Indices, hessian: Array | None = None) -> SwapState:
        """The second-order model at a fit on the coordinates `members`, which must include the support of the fit."""
        if hessian is None:
            hessian = self._block(fit, members)
        support = np.searchsorted(members, fit.support).astype(np.int64)
        rows = hessian[support]
        state = self._outside(fit, members, inverse_block(rows[:, support]), rows, hessian.diagonal())
        state.allowed[support] = 0.0
        return state._replace(hessian=hessian, support=support)

    def _outside(self, fit: Fit, members: Indices, inverse: Array, rows: Array, diagonal: Array) -> SwapState:
        """The model without its Hessian: what the best swap with a coordinate of `members` is found from.

        Args:
            fit: the support Q and the gradient.
            members: coordinates (m,).
            inverse: P (k, k).
            rows: H_Q: on the members (k, m).
            diagonal: diag H on the members (m,).
        """
        projection = np.ascontiguousarray(inverse @ rows)
        return SwapState(
            members=members,
            hessian=np.zeros((0, 0)),
            support=fit.support,
            inverse=np.ascontiguousarray(inverse),
            projection=projection,
            schur=diagonal - np.einsum("ij,ij->j", rows, projection),
            gradient=fit.gradient[members],
            theta=fit.theta[fit.support],
            allowed=self.problem.candidates[members].astype(np.float64),
            locked=np.isin(fit.support, self.problem.forced),
        )

    def _block(self, fit: Fit, members: Indices) -> Array:
        objective = self.problem.objective
        if isinstance(objective, GramLeastSquares):
            objective.know(fit.support)
            return objective.rows
        if not self.whole:
            if members.size == self.problem.dimension:
                return self.hessian(fit)
            return np.ascontiguousarray(objective.hessian_block(fit.theta, members))
        if self.gram is None:
            self.gram = np.ascontiguousarray(objective.hessian_block(fit.theta, members))
        return self.gram

    def hessian(self, fit: Fit) -> Array:
        """H (d, d) at a fit; the one that was computed last is kept."""
        if self.latest is None or self.latest[0] is not fit.theta:
            block = self.problem.objective.hessian_block(fit.theta, np.arange(self.problem.dimension))
            self.latest = (fit.theta, np.ascontiguousarray(block))
        return self.latest[1]

    def _improve_anywhere(self, fit: Fit) -> Fit | None:
        """The best swaps of the model over all pairs, tried on f in the order of their predicted decrease."""
        for leaving, entering, _ in self.best_pairs(fit):
            support = fit.support.copy()
            support[leaving] = entering
            trial = refit(self.problem.objective, np.sort(support), fit.theta)
            if fit.value - trial.value > 0.5 * self.tolerance * self._size(fit):
                return trial
        return None

    def best_pairs(self, fit: Fit) -> list[tuple[int, int, float]]:
        """The best swap in every chunk, best first: (position in the support, new coordinate, change of the model)."""
        objective, support = self.problem.objective, fit.support
        inverse = inverse_block(objective.hessian_block(fit.theta, support))
        diagonal = self._diagonal(fit)
        columns = np.setdiff1d(np.flatnonzero(self.problem.candidates), support)
        pairs = []
        for part in np.array_split(columns, max(1, columns.size * support.size // _CHUNK)):
            rows = objective.hessian_columns(fit.theta, support, part).T
            state = self._outside(fit, part, inverse, rows, diagonal[part])
            leaving, entering, change = kernels.best_swap(state, diagonal[part])
            if leaving >= 0 and change < -self.tolerance * self._size(fit):
                pairs.append((leaving, int(part[entering]), change))
        return sorted(pairs, key=lambda pair: pair[2])

    def _diagonal(self, fit: Fit) -> Array:
        objective = self.problem.objective
        return self.problem.scale**2 if objective.quadratic else objective.hessian_diagonal(fit.theta)
