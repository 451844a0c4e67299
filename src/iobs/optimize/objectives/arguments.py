"""Validate user arguments (y, sample_weight, ridge, forced) against a design matrix."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from iobs.errors import ProblemError
from iobs.optimize.objectives import design as designs
from iobs.optimize.objectives.design import Array, Design, Indices, MatrixLike, VectorLike


def prepare(X: MatrixLike, y: VectorLike, sample_weight: VectorLike | None) -> tuple[Design, Array, Array]:
    """The design (n, d), target (n,) and sample weights (n,), validated and converted.

    Raises:
        ProblemError: lengths differ, a weight is negative, all weights are zero, or the target is too large to square.
    """
    design = designs.as_design(X)
    n = design.shape[0]
    target = designs.as_vector(y, "target y", n)
    weights = np.ones(n) if sample_weight is None else weights_of(sample_weight, n)
    with np.errstate(over="ignore"):
        if not np.isfinite(weights @ target**2):
            raise ProblemError("The target y is too large to square; divide it by a constant.")
    return design, target, weights


def weights_of(sample_weight: VectorLike, n: int, name: str = "sample weights") -> Array:
    """Sample weights (n,), validated and converted.

    Raises:
        ProblemError: the length is not n, a weight is negative, NaN or infinite, or all weights are zero.
    """
    weights = designs.as_vector(sample_weight, name, n)
    if weights.min() < 0 or weights.sum() == 0:
        raise ProblemError(
            f"The {name} must not be negative and not all zero, got {weights.min():g} to {weights.max():g}."
        )
    return weights


def weighted_rows(weights: Array) -> Indices | None:
    """The samples of positive weight; None if that is all of them.

    A sample of weight zero is left out of f where its own loss may overflow: zero times infinity is no number.
    """
    return None if (weights > 0).all() else np.flatnonzero(weights).astype(np.int64)


def ridge_vector(ridge: float | VectorLike, dimension: int) -> Array:
    """The ridge of every coordinate (dimension,), from one number or from one per coordinate.

    Raises:
        ProblemError: a ridge is negative or not finite.
    """
    if type(ridge) is float and ridge == 0:
        return np.zeros(dimension)
    values = (
        np.full(dimension, float(np.asarray(ridge)))
        if np.ndim(ridge) == 0
        else designs.as_vector(ridge, "ridge", dimension)
    )
    if values.min() < 0 or not np.isfinite(values).all():
        raise ProblemError(
            f"The ridge must be finite and not negative, got values from {values.min()} to {values.max()}."
        )
    return values


def forced_columns(forced: npt.ArrayLike | None, features: int) -> Indices:
    """Sorted indices of the forced columns, from indices or from a boolean mask.

    Raises:
        ProblemError: neither indices nor a mask of the right length, or an index out of range.
    """
    chosen = np.atleast_1d(np.asarray([] if forced is None else forced))
    if not chosen.size and chosen.dtype != np.bool_:
        return np.zeros(0, np.int64)
    if chosen.dtype.kind == "f" and (chosen == np.round(chosen)).all():
        chosen = chosen.astype(np.int64)
    if chosen.dtype == np.bool_:
        if chosen.shape != (features,):
            raise ProblemError(f"Forced features as a mask need {features} entries, got shape {chosen.shape}.")
        return np.flatnonzero(chosen).astype(np.int64)
    if chosen.ndim != 1 or chosen.dtype.kind not in "iu":
        raise ProblemError(f"Forced features must be numbers or a boolean mask, got {forced!r}.")
    if not 0 <= int(chosen.min()) <= int(chosen.max()) < features:
        raise ProblemError(f"Forced features must lie in 0 ... {features - 1}, got {chosen.tolist()}.")
    return np.unique(chosen).astype(np.int64)
