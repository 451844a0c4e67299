"""Families of generalised linear models: logistic, Poisson, gamma, Tweedie, negative binomial.

Every loss is half the deviance: zero where the mean equals y, so that a perfect fit has the loss 0. The link is the
logit for `Logistic` and the logarithm for all others. A family gives l and its derivatives with respect to the margin.
It also gives the variance function for its dispersion, and the expected curvature for classical standard errors.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import cached_property
from numbers import Real
from typing import TypedDict, Unpack

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import expit, gammaln, psi, xlogy

from iobs.errors import ProblemError, is_a
from iobs.optimize.objectives import centring
from iobs.optimize.objectives import design as designs
from iobs.optimize.objectives.design import Array, MatrixLike, VectorLike
from iobs.optimize.objectives.linear import LinearModel


class Options(TypedDict, total=False):
    """Arguments that all families have; `Logistic` explains them."""

    ridge: float | VectorLike
    intercept: bool
    sample_weight: VectorLike | None
    forced: npt.ArrayLike | None
    offset: VectorLike | None


class Family(LinearModel):
    """Base class of sum_i w_i l(m_i, y_i) + 1/2 ridge norm(theta)^2 with m_i = x_i^T theta + offset_i + b."""

    def __init__(
        self,
        X: MatrixLike,
        y: VectorLike,
        *,
        ridge: float | VectorLike = 0.0,
        intercept: bool = False,
        sample_weight: VectorLike | None = None,
        forced: npt.ArrayLike | None = (),
        offset: VectorLike | None = None,
    ) -> None:
        design, target, weights = designs.prepare(X, y, sample_weight)
        target, rows = self._accepted(target), designs.weighted_rows(weights)
        if offset is not None:
            self.offset = designs.as_vector(offset, "offset", target.size)
        if rows is not None:
            design, target, weights = design.samples(rows), target[rows], weights[rows]
            self.offset = None if self.offset is None else self.offset[rows]
        penalty, always = designs.ridge_vector(ridge, design.shape[1]), designs.forced_columns(forced, design.shape[1])
        if intercept:  # the last coordinate
            always, penalty = np.append(always, design.shape[1]), np.append(penalty, 0.0)
            design, self.mean = centring.with_intercept(design, weights)
        super().__init__(design, target, weights, penalty, always)
        if intercept and self.offset is not None:
            self.level = self._best_level()
            self.offset = self.offset + self.level

    @abstractmethod
    def _accepted(self, target: Array) -> Array:
        """The target as the family takes it.

        Raises:
            ProblemError: values that the family does not have.
        """


class LogLink(Family):
    """Base class of the families whose mean is exp(m) and whose dispersion is free."""

    @abstractmethod
    def variance(self, mean: Array) -> Array:
        """The variance function of the family at a mean, without the dispersion."""

    def information(self, margin: Array) -> Array:
        """mu^2 / variance(mu)."""
        mean = np.exp(margin)
        return np.asarray(mean**2 / self.variance(mean))

    def dispersion(self, theta: Array, freedom: float) -> float:
        """Pearson's statistic by degree of freedom; NaN without any."""
        if freedom <= 0:
            return math.nan
        mean = np.exp(self.margin(theta))
        return float(self.weights @ ((self.target - mean) ** 2 / self.variance(mean))) / freedom


class Logistic(Family):
    """sum_i w_i [log(1 + exp(m_i)) - y_i m_i] + ridge, m_i = x_i^T theta + b.

    Args:
        X: (n, d) design.
        y: (n,) in [0, 1] (soft labels are allowed), or in {-1, 1}, or boolean.
        ridge: as `LeastSquares`.
        intercept: add a constant that is always in the support, returned as `MinimizeResult.intercept`.
        sample_weight: (n,) non-negative.
        forced: columns that are always in the support and not counted in k.
        offset: (n,) known part of the margins, such as the log of the exposure; zero if not given.

    Raises:
        ProblemError: shapes do not fit, or labels outside [0, 1].
        NonFiniteError: NaN or infinity.
    """

    def _accepted(self, target: Array) -> Array:
        if np.isin(target, (-1.0, 1.0)).all() and (target == -1).any():
            target = 0.5 * (target + 1)
        if target.min() < 0 or target.max() > 1:
            raise ProblemError("Logistic needs labels in [0, 1] or in {-1, 1}; encode the two classes as 0 and 1.")
        return target

    def losses(self, margin: Array) -> Array:
        """log(1 + exp(m)) - y m, minus its minimum over m, so that soft labels can reach 0.

        Computed as log(1 + exp(-|m|)) + (max(m, 0) - y m), the bracket as one product: full relative accuracy in both
        tails.
        """
        y = self.target
        away = np.where(margin > 0, (1 - y) * margin, -y * margin)
        return np.asarray(np.log1p(np.exp(-np.abs(margin))) + away + self._entropy)

    @cached_property
    def _entropy(self) -> Array:
        return np.asarray(xlogy(self.target, self.target) + xlogy(1 - self.target, 1 - self.target))

    def slopes(self, margin: Array) -> Array:
        """sigma(m) - y."""
        return np.asarray(expit(margin)) - self.target

    def curvatures(self, margin: Array) -> Array:
        """sigma(m) sigma(-m), without cancellation in the tails."""
        return np.asarray(expit(margin) * expit(-margin))


