"""Weights that are computed anew in every forward pass, as plain parameters while a model is pruned.

Weight norm, other parametrisations that can be inverted, and the masks of `torch.nn.utils.prune` compute a weight from
other parameters. During a run the weight is a parameter itself. Afterwards the other parameters are set so that they
give the pruned weight, with all its zeros.

`iobs.fold` replaces computed weights by plain parameters for good. It also folds those that a run leaves alone.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from iobs.errors import CalibrationError, unless_out_of_memory
from iobs.pruning.network.calls import Args, Kwargs, before_calls, recorded_calls
from iobs.pruning.network.layers import CONVOLUTIONS, joined
from iobs.pruning.network.modes import evaluating, keeping_buffers
from iobs.pruning.network.selection import require_usable
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch

_CONVOLVE = (functional.conv1d, functional.conv2d, functional.conv3d)
_PROBED = 1e-2  # relative difference up to which a weight counts as given back by its parametrisation

Restore = Callable[[], None]


@contextmanager
@torch.no_grad()
def folded(model: nn.Module) -> Iterator[None]:
    """Make the computed weights of a model parameters; on exit restore the modules, with the weights as they are then.

    Parametrisations that cannot be inverted without loss of zeros are left alone, such as the spectral norm. Weights
    that are computed from the same parameters become one parameter. Those that share some of them are left alone.
    """
    restores: list[Restore] = []
    weights: dict[tuple[int, ...], nn.Parameter] = {}
    apart = _sharing_in_part(model)
    try:
        for module in [*model.modules()]:
            if parametrize.is_parametrized(module):
                restores += _without_parametrisations(module, weights, apart)
            for key, hook in [*module._forward_pre_hooks.items()]:
                if isinstance(hook, WeightNorm):
                    restores.append(_without_weight_norm(module, key, hook))
                elif isinstance(hook, BasePruningMethod):
                    restores.append(_without_mask(module, key, hook))
        yield
    finally:
        for restore in reversed(restores):
            restore()


def normed_weights(model: nn.Module) -> set[str]:
    """The names of the weights that weight norm computes: what it gives back for a pruned weight is rounded."""
    names: set[str] = set()
    for path, module in model.named_modules():
        if parametrize.is_parametrized(module):
            lists = module.get_submodule("parametrizations").named_children()
            names |= {
                joined(path, name) for name, norms in lists if any(isinstance(norm, _WeightNorm) for norm in norms)
            }
        hooks = module._forward_pre_hooks.values()
        names |= {joined(path, hook.name) for hook in hooks if isinstance(hook, WeightNorm)}
    return names


def unfolded(model: nn.Module) -> set[int]:
    """Identities of the parameters from which a weight is still computed: a solution for them could not be kept."""
    sources: list[nn.Parameter] = []
    for module in model.modules():
        if isinstance(module, parametrize.ParametrizationList):
            sources += module.parameters()
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                sources.append(getattr(module, f"{hook.name}_orig"))
    return {id(parameter) for parameter in sources}


def _sources(parametrisation: nn.Module) -> tuple[int, ...]:
    """Identities of the parameters from which a parametrisation computes its weight."""
    return tuple(id(parameter) for parameter in parametrisation.parameters())


def _sharing_in_part(model: nn.Module) -> set[int]:
    """Identities of the parameters that two parametrisations share, of which one has others besides."""
    lists = {_sources(module) for module in model.modules() if isinstance(module, parametrize.ParametrizationList)}
    counts = Counter(source for sources in lists for source in {*sources})
    return {source for source, count in counts.items() if count > 1}


def _plain(
    module: nn.Module, name: str, value: Tensor, trained: bool, shared: nn.Parameter | None = None
) -> Callable[[], Tensor | None]:
    """Register a parameter; returns a function that removes it, and returns its value if it has changed."""
    before = value.detach().clone(memory_format=torch.contiguous_format)
    module.register_parameter(name, nn.Parameter(before.clone(), trained) if shared is None else shared)

    def taken() -> Tensor | None:
        now = module._parameters.pop(name)
        assert now is not None
        return None if torch.equal(now.detach(), before) else now.detach()

    return taken


def _without_parametrisations(
    module: nn.Module, weights: dict[tuple[int, ...], nn.Parameter], apart: set[int]
) -> list[Restore]:
    """Remove the parametrisations of a module if all of them can be inverted.

    Args:
        module: the module.
        weights: the parameters that weights have become, by `_sources`; those of the module are added.
        apart: `_sharing_in_part` of the model.
    """
    inner, kind = module._modules["parametrizations"], type(module)
    assert isinstance(inner, nn.ModuleDict)
    lists = {name: value for name, value in inner.items() if isinstance(value, parametrize.ParametrizationList)}
    sources = {name: _sources(parametrisation) for name, parametrisation in lists.items()}
    if not all(_gives_back(lists[name]) and apart.isdisjoint(sources[name]) for name in lists):
        return []
    values = {name: parametrisation().detach() for name, parametrisation in lists.items()}
    shared = {name: weights[sources[name]] for name in lists if sources[name] in weights}
    if not all(torch.equal(weight, values[name]) for name, weight in shared.items()):  # as along other dimensions
        return []
    del module._modules["parametrizations"]
    module.__class__ = kind.__bases__[0]
    takes = {
        name: _plain(
            module,
            name,
            values[name],
            any(parameter.requires_grad for parameter in lists[name].parameters(recurse=False)),
            shared.get(name),
        )
        for name in lists
    }
    weights |= {sources[name]: module.get_parameter(name) for name in lists if sources[name]}

    def restore() -> None:
        changed = {name: take() for name, take in takes.items()}
        module.__class__ = kind
        module._modules["parametrizations"] = inner
        for name, value in changed.items():
            if value is not None:
                _invert(lists[name], value)

    return [restore]


def _gives_back(parametrisation: parametrize.ParametrizationList) -> bool:
    """True if, on a sparse weight, a parametrisation can be set to give it, with its zeros."""
    try:
        trial = copy.deepcopy(parametrisation)
        sparse = trial().detach().clone()
        if sparse.ndim < 2 or not sparse.is_floating_point():
            return False
        sparse.view(-1)[::2] = 0
        _invert(trial, sparse)
        weight = trial().detach()
    except unless_out_of_memory(RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError):
        return False
    near = float((weight - sparse).float().norm()) <= _PROBED * float(sparse.float().norm())
    return near and bool((weight[sparse == 0] == 0).all())


def _invert(parametrisation: parametrize.ParametrizationList, weight: Tensor) -> None:
    """Set the parameters of a parametrisation so that it gives a weight."""
    if len(parametrisation) == 1 and isinstance(norm := parametrisation[0], _WeightNorm):
        length, direction = (parametrisation.get_parameter(f"original{place}") for place in (0, 1))
        _set_norm(length, direction, weight, norm.dim)
    else:
        parametrisation.right_inverse(weight)


def _set_norm(length: Tensor, direction: Tensor, weight: Tensor, dim: int) -> None:
    """Set the length and the direction of weight norm; a vector of zeros has length 0 and any direction."""
    norms = torch.norm_except_dim(weight, 2, dim)
    length.data.copy_(norms)
    direction.data.copy_(torch.where(norms == 0, torch.ones_like(weight), weight))


def _without_weight_norm(module: nn.Module, key: int, hook: WeightNorm) -> Restore:
    """Remove the weight norm of `torch.nn.utils.weight_norm`."""
    name = hook.name
    value = hook.compute_weight(module).detach()
    length, direction = module._parameters.pop(f"{name}_g"), module._parameters.pop(f"{name}_v")
    assert length is not None
    assert direction is not None
    del module._forward_pre_hooks[key]
    vars(module).pop(name, None)
    take = _plain(module, name, value, direction.requires_grad)

    def restore() -> None:
        changed = take()
        module._parameters[f"{name}_g"], module._parameters[f"{name}_v"] = length, direction
        if changed is not None:
            _set_norm(length, direction, changed, hook.dim)
        module._forward_pre_hooks[key] = hook
        setattr(module, name, hook.compute_weight(module))

    return restore


def _without_mask(module: nn.Module, key: int, hook: BasePruningMethod) -> Restore:
    """Remove a mask of `torch.nn.utils.prune`; afterwards it marks the entries of the weight that are not zero."""
    name = hook._tensor_name
    original, mask = module._parameters.pop(f"{name}_orig"), module._buffers.pop(f"{name}_mask")
    assert original is not None
    assert mask is not None
    del module._forward_pre_hooks[key]
    vars(module).pop(name, None)
    take = _plain(module, name, (original * mask).detach(), original.requires_grad)

    def restore() -> None:
        changed = take()
        module._parameters[f"{name}_orig"], module._buffers[f"{name}_mask"] = original, mask
        if changed is not None:
            original.data.copy_(changed)
            mask.copy_(changed != 0)
        module._forward_pre_hooks[key] = hook
        setattr(module, name, mask.to(original.dtype) * original)

    return restore


class FoldedConvolution(nn.Module):
    """A convolution whose weight was standardised in every forward pass, with the standardised weight as a parameter.

    Args:
        weight: (outputs, inputs of one group, *kernel).
        bias: (outputs,), shared with the convolution; or None.
        pad: padding in the order of `torch.nn.functional.pad`, zeros.
        options: stride, padding, dilation and groups of the convolution.
    """

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, pad: list[int], options: Kwargs) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = bias
        self.pad, self.options = pad, options

    def forward(self, value: Tensor) -> Tensor:
        """Convolve, (samples, channels, *places) -> (samples, outputs, *places)."""
        convolve = _CONVOLVE[self.weight.ndim - 3]
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
        ModelError, LayerSelectionError: as in `require_usable`.
        CalibrationError: the model does not take the batch; it is unchanged.
    """
    require_usable(model)
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
    changed = False
    if parametrize.is_parametrized(module):
        lists = module.get_submodule("parametrizations")
        for name, parametrisation in [*lists.named_children()]:
            trained = any(original.requires_grad for original in parametrisation.parameters(recurse=False))
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)
            if name not in module._parameters:  # torch leaves a plain tensor where there were several originals
                value = getattr(module, name).detach()
                delattr(module, name)
                module.register_parameter(name, nn.Parameter(value.contiguous(), trained))
            changed = True
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
        changed = True
    return changed


