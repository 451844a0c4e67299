"""Small random problems shared by the tests."""

from __future__ import annotations

import numpy as np


def correlated_design(rng: np.random.Generator, n: int, d: int, rho: float) -> np.ndarray:
    """Rows with AR(1) correlation rho between neighbouring columns, each column of variance one."""
    design = rng.standard_normal((n, d))
    for j in range(1, d):
        design[:, j] = rho * design[:, j - 1] + np.sqrt(1 - rho**2) * design[:, j]
    return design


def sparse_signal(rng: np.random.Generator, d: int, k: int) -> np.ndarray:
    """A vector (d,) with k entries of size U(0.5, 1.5) and random sign."""
    theta = np.zeros(d)
    theta[rng.choice(d, k, replace=False)] = rng.uniform(0.5, 1.5, k) * rng.choice([-1, 1], k)
    return theta
