"""Fine-tuning that keeps the zeros: masks at the optimiser's own step, so nothing else needs to know."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from iobs.errors import LayerSelectionError


@dataclass
class SparseTraining:
    """What `keep_sparse` set up; `remove()` lets the weights become dense again.

    Attributes:
        masks: by parameter, False where an entry stays zero.
    """

    masks: dict[nn.Parameter, Tensor]
    handles: list[Any]

    def remove(self) -> None:
        """Stop keeping the zeros."""
        for handle in self.handles:
            handle.remove()


@torch.no_grad()
def keep_sparse(model: nn.Module, optimizer: torch.optim.Optimizer) -> SparseTraining:
    """Keep every entry that is zero now zero through all further steps of an optimiser.

    Gradients of zeros are dropped as soon as they are there, so that they enter no momentum, no norm that gradients are
    clipped to and no line search, and the zeros are written again after a step, whatever weight decay did. A matrix of
    zeros alone, such as an adapter's before its first step, is not kept: it could never be trained. Works under
    DistributedDataParallel as it stands: every rank has the same zeros. Wrap the model before or after.

    Args:
        model: a pruned network. Its parameters of two or more dimensions are looked at.
        optimizer: the optimiser that steps on them.

    Returns:
        A handle; its `remove()` ends it.

    Raises:
        LayerSelectionError: no matrix of the model that the optimiser steps on holds a zero.
    """
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = {
        name: (parameter, parameter != 0)
        for name, parameter in model.named_parameters()
        if id(parameter) in stepped and parameter.ndim >= 2 and bool((parameter == 0).any())
    }
    empty = [name for name, (_, mask) in found.items() if not bool(mask.any())]
    if empty:
        warnings.warn(f"{', '.join(empty)}: all zeros, so taken for not yet trained, and not kept.", stacklevel=2)
    masks = {parameter: mask for name, (parameter, mask) in found.items() if name not in empty}
    if not masks:
        raise LayerSelectionError(
            "There are no zeros to keep: prune the model first, and give the optimizer that steps on its weights."
        )

    @torch.no_grad()
    def drop(parameter: nn.Parameter) -> None:
        if parameter.grad is None:
            return
        if parameter.grad.layout is torch.strided:
            parameter.grad.masked_fill_(~masks[parameter], 0)  # of NaN, too
        else:
            parameter.grad.mul_(masks[parameter])

    @torch.no_grad()
    def before(*_: Any) -> None:  # gradients that were averaged over ranks, or put there by hand
        for parameter in masks:
            drop(parameter)

    @torch.no_grad()
    def after(*_: Any) -> None:
        for parameter, mask in masks.items():
            parameter.masked_fill_(~mask, 0)

    steps = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    trained = [parameter for parameter in masks if parameter.requires_grad]
    gradients = [parameter.register_post_accumulate_grad_hook(drop) for parameter in trained]  # type: ignore[no-untyped-call]
    return SparseTraining(masks, steps + gradients)
