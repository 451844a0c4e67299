"""Lower bounds on a convex f over sparse vectors: tangents, and the perspective relaxation that finds the best one.

    f(v) = F(v) + 1/2 sum_i ridge_i v_i^2,      lower <= v <= upper,      F convex

A feature has one or more coordinates, and at most k features are used. A node of the search tree has used some of them,
has excluded others, and may use `room` more, of some groups at least one (module `choices`). Every tangent of F lies
below F. So for any point w with g = grad F(w)

    f(v) >= F(w) - g^T w - the largest sum of c_j over the features j of one of its supports,
    c_j = max over v_j within its bounds of -g_j^T v_j - 1/2 ridge_j |v_j|^2.

No part of this is iterative or approximate: a w that was found badly gives a weak bound, never a wrong one. One tangent
bounds every node of the tree. The best w of a node is a minimiser of the perspective relaxation (Guenluek and Linderoth
2010): a free feature is used by a share z_j, and its ridge is divided by z_j. For a fixed price tau of a share, the
relaxation is separable in the features beyond F. It is then solved by Newton steps on a working set, each by coordinate
descent, and tau is found so that the shares add up to `room`. The first unit of shares of a group does not count; a
group has a price of its own, at most tau, at which its shares add up to 1.

Rounding: let F be a sum over n samples, a_i = dF/dm_i, and eps the unit of rounding. The computed tangent belongs to
computed margins, and is off by at most about (n + d) eps times the sum of absolute values of all terms that it adds.
The margins of a tangent are 8 times this, with |a|_2 |x_j|_2 as a bound on sum_i |a_i x_ij|.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numba import njit

from iobs.optimize.bounds.choices import Choices
from iobs.optimize.curvature import QuadraticObjective
from iobs.optimize.objectives.base import DesignObjective
from iobs.optimize.objectives.design import Array, Booleans, Indices

_EPS = float(np.finfo(float).eps)
_STEPS = 40  # most Newton steps of one node
_OF_A_GROUP = 4  # free features of the largest costs of each group that the working set holds
_ALL = 48  # up to so many free coordinates the working set holds all of them
_HALVINGS = 12
_INNER = 0.03  # accuracy of the first descent, relative to the square root of what the bound still lacks
_SWEEPS = 400  # most passes of coordinate descent at one price
_JUMPED = 120  # most coordinates for which a linear system is solved between passes
_ROUNDS = 40  # most changes of the prices in one Newton step
_SLOPE, _FLATTEST, _STEEPEST = 1.5, 0.5, 30.0  # by which power sums of shares fall with the price: first guess, limits
_DAMPED = 8  # changes of the prices after which a step is half as long, as prices of groups disturb each other
_NARROW = 1e-5  # an interval of the logarithm of a price within which the sum of shares jumps
_FILLED = 2e-5  # the shares fill the room, and those of a group add up to 1, up to this relative error


@dataclass(frozen=True)
class Tangent:
    """A tangent of F and the bound that it gives for every node.

    Attributes:
        base: F(w) - g^T w minus the costs of coordinates that belong to no feature.
        costs: c_j of every feature (p,).
        base_margin: absolute allowance for rounding of `base`.
        margins: the same of `costs` (p,).
    """

    base: float
    costs: Array
    base_margin: float
    margins: Array

    def margin(self, choices: Choices) -> float:
        """The allowance for rounding of the bound of a node; excluded features add none."""
        return self.base_margin + float(self.margins[choices.used | choices.free].sum())

    def bound(self, choices: Choices) -> float:
        """A lower bound on f at a node, the margin subtracted."""
        return self.base - choices.largest(self.costs) - self.margin(choices)


@dataclass(frozen=True)
class Relaxed:
    """The relaxation of a node.

    Attributes:
        theta: approximate minimiser (d,).
        shares: z_j of every feature (p,); 1 where it is used.
        prices: tau, and the price of each group by its number; 0 where there is none.
        bound: a lower bound on f at the node, margin subtracted.
        tangent: the tangent with that bound.
        value: the relaxed f at theta, which the bound cannot pass.
    """

    theta: Array
    shares: Array
    prices: Array
    bound: float
    tangent: Tangent
    value: float


class SparseConvex:
    """f with its features, ridge and bounds, as the relaxation needs them.

    Args:
        objective: a convex f, of a design or quadratic.
        owner: for every coordinate the number of its feature, -1 where it is always used (d,).
        ridge: the weight of 1/2 v_i^2 that f - F has (d,); F must be convex.
        lower: of the coordinates (d,), at most 0.
        upper: of the coordinates (d,), at least 0.

    Attributes:
        features: p.
    """

    def __init__(
        self,
        objective: DesignObjective | QuadraticObjective,
        owner: Indices,
        ridge: Array,
        lower: Array,
        upper: Array,
    ) -> None:
        self.objective, self.owner, self.ridge = objective, owner, ridge
        self.lower, self.upper = lower, upper
        self.features = int(owner.max(initial=-1)) + 1
        self.always = owner < 0

    def within(self, places: Indices, lower: Array | float, upper: Array | float) -> SparseConvex:
        """The same f with other bounds on some coordinates."""
        low, high = self.lower.copy(), self.upper.copy()
        low[places], high[places] = lower, upper
        return SparseConvex(self.objective, self.owner, self.ridge, low, high)

    @cached_property
    def _lengths(self) -> Array:
        """|x_i|_2 of every coordinate (d,), or sqrt(H_ii) where there is no design."""
        if isinstance(self.objective, QuadraticObjective):
            return np.sqrt(self.objective.hessian_diagonal(np.zeros(self.ridge.size)))
        design = self.objective.design
        return np.repeat(np.sqrt(design.squares(np.ones(design.shape[0]))), self.objective.outputs)

    @property
    def samples(self) -> int:
        """The number of samples; 0 for a quadratic that is given by its Hessian."""
        return 0 if isinstance(self.objective, QuadraticObjective) else self.objective.design.shape[0]

    @property
    def _additions(self) -> int:
        """Most numbers that are added up for one number of a tangent."""
        return self.ridge.size + self.samples + 64

    def split(self, theta: Array, value: float, gradient: Array) -> tuple[float, Array]:
        """F and its gradient, from f and its gradient."""
        return value - 0.5 * float(self.ridge @ theta**2), gradient - self.ridge * theta

    def tangent(self, theta: Array, value: float, gradient: Array) -> Tangent:
        """The tangent at theta, given f and its gradient there; it bounds nothing where they overflow."""
        with np.errstate(over="ignore", invalid="ignore"):
            smooth, slope = self.split(theta, value, gradient)
            costs, best = self.costs(slope)
            base = smooth - float(slope @ theta) - float(costs[self.always].sum())
            unit = 8 * _EPS * self._additions
            factors = unit * (np.abs(slope) + self.objective.slope_norm(theta) * self._lengths)
            margins = factors * np.abs(best) + unit * np.abs(costs)
            base_margin = unit * (abs(value) + abs(smooth)) + float(factors @ np.abs(theta))
            base_margin += float(margins[self.always].sum())
        # Overflow far from any minimiser, or a coordinate that nothing bounds.
        if not np.isfinite(base - base_margin - float(margins.sum())):
            nothing = np.zeros(self.features)
            return Tangent(-np.inf, nothing, 0.0, nothing)
        return Tangent(base, self.by_feature(costs), base_margin, self.by_feature(margins))

    def costs(self, slope: Array) -> tuple[Array, Array]:
        """c_i of every coordinate, and the v_i at which it is attained (d,) each."""
        with np.errstate(divide="ignore", invalid="ignore"):
            best = np.clip(-slope / self.ridge, self.lower, self.upper)
        best = np.where(slope == 0, 0.0, best)
        with np.errstate(over="ignore", invalid="ignore"):
            costs = np.where(np.isinf(best), np.inf, -slope * best - 0.5 * self.ridge * best**2)
        return costs, np.where(np.isinf(best), 0.0, best)

    def coordinates(self, features: Booleans) -> Booleans:
        """The coordinates of some features (p,), without those that are always used (d,)."""
        return np.asarray(np.append(features, False)[self.owner])  # the owner -1 takes the last entry

    def by_feature(self, values: Array) -> Array:
        """Sums over the coordinates of every feature (p,)."""
        inside = ~self.always
        return np.asarray(np.bincount(self.owner[inside], values[inside], minlength=self.features), dtype=np.float64)

    def relax(self, choices: Choices, start: Array, prices: Array, enough: float) -> Relaxed:
        """Solve the relaxation of a node.

        Args:
            choices: its supports.
            start: first guess (d,); coordinates of excluded features must be zero.
            prices: first guess of tau and of the prices of groups, by their numbers; 0 or missing where unknown.
            enough: a bound above which the node is of no use, so that no better one is needed.
        """
        theta, objective = start, self.objective
        value, gradient = objective.value_and_gradient(theta)
        if not np.isfinite(value):
            theta = np.zeros_like(start)
            value, gradient = objective.value_and_gradient(theta)
        best: tuple[float, Tangent] | None = None
        limited = self.coordinates(choices.free)
        held = self.coordinates(choices.used) | self.always
        part = self._parts(choices)
        known = np.append(prices, np.zeros(max(choices.groups.max(initial=-1) + 2 - prices.size, 0)))
        prices = known[np.append(0, choices.groups + 1)] if choices.limited else np.zeros(1 + choices.groups.size)
        relaxed = np.inf
        for step in range(_STEPS):
            tangent = self.tangent(theta, value, gradient)
            bound = tangent.bound(choices)
            if best is None or bound > best[0]:
                best = bound, tangent
            smooth, slope = self.split(theta, value, gradient)
            if step:
                relaxed = smooth + self._penalty(theta, held, limited, prices[part])
                relaxed -= choices.room * prices[0] + float(prices[1:].sum())
                spread = relaxed - best[0]
                # A node that cannot be pruned needs only a bound that orders the nodes.
                close = 1e-9 * abs(relaxed) + (0.02 if relaxed > enough else 0.1) * abs(enough - best[0])
                if best[0] > enough or spread <= close:
                    break
            elif best[0] > enough:
                break
            working = self._working(theta, held, limited, tangent.costs, choices)
            if not working.size:
                break
            inner = _INNER * 0.5**step  # a pass that ends early costs a Newton step with a new Hessian
            block = objective.hessian_block(theta, working)
            block[np.diag_indices(working.size)] -= self.ridge[working]
            point = theta[working].copy()
            prices = _minimise_model(
                block, slope[working].copy(), point, self.ridge[working], self.lower[working], self.upper[working],
                self._starts(working), held[working], part[working], choices.room, prices, choices.limited,
                max(inner * np.sqrt(abs(enough - best[0]) / working.size), 1e-8 * np.sqrt(abs(value))),
            )  # fmt: skip
            moved = theta.copy()
            moved[working] = point
            before = smooth + self._penalty(theta, held, limited, prices[part])
            accepted = None
            for _ in range(_HALVINGS):
                trial = objective.value_and_gradient(moved)
                if np.isfinite(trial[0]):
                    after = self.split(moved, *trial)[0] + self._penalty(moved, held, limited, prices[part])
                    if objective.quadratic or after <= before + 1e-12 * abs(before):
                        accepted = trial
                        break
                moved = 0.5 * (moved + theta)
            if accepted is None or np.array_equal(moved, theta):
                break
            theta, (value, gradient) = moved, accepted
        assert best is not None
        shares = self._shares(theta, choices.used, limited, prices[part])
        known[np.append(0, choices.groups + 1)] = prices
        return Relaxed(theta, shares, known, best[0], best[1], relaxed)

    def _parts(self, choices: Choices) -> Indices:
        """For every coordinate 1 + the place of its group among the groups; 0 without a group (d,)."""
        grouped = self.coordinates(choices.roles >= 0)
        part = np.zeros(self.owner.size, np.int64)
        part[grouped] = 1 + np.searchsorted(choices.groups, choices.roles[self.owner[grouped]])
        return part

    def _working(self, theta: Array, held: Booleans, limited: Booleans, costs: Array, choices: Choices) -> Indices:
        """The coordinates that a Newton step moves: used ones, non-zero ones, and free ones of the largest costs."""
        if int(limited.sum()) <= _ALL:
            return np.flatnonzero(held | limited).astype(np.int64)
        free = np.flatnonzero(np.bincount(self.owner[limited], minlength=self.features) > 0)
        count = 2 * (choices.room + choices.groups.size) + 10
        chosen = np.zeros(self.features, dtype=np.bool_)
        chosen[free[np.argsort(-costs[free], kind="stable")[:count]]] = True
        for group in choices.groups:
            members = choices.members(int(group))
            chosen[members[np.argsort(-costs[members], kind="stable")[:_OF_A_GROUP]]] = True
        chosen[self.owner[(theta != 0) & limited]] = True
        return np.flatnonzero(held | (limited & self.coordinates(chosen))).astype(np.int64)

    def _starts(self, working: Indices) -> Indices:
        """The beginnings of the blocks of a working set: of every feature, and of every coordinate without one."""
        owner = self.owner[working]
        new = np.ones(owner.size, dtype=np.bool_)
        new[1:] = (owner[1:] != owner[:-1]) | (owner[1:] < 0)
        return np.append(np.flatnonzero(new), owner.size).astype(np.int64)

    def _penalty(self, theta: Array, held: Booleans, limited: Booleans, price: Array) -> float:
        """1/2 ridge v^2 of the held coordinates, and the penalty of the free ones by their prices (d,)."""
        total = 0.5 * float(self.ridge[held] @ theta[held] ** 2)
        there = np.flatnonzero(limited & (theta != 0))
        if there.size:
            total += _free_penalty(
                theta[there], self.ridge[there], self.lower[there], self.upper[there], self._starts(there), price[there]
            )
        return total

    def _shares(self, theta: Array, used: Booleans, limited: Booleans, price: Array) -> Array:
        shares = used.astype(np.float64)
        there = np.flatnonzero(limited & (theta != 0))
        if there.size:
            starts = self._starts(there)
            shares[self.owner[there[starts[:-1]]]] = _block_shares(
                theta[there], self.ridge[there], self.lower[there], self.upper[there], starts, price[there]
            )
        return shares


@njit(cache=True, nogil=True)
def _edge(price: float, ridge: float, limit: float) -> tuple[float, float]:
    """(slope, radius): a free block pays slope * |v| up to the radius, and price + ridge / 2 |v|^2 beyond."""
    if price <= 0.0:
        return 0.0, 0.0
    if limit <= 0.0:
        return np.inf, 0.0
    if price <= 0.5 * ridge * limit * limit:
        slope = np.sqrt(2.0 * ridge * price)
        return slope, slope / ridge
    return (price + 0.5 * ridge * limit * limit) / limit, limit


@njit(cache=True, nogil=True)
def _share(size: float, price: float, ridge: float, limit: float) -> float:
    if size <= 0.0:
        return 0.0
    _, radius = _edge(price, ridge, limit)
    return 1.0 if size >= radius else size / radius


@njit(cache=True, nogil=True)
def _size_and_limit(point: Array, lower: Array, upper: Array, first: int, last: int) -> tuple[float, float]:
    """The norm of a block and its largest norm; blocks of several coordinates have no bounds."""
    if last - first == 1:
        value = point[first]
        return abs(value), (upper[first] if value > 0 else -lower[first])
    total = 0.0
    for i in range(first, last):
        total += point[i] * point[i]
    return np.sqrt(total), np.inf


@njit(cache=True, nogil=True)
def _block_shares(point: Array, ridge: Array, lower: Array, upper: Array, starts: Indices, price: Array) -> Array:
    shares = np.zeros(starts.size - 1)
    for block in range(starts.size - 1):
        first = starts[block]
        size, limit = _size_and_limit(point, lower, upper, first, starts[block + 1])
        shares[block] = _share(size, price[first], ridge[first], limit)
    return shares


@njit(cache=True, nogil=True)
def _free_penalty(point: Array, ridge: Array, lower: Array, upper: Array, starts: Indices, price: Array) -> float:
    total = 0.0
    for block in range(starts.size - 1):
        first = starts[block]
        size, limit = _size_and_limit(point, lower, upper, first, starts[block + 1])
        slope, radius = _edge(price[first], ridge[first], limit)
        if size >= radius and size > 0.0:
            total += price[first] + 0.5 * ridge[first] * size * size
        elif size > 0.0:
            total += slope * size
    return total


@njit(cache=True, nogil=True)
def _shrunk(size: float, curvature: float, price: float, ridge: float, limit: float) -> float:
    """The size of v at the minimum of curvature / 2 (v - size / curvature)^2 and the penalty of a free block."""
    slope, radius = _edge(price, ridge, limit)
    if size <= slope:
        return 0.0
    small = (size - slope) / curvature
    if small <= radius:
        return small
    return min(max(size / (curvature + ridge), radius), limit)


@njit(cache=True, nogil=True)
def _sweep(
    hessian: Array, gradient: Array, point: Array, ridge: Array, lower: Array, upper: Array, starts: Indices,
    held: Booleans, price: Array,
) -> float:  # fmt: skip
    """One pass of coordinate descent, in place; returns the largest change, in units of sqrt(curvature)."""
    largest = 0.0
    for block in range(starts.size - 1):
        first, last = starts[block], starts[block + 1]
        if held[first] or last - first == 1:
            for i in range(first, last):
                curvature = max(hessian[i, i], 1e-300)
                aim = curvature * point[i] - gradient[i]
                if held[i]:
                    new = min(max(aim / (curvature + ridge[i]), lower[i]), upper[i])
                elif aim > 0:
                    new = _shrunk(aim, curvature, price[i], ridge[i], upper[i])
                else:
                    new = -_shrunk(-aim, curvature, price[i], ridge[i], -lower[i])
                change = new - point[i]
                if change != 0.0:
                    point[i] = new
                    for m in range(point.size):
                        gradient[m] += change * hessian[i, m]
                    largest = max(largest, abs(change) * np.sqrt(curvature))
            continue
        curvature = 1e-300
        for i in range(first, last):
            row = 0.0
            for m in range(first, last):
                row += abs(hessian[i, m])
            curvature = max(curvature, row)
        size = 0.0
        for i in range(first, last):
            size += (curvature * point[i] - gradient[i]) ** 2
        size = np.sqrt(size)
        factor = _shrunk(size, curvature, price[first], ridge[first], np.inf) / size if size > 0 else 0.0
        aims = factor * (curvature * point[first:last] - gradient[first:last])
        for i in range(first, last):
            change = aims[i - first] - point[i]
            if change != 0.0:
                point[i] += change
                for m in range(point.size):
                    gradient[m] += change * hessian[i, m]
                largest = max(largest, abs(change) * np.sqrt(curvature))
    return largest


@njit(cache=True, nogil=True)
def _jump(
    hessian: Array, gradient: Array, point: Array, ridge: Array, lower: Array, upper: Array, starts: Indices,
    held: Booleans, price: Array,
) -> None:  # fmt: skip
    """Minimise over the coordinates that are not at a kink, as far as none of them meets a kink; in place.

    Coordinate descent alone is slow where columns depend on each other.
    """
    size = point.size
    moving = np.zeros(size, np.int64)
    low, high, slope, weight = np.zeros(size), np.zeros(size), np.zeros(size), np.zeros(size)
    count = 0
    for block in range(starts.size - 1):
        first = starts[block]
        if starts[block + 1] - first > 1 and not held[first]:
            continue  # the penalty of a block of several coordinates is not quadratic
        for i in range(first, starts[block + 1]):
            value = point[i]
            if value <= lower[i] or value >= upper[i] or (value == 0.0 and not held[i]):
                continue
            bottom, top, pull, curvature = lower[i], upper[i], ridge[i] * value, ridge[i]
            if not held[i]:
                edge, radius = _edge(price[i], ridge[i], upper[i] if value > 0 else -lower[i])
                if abs(value) < radius:
                    pull, curvature = (edge if value > 0 else -edge), 0.0
                    bottom, top = (0.0, radius) if value > 0 else (-radius, 0.0)
                elif value > 0:
                    bottom = radius
                else:
                    top = -radius
            moving[count], low[count], high[count] = i, bottom, top
            slope[count], weight[count] = gradient[i] + pull, curvature
            count += 1
    if count == 0 or count > _JUMPED:
        return
    system = np.zeros((count, count))
    for a in range(count):
        for b in range(count):
            system[a, b] = hessian[moving[a], moving[b]]
        system[a, a] += weight[a] + 1e-12 * hessian[moving[a], moving[a]] + 1e-300
    step = np.linalg.solve(system, -slope[:count])
    length = 1.0
    for a in range(count):
        if not np.isfinite(step[a]):
            return
        room = (high[a] if step[a] > 0 else low[a]) - point[moving[a]]
        if abs(step[a]) * length > abs(room):
            length = room / step[a]
    for a in range(count):
        i, change = moving[a], length * step[a]
        moved = min(max(point[i] + change, low[a]), high[a])
        change = moved - point[i]
        point[i] = moved
        for m in range(size):
            gradient[m] += change * hessian[i, m]


@njit(cache=True, nogil=True)
def _settle(
    hessian: Array, gradient: Array, point: Array, ridge: Array, lower: Array, upper: Array, starts: Indices,
    held: Booleans, part: Indices, prices: Array, accuracy: float,
) -> Array:  # fmt: skip
    """Coordinate descent at some prices until nothing moves; returns the sums of the shares of the parts."""
    price = prices[part]
    for sweep in range(_SWEEPS):
        if _sweep(hessian, gradient, point, ridge, lower, upper, starts, held, price) <= accuracy:
            break
        if sweep % 3 == 2:
            _jump(hessian, gradient, point, ridge, lower, upper, starts, held, price)
    sums = np.zeros(prices.size)
    for block in range(starts.size - 1):
        first = starts[block]
        if not held[first]:
            size, limit = _size_and_limit(point, lower, upper, first, starts[block + 1])
            sums[part[first]] += _share(size, price[first], ridge[first], limit)
    return sums


@njit(cache=True, nogil=True)
def _minimise_model(
    hessian: Array, gradient: Array, point: Array, ridge: Array, lower: Array, upper: Array, starts: Indices,
    held: Booleans, part: Indices, room: int, prices: Array, limited: bool, accuracy: float,
) -> Array:  # fmt: skip
    """Minimise a quadratic model of F with the penalty, in place; returns the prices at which the shares fit.

    Those of a group add up to 1, or to more at the common price, and then what is more fills the room with the others.

    Args:
        hessian: of F at the point (s, s).
        gradient: of F at the point (s,), updated.
        point: (s,), updated.
        ridge: (s,).
        lower: (s,).
        upper: (s,).
        starts: beginnings of the blocks, and s.
        held: true where a coordinate is used (s,).
        part: 0, or 1 + the place of its group (s,).
        room: largest sum of the shares of the free blocks, beyond 1 for each group.
        prices: first guess of the common price and of those of groups; 0 where unknown.
        limited: whether there are more free features than may be used; otherwise all prices are 0.
        accuracy: stop descending once no coordinate moves by more, in units of 1 / sqrt(curvature).
    """
    if not limited:
        _settle(hessian, gradient, point, ridge, lower, upper, starts, held, part, prices, accuracy)
        return prices
    prices = prices.copy()
    most = 0.0
    for i in range(point.size):
        if not held[i]:
            most = max(most, gradient[i] * gradient[i] / (2.0 * (ridge[i] + hessian[i, i] + 1e-300)))
    for number in range(prices.size):
        if prices[number] <= 0.0:
            prices[number] = max(0.5 * prices[0] if number and room else 0.1 * most, 1e-300)
    logs, excesses, slopes = np.zeros(prices.size), np.zeros(prices.size), np.full(prices.size, _SLOPE)
    alone, low, high = prices.size == 1, -np.inf, np.inf  # where no other price moves the sum, an interval is known
    joined = prices >= prices[0] if room else np.zeros(prices.size, np.bool_)  # groups at the common price
    joined[0] = False
    for turn in range(_ROUNDS):
        for number in range(1, prices.size):
            if joined[number]:
                prices[number] = prices[0]
        sums = _settle(hessian, gradient, point, ridge, lower, upper, starts, held, part, prices, accuracy)
        total = sums[0]
        for number in range(1, prices.size):
            joined[number] = joined[number] and sums[number] >= 1.0
            if joined[number]:
                total += sums[number] - 1.0
                sums[number] = 1.0
        sums[0] = total / room if room else 1.0
        if np.abs(sums - 1.0).max() <= _FILLED or high - low <= _NARROW:
            break
        for number in range(prices.size):
            if joined[number] or (number == 0 and not room):
                continue
            log, excess = np.log(prices[number]), np.log(max(sums[number], 0.01))
            if alone:
                low, high = (log, high) if excess > 0 else (low, log)
            if turn and abs(log - logs[number]) > 1e-7:  # secants of the logarithms of sums over those of prices
                slope = (excess - excesses[number]) / (logs[number] - log)
                slopes[number] = min(slope if slope > 0 else 1.5 * slopes[number], _STEEPEST)
                slopes[number] = max(slopes[number], _FLATTEST)
            logs[number], excesses[number] = log, excess
            step = min(max(excess / slopes[number], -1.5), 1.5)
            log += step if alone else step / (1.0 + turn / _DAMPED)
            if np.isfinite(high - low):
                log = min(max(log, 0.9 * low + 0.1 * high), 0.1 * low + 0.9 * high)
            prices[number] = max(np.exp(log), 1e-300)
            joined[number] = number > 0 and room > 0 and prices[number] >= prices[0]
    return prices
