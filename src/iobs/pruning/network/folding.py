"""Weights that are computed anew in every forward pass, as plain parameters while a model is pruned.

Weight norm, other parametrisations that can be inverted, and the masks of `torch.nn.utils.prune` compute a weight from
other parameters. During a run the weight is a parameter itself. Afterwards the other parameters are set so that they
give the pruned weight, with all its zeros.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from iobs.errors import is_out_of_memory
from iobs.pruning.network.layers import joined

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
    known: dict[tuple[int, ...], nn.Parameter] = {}
    apart = _sharing_in_part(model)
    try:
        for module in [*model.modules()]:
            if parametrize.is_parametrized(module):
                restores += _without_parametrisations(module, known, apart)
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
    found: set[str] = set()
    for path, module in model.named_modules():
        if parametrize.is_parametrized(module):
            lists = module.get_submodule("parametrizations").named_children()
            found |= {joined(path, name) for name, own in lists if any(isinstance(one, _WeightNorm) for one in own)}
        hooks = module._forward_pre_hooks.values()
        found |= {joined(path, hook.name) for hook in hooks if isinstance(hook, WeightNorm)}
    return found


def unfolded(model: nn.Module) -> set[int]:
    """Identities of the parameters from which a weight is still computed: a solution for them could not be kept."""
    found: list[nn.Parameter] = []
    for module in model.modules():
        if isinstance(module, parametrize.ParametrizationList):
            found += module.parameters()
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                found.append(getattr(module, f"{hook.name}_orig"))
    return {id(one) for one in found}


def _sources(parametrisation: nn.Module) -> tuple[int, ...]:
    """Identities of the parameters from which a parametrisation computes its weight."""
    return tuple(id(one) for one in parametrisation.parameters())


def _sharing_in_part(model: nn.Module) -> set[int]:
    """Identities of the parameters that two parametrisations share, of which one has others besides."""
    lists = {_sources(one) for one in model.modules() if isinstance(one, parametrize.ParametrizationList)}
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
    module: nn.Module, known: dict[tuple[int, ...], nn.Parameter], apart: set[int]
) -> list[Restore]:
    """Remove the parametrisations of a module if all of them can be inverted.

    Args:
        module: the module.
        known: the parameters that weights have become, by `_sources`; those of the module are added.
        apart: `_sharing_in_part` of the model.
    """
    inner, own = module._modules["parametrizations"], type(module)
    assert isinstance(inner, nn.ModuleDict)
    lists = {name: one for name, one in inner.items() if isinstance(one, parametrize.ParametrizationList)}
    if not all(_gives_back(one) and apart.isdisjoint(_sources(one)) for one in lists.values()):
        return []
    values = {name: one().detach() for name, one in lists.items()}
    shared = {name: known[_sources(one)] for name, one in lists.items() if _sources(one) in known}
    if not all(torch.equal(one, values[name]) for name, one in shared.items()):  # as along other dimensions
        return []
    del module._modules["parametrizations"]
    module.__class__ = own.__bases__[0]
    takes = {
        name: _plain(
            module,
            name,
            values[name],
            any(one.requires_grad for one in lists[name].parameters(recurse=False)),
            shared.get(name),
        )
        for name in lists
    }
    known |= {_sources(one): module.get_parameter(name) for name, one in lists.items() if _sources(one)}

    def restore() -> None:
        changed = {name: take() for name, take in takes.items()}
        module.__class__ = own
        module._modules["parametrizations"] = inner
        for name, value in changed.items():
            if value is not None:
                _invert(lists[name], value)

    return [restore]


def _gives_back(parametrisation: parametrize.ParametrizationList) -> bool:
    """Check on a sparse weight that a parametrisation can be set to give it, with its zeros."""
    try:
        trial = copy.deepcopy(parametrisation)
        sparse = trial().detach().clone()
        if sparse.ndim < 2 or not sparse.is_floating_point():
            return False
        sparse.view(-1)[::2] = 0
        _invert(trial, sparse)
        found = trial().detach()
    except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        return False
    near = float((found - sparse).float().norm()) <= _PROBED * float(sparse.float().norm())
    return near and bool((found[sparse == 0] == 0).all())


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
