"""Size of the checkpoint of a run, from the entries that are written and removed."""

from __future__ import annotations

from iobs.pruning.descent.descent import STEPS_BETWEEN_SAVES
from iobs.pruning.recipe import Recipe

_MASTER = 4  # bytes of a fitted weight in float32


def checkpoint_bytes(weights: int, block: int, itemsize: int, recipe: Recipe) -> int:
    """Most bytes of all entries at one time: at the end of the last block, or of the steps of the network.

    Every layer has its last projection, and every block its fit in a window. A block in work has its projections at
    lower sparsity with the fits between them. The window before it stays until the window of the block is stored. Steps
    of the network have two states while one is written, and then the last state and the result.

    Args:
        weights: number of pruned weights.
        block: the same in the largest block.
        itemsize: bytes of a weight in a forward pass.
        recipe: how to prune.
    """
    fit = recipe.blocks
    if fit is None:
        return itemsize * weights
    fitted = _MASTER * (fit.steps > 0 or fit.fits_levels)
    network = _MASTER * (2 if fit.network_steps > STEPS_BETWEEN_SAVES else 1) if fit.network_steps else 0
    levels = (fit.masks - 1) * (itemsize + _MASTER * (fit.between > 0))
    in_work = (levels + fitted * (fit.window - 1)) * block
    return (itemsize + fitted) * weights + max(in_work, network * weights)