class Poisson(Family):
    """sum_i w_i [exp(m_i) - y_i m_i] + ridge, minus the same at m_i = log y_i; m_i = x_i^T theta + b.

    Args:
        X: (n, d) design.
        y: (n,) non-negative (noiseless rates are allowed).
        ridge: as `Logistic`.
        intercept: as `Logistic`.
        sample_weight: (n,) non-negative.
        forced: columns that are always in the support and not counted in k.
        offset: (n,) known part of the margins, such as the log of the exposure; zero if not given.

    Raises:
        ProblemError: shapes do not fit, or a negative target.
        NonFiniteError: NaN or infinity.
    """

    def _accepted(self, target: Array) -> Array:
        if target.min() < 0:
            raise ProblemError("Poisson needs non-negative targets; for real-valued targets use the squared loss.")
        return target

    def losses(self, margin: Array) -> Array:
        """exp(m) - y m - (y - y log y)."""
        y = self.target
        return np.asarray(np.exp(margin) - y * margin - y + xlogy(y, y))

    def slopes(self, margin: Array) -> Array:
        """exp(m) - y."""
        return np.asarray(np.exp(margin)) - self.target

    def curvatures(self, margin: Array) -> Array:
        """exp(m)."""
        return np.asarray(np.exp(margin))


class Gamma(LogLink):
    """sum_i w_i [y_i exp(-m_i) + m_i - 1 - log y_i] + ridge, m_i = x_i^T theta + offset_i + b.

    The dispersion is estimated by Pearson's statistic for standard errors, and by maximum likelihood for criteria.

    Args:
        X: (n, d) design.
        y: (n,) positive.
        ridge: as `Logistic`; so are intercept, sample_weight, forced and offset.

    Raises:
        ProblemError: shapes do not fit, or a target that is not positive.
        NonFiniteError: NaN or infinity.
    """

    def _accepted(self, target: Array) -> Array:
        if target.min() <= 0:
            raise ProblemError("Gamma needs positive targets; for targets with zeros use the loss tweedie.")
        return target

    def losses(self, margin: Array) -> Array:
        """y exp(-m) + m - 1 - log y."""
        return np.asarray(self.target * np.exp(-margin) + margin - 1 - np.log(self.target))

    def slopes(self, margin: Array) -> Array:
        """1 - y exp(-m)."""
        return np.asarray(1 - self.target * np.exp(-margin))

    def curvatures(self, margin: Array) -> Array:
        """y exp(-m)."""
        return np.asarray(self.target * np.exp(-margin))

    def variance(self, mean: Array) -> Array:
        """mu^2."""
        return mean**2

    def deviance(self, loss: float, samples: float) -> float:
        """-2 log-likelihood at the best shape, which solves log(shape) - psi(shape) = loss / n."""
        mean = max(loss / samples, 1e-12)
        shape = math.exp(brentq(lambda log: log - psi(math.exp(log)) - mean, -40.0, 40.0))
        return float(2 * (samples * (gammaln(shape) + shape - shape * math.log(shape)) + shape * loss))


