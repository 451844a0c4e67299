"""Fold computed weights into plain parameters for good, so that they can be pruned: `iobs.fold`."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode

from iobs.errors import CalibrationError
from iobs.pruning.network.calls import before_calls
from iobs.pruning.network.layers import CONVOLUTIONS
from iobs.pruning.network.modes import evaluating, keeping_buffers
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch

Options: TypeAlias = dict[str, Any]  # keyword arguments of a function of torch


class FoldedConvolution(nn.Module):
    """A convolution whose weight was standardised in every forward pass, with the standardised weight as a parameter.

    Args:
        weight: (outputs, inputs of one group, *kernel).
        bias: (outputs,), shared with the convolution; or None.
        pad: padding in the order of `torch.nn.functional.pad`, zeros.
        options: stride, padding, dilation and groups of the convolution.
    """

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, pad: list[int], options: Options) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = bias
        self.pad, self.options = pad, options

    def forward(self, value: Tensor) -> Tensor:
        """Convolve, (samples, channels, *places) -> (samples, outputs, *places)."""
        convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[self.weight.ndim - 3]
        value = functional.pad(value, self.pad) if any(self.pad) else value
        return convolve(value, self.weight, self.bias, **self.options)


@torch.no_grad()
def fold(model: nn.Module, batch: Batch | None = None) -> list[str]:
    """Replace weights that a model computes in every forward pass by plain parameters of the same value, in place.

    Folded are parametrisations (spectral norm, weight norm and others), the masks of `torch.nn.utils.prune`, and, with
    a batch, convolutions whose class standardises the weight. One that is the model itself stays as it is, and so does
    one whose input is given by name. The outputs in eval mode stay the same up to rounding. `iobs.prune` needs no
    folding of weight norm and masks; it does for the others, which it leaves dense.

    Args:
        model: any module.
        batch: a batch that the model accepts, as for `iobs.prune`. It shows the standardised weights and the padding,
            which then is the padding for inputs of this size.

    Returns:
        The paths of the modules that changed.

    Raises:
        CalibrationError: the model does not take the batch; it is unchanged.
    """
    if batch is not None:
        _call(model, batch)
    changed = []
    training = {module: module.training for module in model.modules()}
    model.eval()  # the spectral norm changes its estimate in training mode
    try:
        for path, module in [*model.named_modules()]:
            if _plain_weights(module):
                changed.append(path)
        if batch is not None:
            changed += _plain_convolutions(model, batch)
    finally:
        for module, mode in training.items():
            module.training = mode
    return changed


def _plain_weights(module: nn.Module) -> bool:
    """Remove the parametrisations, norms and masks of one module; returns False if there are none."""
    found = False
    if parametrize.is_parametrized(module):
        lists = module.get_submodule("parametrizations")
        for name, own in [*lists.named_children()]:
            trained = any(one.requires_grad for one in own.parameters(recurse=False))
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)
            if name not in module._parameters:  # torch leaves a plain tensor where there were several originals
                value = getattr(module, name).detach()
                delattr(module, name)
                module.register_parameter(name, nn.Parameter(value.contiguous(), trained))
            found = True
    for key, hook in [*module._forward_pre_hooks.items()]:
        if isinstance(hook, WeightNorm):
            remove_weight_norm(module, hook.name)
        elif isinstance(hook, SpectralNorm):
            remove_spectral_norm(module, hook.name)
        elif isinstance(hook, BasePruningMethod):
            hook.remove(module)
            del module._forward_pre_hooks[key]
        else:
            continue
        found = True
    return found


def _plain_convolutions(model: nn.Module, batch: Batch) -> list[str]:
    """Replace convolutions that multiply with another weight than their parameter."""
    plain_forwards = {one.forward for one in CONVOLUTIONS}
    own = {
        path: module
        for path, module in model.named_modules()
        if path and isinstance(module, CONVOLUTIONS) and type(module).forward not in plain_forwards
    }
    found: dict[str, FoldedConvolution] = {}

    def note(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: Options) -> None:
        if kwargs or len(args) != 1:
            return  # the plain convolution takes its input alone, by place
        with _Convolutions() as seen:
            type(module).forward(module, *args)
        if len(seen.calls) == 1 and (plain := _folded(module, args[0], *seen.calls[0])) is not None:
            found[path] = plain

    with before_calls(model, own, note):
        _call(model, batch)
    for path, plain in found.items():
        parent, _, name = path.rpartition(".")
        plain.train(own[path].training)
        plain.weight.requires_grad_(own[path].weight.requires_grad)
        setattr(model.get_submodule(parent), name, plain)
    return [*found]


def _call(model: nn.Module, batch: Batch) -> None:
    """Call a model on the first sample of a batch.

    Raises:
        CalibrationError: it does not take the batch.
    """
    with evaluating(model), keeping_buffers(model), torch.no_grad():
        batches.called(model, batches.first_sample(batch), f"the batch, {batches.shapes(batch)}", CalibrationError)


def _folded(
    module: nn.Module, given: Tensor, value: Tensor, weight: Tensor, options: Options
) -> FoldedConvolution | None:
    """The plain convolution of a call; None if it multiplies with its parameter, or changes its input otherwise."""
    if weight.data_ptr() == module.get_parameter("weight").data_ptr():
        return None
    bias = module._parameters["bias"]
    if value.shape == given.shape and torch.equal(value, given):
        return FoldedConvolution(weight.detach().clone(), bias, [0, 0] * (weight.ndim - 2), options)
    sizes = [after - before for before, after in zip(given.shape[2:], value.shape[2:], strict=True)]
    sides = [(size // 2, size - size // 2) for size in sizes]
    pad = [one for pair in reversed(sides) for one in pair]
    if min(sizes) < 0 or not torch.equal(functional.pad(given, pad), value):
        return None
    return FoldedConvolution(weight.detach().clone(), bias, pad, options)


class _Convolutions(TorchFunctionMode):
    """Record the calls of convolutions: input, weight and options."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor, Options]] = []

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Options | None = None
    ) -> Any:
        """Record a convolution before it is computed."""
        if func in (functional.conv1d, functional.conv2d, functional.conv3d):
            names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            given.pop("bias", None)
            self.calls.append((given.pop("input"), given.pop("weight"), given))
        return func(*args, **(kwargs or {}))
