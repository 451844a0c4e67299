"""Cheap checks of the samples of an estimator."""

from __future__ import annotations

import math

import numpy as np


def is_clean(X: object, y: object) -> bool:
    """Check that samples need no conversion: NumPy arrays in float64, (n, d) and (n,), finite and not empty."""
    return (
        type(X) is np.ndarray
        and type(y) is np.ndarray
        and X.dtype == np.float64
        and y.dtype == np.float64
        and X.ndim == 2
        and X.size > 0
        and y.shape == X.shape[:1]
        and math.isfinite(X.sum())
        and math.isfinite(y.sum())
    )