def _plain_convolutions(model: nn.Module, batch: Batch) -> list[str]:
    """Replace convolutions that multiply with another weight than their parameter."""
    plain_forwards = {kind.forward for kind in CONVOLUTIONS}
    candidates = {
        path: module
        for path, module in model.named_modules()
        if path and isinstance(module, CONVOLUTIONS) and type(module).forward not in plain_forwards
    }
    replacements: dict[str, FoldedConvolution] = {}

    def note(path: str, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if kwargs or len(args) != 1:
            return  # the plain convolution takes its input alone, by place
        with recorded_calls(_CONVOLVE) as calls:
            type(module).forward(module, *args)
        if len(calls) == 1 and (plain := _folded_convolution(module, args[0], *calls[0][1:])) is not None:
            replacements[path] = plain

    with before_calls(model, candidates, note):
        _call(model, batch)
    for path, plain in replacements.items():
        parent, _, name = path.rpartition(".")
        plain.train(candidates[path].training)
        plain.weight.requires_grad_(candidates[path].weight.requires_grad)
        setattr(model.get_submodule(parent), name, plain)
    return [*replacements]


def _call(model: nn.Module, batch: Batch) -> None:
    """Call a model on the first sample of a batch.

    Raises:
        CalibrationError: it does not take the batch.
    """
    with evaluating(model), keeping_buffers(model), torch.no_grad():
        batches.called(model, batches.first_sample(batch), f"the batch, {batches.shapes(batch)}", CalibrationError)


def _folded_convolution(module: nn.Module, value: Tensor, args: Args, kwargs: Kwargs) -> FoldedConvolution | None:
    """The plain convolution of the call in a module's forward on a value.

    None if the call multiplies with the module's parameter, or changes the value otherwise than by padding.
    """
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    options = dict(zip(names, args, strict=False)) | kwargs
    padded, weight, _ = options.pop("input"), options.pop("weight"), options.pop("bias", None)
    if weight.data_ptr() == module.get_parameter("weight").data_ptr():
        return None
    bias = module._parameters["bias"]
    if padded.shape == value.shape and torch.equal(padded, value):
        return FoldedConvolution(weight.detach().clone(), bias, [0, 0] * (weight.ndim - 2), options)
    sizes = [after - before for before, after in zip(value.shape[2:], padded.shape[2:], strict=True)]
    pad = [side for size in reversed(sizes) for side in (size // 2, size - size // 2)]
    if min(sizes) < 0 or not torch.equal(functional.pad(value, pad), padded):
        return None
    return FoldedConvolution(weight.detach().clone(), bias, pad, options)
