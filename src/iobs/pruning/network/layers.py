"""Layers: addresses of the prunable weight matrices of a model, to read and write them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from iobs.core.late import library_class

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)

_FEWEST_TOKENS = 64  # rows of an embedding that is a layer; steps and tables of fewer weigh as much as their integers

# Layers that an observed forward pass has shown, by model; no class tells them.
_BY_USE: WeakKeyDictionary[nn.Module, tuple[Layer, ...]] = WeakKeyDictionary()
_CHANGED: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()
_GATES = {4: "ifgo", 3: "rzn", 1: ""}  # names of the gates, by their number: LSTM, GRU, plain recurrence


@dataclass(frozen=True)
class RowBlock:
    """One of `count` equal blocks of consecutive rows of a parameter, such as the queries or a gate."""

    name: str
    index: int
    count: int


Axes: TypeAlias = tuple[tuple[int, int], ...]  # (size, stride) of some dimensions, the slowest first


@dataclass(frozen=True)
class View:
    """The entries of a contiguous parameter that a matrix consists of, in the order in which a product reads them.

    Args:
        offset: position of the first entry in the flattened parameter.
        rows: dimensions that are flattened into rows, with strides in the flattened parameter.
        columns: dimensions that are flattened into columns.
        name: of the matrix, where the parameter holds several of different kinds; otherwise empty.
    """

    offset: int
    rows: Axes
    columns: Axes
    name: str = ""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix, (rows, columns)."""
        return math.prod(size for size, _ in self.rows), math.prod(size for size, _ in self.columns)

    def of(self, stored: Tensor) -> Tensor:
        """The entries in a contiguous tensor of the parameter's size, as a view (*rows, *columns)."""
        sizes, strides = zip(*self.rows, *self.columns, strict=True)
        return stored.view(-1).as_strided(sizes, strides, stored.storage_offset() + self.offset)


PROJECTIONS = tuple(RowBlock(name, index, 3) for index, name in enumerate("qkv"))  # of nn.MultiheadAttention


