"""What users give with a design, as arrays that fit it: target, sample weights, ridge and forced columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from iobs.errors import ProblemError
from iobs.optimize import designs
from iobs.optimize.designs import Array, Design, Indices


def prepare(X: Any, y: Any, sample_weight: Any) -> tuple[Design, Array, Array]:
    """Design, target and sample weights as arrays that belong together.

    Raises:
        ProblemError: lengths differ, negative weights, none above zero, or a target too large to square.
    """
    design = designs.as_design(X)
    n = design.shape[0]
    target = designs.as_vector(y, "target y", n)
    weights = np.ones(n) if sample_weight is None else designs.as_vector(sample_weight, "sample weights", n)
    if weights.min() < 0 or weights.sum() == 0:
        raise ProblemError("Sample weights must not be negative, and not all zero.")
    with np.errstate(over="ignore"):
        if not np.isfinite(weights @ target**2):
            raise ProblemError("The target y is too large to square; divide it by a constant.")
    return design, target, weights


def ridge_vector(ridge: float | Any, dimension: int) -> Array:
    """The ridge of every coordinate, (dimension,), from one number or from all.

    Raises:
        ProblemError: negative or infinite.
    """
    values = np.full(dimension, float(ridge)) if np.ndim(ridge) == 0 else designs.as_vector(ridge, "ridge", dimension)
    if values.min() < 0 or not np.isfinite(values).all():
        raise ProblemError("The ridge must be finite and not negative.")
    return values


def forced_columns(forced: Any, features: int) -> Indices:
    """Column numbers, from numbers or from a boolean mask.

    Raises:
        ProblemError: neither, or out of range.
    """
    chosen = np.atleast_1d(np.asarray([] if forced is None else forced))
    if chosen.dtype.kind == "f" and (chosen == np.round(chosen)).all():
        chosen = chosen.astype(np.int64)
    if chosen.dtype == np.bool_:
        if chosen.shape != (features,):
            raise ProblemError(f"Forced features as a mask need {features} entries, got shape {chosen.shape}.")
        return np.flatnonzero(chosen).astype(np.int64)
    if chosen.size and (chosen.ndim != 1 or chosen.dtype.kind not in "iu"):
        raise ProblemError(f"Forced features must be numbers or a boolean mask, got {forced!r}.")
    if chosen.size and not 0 <= int(chosen.min()) <= int(chosen.max()) < features:
        raise ProblemError(f"Forced features must lie in 0 ... {features - 1}, got {chosen.tolist()}.")
    return np.unique(chosen).astype(np.int64)
