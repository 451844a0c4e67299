"""Conjugate gradients with a matrix that is only multiplied with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from iobs.optimize.objectives.design import Array


def conjugate_gradients(
    product: Callable[[Array], Array],
    right: Array,
    *,
    goal: float,
    steps: int,
    seen: Callable[[Array, Array], None] = lambda direction, product: None,
) -> Array:
    """Solve H x = right approximately, from zero; the last iterate is returned where the curvature is not positive.

    Args:
        product: v -> H v, (d,).
        right: (d,).
        goal: squared norm of the residual at which to stop.
        steps: largest number of products.
        seen: called with each direction and its product, if its curvature is positive.
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
