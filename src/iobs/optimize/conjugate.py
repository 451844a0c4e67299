"""Conjugate gradients on a matrix that is only multiplied with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from iobs.optimize.designs import Array


def conjugate_gradients(
    product: Callable[[Array], Array],
    right: Array,
    *,
    goal: float,
    steps: int,
    seen: Callable[[Array, Array], None] = lambda direction, product: None,
) -> Array:
    """An approximate solution of H x = right, from zero; the last iterate where the curvature is not positive.

    Args:
        product: v -> H v, (d,).
        right: (d,).
        goal: squared norm of a residual that is small enough.
        steps: at most so many products.
        seen: is told each direction and its product, unless its curvature is not positive.
    """
    residual, solution = right.copy(), np.zeros_like(right)
    direction = right.copy()
    size = float(residual @ residual)
    for _ in range(steps):
        if size <= goal or size == 0:
            break
        image = product(direction)
        curvature = float(direction @ image)
        if not curvature > 0:
            break
        seen(direction, image)
        length = size / curvature
        solution += length * direction
        residual -= length * image
        following = float(residual @ residual)
        direction = residual + following / size * direction
        size = following
    return solution
