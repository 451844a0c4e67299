"""The best scorecards: integer points for at most k columns, by a tree over supports and a tree over points.

No card is better than the logistic model with real coefficients on the same support. So the search of near-optimal
supports (`convex_tree`) goes through all supports whose real model is better than the best card known, and
`search_points` through the cards of each of them:

    minimise over integer w, real a and 0 <= s <= S:   sum_i log(1 + exp(m_i)) - y_i m_i + 1/2 ridge |s w|^2,
    m_i = a + s x_i^T w,     low <= w <= high

A node bounds every w_j. With theta = s w its relaxation is convex: minimise f where low_j s <= theta_j <= high_j s. A
barrier method solves it by Newton steps. With the slopes g of f at any point, its tangent bounds f on the whole set:

    f(v) >= f(theta, a) - g^T theta - g_a a + S min(0, sum_j min(low_j g_j, high_j g_j)) - |g_a| max |a|,

and at the minimiser for a small weight of the barrier this is close to f. The bound on |a| follows from the known
value. Equal rows of the support are added up, so that k yes-no columns have at most 2^k rows.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from copy import copy
from dataclasses import dataclass, field

import numpy as np
from scipy.special import expit

from iobs.optimize.bounds.convex import INTERRUPTED, FeatureProblem
from iobs.optimize.bounds.convex_tree import ConvexTree
from iobs.optimize.objectives.design import Array, Booleans, Indices
from iobs.optimize.objectives.families import Logistic
from iobs.optimize.problem import Problem, generator_of
from iobs.optimize.refit.newton import Fit, refit
from iobs.optimize.refit.within import Bounds

_BARRIERS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-6)  # bounds on the error of the relaxation, relative to the best known value
_NEWTON = 30
_CONVERGED = 1e-11  # decrement relative to f at which Newton's method ends
_CLOSE = 0.1  # a node that stays open needs its bound only up to this share of what it lacks


@dataclass(frozen=True)
class Scorecard:
    """Integer points and the logistic model of their sum.

    Attributes:
        points: w (k,).
        scale: s.
        intercept: a.
        value: f.
    """

    points: Indices
    scale: float
    intercept: float
    value: float


class RiskModel:
    """f on one support, equal rows added up.

    Args:
        columns: of the support (n, k).
        labels: 0 or 1 (n,).
        weights: of the samples (n,).
        ridge: weights of 1/2 theta_j^2 (k,).
        scale: S, the largest s.
    """

    def __init__(self, columns: Array, labels: Array, weights: Array, ridge: Array, scale: float) -> None:
        self.rows, place = np.unique(columns, axis=0, return_inverse=True)
        self.counts = np.bincount(place.ravel(), weights)
        self.positives = np.bincount(place.ravel(), weights * labels)
        self.ridge, self.scale = ridge, scale

    def value(self, theta: Array, intercept: float) -> float:
        """f."""
        margin = self.rows @ theta + intercept
        losses = float(self.counts @ np.logaddexp(0.0, margin) - self.positives @ margin)
        return losses + 0.5 * float(self.ridge @ theta**2)

    def derivatives(self, theta: Array, intercept: float) -> tuple[Array, Array]:
        """The gradient (k + 1,) and the Hessian (k + 1, k + 1) by theta and the intercept."""
        design = np.column_stack([self.rows, np.ones(len(self.rows))])
        chance = expit(design @ np.append(theta, intercept))
        gradient = design.T @ (self.counts * chance - self.positives)
        gradient[:-1] += self.ridge * theta
        hessian = (design * (self.counts * chance * (1 - chance))[:, None]).T @ design
        hessian[np.diag_indices(theta.size)] += self.ridge
        return gradient, hessian

    def most_intercept(self, ceiling: float, points: Array) -> float:
        """A bound on |a| of every model with a value of at most the ceiling, since no row of a class has a larger loss.

        Both classes must be there, with positive weights.

        Args:
            ceiling: of f.
            points: the largest |w_j| (k,).
        """
        masses = np.concatenate([self.positives, self.counts - self.positives])
        lightest = float(masses[masses > 1e-9 * self.counts.max()].min())
        return ceiling / lightest + self.scale * float((np.abs(self.rows) @ points).max())


@dataclass(order=True)
class _Box:
    """Bounds low <= w <= high, and a lower bound on f within them."""

    bound: float
    number: int
    low: Indices = field(compare=False)
    high: Indices = field(compare=False)


class BestCards:
    """The `count` best scorecards known.

    Args:
        count: number of cards.
        worst: cards with a larger value are of no use, such as the value without any points.
        gap: further cards are searched for only if they are better than the worst of them by this share.

    Attributes:
        cards: by support and points.
        worst: value that a further card must have at most to be kept.
    """

    def __init__(self, count: int, worst: float, gap: float = 0.0) -> None:
        self.count, self.worst, self.gap = count, worst, gap
        self.cards: dict[tuple[tuple[int, ...], tuple[int, ...]], Scorecard] = {}

    @property
    def limit(self) -> float:
        """The value that a card must have at most to be searched for."""
        return (1 - self.gap) * self.worst if len(self.cards) == self.count else self.worst

    def add(self, support: Indices, card: Scorecard, most_scale: float) -> None:
        """Keep a card if it is among the best; points of 0 do not make another card.

        Nor does a common factor of the points, unless the scale of the points without it were above the largest.

        Args:
            support: columns of the card.
            card: the card.
            most_scale: the largest scale.
        """
        used = np.flatnonzero(card.points)
        if not (used.size and card.scale > 0 and card.value <= self.worst):
            return
        key = tuple(support[used].tolist()), tuple(card.points[used].tolist())
        factor = math.gcd(*key[1])
        if key in self.cards or (factor > 1 and factor * card.scale <= most_scale):
            return
        self.cards[key] = Scorecard(card.points[used], card.scale, card.intercept, card.value)
        if len(self.cards) > self.count:
            del self.cards[max(self.cards, key=lambda each: self.cards[each].value)]
        if len(self.cards) == self.count:
            self.worst = max(card.value for card in self.cards.values())


def search_points(
    model: RiskModel, support: Indices, low: Indices, high: Indices, best: BestCards, deadline: float
) -> tuple[float, int]:
    """Find all cards of a support that belong to the best ones.

    Args:
        model: f on the support.
        support: its columns (k,).
        low: least points (k,), at most 0.
        high: most points (k,), at least 0.
        best: the cards known; better ones are added.
        deadline: on `time.perf_counter`.

    Returns:
        A lower bound on f over cards of the support that are not in `best`, and the number of nodes.
    """
    numbers, nodes, dropped = itertools.count(), 0, math.inf
    left = [_Box(-math.inf, next(numbers), low, high)]
    while left and left[0].bound <= best.limit:
        if nodes and time.perf_counter() > deadline:
            return min(dropped, left[0].bound), nodes
        node = heapq.heappop(left)
        nodes += 1
        if (node.low == node.high).all():
            card = fitted_card(model, node.low)
            best.add(support, card, model.scale)
            if card.value > best.limit:  # and perhaps better than the worst card at the end
                dropped = min(dropped, card.value)
            continue
        bound, theta, scale = relaxed(model, node.low, node.high, best.limit)
        bound = max(bound, node.bound)
        if bound > best.limit:
            dropped = min(dropped, bound)
            continue
        shares = np.clip(theta / scale, node.low, node.high)
        best.add(support, fitted_card(model, np.rint(shares).astype(np.int64)), model.scale)
        distance = np.where(node.low == node.high, -1.0, np.abs(shares - np.rint(shares)))
        chosen = int(np.argmax(distance))
        cut = int(min(math.floor(shares[chosen]), node.high[chosen] - 1))
        for lower, upper in ((node.low[chosen], cut), (cut + 1, node.high[chosen])):
            child = _Box(bound, next(numbers), node.low.copy(), node.high.copy())
            child.low[chosen], child.high[chosen] = lower, upper
            heapq.heappush(left, child)
    return min([dropped, *(node.bound for node in left[:1])]), nodes


def fitted_card(model: RiskModel, points: Indices) -> Scorecard:
    """The best scale and intercept for given points."""
    along = model.rows @ points
    sums = copy(model)
    totals, place = np.unique(along, return_inverse=True)
    sums.rows = totals[:, None]
    sums.counts, sums.positives = np.bincount(place, model.counts), np.bincount(place, model.positives)
    sums.ridge = np.array([float(model.ridge @ points.astype(np.float64) ** 2)])
    scale, intercept = _minimise(sums, 0.0, moves=bool(points.any()))
    if not 0 <= scale <= model.scale:
        scale, intercept = _minimise(sums, min(max(scale, 0.0), model.scale), moves=False)
    return Scorecard(points, scale, intercept, sums.value(np.array([scale]), intercept))


def _minimise(model: RiskModel, scale: float, *, moves: bool) -> tuple[float, float]:
    """The minimiser (s, a) of a model of one column, from a scale that stays unless it `moves`."""
    point = np.array([scale, 0.0])
    value = model.value(point[:1], 0.0)
    for _ in range(100):
        gradient, hessian = model.derivatives(point[:1], float(point[1]))
        chosen = slice(0 if moves else 1, 2)
        step = np.zeros(2)
        step[chosen] = -np.linalg.solve(hessian[chosen, chosen] + 1e-14 * np.eye(2)[chosen, chosen], gradient[chosen])
        decrement, length = -float(gradient @ step), 1.0
        while True:
            moved = point + length * step
            if model.value(moved[:1], float(moved[1])) <= value - 1e-4 * length * decrement:
                break
            length *= 0.5
            if length < 1e-8:
                return float(point[0]), float(point[1])
        point = point + length * step
        value = model.value(point[:1], float(point[1]))
        if decrement <= 1e-24 * max(value, 1e-300):
            break
    return float(point[0]), float(point[1])


def relaxed(model: RiskModel, low: Indices, high: Indices, ceiling: float) -> tuple[float, Array, float]:
    """A lower bound on f where low <= w <= high, and the minimiser (theta (k,), s) of the relaxation.

    Args:
        model: f.
        low: (k,).
        high: (k,).
        ceiling: a bound above it needs not be better.
    """
    free = np.flatnonzero(low < high)
    fixed = np.where(low == high, low, 0).astype(np.float64)
    spread = np.zeros((low.size, free.size))
    spread[free, np.arange(free.size)] = 1.0
    change = np.zeros((low.size + 1, free.size + 2))  # (theta, a) = change @ (s, theta of free, a)
    change[:-1, 0], change[:-1, 1:-1], change[-1, -1] = fixed, spread, 1.0
    bottom, top = low[free].astype(np.float64), high[free].astype(np.float64)
    limits = np.zeros((2 * free.size + 1, free.size + 2))  # limits @ (s, theta of free, a) > room
    limits[-1, 0], room = -1.0, np.append(np.zeros(2 * free.size), -model.scale)
    limits[: free.size, 0], limits[: free.size, 1:-1] = -bottom, np.eye(free.size)
    limits[free.size : -1, 0], limits[free.size : -1, 1:-1] = top, -np.eye(free.size)
    mean = min(max(float(model.positives.sum() / model.counts.sum()), 1e-6), 1 - 1e-6)
    points = np.maximum(np.abs(low), np.abs(high)).astype(np.float64)
    scale = min(0.5 * model.scale, 1.0 / max(1.0, float((np.abs(model.rows) @ points).max())))
    point = np.concatenate([[scale], 0.5 * (bottom + top) * scale, [math.log(mean / (1 - mean))]])
    best = -math.inf
    start = model.value(np.zeros(low.size), math.log(mean / (1 - mean)))
    reference = ceiling if math.isfinite(ceiling) else start
    most_intercept = model.most_intercept(max(reference, start), points)
    for share in _BARRIERS:
        weight = share * reference / (2 * free.size + 1)
        point = _centre(model, change, (limits, room), point, weight)
        whole = change @ point
        value, gradient = model.value(whole[:-1], float(whole[-1])), model.derivatives(whole[:-1], float(whole[-1]))[0]
        dual = float(np.minimum(low * gradient[:-1], high * gradient[:-1]).sum())
        largest = 1.0 + float(np.abs(model.rows @ whole[:-1]).max()) + abs(float(whole[-1]))
        terms = abs(value) + largest * float(model.counts.sum())
        margin = 64 * np.finfo(float).eps * (len(model.rows) + low.size) * terms
        bound = value - float(gradient @ whole) + model.scale * min(dual, 0.0)
        best = max(best, bound - most_intercept * abs(float(gradient[-1])) - margin)
        if best > ceiling or value - best <= _CLOSE * (ceiling - best):
            break
    return best, change[:-1] @ point, float(point[0])


def _centre(model: RiskModel, change: Array, inside: tuple[Array, Array], point: Array, weight: float) -> Array:
    """Minimise f - weight * sum log(limits @ x - room) from a point x, by damped Newton steps.

    Args:
        model: f.
        change: from x to (theta, a).
        inside: the limits and the room.
        point: x.
        weight: of the barrier.
    """
    limits, room = inside

    def total(x: Array) -> float:
        slack = limits @ x - room
        if not (slack > 0).all():
            return math.inf
        whole = change @ x
        return model.value(whole[:-1], float(whole[-1])) - weight * float(np.log(slack).sum())

    value = total(point)
    for _ in range(_NEWTON):
        whole, slack = change @ point, limits @ point - room
        gradient, hessian = model.derivatives(whole[:-1], float(whole[-1]))
        pull = weight / slack
        slope = change.T @ gradient - limits.T @ pull
        curvature = change.T @ hessian @ change + (limits * (pull / slack)[:, None]).T @ limits
        step = -np.linalg.solve(curvature + 1e-15 * np.diag(curvature.diagonal()), slope)
        decrement, length = -float(slope @ step), 1.0
        moved = point + step
        after = total(moved)
        while not after <= value - 1e-4 * length * decrement + 1e-14 * abs(value):
            length *= 0.5
            if length < 1e-10:
                return point
            moved = point + length * step
            after = total(moved)
        point, value = moved, after
        if decrement <= _CONVERGED * 1e-6 * abs(value):
            break
    return point


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