class Tweedie(LogLink):
    """Half the Tweedie deviance + ridge: variance mu^power, for amounts that are zero or positive.

        l = y^(2 - p) / ((1 - p) (2 - p)) - y mu^(1 - p) / (1 - p) + mu^(2 - p) / (2 - p),  mu = exp(m)

    Args:
        X: (n, d) design.
        y: (n,) non-negative.
        power: p, with 1 < p < 2; `Poisson` is the limit 1 and `Gamma` the limit 2.
        options: ridge, intercept, sample_weight, forced and offset as `Logistic`.

    Raises:
        ProblemError: shapes do not fit, a negative target, or a power out of range.
        NonFiniteError: NaN or infinity.
    """

    def __init__(self, X: MatrixLike, y: VectorLike, *, power: float = 1.5, **options: Unpack[Options]) -> None:
        if not (is_a(Real, power) and 1 < power < 2):
            raise ProblemError(f"The power must lie between 1 and 2, got {power!r}; use Poisson for 1 and Gamma for 2.")
        self.power = power
        super().__init__(X, y, **options)

    def _accepted(self, target: Array) -> Array:
        if target.min() < 0:
            raise ProblemError("Tweedie needs non-negative targets; for real-valued targets use the squared loss.")
        return target

    def losses(self, margin: Array) -> Array:
        """Half the deviance of every sample."""
        p, y = self.power, self.target
        moving = np.exp((2 - p) * margin) / (2 - p) - y * np.exp((1 - p) * margin) / (1 - p)
        return np.asarray(moving + y ** (2 - p) / ((1 - p) * (2 - p)))

    def slopes(self, margin: Array) -> Array:
        """mu^(2 - p) - y mu^(1 - p)."""
        p = self.power
        return np.asarray(np.exp((2 - p) * margin) - self.target * np.exp((1 - p) * margin))

    def curvatures(self, margin: Array) -> Array:
        """(2 - p) mu^(2 - p) + (p - 1) y mu^(1 - p)."""
        p = self.power
        return np.asarray((2 - p) * np.exp((2 - p) * margin) + (p - 1) * self.target * np.exp((1 - p) * margin))

    def variance(self, mean: Array) -> Array:
        """mu^p."""
        return np.asarray(mean**self.power)

    def deviance(self, loss: float, samples: float) -> float:
        """n log(deviance / n): the saddlepoint approximation of the likelihood at the best dispersion."""
        return samples * math.log(max(2 * loss, 1e-300) / samples)


class NegativeBinomial(LogLink):
    """Half the deviance of counts with variance mu + alpha mu^2, + ridge; mu = exp(m).

    Args:
        X: (n, d) design.
        y: (n,) non-negative.
        alpha: positive; near 0 the counts are Poisson.
        options: ridge, intercept, sample_weight, forced and offset as `Logistic`.

    Raises:
        ProblemError: shapes do not fit, a negative target, or an alpha that is not positive.
        NonFiniteError: NaN or infinity.
    """

    def __init__(self, X: MatrixLike, y: VectorLike, *, alpha: float = 1.0, **options: Unpack[Options]) -> None:
        if not (is_a(Real, alpha) and alpha > 0 and np.isfinite(alpha)):
            raise ProblemError(f"alpha must be positive, got {alpha!r}; use Poisson for 0.")
        self.alpha = alpha
        super().__init__(X, y, **options)

    def _accepted(self, target: Array) -> Array:
        if target.min() < 0:
            raise ProblemError("NegativeBinomial needs non-negative targets.")
        return target

    @cached_property
    def _least(self) -> Array:
        """The smallest negative log-likelihood of every sample, at mu = y."""
        y = self.target
        return np.asarray((y + 1 / self.alpha) * np.log1p(self.alpha * y) - xlogy(y, y))

    def losses(self, margin: Array) -> Array:
        """(y + 1/alpha) log(1 + alpha mu) - y m, minus the same at mu = y."""
        y = self.target
        growth = np.logaddexp(0.0, margin + math.log(self.alpha))
        return np.asarray((y + 1 / self.alpha) * growth - y * margin - self._least)

    def slopes(self, margin: Array) -> Array:
        """(mu - y) / (1 + alpha mu)."""
        share = expit(margin + math.log(self.alpha))  # alpha mu / (1 + alpha mu)
        return np.asarray(share / self.alpha - self.target * (1 - share))

    def curvatures(self, margin: Array) -> Array:
        """mu (1 + alpha y) / (1 + alpha mu)^2."""
        share = expit(margin + math.log(self.alpha))
        return np.asarray((1 / self.alpha + self.target) * share * (1 - share))

    def variance(self, mean: Array) -> Array:
        """mu + alpha mu^2."""
        return mean + self.alpha * mean**2

    def dispersion(self, theta: Array, freedom: float) -> float:
        """1: alpha is given."""
        return 1.0


# Those with a log link, by the names that estimators, the command line and files of models know.
FAMILIES: dict[str, type[Family]] = {
    "poisson": Poisson,
    "gamma": Gamma,
    "tweedie": Tweedie,
    "negative_binomial": NegativeBinomial,
}
