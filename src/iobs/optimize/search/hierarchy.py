"""Sparse models with interactions: an interaction may be in the support only with its main effects.

The coordinates are d main effects, then one for every pair of features. Under strong hierarchy an interaction needs
both main effects of its pair, under weak hierarchy at least one (Bien, Taylor and Tibshirani 2013). k counts all terms.

A search removes a term, with the interactions that lose their main effects, and fills the support up again. Least
squares with few enough supports is enumerated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.design import Array, Indices
from iobs.optimize.objectives.gram import GramLeastSquares, by_gram
from iobs.optimize.problem import generator_of
from iobs.optimize.refit.newton import Fit, on_data, refit

Kind = Literal["strong", "weak"]
Terms = frozenset[int]

_ENUMERATED = 20_000  # most supports of which all are fitted
_BATCH = 4096  # number of supports that are solved at once
_TRIED = 4  # most promising additions of each size that are fitted
_STARTS = 10  # most promising additions of each size to the empty model from which a thorough search starts
_PAIRED = 12  # most terms for which an exchange may remove two
_KICKS = 8


def pairs_of(features: int) -> Indices:
    """The features (features (features - 1) / 2, 2) of every interaction, in the order of `itertools.combinations`."""
    return np.column_stack(np.triu_indices(features, 1)).astype(np.int64)


@dataclass(frozen=True)
class Hierarchy:
    """The terms of a model with interactions.

    Attributes:
        objective: f of d + d (d - 1) / 2 terms; further coordinates must be forced, such as an intercept.
        features: d.
        kind: "strong" or "weak".
        forced: main effects of every support, not counted in k.
    """

    objective: Objective
    features: int
    kind: Kind
    forced: Terms = frozenset()

    @cached_property
    def pairs(self) -> Indices:
        """The features of every interaction (T - d, 2)."""
        return pairs_of(self.features)

    @property
    def terms(self) -> int:
        """T."""
        return self.features + len(self.pairs)

    @property
    def choices(self) -> int:
        """The number of terms that k counts."""
        return self.terms - len(self.forced)

    def support(self, chosen: Terms) -> Indices:
        """The coordinates of the chosen terms, the forced terms and the forced coordinates of the objective."""
        return np.union1d(np.array(sorted(chosen | self.forced), dtype=np.int64), self.objective.forced).astype(
            np.int64
        )

    def allowed(self, chosen: Terms, term: int) -> bool:
        """Check that the main effects that a term needs are chosen or forced."""
        if term < self.features:
            return True
        inside = [int(parent) in chosen or int(parent) in self.forced for parent in self.pairs[term - self.features]]
        return all(inside) if self.kind == "strong" else any(inside)

    def closed(self, chosen: Terms) -> Terms:
        """The chosen terms without the interactions that lack their main effects."""
        return frozenset(term for term in chosen if self.allowed(chosen, term))

    def additions(self, chosen: Terms, room: int) -> dict[int, Indices]:
        """Every term that is not chosen, with the main effects that it needs, of at most `room` terms in all.

        Returns:
            For each number of terms m the additions (count, m).
        """
        inside = np.zeros(self.terms, dtype=np.bool_)
        inside[list(chosen | self.forced)] = True
        d = self.features
        first, second = self.pairs.T
        numbers = np.arange(d, self.terms)
        missing = 2 - inside[first].astype(np.int64) - inside[second]
        free = ~inside[d:]
        open_pairs = numbers[free & (missing == 0 if self.kind == "strong" else missing < 2)]
        offers = {1: np.concatenate([np.flatnonzero(~inside[:d]), open_pairs])[:, None]}
        alone = free & (missing == 2)
        if self.kind == "strong":
            missing_one = free & (missing == 1)
            offers[2] = np.column_stack([numbers, np.where(inside[first], second, first)])[missing_one]
            offers[3] = np.column_stack([numbers, first, second])[alone]
        else:
            either = [np.column_stack([numbers, parent])[alone] for parent in (first, second)]
            offers[2] = np.concatenate(either)
        return {size: terms for size, terms in offers.items() if size <= room and len(terms)}

    def count(self, k: int) -> int:
        """The number of supports of exactly k terms, when no term is forced."""
        total = 0
        for mains in range(min(k, self.features) + 1):
            inner = mains * (mains - 1) // 2
            open_pairs = inner if self.kind == "strong" else inner + mains * (self.features - mains)
            total += math.comb(self.features, mains) * math.comb(open_pairs, k - mains)
        return total

    def supports(self, k: int) -> Iterator[tuple[int, ...]]:
        """All supports of exactly k terms, when no term is forced."""
        for size in range(min(k, self.features) + 1):
            for mains in itertools.combinations(range(self.features), size):
                chosen = frozenset(mains)
                usable = [term for term in range(self.features, self.terms) if self.allowed(chosen, term)]
                for interactions in itertools.combinations(usable, k - size):
                    yield mains + interactions


def hierarchical_path(
    hierarchy: Hierarchy, sizes: Sequence[int], *, seed: int = 0, thorough: bool = False
) -> list[Fit]:
    """The best fits found for ascending numbers of terms, each started from the one before.

    Args:
        hierarchy: the terms and f.
        sizes: ascending values of k.
        seed: seed of random restarts.
        thorough: start from many models for every size.
    """
    objective = by_gram(hierarchy.objective) or hierarchy.objective
    search = _HierarchicalSearch(hierarchy, objective, generator_of(seed))
    chosen: Terms = frozenset()
    fits = []
    for size in sizes:
        chosen = search.best(chosen, min(size, hierarchy.choices), thorough)
        fits.append(on_data(hierarchy.objective, search.fitted(chosen)))
    return fits


@dataclass(frozen=True)
class _HierarchicalSearch:
    hierarchy: Hierarchy
    objective: Objective
    rng: np.random.Generator

    def fitted(self, chosen: Terms, start: Array | None = None) -> Fit:
        return refit(self.objective, self.hierarchy.support(chosen), start)

    def best(self, chosen: Terms, k: int, thorough: bool) -> Terms:
        """The best support of k terms that is found from a smaller one."""
        if k and not self.hierarchy.forced and self.hierarchy.count(k) <= _ENUMERATED:
            enumerated = self.enumerated(k)
            if enumerated is not None:
                return enumerated
        chosen, fit = self.improved(*self.filled(chosen, self.fitted(chosen), k), k)
        nothing: Terms = frozenset()
        empty = self.fitted(nothing)
        for terms in itertools.chain.from_iterable(
            self._promising(nothing, empty, k, _STARTS).values() if thorough else ()
        ):
            other, trial = self.improved(*self.filled(terms, self.fitted(terms), k), k)
            if trial.value < fit.value:
                chosen, fit = other, trial
        for _ in range(_KICKS if thorough and chosen else 0):
            gone = self.rng.choice(np.array(sorted(chosen)), max(1, len(chosen) // 2), replace=False)
            rest = self.hierarchy.closed(chosen - frozenset(gone.tolist()))
            other, trial = self.improved(*self.filled(rest, self.fitted(rest), k), k)
            if trial.value < fit.value:
                chosen, fit = other, trial
        return chosen

    def enumerated(self, k: int) -> Terms | None:
        """The best of all supports by the Gram matrix; None where it is not whole or some support is singular."""
        gram = self.objective
        if not isinstance(gram, GramLeastSquares) or not gram.complete:
            return None
        best, least = None, np.inf
        supports = self.hierarchy.supports(k)
        while batch := list(itertools.islice(supports, _BATCH)):
            rows = np.array(batch)
            blocks, linear = gram.rows[rows[:, :, None], rows[:, None, :]], gram.linear[rows]
            try:
                factor = np.linalg.cholesky(blocks)
            except np.linalg.LinAlgError:
                return None
            half = np.linalg.solve(factor, linear[:, :, None])[:, :, 0]
            values = -0.5 * (half**2).sum(axis=1)
            number = int(np.argmin(values))
            if values[number] < least:
                best, least = frozenset(batch[number]), float(values[number])
        return best

    def filled(self, chosen: Terms, fit: Fit, k: int) -> tuple[Terms, Fit]:
        """Add the terms that lower f most for each term added, up to k."""
        while len(chosen) < k:
            addition = self._addition(chosen, fit, k - len(chosen))
            if addition is None:
                break
            chosen, fit = addition
        return chosen, fit

    def _addition(self, chosen: Terms, fit: Fit, room: int) -> tuple[Terms, Fit] | None:
        best: tuple[Terms, Fit] | None = None
        most = 0.0
        for size, offers in self._promising(chosen, fit, room, _TRIED).items():
            for terms in offers:
                trial = self.fitted(chosen | terms, fit.theta)
                if best is None or (fit.value - trial.value) / size > most:
                    best, most = (chosen | terms, trial), (fit.value - trial.value) / size
        return best

    def _promising(self, chosen: Terms, fit: Fit, room: int, count: int) -> dict[int, list[Terms]]:
        """The `count` additions of each size whose single steps promise most, best first."""
        gain = fit.gradient**2 / np.maximum(self.objective.hessian_diagonal(fit.theta), 1e-300)
        gain[self.objective.constant_coordinates()] = -np.inf
        gain[self.objective.copied_coordinates()] = -np.inf
        promising: dict[int, list[Terms]] = {}
        for size, offers in self.hierarchy.additions(chosen, room).items():
            scores = gain[offers].sum(axis=1)
            order = np.argsort(-scores, kind="stable")[:count]
            promising[size] = [frozenset(offers[number].tolist()) for number in order if np.isfinite(scores[number])]
        return promising

    def improved(self, chosen: Terms, fit: Fit, k: int) -> tuple[Terms, Fit]:
        """Remove one or two terms and fill up again, while that lowers f."""
        better = True
        while better:
            better = False
            leaving = [{term} for term in sorted(chosen)]
            if len(chosen) <= _PAIRED:
                leaving += [set(pair) for pair in itertools.combinations(sorted(chosen), 2)]
            for terms in leaving:
                rest = self.hierarchy.closed(chosen - terms)
                other, trial = self.filled(rest, self.fitted(rest, fit.theta), k)
                if other != chosen and trial.value < fit.value - 1e-10 * max(abs(fit.value), 1e-300):
                    chosen, fit, better = other, trial, True
                    break
        return chosen, fit
