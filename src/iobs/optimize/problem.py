"""The problem that a method solves: an objective, k, and the coordinates that may or must be in the support."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral

import numpy as np

from iobs.errors import ProblemError, is_a, shown
from iobs.optimize.objectives.autodiff import TorchObjective
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.design import Array, Booleans, Indices

DENSE_LIMIT = 4096  # most coordinates for which a d x d array is formed
_EXACT_SCALE = 64  # most variables for which d Hessian products for an exact diagonal are cheap
_ROUNDS, _PROBES = 3, 8
_EVEN = 10.0  # estimates within this factor of their median count as equal


def generator_of(seed: object, *stream: int) -> np.random.Generator:
    """The random numbers of a seed, or of a stream of them; None draws a seed.

    Raises:
        ProblemError: it is no whole number of at least 0.
    """
    if seed is not None and not (is_a(Integral, seed) and seed >= 0):  # type: ignore[operator]
        raise ProblemError(f"The seed must be a whole number of at least 0, got {shown(seed)}.")
    return np.random.default_rng([seed, *stream] if stream and seed is not None else seed)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Problem:
    """minimise f(theta) subject to norm(theta)_0 <= k, forced coordinates not counted.

    Attributes:
        objective: f.
        k: largest number of free coordinates that are not zero.
        damping: relative to mean diag(H); None lets the method choose.
        rng: the only source of randomness.
        allowed: boolean (d,), true where a coordinate may enter the support; None allows all.

    Raises:
        ProblemError: k is not an integer, negative, or larger than the number of free coordinates; or the damping is
            negative or not finite.
    """

    objective: Objective
    k: int
    damping: float | None = None
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    allowed: Booleans | None = None

    def __post_init__(self) -> None:
        if not is_a(Integral, self.k) or isinstance(self.k, bool):
            raise ProblemError(f"k must be an integer, got {shown(self.k)}.")
        free = self.objective.dimension - self.objective.forced.size
        if not 0 <= self.k <= free:
            raise ProblemError(f"k must lie between 0 and the {free} coordinates there are, got {self.k}.")
        if self.damping is not None and not (np.isfinite(self.damping) and self.damping >= 0):
            raise ProblemError(f"The damping must be finite and not negative, got {self.damping}.")

    @property
    def dimension(self) -> int:
        """d."""
        return self.objective.dimension

    @property
    def forced(self) -> Indices:
        """Coordinates that are always in the support."""
        return self.objective.forced

    def damping_or(self, damping: float | None) -> float | None:
        """The method's own damping if not None, else the requested one."""
        return self.damping if damping is None else damping

    @property
    def expensive_columns(self) -> bool:
        """Each column of the Hessian takes a differentiation of its own."""
        return isinstance(self.objective, TorchObjective)

    @cached_property
    def scale(self) -> Array:
        """sqrt(diag H) at zero (d,), 1 where H_jj is zero: theta * scale does not depend on units of columns."""
        if isinstance(self.objective, TorchObjective) and self.dimension > _EXACT_SCALE:
            return _equilibrated(self.objective)
        return self.scale_at(np.zeros(self.dimension))

    def scale_at(self, theta: Array) -> Array:
        """sqrt(diag H) at theta (d,), 1 where H_jj is zero or infinite."""
        diagonal = self.objective.hessian_diagonal(theta)
        usable = (diagonal > 0) & np.isfinite(diagonal)
        return np.asarray(np.sqrt(np.where(usable, diagonal, 1.0)))

    @cached_property
    def candidates(self) -> Booleans:
        """Boolean (d,), true where a coordinate may enter the support: allowed, not forced, not constant."""
        mask = np.ones(self.dimension, dtype=np.bool_) if self.allowed is None else self.allowed.copy()
        mask[self.forced] = False
        mask[self.objective.constant_coordinates()] = False
        return mask

    def without_copies(self, *, penalised: bool = False, limits: tuple[Array, Array] | None = None) -> Problem:
        """The problem in which of equal columns a single one may be chosen; arguments as `copied_coordinates`."""
        copies = self.objective.copied_coordinates(penalised=penalised, limits=limits)
        if not copies.size:
            return self
        allowed = np.ones(self.dimension, dtype=np.bool_) if self.allowed is None else self.allowed.copy()
        allowed[copies] = False
        return replace(self, allowed=allowed)

    @cached_property
    def at_zero(self) -> tuple[float, Array]:
        """f and its gradient (d,) at zero."""
        return self.objective.value_and_gradient(np.zeros(self.dimension))

    @cached_property
    def first_slope(self) -> float:
        """The largest entry of the scaled gradient at zero, which does not depend on the units of the columns."""
        return float(np.abs(self.at_zero[1] / self.scale).max(initial=0.0))

    @property
    def size(self) -> int:
        """The number of free coordinates that a support can hold."""
        return min(self.k, int(self.candidates.sum()))

    def top(self, scores: Array, count: int | None = None) -> Indices:
        """The sorted support of the `count` (default k) largest scores among the candidates, plus forced coordinates.

        Ties go to the lower index, so that equal scores always give the same support.
        """
        count = self.size if count is None else min(count, int(self.candidates.sum()))
        if count == 0:
            return np.sort(self.forced)
        finite = scores if np.isfinite(scores).all() else np.nan_to_num(scores, nan=-1.0)
        masked = np.where(self.candidates, finite, -np.inf)
        threshold = np.partition(masked, masked.size - count)[masked.size - count]
        above = np.flatnonzero(masked > threshold)
        tied = np.flatnonzero(masked == threshold)[: count - above.size]
        return np.sort(np.concatenate([above, tied, self.forced])).astype(np.int64)

    def truncate(self, theta: Array, scores: Array | None = None, count: int | None = None) -> Array:
        """T_k: theta with all but its `count` (default k) largest free entries set to zero; forced entries stay."""
        support = self.top(np.abs(theta) if scores is None else scores, count)
        truncated = np.zeros_like(theta)
        truncated[support] = theta[support]
        return truncated

    def feasible(self, theta: Array) -> bool:
        """Check that theta has at most k non-zero free entries."""
        return int(np.count_nonzero(theta)) - int(np.count_nonzero(theta[self.forced])) <= self.k


