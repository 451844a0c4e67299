"""Physical removal of units: parameters, buffers and modules become narrower in place."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from iobs.core.late import library_class
from iobs.pruning.network.layers import CONVOLUTIONS, TRANSPOSED
from iobs.pruning.structure.units import Reader, Site

CONFIG = "config."  # prefix of names of attributes that are fields of a module's configuration


@torch.no_grad()
def remove(
    model: nn.Module,
    sites: Iterable[Site],
    kept: Mapping[str, Sequence[int]],
    biases: Mapping[str, Tensor] | None = None,
) -> None:
    """Remove units from a model: all rows that write them and all columns that read them.

    Parameters are new tensors afterwards, so an optimizer has to be made anew. They keep attributes of the user, such
    as `no_decay`, unless these are tensors. The sites describe the model before the removal; find them again before
    another one.

    Args:
        model: changed in place.
        sites: of the model, from `checked_sites`.
        kept: units to keep by name of the site, at least one of each; sites without an entry keep all units.
        biases: biases to add to the outputs of readers, (rows,), by path of the reader. They are added to the layer's
            bias. A layer without one: they are subtracted from the running mean of its batch norm, or it gets a bias.
    """
    by_name = {site.name: site for site in sites}
    chosen = {name: set(units) for name, units in kept.items()}
    readers = {reader.path: reader for site in by_name.values() for reader in site.readers}
    assert all(units and units <= set(range(by_name[name].count)) for name, units in chosen.items())
    gone: dict[tuple[str, str], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for name, units in chosen.items():
        removed = set(range(by_name[name].count)) - units
        for part in by_name[name].slices:
            gone[part.path, part.parameter][part.axis] |= set(part.of(removed))
    for (path, parameter), axes in gone.items():
        _narrow(model.get_submodule(path), parameter, axes)
    for name, units in chosen.items():
        for attribute in by_name[name].attributes:
            set_number(model.get_submodule(attribute.path), attribute.name, attribute.each * len(units))
    for path, bias in (biases or {}).items():
        weight = readers[path].weight
        removed = gone[weight.path, weight.parameter][1 - weight.axis]  # rows that write units of another site
        _add_bias(model, readers[path], bias[[row for row in range(len(bias)) if row not in removed]])


@torch.no_grad()
def zero_columns(owner: nn.Module, site: Site, keep: Sequence[int]) -> None:
    """Set the columns of readers to zero for all units but some."""
    gone = set(range(site.count)) - set(keep)
    for reader in site.readers:
        weight = reader.weight.stored(owner)
        weight.index_fill_(
            reader.weight.axis, torch.tensor(reader.weight.of(gone), dtype=torch.int64, device=weight.device), 0
        )


def set_number(module: nn.Module, name: str, value: object) -> None:
    """Set a number of a module; a field of a `config` is set in a copy that belongs to this module alone."""
    if name.startswith(CONFIG):
        module.config = copy.copy(module.config)
        setattr(module.config, name.removeprefix(CONFIG), value)
    else:
        setattr(module, name, value)


def _narrow(module: nn.Module, name: str, gone: Mapping[int, Collection[int]]) -> None:
    """Delete positions along some axes of a parameter or buffer, and let the module's sizes follow."""
    value: Tensor = getattr(module, name)
    old, layout = tuple(value.shape), _layout(value)
    for axis, positions in gone.items():
        keep = [position for position in range(value.shape[axis]) if position not in positions]
        value = value.index_select(axis, torch.tensor(keep, device=value.device))
    value = value.contiguous(memory_format=layout)
    if name in module._parameters:
        before = module._parameters[name]
        assert before is not None
        narrow = nn.Parameter(value, before.requires_grad)
        vars(narrow).update({mark: value for mark, value in vars(before).items() if not isinstance(value, Tensor)})
        module._parameters[name] = narrow
    else:
        module._buffers[name] = value
    _resize(module, name, old, tuple(value.shape))


def _layout(value: Tensor) -> torch.memory_format:
    """The memory format of a tensor: kernels of convolutions may have their channels last."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(value.ndim, torch.contiguous_format)
    fits = not value.is_contiguous() and value.is_contiguous(memory_format=last)
    return last if fits else torch.contiguous_format


def _resize(module: nn.Module, name: str, old: tuple[int, ...], new: tuple[int, ...]) -> None:
    """Set the sizes that a module of torch or transformers stores beside its parameters."""
    if isinstance(module, nn.modules.batchnorm._NormBase):
        module.num_features = new[0]
    elif isinstance(module, nn.GroupNorm) and name == "weight":
        module.num_groups, module.num_channels = module.num_groups * new[0] // old[0], new[0]
    elif isinstance(module, nn.LayerNorm):
        module.normalized_shape = new
    elif isinstance(module, nn.PReLU):
        module.num_parameters = new[0]
    if name != "weight":
        return
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = new
    elif isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)):
        module.groups = module.groups * new[0] // old[0] if module.groups > 1 else 1
        sides = new[0], new[1] * module.groups  # a transposed convolution has its inputs first
        module.in_channels, module.out_channels = sides if isinstance(module, TRANSPOSED) else sides[::-1]
    elif isinstance(module, nn.Embedding):
        module.embedding_dim = new[1]
    elif isinstance(module, library_class("transformers.pytorch_utils", "Conv1D")):
        module.nx, module.nf = new  # type: ignore[assignment]


def take_biases(model: nn.Module, paths: Iterable[str]) -> dict[str, nn.Parameter]:
    """Take the biases of modules away; returns them by path."""
    biases = {}
    for path in paths:
        module = model.get_submodule(path)
        biases[path] = module.get_parameter("bias")
        module.register_parameter("bias", None)
    return biases


def _add_bias(model: nn.Module, reader: Reader, bias: Tensor) -> None:
    module = model.get_submodule(reader.path)
    weight = reader.weight.stored(model)
    before = module._parameters.get("bias")
    if before is not None:
        before.add_(bias.to(before))
    elif reader.norm is not None:
        mean = model.get_submodule(reader.norm).get_buffer("running_mean")
        mean.sub_(bias.to(mean))
    else:
        module._parameters["bias"] = nn.Parameter(bias.to(weight, copy=True), weight.requires_grad)