@dataclass(frozen=True)
class Layer:
    """The address of one weight matrix.

    The matrix is always (rows, columns) = (outputs, inputs of one group). Convolution kernels are flattened, and the
    (in, out) weight of GPT-2's Conv1D is transposed. The rows of a grouped convolution fall into `groups` equal
    consecutive parts; each part has its own Gram matrix. `nn.MultiheadAttention` stores the weights of queries, keys
    and values in one parameter. They are three matrices here, since their inputs may differ. The gates of a recurrent
    layer are one matrix each, since their pre-activations differ in scale.

    A matrix that was found by its use in a product (`calibration.uses`) is a `view` of its parameter.

    Args:
        path: of the module.
        shape: of the matrix, (rows, columns).
        parameter: name in the module.
        expert: index in a stack of experts (experts, ., .), or None.
        part: the rows of the parameter that the matrix consists of; None: all rows.
        groups: number of groups of a convolution.
        kernel: positions of the kernel of a convolution, which run fastest in the columns.
        transposed: the parameter is stored as (columns, rows).
        stored_as: full name of the parameter of another module that this one shares, or None.
        view: the entries of the parameter that the matrix consists of, for a matrix that was found by its use.
    """

    path: str
    shape: tuple[int, int]
    parameter: str = "weight"
    expert: int | None = None
    part: RowBlock | None = None
    groups: int = 1
    kernel: int = 1
    transposed: bool = False
    stored_as: str | None = None
    view: View | None = None

    @property
    def name(self) -> str:
        """The name of the matrix in reports and name patterns."""
        name = self.path if self.parameter == "weight" else joined(self.path, self.parameter)
        inner = None if self.view is None else self.view.name or None
        parts = (self.expert, None if self.part is None else self.part.name, inner)
        return ".".join([name, *(str(part) for part in parts if part is not None)])

    @property
    def weights(self) -> int:
        """Number of entries."""
        return self.shape[0] * self.shape[1]

    @property
    def key(self) -> str:
        """The name of the parameter that holds the matrix, as in `named_parameters`."""
        return self.stored_as or joined(self.path, self.parameter)

    @property
    def slot(self) -> Hashable:
        """The place of the matrix in the model, which all names of a shared matrix have in common."""
        return self.key, self.expert, self.part, self.view

    @property
    def is_called(self) -> bool:
        """True if the matrix is the weight of its module, so that its input is the module's argument."""
        return self.expert is None and self.part is None and self.view is None and self.parameter == "weight"

    def stored(self, model: nn.Module) -> nn.Parameter:
        """The whole parameter that holds the matrix."""
        return model.get_submodule(self.path).get_parameter(self.parameter)

    def tensor(self, model: nn.Module) -> Tensor:
        """The stored tensor; for an expert or a part a view of its slice of the parameter."""
        return self._slice(self.stored(model).detach())

    def _slice(self, stored: Tensor) -> Tensor:
        if self.view is not None:
            return self.view.of(stored)
        if self.part is not None:
            return stored.chunk(self.part.count)[self.part.index]
        return stored if self.expert is None else stored[self.expert]

    def matrix(self, stored: Tensor) -> Tensor:
        """A copy of the layer's slice of a parameter as a matrix (rows, columns), in float32 (float64 stays)."""
        part = self._slice(stored)
        if self.view is not None:
            part = part.reshape(self.shape)
        matrix = part.T if self.transposed else part.flatten(1)
        return matrix.to(torch.promote_types(matrix.dtype, torch.float32), copy=True).contiguous()

    def read(self, model: nn.Module) -> Tensor:
        """A copy of the layer's matrix in the model, (rows, columns), in float32 (float64 stays)."""
        return self.matrix(self.stored(model).detach())

    def write(self, model: nn.Module, matrix: Tensor) -> None:
        """Write a matrix (rows, columns) into the model, rounded to the parameter's dtype; zeros stay exact."""
        self.write_into(self.stored(model).detach(), matrix)

    def write_into(self, stored: Tensor, matrix: Tensor) -> None:
        """Write a matrix (rows, columns) into a parameter's tensor, or a copy of it."""
        part = self._slice(stored)
        part.copy_(matrix.T if self.transposed else matrix.reshape(part.shape))


def holds_weights(stored: Tensor) -> bool:
    """True if the entries of a parameter are weights: floating-point numbers of at least 16 bits.

    Shorter floats, such as float8, are codes of a quantised matrix: its scales are stored elsewhere.
    """
    return stored.dtype.is_floating_point and stored.dtype.itemsize > 1


def biases_of(model: nn.Module, layers: Sequence[Layer]) -> dict[Layer, str]:
    """The names of the layers' biases, (rows,); layers without one are left out, and biases that modules share."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    uses = Counter(id(value) for value in parameters.values())
    biases = {}
    for layer in layers:
        direct = layer.is_called or isinstance(model.get_submodule(layer.path), TRANSPOSED)
        bias = parameters.get(joined(layer.path, "bias")) if direct else None
        if bias is not None and uses[id(bias)] == 1 and bias.is_floating_point() and bias.shape == layer.shape[:1]:
            biases[layer] = joined(layer.path, "bias")
    return biases


def projections(stored: Tensor) -> dict[str, Tensor]:
    """The rows of queries, keys and values in the `in_proj_weight` of nn.MultiheadAttention, as views."""
    return {part.name: rows for part, rows in zip(PROJECTIONS, stored.chunk(3), strict=True)}


def linear_maps() -> tuple[type[nn.Module], ...]:
    """The classes that multiply their input by their `weight`, with GPT-2's Conv1D if it was imported."""
    return nn.Linear, *CONVOLUTIONS, *library_class("transformers.pytorch_utils", "Conv1D")


