"""Recipes: everything that is asked of a run, as frozen values without tensors, paths or results."""

from iobs.pruning.recipe.allocation import Allocation, as_allocation
from iobs.pruning.recipe.block_fit import BlockFit
from iobs.pruning.recipe.finetune import Augmentation, FineTune, Loss, LossFunction
from iobs.pruning.recipe.network_solvers import CBS, CHITA, GlobalMagnitude, NetworkSolver, WoodFisher
from iobs.pruning.recipe.recipe import PRESETS, Changes, Recipe, as_recipe
from iobs.pruning.recipe.rounds import Rounds
from iobs.pruning.recipe.rules import Rule

__all__ = [
    "CBS",
    "CHITA",
    "PRESETS",
    "Allocation",
    "Augmentation",
    "BlockFit",
    "Changes",
    "FineTune",
    "GlobalMagnitude",
    "Loss",
    "LossFunction",
    "NetworkSolver",
    "Recipe",
    "Rounds",
    "Rule",
    "WoodFisher",
    "as_allocation",
    "as_recipe",
]
