"""Units of a network: channels, neurons and heads, as rows that write and columns that read them; and their removal."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, lcm
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from iobs.core.column_groups import Groups
from iobs.core.late import library_class
from iobs.pruning.network.layers import CONVOLUTIONS, TRANSPOSED, Layer, joined

Kind: TypeAlias = Literal["channels", "neurons", "heads", "experts"]
Index: TypeAlias = tuple[tuple[int, ...], ...]  # of every unit: positions along one axis of a parameter


@dataclass(frozen=True)
class Slices:
    """The slices of one parameter or buffer that belong to the units of a site.

    Args:
        path: of the module.
        parameter: name of the parameter or buffer in the module.
        axis: of the parameter, along which the units lie.
        index: positions along the axis, for every unit.
    """

    path: str
    parameter: str
    axis: int
    index: Index

    @property
    def key(self) -> str:
        """Full name, as in `named_parameters`."""
        return joined(self.path, self.parameter)

    def of(self, units: Collection[int]) -> list[int]:
        """The positions of some units, in ascending order."""
        return sorted(position for unit in units for position in self.index[unit])

    def stored(self, model: nn.Module) -> Tensor:
        """The whole parameter or buffer, in its stored layout."""
        value: Tensor = getattr(model.get_submodule(self.path), self.parameter)
        return value


@dataclass(frozen=True)
class Reader:
    """A layer that reads the units of a site.

    Args:
        weight: slices of its weight along the input axis; positions are input channels.
        width: number of columns of its matrix for one input channel: the entries of a convolution kernel, otherwise 1.
        positions: number of input vectors in the traced forward pass.
        norm: path of the batch norm that alone takes the layer's outputs, or None.
        bias: True if the layer has a bias.
    """

    weight: Slices
    width: int = 1
    positions: int = 1
    norm: str | None = None
    bias: bool = False

    @property
    def path(self) -> str:
        """Path of the module."""
        return self.weight.path

    def products(self, model: nn.Module) -> int:
        """Multiplications by the columns of one unit in the traced forward pass."""
        stored = self.weight.stored(model)
        return self.positions * len(self.weight.index[0]) * (stored.numel() // stored.shape[self.weight.axis])

    @property
    def columns(self) -> Index:
        """Columns of every unit in the layer's matrix (rows, columns), as `Layer.read` returns it."""
        width = self.width
        return tuple(
            tuple(position * width + entry for position in unit for entry in range(width)) for unit in self.weight.index
        )


@dataclass(frozen=True)
class Attribute:
    """A whole number in a module that counts units: `num_heads` of an attention module, for example.

    Args:
        path: of the module.
        name: of the attribute.
        each: the attribute's value for one unit.
    """

    path: str
    name: str
    each: int