def find_layers(model: nn.Module) -> list[Layer]:
    """Every prunable matrix of a model.

    These are the weights of Linear, Conv1d-3d, GPT-2's Conv1D and their subclasses, and of fused experts. They are also
    the projections of nn.MultiheadAttention, and the gates and projections of LSTM, GRU and RNN and their cells.
    Matrices that an observed forward pass of this model multiplied (`found_by_use`) come after them, in place of layers
    of the same parameters.
    """
    names = {name for name, _ in model.named_parameters()}
    by_use = [layer for layer in _BY_USE.get(model, ()) if layer.key in names]
    taken = {layer.key for layer in by_use}
    return [*(layer for layer in layers_by_class(model) if layer.key not in taken), *by_use]


def found_by_use(model: nn.Module, layers: Sequence[Layer], changed: Mapping[str, str] | None = None) -> None:
    """Remember the layers that an observed forward pass of the model has shown; `find_layers` adds them.

    Args:
        model: the model.
        layers: the layers.
        changed: functions that change parameters before they multiply, by name of the parameter.
    """
    _BY_USE[model], _CHANGED[model] = tuple(layers), dict(changed or {})


def changing_functions(model: nn.Module) -> Mapping[str, str]:
    """The functions of `found_by_use`; none before an observation."""
    return _CHANGED.get(model, {})


def layers_by_class(model: nn.Module) -> list[Layer]:
    """The layers that the classes of the modules show, in the order of the modules."""
    transposed, maps = library_class("transformers.pytorch_utils", "Conv1D"), linear_maps()
    names = {id(parameter): name for name, parameter in model.named_parameters()}  # one name per shared parameter
    layers = []
    for path, module in model.named_modules():
        if isinstance(module, maps):
            of_module = _map_of(path, module, isinstance(module, transposed))
        else:
            of_module = _projections_of(path, module) if isinstance(module, nn.MultiheadAttention) else []
            of_module += _gates_of(path, module) if isinstance(module, RECURRENT) else []
            of_module += _fused_experts(path, module)
        for layer in of_module:
            name = names[id(module.get_parameter(layer.parameter))]
            layers.append(layer if name == layer.key else replace(layer, stored_as=name))
    return layers


def embedding_layers(model: nn.Module, layers: Sequence[Layer]) -> list[Layer]:
    """The tables of embeddings as matrices (tokens, features), without those that a layer holds already.

    Tables of fewer than `_FEWEST_TOKENS` rows are left out, and those that a forward pass changes (`max_norm`).
    """
    held = {id(layer.stored(model)) for layer in layers}
    tables = []
    for path, module in model.named_modules():
        weight = module._parameters.get("weight") if isinstance(module, nn.Embedding) else None
        if weight is None or id(weight) in held or not holds_weights(weight) or module.max_norm is not None:
            continue
        if len(weight) >= _FEWEST_TOKENS and weight.numel():
            held.add(id(weight))
            tables.append(Layer(path, (len(weight), weight.shape[1])))
    return tables


def embeddings_of(model: nn.Module, layers: Sequence[Layer]) -> dict[str, Layer]:
    """The layers whose matrix an embedding looks up, by the paths of the embeddings."""
    by_parameter = {id(layer.stored(model)): layer for layer in layers if layer.is_called}
    tables = ((path, module) for path, module in model.named_modules() if isinstance(module, nn.Embedding))
    return {path: by_parameter[id(table.weight)] for path, table in tables if id(table.weight) in by_parameter}


def overlapping(model: nn.Module) -> dict[str, str]:
    """The parameters with entries in the memory of an earlier one, such as its transpose: by name, the earlier name."""
    places: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        plain = type(parameter) is nn.Parameter and parameter.layout is torch.strided
        if plain and not parameter.is_meta and parameter.numel():
            places.setdefault(parameter.untyped_storage().data_ptr(), []).append((name, parameter))
    earlier: dict[str, str] = {}
    for shared in places.values():
        if len(shared) < 2:
            continue
        entries = shared[0][1].untyped_storage().nbytes() // min(parameter.element_size() for _, parameter in shared)
        owner = torch.full((entries,), -1, dtype=torch.int32)
        for number, (name, parameter) in enumerate(shared):
            place = owner.as_strided(parameter.shape, parameter.stride(), parameter.storage_offset())
            first = int(place.max())
            if first >= 0:
                earlier[name] = shared[first][0]
            else:
                place.fill_(number)
    return earlier


