"""Solvers whose work grows with the cube of the columns for every single row."""

from __future__ import annotations

from collections.abc import Iterable

from iobs.pruning.network.layers import Layer
from iobs.pruning.recipe import Recipe
from iobs.pruning.runtime.ranks import current
from iobs.solvers.obc import OBC
from iobs.solvers.swap import Swap

_REMOVAL = 1 / 12  # operations of greedy removal, in cubes of the columns for a row
_SWAP = 1 / 4  # the same of one inverse of half of the columns, which is the least that proves a row
_SPEED = 5e10  # operations in a second: float64 in such loops, on all cores of a large CPU
_LONG = 24 * 3600  # seconds of solves that deserve a warning


def slow_seconds(layers: Iterable[Layer], recipe: Recipe) -> float:
    """Least seconds of the solves whose work is rows x columns^3; 0 if the recipe has no such solver.

    Args:
        layers: the layers to prune.
        recipe: how to prune.
    """
    operations = 0.0
    for layer in layers:
        own = recipe.for_layer(layer.name)
        removal = _REMOVAL if own.solver == "obc" or isinstance(own.solver, OBC) else 0.0
        swap = _SWAP if own.refine == "swap" or isinstance(own.refine, Swap) else 0.0
        operations += (removal + swap) * layer.shape[0] * float(layer.shape[1]) ** 3
    return operations / _SPEED / current().size


def warning_of(layers: Iterable[Layer], recipe: Recipe) -> str | None:
    """A warning before a run whose solves take days; None for other runs."""
    seconds = slow_seconds(layers, recipe)
    if seconds < _LONG:
        return None
    return (
        f"Warning: the solves take rows x columns^3 operations, at least {seconds / _LONG:.0f} days for these layers. "
        "Take --solver admm with --set solver.budget=best in place of obc and of refine=swap, or fewer layers."
    )
