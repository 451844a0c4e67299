"""A lower bound on a convex quadratic over all k-sparse vectors, by tangents and bounds on the coefficients.

The Hessian need not be definite. Every tangent of f lies below f: f(v) >= f(w) + g^T (v - w), g = H w - c, for any w.
If all entries of v are at most t in absolute value and at most k are not zero, the right-hand side is at least

    A(w, t) = f(w) - g^T w - t h_k(g),      h_k(g) = the sum of the k largest |g_i|.

For a known t this bound is strong even where H is singular. The reason is that the dense vectors that fit all samples
have many or large entries. Tangents also prove that no good vector has large entries. Let the largest entry be
v_j = s tau, s = +-1, so that the other k - 1 entries are at most tau. Put w = w_a + s b V with V_j = 1. X V is roughly
the part of column j that the other columns do not explain. V is a row of a regularised inverse, or comes from a lasso
of column j on the others. With Z = H V and f_a = f(w_a) - g_a^T w_a,

    f(v) >= f_a - s b (V^T H w_a) - b^2 / 2 V^T Z + tau (s g_aj + b Z_j - h_{k-1}(g_a) - b h_{k-1}(Z without j)).

For fixed a and b >= 0 the right-hand side is linear in tau. On an interval of tau its minimum is at an end; beyond the
last end it does not fall if the slope is not negative. The best b at a given tau is

    b = (tau (Z_j - h_{k-1}(Z)) - s V^T H w_a)_+ / (V^T Z).

All j, s, a and intervals take a few matrix products. Choose t where A and the bounds for tau > t are equal. Then f is
at least the smaller of A and the bounds for all larger tau.

Within the box the same tangents bound each entry separately: v_j = s m, the others at most t. Let f be above the target
that is to be proved wherever v_j is beyond M_j. Then M_j replaces t for coordinate j in A, with new w for the new box.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numba import njit

from iobs.optimize.objectives.design import Array

_RATIO = 1.12  # ratio of the ends of neighbouring intervals
_INTERVALS = 36
_RIDGES = (3e-3, 1e-2)  # of the regularised inverse, relative to the diagonal of H
_STALLED = 3e-3  # a box that shrinks by less than this (mean, relative) counts as not shrinking
_PASSES = 150  # most shrinking passes for one target
_TRIALS = 8  # number of targets
_STEP = 0.15  # the next target lies this share of the way from the proved bound to the ceiling
_SHARES = (0.985, 0.95, 0.9, 0.8)  # shares of a box that are tried as the new box, largest first


@njit(cache=True, nogil=True)
def lasso(hessian: Array, point: Array, gradient: Array, penalty: Array, sweeps: int, tolerance: float) -> None:
    """Run coordinate descent on 1/2 w^T H w - c^T w + sum_i penalty_i |w_i| from a point, in place.

    Args:
        hessian: (d, d), positive diagonal.
        point: w (d,), updated.
        gradient: H w - c (d,), updated.
        penalty: (d,).
        sweeps: largest number of passes; three of four visit only the non-zero entries.
        tolerance: stop once no entry moves by more than this in a full pass.
    """
    d = point.size
    for sweep in range(sweeps):
        everything = sweep % 4 == 0
        largest = 0.0
        for i in range(d):
            if not everything and point[i] == 0.0:
                continue
            curvature = hessian[i, i]
            aim = point[i] * curvature - gradient[i]
            new = 0.0
            if aim > penalty[i]:
                new = (aim - penalty[i]) / curvature
            elif aim < -penalty[i]:
                new = (aim + penalty[i]) / curvature
            if new != point[i]:
                change = new - point[i]
                for m in range(d):
                    gradient[m] += change * hessian[i, m]
                point[i] = new
                largest = max(largest, abs(change))
        if everything and largest <= tolerance:
            return


@dataclass(frozen=True)
class Tangents:
    """Tangent points w_a of f, one per row.

    Attributes:
        points: w_a (a, d).
        gradients: g_a (a, d).
        values: f(w_a) - g_a^T w_a (a,).
    """

    points: Array
    gradients: Array
    values: Array


@dataclass(frozen=True)
class Directions:
    """Directions V_j that move mostly coordinate j, one per row.

    Attributes:
        images: Z = V H (d, d), with V_jj = 1.
        diagonal: Z_jj (d,).
        rest: h_{k-1} of Z_j without entry j (d,).
        lengths: V_j^T H V_j (d,).
    """

    images: Array
    diagonal: Array
    rest: Array
    lengths: Array


class Boxes:
    """Lower bounds on a convex quadratic over k-sparse vectors, by boxes around the coefficients (see the module).

    Args:
        hessian: H (d, d), positive semi-definite with a positive diagonal.
        linear: c (d,).
        constant: f(0).
        k: number of non-zeros.
    """

    def __init__(self, hessian: Array, linear: Array, constant: float, k: int) -> None:
        self.units = 1.0 / np.sqrt(hessian.diagonal())  # units in which all columns have length 1
        self.hessian = np.ascontiguousarray(hessian * self.units * self.units[:, None])
        self.linear = linear * self.units
        self.constant, self.k = constant, k
        self.largest = self.spread = 0.0  # the largest norm(w_a)_1 and norm(V_j)_1, for the rounding margin

    def lower(self, proved: float, upper: float, deadline: float) -> tuple[float, float]:
        """(bound, margin): f is at least bound - margin on every k-sparse vector; bound is -inf if nothing is proved.

        Args:
            proved: a lower bound already known; the search ends early if its first bound is below it.
            upper: the best value known, the ceiling of all targets.
            deadline: on `time.perf_counter`; the bound proved by then is returned.
        """
        d = self.linear.size
        tangents = self._tangents(np.ones((2, d)))
        families = [self._inverse_directions(ridge) for ridge in _RIDGES]
        near = float(np.abs(tangents.points[-1]).max())
        ends = np.geomspace(near, near * _RATIO ** (_INTERVALS - 1), _INTERVALS)
        bounds = np.max([self._beyond(tangents, family, ends) for family in families], axis=0)
        outside = np.minimum.accumulate(bounds[::-1])[::-1]
        inside = [self._inside(tangents, np.full((2, d), end)) for end in ends]
        bound, ceiling = float(np.minimum(inside, outside).max()), min(upper, float(outside.max()))
        for _ in range(_TRIALS):
            target = bound + _STEP * (ceiling - bound)
            if bound < proved or not np.isfinite(bound) or time.perf_counter() > deadline:
                break
            start = float(ends[int(np.argmax(outside >= target))])
            reached = self._shrink_until(target, tangents, families, np.full((2, d), start), deadline)
            if reached < target:
                ceiling = target
            bound = max(bound, min(target, reached))
        # Rounding: in columns of length 1 a gradient at w is off by at most d eps norm(w)_1, multiplied by norm(v)_1.
        size = self.largest + self.spread * float(ends[-1])
        margin = 8 * d * np.finfo(float).eps * (size * (size + self.k * float(ends[-1])) + abs(self.constant))
        return bound, margin

    def _shrink_until(
        self, target: float, tangents: Tangents, families: list[Directions], box: Array, deadline: float
    ) -> float:
        """The best A over boxes outside which f is at least `target`."""
        reached, fresh = self._inside(tangents, box), False
        for _ in range(_PASSES):
            if reached >= target or time.perf_counter() > deadline:
                break
            smaller = np.min([self._shrink(target, tangents, family, box) for family in families], axis=0)
            moved = float(np.log(smaller / box).mean()) < -_STALLED
            box = smaller
            if not moved:
                if fresh:
                    break
                tangents = self._tangents(box)
            fresh = not moved
            reached = max(reached, self._inside(tangents, box))
        return reached

    def _shrink(self, target: float, tangents: Tangents, family: Directions, box: Array) -> Array:
        """A smaller box (2, d); in the old box but outside the new one f is at least `target`."""
        cross = family.images @ tangents.points.T
        slopes = tangents.gradients.T
        far = _top_sum(self._weighted(tangents.gradients, box), self.k - 1)
        new = box.copy()
        for side, sign in enumerate((1.0, -1.0)):
            weighted = self._weighted(sign * family.images, box)
            np.fill_diagonal(weighted, 0.0)
            rest = _top_sum(weighted, self.k - 1)[:, None]
            going = np.ones(self.linear.size, dtype=np.bool_)
            for share in _SHARES:
                high, low = new[side][:, None], share * box[side][:, None]
                pull = 0.5 * (low + high) * family.diagonal[:, None] - rest - sign * cross
                amount = np.maximum(pull, 0.0) / family.lengths[:, None]
                base = tangents.values - far - amount * (rest + sign * cross + 0.5 * amount * family.lengths[:, None])
                slope = sign * slopes + amount * family.diagonal[:, None]
                going &= (base + slope * np.where(slope > 0, low, high)).max(axis=1) >= target
                new[side, going] = low[going, 0]
        return np.asarray(np.maximum(new, 1e-6 * new.max()))

    def _weighted(self, gradients: Array, box: Array) -> Array:
        """The largest possible value of -g_i v_i in the box, (m, d)."""
        return np.asarray(np.where(gradients < 0, -gradients * box[0], gradients * box[1]))

    def _tangents(self, box: Array) -> Tangents:
        """Tangent points on the path of the lasso with penalties 1 / box."""
        wide = box.max(axis=0)
        point, gradient = np.zeros(wide.size), -self.linear.copy()
        points, gradients = [point.copy()], [gradient.copy()]
        for level in float(np.abs(gradient * wide).max()) * np.geomspace(0.3, 1e-3, 24):
            lasso(self.hessian, point, gradient, level / wide, 60, 1e-3 * float(np.abs(point).max()))
            gradient = self.hessian @ point - self.linear
            points.append(point.copy())
            gradients.append(gradient.copy())
        stack, slopes = np.array(points), np.array(gradients)
        self.largest = max(self.largest, float(np.abs(stack).sum(axis=1).max()))
        values = self.constant - 0.5 * np.einsum("ad,ad->a", stack, slopes + self.linear)
        return Tangents(stack, slopes, values)

    def _inside(self, tangents: Tangents, box: Array) -> float:
        """The largest A over the tangents."""
        return float((tangents.values - _top_sum(self._weighted(tangents.gradients, box), self.k)).max())

    def _inverse_directions(self, ridge: float) -> Directions:
        """Rows of (H + ridge I)^-1, each divided by its own diagonal entry."""
        inverse = np.linalg.inv(self.hessian + ridge * np.eye(self.linear.size))
        vectors = np.ascontiguousarray(inverse / inverse.diagonal()[:, None])
        images = vectors @ self.hessian
        others = np.abs(images)
        np.fill_diagonal(others, 0.0)
        lengths = np.einsum("ij,ij->i", vectors, images)
        self.spread = max(self.spread, float(np.abs(vectors).sum(axis=1).max()))
        return Directions(images, images.diagonal().copy(), _top_sum(others, self.k - 1), lengths)

    def _beyond(self, tangents: Tangents, family: Directions, ends: Array) -> Array:
        """Lower bounds (intervals,) on f where the largest entry, of any coordinate and sign, lies in the interval.

        Interval i is [ends[i], ends[i + 1]]; the last one has no upper end.
        """
        cross = family.images @ tangents.points.T  # V_j^T H w_a
        slopes = tangents.gradients.T
        far = _top_sum(np.abs(tangents.gradients), self.k - 1)
        room = (family.diagonal - family.rest)[:, None]
        lengths = family.lengths[:, None]
        bounds = np.full(ends.size, np.inf)
        for number, low in enumerate(ends):
            last = number == ends.size - 1
            high = low if last else ends[number + 1]
            for sign in (1.0, -1.0):
                amount = np.maximum(0.5 * (low + high) * room - sign * cross, 0.0) / lengths
                base = tangents.values - sign * amount * cross - 0.5 * amount**2 * lengths
                slope = sign * slopes + amount * room - far
                value = base + slope * np.where(slope > 0, low, high)
                if last:
                    value = np.where(slope > 1e-9 * np.abs(self.linear).max(), value, -np.inf)
                bounds[number] = min(bounds[number], float(value.max(axis=1).min()))
        return bounds


def _top_sum(values: Array, count: int) -> Array:
    """The sum of the `count` largest entries of every row."""
    if count <= 0:
        return np.zeros(values.shape[0])
    if count >= values.shape[1]:
        return np.asarray(values.sum(axis=1))
    return np.asarray(np.partition(values, values.shape[1] - count, axis=1)[:, -count:].sum(axis=1))
