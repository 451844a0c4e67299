"""Recipes that need one block in memory at a time, not the whole model."""

from __future__ import annotations

from iobs.errors import ProblemError
from iobs.pruning.recipe import Recipe, as_allocation


def require_streamable(recipe: Recipe) -> None:
    """Refuse recipes that need the whole model in memory.

    Raises:
        ProblemError: names the settings.
    """
    usual = Recipe()
    whole = ["inputs", "batch_norm", "curvature"]
    # On text, steps of the whole network take the place of a fine-tuning and its rounds; see `decide_steps`.
    if recipe.blocks is None or not recipe.blocks.network_steps or recipe.finetune is None:
        whole += ["rounds", "finetune"]
    names = [name for name in whole if getattr(recipe, name) != getattr(usual, name)]
    if recipe.blocks is not None and recipe.blocks.sampled not in (0, "auto"):
        names.append("blocks.sampled")
    if not as_allocation(recipe.allocation).by_block:
        names.append("allocation")
    if recipe.target == "model":
        names.append("target")
    if recipe.network_solver is not None:
        names.append("solver")
    if names:
        raise ProblemError(
            f"{', '.join(names)}: not with one block in memory at a time yet, because the whole model would be "
            'needed. Take the recipes "one-shot", "fast" or "best" and their solver, refine, damping, target, '
            "bias, blocks, rules and keep_zeros, or prune in memory."
        )