@dataclass(frozen=True)
class Site:
    """A place of a network with units of one kind that can be removed.

    Removal of a unit deletes its columns from all readers and its rows from all writers; the rest of the network keeps
    its shape.

    Args:
        name: path of the first reader, or the name of its parameter if the model itself holds it; followed by a colon
            and a writer's path if several sites share the reader.
        kind: of the units.
        readers: layers that read the units, the layer with the most multiplications first.
        writers: rows of every parameter and buffer that only serves these units.
        owner: path of a module that holds all readers, writers and attributes; it is called as one.
        inner: True if the units are read after all of their writers. Layers that read one average of each sample, as
            the gate of a squeeze-and-excitation block does, may come before.
        attributes: numbers in modules that follow the number of units.
    """

    name: str
    kind: Kind
    readers: tuple[Reader, ...]
    writers: tuple[Slices, ...]
    owner: str = ""
    inner: bool = True
    attributes: tuple[Attribute, ...] = ()

    @property
    def count(self) -> int:
        """Number of units."""
        return len(self.slices[0].index)

    @property
    def reader(self) -> str:
        """Path of the layer whose columns are solved for."""
        return self.readers[0].path

    @property
    def columns(self) -> Index:
        """Columns of every unit in the matrix of the first reader."""
        return self.readers[0].columns

    def step(self, multiple_of: int) -> int:
        """The smallest number of units with which all readers and writers have a multiple of 8, 16 or another width."""
        return lcm(*(multiple_of // gcd(multiple_of, len(part.index[0])) for part in self.slices))

    @property
    def slices(self) -> tuple[Slices, ...]:
        """Everything that a removal makes narrower: writers and readers."""
        return (*self.writers, *(reader.weight for reader in self.readers))

    @property
    def can_bias(self) -> bool:
        """True if a free bias of the first reader has a place: its own bias, or the batch norm that follows."""
        return self.readers[0].bias or self.readers[0].norm is not None

    def inside(self) -> Site:
        """The site with paths that begin at its owner, as a module of its own; batch norms may lie outside."""
        start = len(self.owner) + 1 if self.owner else 0

        def moved(part: Slices | Attribute) -> Any:
            return replace(part, path=part.path[start:])

        return replace(
            self,
            readers=tuple(replace(reader, weight=moved(reader.weight), norm=None) for reader in self.readers),
            writers=tuple(map(moved, self.writers)),
            attributes=tuple(map(moved, self.attributes)),
        )


def common_path(names: Sequence[str]) -> str:
    """The longest path of a module that holds all parameters, by their full names."""
    split = [name.split(".") for name in names]
    length = 0
    while all(len(parts) > length + 1 and parts[length] == split[0][length] for parts in split):
        length += 1
    return ".".join(split[0][:length])


@dataclass(frozen=True)
class ChosenGroups(Groups):
    """Groups of columns of which some are kept for sure: a solver finds weights, not groups.

    Args:
        chosen: numbers of the kept groups, ascending; `keep` is their count.
    """

    chosen: tuple[int, ...] = ()

    def zeros(self, shape: tuple[int, int]) -> int:
        """Number of zeros of a (rows, columns) matrix without the other groups."""
        return shape[0] * int((~self.mask(shape[1])).sum())

    def mask(self, columns: int) -> Tensor:
        """The kept columns, bool (columns,)."""
        return torch.isin(self.labels(columns), torch.tensor(self.chosen, dtype=torch.int64))


@dataclass(frozen=True)
class SitesOfLayers:
    """Sites of a run and the layers that read them.

    Attributes:
        sites: in the order of the forward pass.
        layers: the layers that read units, by path.
    """

    sites: tuple[Site, ...] = ()
    layers: Mapping[str, Layer] = field(default_factory=dict)

    def readers(self, site: Site) -> tuple[Layer, ...]:
        """The layers that read the units of a site, the layer with the most multiplications first."""
        return tuple(self.layers[reader.path] for reader in site.readers)

    def of(self, layer: Layer) -> list[Site]:
        """The sites whose units a layer reads."""
        return [site for site in self.sites if layer in self.readers(site)]  # a module may have other matrices too

    def read_by(self, layers: Collection[Layer]) -> SitesOfLayers:
        """The sites whose readers are all among some layers."""
        read = tuple(site for site in self.sites if all(layer in layers for layer in self.readers(site)))
        return replace(self, sites=read)

    def columns(self, site: Site, layer: Layer) -> Index:
        """Columns of every unit of a site in the matrix of a layer that reads them."""
        return next(reader.columns for reader in site.readers if reader.path == layer.path)

    def single(self, site: Site) -> bool:
        """True if one layer reads the units of a site, and nothing else.

        Its columns then fall into units, and its solver chooses the units. Other sites are chosen beforehand.
        """
        layer = self.readers(site)[0]
        return len(site.readers) == 1 and sum(map(len, site.columns)) == layer.shape[1]

    def groups(self, layer: Layer) -> Groups:
        """Columns of a layer in groups, all of them kept: those of every unit, and those that belong to no unit."""
        labels, count = torch.full((layer.shape[1],), -1), 0
        for site in self.of(layer):
            for columns in self.columns(site, layer):
                labels[list(columns)] = count
                count += 1
        if bool((labels < 0).any()):
            labels[labels < 0] = count
            count += 1
        return Groups(tuple(labels.tolist()), keep=count)

    def chosen(self, layer: Layer, kept: Mapping[str, Collection[int]]) -> ChosenGroups:
        """The groups of a layer with the units that sites keep, by name of the site."""
        every = self.groups(layer)
        chosen, count = [], 0
        for site in self.of(layer):
            chosen += [count + unit for unit in sorted(kept[site.name])]
            count += site.count
        assert every.keep is not None
        chosen += range(count, every.keep)
        return ChosenGroups(every.index, keep=len(chosen), chosen=tuple(chosen))

    def mask(self, layer: Layer, removed: Mapping[str, Iterable[int]]) -> Tensor:
        """Columns of a layer without those of removed units, bool (columns,); units by name of the site."""
        mask = torch.ones(layer.shape[1], dtype=torch.bool)
        for site in self.of(layer):
            columns = self.columns(site, layer)
            for unit in removed.get(site.name, ()):
                mask[list(columns[unit])] = False
        return mask


# ---- physical removal of units: parameters, buffers and modules become narrower in place
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
