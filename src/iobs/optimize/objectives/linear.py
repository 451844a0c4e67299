"""Linear models: their common base and least squares; `families` has the others.

    f(theta) = sum_i w_i l(x_i^T theta, y_i) + 1/2 sum_j ridge_j theta_j^2

All vectors are float64 NumPy arrays. A d x d array is formed only by `hessian_block` on all d coordinates.

The intercept is exact. Least squares centres the data. The other models carry the intercept as a last coordinate that
is always in the support, not counted in k and without ridge (`Objective.forced`). With an intercept the columns are
taken about their means, so that their origin does not matter. The last entry of theta is then the constant at the
means.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from copy import copy
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from iobs.optimize.objectives import centring
from iobs.optimize.objectives import design as designs
from iobs.optimize.objectives.base import DesignObjective
from iobs.optimize.objectives.design import Array, Design, Indices, MatrixLike, VectorLike

_LEVEL = 1e-3  # accuracy of the constant that is added to an offset; the intercept takes the rest


class LinearModel(DesignObjective):
    """Base class of f(theta) = sum_i w_i l(x_i^T theta, y_i) + ridge; a subclass gives l and its two derivatives."""

    quadratic = False
    mean: Array | None = None  # means of the columns (d,) at which the design is centred; None without an intercept
    offset: Array | None = None  # known part of the margins (n,); None for zero
    level: float = 0.0  # what was added to the given offset, and belongs to the intercept

    def __init__(self, design: Design, target: Array, weights: Array, ridge: Array, forced: Indices) -> None:
        self.design = design
        self.target = target
        self.weights = weights
        self.ridge = ridge
        self.forced = forced
        self.dimension = design.shape[1]
        _ = self.squares

    @abstractmethod
    def losses(self, margin: Array) -> Array:
        """l of every sample at its margin x_i^T theta."""

    @abstractmethod
    def slopes(self, margin: Array) -> Array:
        """First derivative of l with respect to the margin."""

    @abstractmethod
    def curvatures(self, margin: Array) -> Array:
        """Second derivative of l with respect to the margin."""

    def information(self, margin: Array) -> Array:
        """Expected second derivative of l with respect to the margin, given the mean: the weights of Fisher scoring."""
        return self.curvatures(margin)

    def dispersion(self, theta: Array, freedom: float) -> float:
        """Estimated variance of y relative to the model's; 1 where the family has no such parameter.

        Args:
            theta: the fit (d,).
            freedom: degrees of freedom of the residuals.
        """
        return 1.0

    def deviance(self, loss: float, samples: float) -> float:
        """-2 log-likelihood of a fit up to a constant of the data, at the best dispersion.

        Args:
            loss: f of the fit, ridge excluded.
            samples: n, or the sum of the sample weights.
        """
        return 2 * loss

    def minibatch(self, rows: Indices) -> Self:
        """The objective of the samples in `rows`, with repetitions and a share of the ridge.

        Samples of weight zero are left out of families, and not counted by `rows`.
        For uniformly drawn rows, n / len(rows) times this objective is an unbiased estimate of f.
        """
        part = copy(self)
        part.design, part.target, part.weights = self.design.samples(rows), self.target[rows], self.weights[rows]
        part.offset = None if self.offset is None else self.offset[rows]
        part.ridge = self.ridge * (rows.size / self.design.shape[0])
        for name in [name for name in vars(part) if isinstance(getattr(type(part), name, None), cached_property)]:
            delattr(part, name)  # computed from all samples
        return part

    def sampled_gradient(self, theta: Array, rows: Indices) -> Array:
        """An unbiased estimate of the gradient from uniformly drawn samples `rows`."""
        return self.design.shape[0] / rows.size * self.minibatch(rows).value_and_gradient(theta)[1]

    def margin(self, theta: Array) -> Array:
        """X theta + offset, (n,)."""
        margin = self.design.matvec(theta)
        return margin if self.offset is None else margin + self.offset

    def value_and_gradient(self, theta: Array) -> tuple[float, Array]:
        """f and its gradient."""
        margin = self.margin(theta)
        with np.errstate(over="ignore", invalid="ignore"):
            gradient = self.design.rmatvec(self.weights * self.slopes(margin)) + self.ridge * theta
            value = float(self.weights @ self.losses(margin)) + 0.5 * float(self.ridge @ theta**2)
        return value, gradient

    def slope_norm(self, theta: Array) -> float:
        """The norm of w_i l'(m_i), (n,)."""
        with np.errstate(over="ignore", invalid="ignore"):
            return float(np.linalg.norm(self.weights * self.slopes(self.margin(theta))))

    def sample_curvature(self, theta: Array) -> Array:
        """The diagonal D of H = X^T D X + ridge, (n,)."""
        with np.errstate(over="ignore"):
            return self.weights * self.curvatures(self.margin(theta))

    def fisher_slopes(self, theta: Array) -> Array:
        """s (n,) of the empirical Fisher matrix X^T diag(s^2) X; an integer weight counts equal rows."""
        return np.sqrt(self.weights) * self.slopes(self.margin(theta))

    def hessian_product(self, theta: Array, vector: Array) -> Array:
        """H v."""
        curvature = self.sample_curvature(theta)
        return self.design.rmatvec(curvature * self.design.matvec(vector)) + self.ridge * vector

    def hessian_block(self, theta: Array, support: Indices) -> Array:
        """H_QQ."""
        half = np.sqrt(self.sample_curvature(theta))[:, None] * self.design.columns(support)
        block = half.T @ half  # a product of a matrix with its own transpose takes half of the multiplications
        designs.add_to_diagonal(block, self.ridge[support])
        return block

    def hessian_columns(self, theta: Array, support: Indices, rows: Indices | None = None) -> Array:
        """H_:Q, or only the rows in `rows`."""
        weighted = self.sample_curvature(theta)[:, None] * self.design.columns(support)
        if rows is None or 2 * rows.size > self.dimension:
            block = self.design.rmatmat(weighted)
            block[support, np.arange(support.size)] += self.ridge[support]
            return block if rows is None else block[rows]
        return self.with_ridge(self.design.rmatmat(weighted, rows), rows, support)

    def hessian_diagonal(self, theta: Array) -> Array:
        """diag H."""
        return self.design.squares(self.sample_curvature(theta)) + self.ridge

    def split(self, theta: Array) -> tuple[Array, float]:
        """The coefficients of the features, and the intercept."""
        if self.mean is None:
            return theta, 0.0
        return theta[:-1], float(theta[-1] - self.mean @ theta[:-1]) + self.level

    def restricted(self, support: Indices) -> Self:
        """The same loss on the columns in `support`."""
        part = super().restricted(support)
        part.mean = None
        return part

    def _best_level(self) -> float:
        """The constant that is best where the margins are it plus the offset, by bisection.

        A search that begins there gives the same model for every origin of the offset.
        """
        assert self.offset is not None
        origin = float(self.offset.mean())
        spread = float(np.abs(self.offset - origin).max()) + 50.0
        low, high = -spread, spread
        with np.errstate(over="ignore", invalid="ignore"):
            while high - low > _LEVEL:
                middle = 0.5 * (low + high)
                slope = float(self.weights @ self.slopes(self.offset - origin + middle))
                # Terms that overflow have both signs for no family: not a number means that all are infinite.
                low, high = (low, middle) if slope > 0 or (np.isnan(slope) and middle > 0) else (middle, high)
        return 0.5 * (low + high) - origin


