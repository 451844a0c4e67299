"""Choice between a run that holds the whole model on a device and a run whose blocks visit it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from iobs.pruning.descent.scoring import needs_reference
from iobs.pruning.network.layers import Layer
from iobs.pruning.network.modes import state
from iobs.pruning.recipe import Recipe
from iobs.pruning.runtime.memory import free_on


def resident_bytes(model: nn.Module, layers: Sequence[Layer], recipe: Recipe) -> int:
    """Bytes that a run takes at least on a device that holds the whole model, without activations and Grams.

    These are the weights, a copy of what may change, a copy of the best round, and the dense model if a loss needs it.
    """
    tensors = dict(state(model))
    whole = sum(value.nbytes for value in tensors.values())
    steps = [step for step in (recipe.rounds.finetune, recipe.finetune) if step is not None]
    everything = recipe.blocks is not None or any(step.parameters == "all" for step in steps)
    changed = whole if everything else sum(tensors[name].nbytes for name in {layer.key for layer in layers})
    return whole + 2 * changed + (whole if recipe.compares and needs_reference(recipe) else 0)


def fits(model: nn.Module, layers: Sequence[Layer], recipe: Recipe, device: torch.device) -> bool:
    """Check that a device has room for a run that holds the whole model there; True for devices other than GPUs."""
    return device.type != "cuda" or resident_bytes(model, layers, recipe) <= free_on(device)