def joined(path: str, parameter: str) -> str:
    """The full name of a module's parameter in the model."""
    return f"{path}.{parameter}" if path else parameter


def _map_of(path: str, module: nn.Module, transposed: bool) -> list[Layer]:
    """The weight of a linear map or a convolution.

    Empty if it is recomputed from other parameters in every forward pass, quantised, or without entries.
    """
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is None or not holds_weights(weight) or not weight.numel():
        return []
    stored = len(weight), weight.numel() // len(weight)
    groups = int(module.groups) if isinstance(module, CONVOLUTIONS) else 1
    kernel = weight[0, 0].numel() if isinstance(module, CONVOLUTIONS) else 1
    shape = stored[::-1] if transposed else stored
    return [Layer(path, shape, groups=groups, kernel=kernel, transposed=transposed)]


def _projections_of(path: str, module: nn.MultiheadAttention) -> list[Layer]:
    """The projections of queries, keys and values: in one parameter if they have the same width, otherwise in three.

    The output projection is a Linear of its own. Weights that are recomputed from other parameters in every forward
    pass are left out.
    """
    width, parameters = module.embed_dim, dict(module.named_parameters(recurse=False))
    if module.kdim == module.vdim == width:
        layers = [Layer(path, (width, width), "in_proj_weight", part=part) for part in PROJECTIONS]
    else:
        widths = {"q": width, "k": module.kdim, "v": module.vdim}
        layers = [Layer(path, (width, columns), f"{name}_proj_weight") for name, columns in widths.items()]
    return [layer for layer in layers if layer.parameter in parameters]


def _gates_of(path: str, module: nn.RNNBase | nn.RNNCellBase) -> list[Layer]:
    """The input-hidden and hidden-hidden matrices of a recurrent layer, one for each gate, and its projections.

    An LSTM with `proj_size` has one projection `weight_hr` for each layer and direction.
    """
    layers = []
    for name, weight in module.named_parameters(recurse=False):
        if name.startswith("weight_hr") and holds_weights(weight):
            layers.append(Layer(path, (weight.shape[0], weight.shape[1]), name))
        if name.startswith(("weight_ih", "weight_hh")) and holds_weights(weight):
            gates, shape = _GATES[weight.shape[0] // module.hidden_size], (module.hidden_size, weight.shape[1])
            parts = [RowBlock(gate, index, len(gates)) for index, gate in enumerate(gates)]
            layers += [Layer(path, shape, name, part=part) for part in parts]
            layers += [] if parts else [Layer(path, shape, name)]
    return layers


def _fused_experts(path: str, module: nn.Module) -> list[Layer]:
    """The slices of the three-dimensional parameters (experts, rows, columns) of a module that holds many experts.

    All such modules of transformers have an attribute `num_experts`, and a true `is_transposed` if they store
    (experts, columns, rows).
    """
    count, transposed = getattr(module, "num_experts", None), bool(getattr(module, "is_transposed", False))
    layers = []
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim == 3 and parameter.shape[0] == count and holds_weights(parameter):
            rows, columns = parameter.shape[:0:-1] if transposed else parameter.shape[1:]
            layers += [Layer(path, (rows, columns), name, expert, transposed=transposed) for expert in range(count)]
    return layers


def same_tensors(state: Mapping[str, object]) -> list[list[str]]:
    """Group the names of a state dict by tensor: tied tensors (same memory, shape, strides, dtype) share a group."""
    groups: dict[object, list[str]] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            # All empty tensors have the same address, and so have all on the meta device.
            here = value.numel() and not value.is_meta
            place = (value.data_ptr(), value.shape, value.stride(), value.dtype) if here else id(value)
            groups.setdefault(place, []).append(name)
    return [*groups.values()]