class LeastSquares(LinearModel):
    """1/2 sum_i w_i (y_i - x_i^T theta - b)^2 + 1/2 ridge norm(theta)^2, with the factor 1/2 so that H = X^T X.

    Args:
        X: (n, d) design, dense NumPy, scipy.sparse or torch; float32 or float64.
        y: (n,) targets.
        ridge: weight of 1/2 norm(theta)^2, or one weight per coordinate (d,).
        intercept: solve for a free constant b, returned as `MinimizeResult.intercept`.
        sample_weight: (n,) non-negative.
        forced: columns that are always in the support and not counted in k.
        offset: (n,) known part of the margins, such as the log of the exposure; zero if not given.

    Raises:
        ProblemError: shapes do not fit, or a negative weight.
        NonFiniteError: NaN or infinity in X, y or the weights.
    """

    quadratic = True
    by_gram: object = None  # this objective by its Gram matrix, once `gram.by_gram` has made it
    # Square roots of the sample weights (n,), already multiplied into X and y; None without weights.
    root: Array | None = None

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
        if offset is not None:
            target = target - designs.as_vector(offset, "offset", target.size)
        if sample_weight is not None and not (weights == 1).all():
            self.root = np.sqrt(weights)
            design, target = centring.scale_rows(design, self.root), self.root * target
        self.level = 0.0
        if intercept:
            root = weights if self.root is None else self.root
            self.mean = centring.column_means(design, root, weights.sum())
            self.level = float(root @ target) / float(weights.sum())
            design, target = centring.centre(design, root, self.mean), target - root * self.level
        columns = design.shape[1]
        super().__init__(
            design,
            target,
            np.ones(design.shape[0]),
            designs.ridge_vector(ridge, columns),
            designs.forced_columns(forced, columns),
        )

    def losses(self, margin: Array) -> Array:
        """1/2 (y - m)^2."""
        return 0.5 * (self.target - margin) ** 2

    def slopes(self, margin: Array) -> Array:
        """m - y."""
        return margin - self.target

    def curvatures(self, margin: Array) -> Array:
        """1 for every sample."""
        return np.ones_like(margin)

    def sample_curvature(self, theta: Array) -> Array:
        """Ones (n,): the weights are already in X."""
        return np.ones(self.design.shape[0])

    def fisher_slopes(self, theta: Array) -> Array:
        """Residuals; sqrt(w) is already in X, so it is divided out of the residual."""
        slopes = self.slopes(self.margin(theta))
        if self.root is None:
            return slopes
        return np.divide(slopes, self.root, out=np.zeros_like(slopes), where=self.root > 0)

    def hessian_diagonal(self, theta: Array) -> Array:
        """Sums of squares of the columns + ridge, computed once."""
        return self.squares + self.ridge

    def hessian_block(self, theta: Array, support: Indices) -> Array:
        """X_Q^T X_Q + ridge."""
        columns = self.design.columns(support)
        block = columns.T @ columns
        designs.add_to_diagonal(block, self.ridge[support])
        return block

    def minibatch(self, rows: Indices) -> Self:
        """See `LinearModel.minibatch`; weights and centring are in the data already."""
        part = super().minibatch(rows)
        part.by_gram = None
        part.root = None if self.root is None else self.root[rows]
        return part

    def restricted(self, support: Indices) -> Self:
        """The same loss on the columns in `support`; weights and centring are in the data already."""
        part = super().restricted(support)
        part.by_gram = part.root = None
        return part

    def deviance(self, loss: float, samples: float) -> float:
        """n log(RSS / n)."""
        floor = max(np.finfo(float).eps ** 2 * float(self.target @ self.target), 1e-300)
        return samples * math.log(max(2 * loss, floor) / samples)

    def split(self, theta: Array) -> tuple[Array, float]:
        """theta and the constant b."""
        return theta, 0.0 if self.mean is None else self.level - float(self.mean @ theta)
