"""Size of the checkpoint of a run, from the entries that are written."""

from __future__ import annotations

from iobs.pruning.recipe import Recipe
from iobs.pruning.reconstruction.network_steps import SAVED_EVERY

_MASTER = 4  # bytes of a fitted weight in float32


def checkpoint_bytes(weights: int, itemsize: int, recipe: Recipe) -> int:
    """Bytes of all entries of a checkpoint: none is removed before the end of the run.

    Args:
        weights: number of pruned weights.
        itemsize: bytes of a weight in a forward pass.
        recipe: how to prune.
    """
    fit = recipe.blocks
    if fit is None:
        return itemsize * weights
    projected = fit.masks * itemsize
    fitted = _MASTER * (fit.window + (fit.masks - 1) * (fit.between > 0))
    slots = 2 if fit.network_steps > SAVED_EVERY else 0  # two states alternate, and the result comes last
    network = _MASTER * (slots + 1) if fit.network_steps else 0
    return (projected + fitted + network) * weights
