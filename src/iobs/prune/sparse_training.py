"""Fine-tuning that keeps the zeros: masks at the optimiser's own step, so nothing else needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from iobs.errors import LayerSelectionError


@dataclass
class SparseTraining:
    """What `keep_sparse` set up; `remove()` lets the weights become dense again."""

    masks: dict[nn.Parameter, Tensor]
    handles: list[Any]

    def remove(self) -> None:
        """Stop keeping the zeros."""
        for handle in self.handles:
            handle.remove()


@torch.no_grad()
def keep_sparse(model: nn.Module, optimizer: torch.optim.Optimizer) -> SparseTraining:
    """Keep every entry that is zero now zero through all further steps of an optimiser.

    Gradients of zeros are dropped before a step, so that they enter no momentum, and the zeros are written again after
    it, whatever weight decay did. Works under DistributedDataParallel as it stands: gradients are averaged before the
    step, and every rank has the same zeros. Wrap the model before or after.

    Args:
        model: a pruned network. Its parameters of two or more dimensions are looked at.
        optimizer: the optimiser that steps on them.

    Returns:
        A handle; its `remove()` ends it.

    Raises:
        LayerSelectionError: no matrix of the model that the optimiser steps on holds a zero.
    """
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    masks = {
        parameter: parameter != 0
        for parameter in model.parameters()
        if id(parameter) in stepped and parameter.ndim >= 2 and bool((parameter == 0).any())
    }
    if not masks:
        raise LayerSelectionError(
            "There are no zeros to keep: prune the model first, and give the optimizer that steps on its weights."
        )

    @torch.no_grad()
    def before(*_: Any) -> None:
        for parameter, mask in masks.items():
            if parameter.grad is not None:
                parameter.grad.mul_(mask)

    @torch.no_grad()
    def after(*_: Any) -> None:
        for parameter, mask in masks.items():
            parameter.mul_(mask)

    return SparseTraining(masks, [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)])
