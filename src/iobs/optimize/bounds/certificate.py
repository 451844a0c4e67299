"""The result of a proof, and its limits."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from numbers import Real

import numpy as np

from iobs.errors import ProblemError, is_a, shown
from iobs.optimize.refit.newton import Fit


@dataclass(frozen=True)
class Certificate:
    """The result of `certify`.

    Attributes:
        lower: no support of k coordinates has a value below `lower - margin`.
        upper: value of the best known support.
        gap: (upper - lower) / |upper|.
        gap_explained: (upper - lower) / |f(0) - upper|, the gap of solvers that drop the constant 1/2 norm(y)^2.
        fit: the best support, its coefficients and value.
        nodes: number of nodes looked at.
        seconds: wall time, the search for the first support included.
        closed: whether the gap is at most the requested gap.
        margin: absolute allowance for rounding in every comparison.
        message: the result in words.
        reason: why the search ended, in words.
        basis: how the bound was obtained, in words.
    """

    lower: float
    upper: float
    gap: float
    gap_explained: float
    fit: Fit = field(repr=False)
    nodes: int
    seconds: float
    closed: bool
    margin: float
    message: str
    reason: str
    basis: str


@dataclass(frozen=True)
class ProofLimits:
    """When to stop: at a relative `gap`, `seconds` after `begun` (on `time.perf_counter`), or after `max_nodes`."""

    gap: float
    begun: float
    seconds: float
    max_nodes: int

    @property
    def deadline(self) -> float:
        """The end of the time, on `time.perf_counter`."""
        return self.begun + self.seconds

    def elapsed(self) -> float:
        """Seconds since the begin."""
        return time.perf_counter() - self.begun

    def after(self, seconds: float, nodes: int) -> ProofLimits:
        """The same limits beyond what earlier processes have used; the begin moves back by their seconds."""
        return ProofLimits(self.gap, self.begun - seconds, self.seconds + seconds, self.max_nodes + nodes)


def require_limits(**limits: float) -> None:
    """Check limits of a search by their names.

    Raises:
        ProblemError: a limit is not a number, negative or NaN.
    """
    for name, limit in limits.items():
        if not is_a(Real, limit) or not limit >= 0:
            raise ProblemError(f"{name} must be a number and must not be negative, got {shown(limit)}.")


def relative_gap(lower: float, upper: float) -> float:
    """(upper - lower) / |upper|, at least 0."""
    return max(0.0, upper - lower) / max(abs(upper), 1e-300)


def negligible(upper: float, start: float, gap: float = 0.0) -> float:
    """The largest allowance for rounding with which a proof of a relative gap still says something.

    Args:
        upper: the best known value.
        start: f(0), which rounding is relative to where the best value is about 0.
        gap: the relative gap.
    """
    return max(max(gap, 1e-6) * abs(upper), 1e-9 * abs(start))


def summarised(
    lower: float, fit: Fit, start: float, limits: ProofLimits, nodes: int, margin: float, reason: str, basis: str, *,
    complete: bool,
) -> Certificate:  # fmt: skip
    """The certificate of the best fit, given a proved lower bound and f(0); `complete`: no support is left to try."""
    upper, seconds = fit.value, limits.elapsed()
    gap = relative_gap(lower, upper)
    closed = gap <= limits.gap
    explained = max(0.0, upper - lower) / max(abs(start - upper), 1e-300)
    exact = lower >= upper - margin and margin <= negligible(upper, start)
    if closed and (complete or exact):
        what = "a global minimiser"
    elif closed:
        what = f"within {max(gap, relative_gap(lower - margin, upper)):.2g} of the best value possible"
    elif np.isfinite(lower):
        what = f"gap {gap:.3g} not closed: at least {lower:.6g}, at most {upper:.6g}"
    else:
        what = f"nothing is proved yet; at most {upper:.6g}"
    message = f"{what} ({nodes} nodes, {seconds:.2f} s, rounding margin {margin:.1e}): {reason}"
    return Certificate(lower, upper, gap, explained, fit, nodes, seconds, closed, margin, message, reason, basis)
