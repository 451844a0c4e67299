"""The best scorecards: integer points for at most k columns, by a tree over supports and a tree over points.

No card is better than the logistic model with real coefficients on the same support. So the search of near-optimal
supports (`convex_tree`) goes through all supports whose real model is better than the best card known, and
`integer_points` through the cards of each of them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from iobs.optimize.bounds.convex import INTERRUPTED, FeatureProblem
from iobs.optimize.bounds.convex_tree import ConvexTree
from iobs.optimize.bounds.integer_points import BestCards, RiskModel, Scorecard, search_points
from iobs.optimize.objectives.design import Array, Booleans, Indices
from iobs.optimize.objectives.families import Logistic
from iobs.optimize.problem import Problem, generator_of
from iobs.optimize.refit.newton import Fit, refit
from iobs.optimize.refit.within import Bounds


@dataclass(frozen=True)
class CardProof:
    """The best scorecards and what is proved about them.

    Attributes:
        cards: (columns (m,), card) of the best ones, the best first.
        lower: no card beside `cards` has a value below it, and no card at all one below the smaller of it and the best.
        nodes: number of nodes of both trees.
        seconds: wall time.
        reason: why the search ended early; "" if it went to its end.
    """

    cards: list[tuple[Indices, Scorecard]]
    lower: float
    nodes: int
    seconds: float
    reason: str


@dataclass(frozen=True)
class CardProblem:
    """Samples and limits of scorecards.

    Attributes:
        X: (n, d).
        labels: 0 or 1 (n,).
        weights: (n,).
        ridge: of every coefficient of the real model; positive.
        k: most columns of a card.
        low: least points of every column (d,), at most 0.
        high: most points (d,), at least 0.
        scale: the largest log-odds of one point.
    """

    X: Array
    labels: Array
    weights: Array
    ridge: float
    k: int
    low: Indices
    high: Indices
    scale: float

    def features(self, seed: int) -> FeatureProblem:
        """The problem of real coefficients between those of the least and of the most points at the largest scale."""
        objective = Logistic(self.X, self.labels, ridge=self.ridge, intercept=True, sample_weight=self.weights)
        problem = Problem(objective, self.k, rng=generator_of(seed))
        bounds = Bounds(self.scale * self.low.astype(np.float64), self.scale * self.high.astype(np.float64))
        return FeatureProblem.of(problem, bounds.extended(objective.dimension))


class CardSearch(ConvexTree):
    """The tree over supports, of which smaller ones are part of larger ones by points of 0.

    Each support that is taken in is searched for cards; `best` is the best real model.

    Args:
        samples: the problem.
        features: the same with real coefficients.
        fit: its best fit known.
        best: the best cards.
        deadline: on `time.perf_counter`.
    """

    def __init__(
        self, samples: CardProblem, features: FeatureProblem, fit: Fit, best: BestCards, deadline: float
    ) -> None:
        self._samples, self.best, self.cards, self._deadline = samples, fit, best, deadline
        self.inner_nodes = 0
        self._rest: dict[bytes, float] = {}  # lower bounds on further cards of the supports that were searched
        self._search(fit.support[fit.support < samples.X.shape[1]])
        # Bounds on coefficients that hold for all cards up to the worst; no other card is looked at.
        self.ceiling = best.worst
        super().__init__(features.relaxable(fit, self.ceiling), features.size, features.candidates, features.bounds)

    @property
    def limit(self) -> float:
        """The value that a further card must have at most."""
        return self.cards.limit

    @property
    def lower(self) -> float:
        """A lower bound on the value of all cards that are not known."""
        return min(self.left, self.ceiling)

    def take(self, fit: Fit, used: Booleans) -> None:
        """Search the cards of a support."""
        key = np.packbits(used).tobytes()
        if key not in self._rest and fit.value <= self.limit:
            self._rest[key] = self._search(np.flatnonzero(used).astype(np.int64))

    def _decide(self, used: Booleans, start: Array) -> None:
        key = np.packbits(used).tobytes()
        if key not in self._rest:
            self.take(self.fitted(used, start), used)
        # A real model above the limit has no card below it.
        self.dropped = min(self.dropped, self._rest.get(key, self.limit))

    def _search(self, support: Indices) -> float:
        samples = self._samples
        model = RiskModel(
            np.asarray(samples.X[:, support], dtype=np.float64), samples.labels, samples.weights,
            np.full(support.size, samples.ridge), samples.scale,
        )  # fmt: skip
        rest, nodes = search_points(
            model, support, samples.low[support], samples.high[support], self.cards, self._deadline
        )
        self.inner_nodes += nodes
        return rest


def best_cards(samples: CardProblem, count: int, gap: float, seconds: float, seed: int) -> CardProof:
    """The best scorecards, and a lower bound on all others.

    Args:
        samples: the problem.
        count: number of cards.
        gap: relative gap at which the proof ends.
        seconds: time limit; without a proof the best cards known are returned.
        seed: of the first search.

    Raises:
        ProblemError: the data do not bound the intercept.
    """
    begun = time.perf_counter()
    features = samples.features(seed)
    empty = refit(features.problem.objective, features.problem.forced)
    best = BestCards(count, empty.value, gap)
    search = None
    try:
        search = CardSearch(samples, features, features.first_fit(), best, begun + seconds)
        reason = search.run(begun + seconds, max_nodes=10**12)
    except KeyboardInterrupt:
        reason = INTERRUPTED
    cards = sorted(best.cards.items(), key=lambda item: (item[1].value, item[0]))
    found = [(np.array(key[0], dtype=np.int64), card) for key, card in cards]
    if not found:  # no column helps
        nothing = np.zeros(0, np.int64)
        found = [(nothing, Scorecard(nothing, 0.0, features.problem.objective.split(empty.theta)[1], empty.value))]
    elapsed = time.perf_counter() - begun
    if search is None:
        return CardProof(found, 0.0, 0, elapsed, reason)
    return CardProof(found, max(search.lower, 0.0), search.nodes + search.inner_nodes, elapsed, reason)
