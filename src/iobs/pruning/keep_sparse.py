"""Fine-tuning that keeps the zeros: masks in hooks of the optimizer, without other changes to the training loop."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from iobs.errors import LayerSelectionError, ProblemError, is_a, require_values


@dataclass(eq=False)
class SparseTraining:
    """The hooks of `keep_sparse`; after `remove()` the weights may become dense again.

    Attributes:
        masks: by parameter, False at entries that stay zero; of a sharded parameter the part of this rank.
        handles: of the hooks.
        matrices: by name the parameters that may have a mask.
    """

    masks: dict[nn.Parameter, Tensor]
    handles: list[RemovableHandle]
    matrices: dict[str, nn.Parameter] = field(default_factory=dict, repr=False)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()
        _LIVE.discard(self)

    @torch.no_grad()
    def mask(self) -> list[str]:
        """Take the zeros that the matrices have now as the masks; return the names of those that are all zeros."""
        counted = {name: (matrix, _nonzeros(matrix)) for name, matrix in self.matrices.items()}
        counted = {name: (matrix, count) for name, (matrix, count) in counted.items() if count < matrix.numel()}
        hooked = {*self.masks}
        self.masks.clear()
        self.masks.update({matrix: _own(matrix) != 0 for matrix, count in counted.values() if count})
        for parameter in self.masks:
            if parameter.requires_grad and parameter not in hooked:
                self.handles.append(parameter.register_post_accumulate_grad_hook(self._drop))  # type: ignore[no-untyped-call]
        return [name for name, (_, count) in counted.items() if not count]

    def before_step(self, *_: object) -> None:
        """Drop gradients that were averaged over ranks or assigned by the user."""
        for parameter in self.masks:
            self._drop(parameter)

    @torch.no_grad()
    def after_step(self, *_: object) -> None:
        """Write the zeros again."""
        for parameter in self.masks:
            value = _own(parameter)
            value.masked_fill_(~self._mask_of(parameter, value), 0)

    @torch.no_grad()
    def _drop(self, parameter: nn.Parameter) -> None:
        """Remove the gradient of the zeros of a parameter."""
        if parameter.grad is None or parameter not in self.masks:
            return
        gradient = _own(parameter.grad)
        if gradient.layout is torch.strided:
            gradient.masked_fill_(~self._mask_of(parameter, gradient), 0)  # unlike a product, this removes NaN too
        else:
            gradient.mul_(self._mask_of(parameter, gradient))

    def _mask_of(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """The mask on the device of a value, to which the model may have moved since."""
        if self.masks[parameter].device != value.device:
            self.masks[parameter] = self.masks[parameter].to(value.device)
        return self.masks[parameter]


_LIVE: WeakSet[SparseTraining] = WeakSet()  # those whose hooks act; the hooks keep them alive


def live_on(model: nn.Module) -> list[SparseTraining]:
    """The handles of `keep_sparse` that hold zeros of a model's parameters."""
    identities = {id(parameter) for parameter in model.parameters()}
    return [each for each in _LIVE if any(id(matrix) in identities for matrix in each.matrices.values())]


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
        A handle; its `remove()` removes the masks. While it is live, a further `iobs.prune` of the model changes the
        masks to the new zeros.

    Raises:
        LayerSelectionError: no matrix that the optimizer steps on holds a zero.
        ModelError: a matrix has no values (meta device).
        ProblemError: other arguments.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner  # a wrapper such as accelerate's has no hooks of its own
    if not (is_a(nn.Module, model) and is_a(torch.optim.Optimizer, optimizer)):
        kinds = f"{type(model).__name__} and {type(optimizer).__name__}"
        raise ProblemError(f"keep_sparse takes a model and its optimizer, in this order; got {kinds}.")
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    matrices = {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) in stepped and parameter.ndim >= 2
    }
    require_values(matrices.items())
    training = SparseTraining({}, [], matrices)
    if empty := training.mask():
        warnings.warn(f"{', '.join(empty)}: all zeros, so taken for not yet trained, and not kept.", stacklevel=2)
    if not training.masks:
        raise LayerSelectionError(
            "There are no zeros to keep: prune the model first, and give the optimizer that steps on its weights."
        )
    training.handles += [
        optimizer.register_step_pre_hook(training.before_step),
        optimizer.register_step_post_hook(training.after_step),
    ]
    _LIVE.add(training)
    return training


def _own(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that lies on this rank, sharing its memory; a plain tensor itself."""
    local = getattr(tensor, "to_local", None)  # of DTensor, which is not imported for plain tensors
    return tensor if local is None else local()


def _nonzeros(parameter: Tensor) -> int:
    """Number of nonzero entries, over all ranks if the parameter is sharded."""
    count = (parameter != 0).sum()
    whole = getattr(count, "full_tensor", None)
    return int(count if whole is None else whole())
