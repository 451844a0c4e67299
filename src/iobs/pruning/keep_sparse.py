"""Fine-tuning that keeps the zeros: masks in hooks of the optimizer, without other changes to the training loop."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from iobs.errors import LayerSelectionError


@dataclass
class SparseTraining:
    """The hooks of `keep_sparse`; after `remove()` the weights may become dense again.

    Attributes:
        masks: by parameter, False at entries that stay zero; of a sharded parameter the part of this rank.
        handles: of the hooks.
    """

    masks: dict[nn.Parameter, Tensor]
    handles: list[RemovableHandle]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()


@torch.no_grad()
def keep_sparse(model: nn.Module, optimizer: torch.optim.Optimizer) -> SparseTraining:
    """Keep every entry that is zero now at zero in all further steps of an optimizer.

    Gradients of zeros are removed as soon as they exist, so that they enter no momentum, gradient norm or line search.
    After each step the zeros are written again, to undo weight decay. A matrix that is entirely zero, such as an
    adapter before its first step, is not kept, since it could never be trained. Works under DistributedDataParallel:
    every rank has the same zeros. Wrap the model before or after this call. Works with parameters that `fully_shard`
    (FSDP2) has split; call it afterwards, on every rank. Does not work under DeepSpeed or FSDP1, which flatten them.

    Args:
        model: a pruned model; all its parameters of two or more dimensions are masked.
        optimizer: the optimizer that steps on these parameters; also in the wrapper of `accelerate`.

    Returns:
        A handle; its `remove()` removes the masks.

    Raises:
        LayerSelectionError: no matrix that the optimizer steps on holds a zero.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner  # a wrapper such as accelerate's has no hooks of its own
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = {
        name: (parameter, _nonzeros(parameter))
        for name, parameter in model.named_parameters()
        if id(parameter) in stepped and parameter.ndim >= 2
    }
    found = {name: (one, count) for name, (one, count) in found.items() if count < one.numel()}
    empty = [name for name, (_, count) in found.items() if not count]
    if empty:
        warnings.warn(f"{', '.join(empty)}: all zeros, so taken for not yet trained, and not kept.", stacklevel=2)
    masks = {parameter: _own(parameter) != 0 for name, (parameter, _) in found.items() if name not in empty}
    if not masks:
        raise LayerSelectionError(
            "There are no zeros to keep: prune the model first, and give the optimizer that steps on its weights."
        )

    def mask_of(parameter: nn.Parameter, value: Tensor) -> Tensor:
        """The mask on the device of a value, to which the model may have moved since."""
        if masks[parameter].device != value.device:
            masks[parameter] = masks[parameter].to(value.device)
        return masks[parameter]

    @torch.no_grad()
    def drop(parameter: nn.Parameter) -> None:
        if parameter.grad is None:
            return
        gradient = _own(parameter.grad)
        if gradient.layout is torch.strided:
            gradient.masked_fill_(~mask_of(parameter, gradient), 0)  # unlike a product, this removes NaN too
        else:
            gradient.mul_(mask_of(parameter, gradient))

    @torch.no_grad()
    def before(*_: object) -> None:  # covers gradients that were averaged over ranks or assigned by the user
        for parameter in masks:
            drop(parameter)

    @torch.no_grad()
    def after(*_: object) -> None:
        for parameter in masks:
            value = _own(parameter)
            value.masked_fill_(~mask_of(parameter, value), 0)

    steps = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    trained = [parameter for parameter in masks if parameter.requires_grad]
    gradients = [parameter.register_post_accumulate_grad_hook(drop) for parameter in trained]  # type: ignore[no-untyped-call]
    return SparseTraining(masks, steps + gradients)


def _own(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that lies on this rank, sharing its memory; a plain tensor itself."""
    local = getattr(tensor, "to_local", None)  # of DTensor, which is not imported for plain tensors
    return tensor if local is None else local()


def _nonzeros(parameter: Tensor) -> int:
    """Number of nonzero entries, over all ranks if the parameter is sharded."""
    count = (parameter != 0).sum()
    whole = getattr(count, "full_tensor", None)
    return int(count if whole is None else whole())