def require_storable(what: str, dimension: int) -> None:
    """Refuse to store H for too many coordinates.

    Args:
        what: the beginning of the error's message.
        dimension: number of coordinates.

    Raises:
        ProblemError: there are more than `DENSE_LIMIT` coordinates.
    """
    if dimension > DENSE_LIMIT:
        raise ProblemError(f"{what}: at most {DENSE_LIMIT} coordinates, got {dimension}.")


def _equilibrated(objective: TorchObjective) -> Array:
    """Estimate sqrt(diag H) from products with random signs, repeated in the scaled variables.

    One round is Hutchinson's estimate of the diagonal. Its noise comes from the largest coordinates where units differ;
    each further round halves the remaining error in logarithms.
    """
    rng = np.random.default_rng(0)
    scale = np.ones(objective.dimension)
    origin = np.zeros(objective.dimension)
    for _ in range(_ROUNDS):
        signs = rng.choice([-1.0, 1.0], (_PROBES, objective.dimension))
        products = objective.hessian_products(origin, signs / scale) / scale
        estimate = np.abs((signs * products).mean(axis=0))
        typical = float(np.median(estimate))
        if not (typical > 0 and np.isfinite(estimate).all()):
            return np.ones(objective.dimension)
        if estimate.max() < _EVEN * typical and estimate.min() > typical / _EVEN:
            return np.full(objective.dimension, np.sqrt(typical)) * scale
        # At most a factor of ten below the typical entry per round: an estimate can be near zero by chance.
        scale = scale * np.sqrt(np.maximum(estimate, 0.01 * typical))
    return scale
