"""Packed files that are ready to run: layers as stored matrices, read by memory map and multiplied as they are.

The file is a safetensors file. A layer `NAME` is stored as tensors `NAME:values`, `NAME:mask` and so on (see
`inference.formats`), and described by a JSON table in the metadata. Layers with one weight, such as an embedding and
the output head, share these tensors. Every other tensor is stored unchanged. A file of unknown origin is checked in
full before a kernel reads it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from iobs.errors import ModelError
from iobs.inference.choices import Precision
from iobs.inference.formats import FORMATS, StoredMatrix, require_valid
from iobs.inference.fused import can_fuse, fuse
from iobs.inference.storing import replace_layers, stored_matrices
from iobs.models.weights import (
    DTYPE_NAMES,
    DTYPES,
    Entry,
    ShardWriter,
    fill_weights,
    plain_names,
    read_entries,
)
from iobs.pruning.network.layers import same_tensors

_TABLE = "iobs_matrices"
_WEIGHT = "weight"


@dataclass(frozen=True)
class ReadyLayer:
    """A layer of a packed file that is ready to run.

    Attributes:
        matrix: the stored matrix.
        shape: of the dense weight.
        dtype: of the dense weight.
        tied: another part of the model uses the dense weight too, which is among the other tensors of the file.
    """

    matrix: StoredMatrix
    shape: tuple[int, ...]
    dtype: torch.dtype
    tied: bool

    def dense(self) -> Tensor:
        """The dense weight, rounded to its format."""
        return self.matrix.to_dense().reshape(self.shape).to(self.dtype)


@dataclass(frozen=True)
class ReadyFile:
    """Contents of a packed file that is ready to run; tensors lie in the memory map.

    Args:
        layers: the stored layers, by name.
        tensors: all other tensors of the state dict; tied tensors once.
    """

    layers: Mapping[str, ReadyLayer]
    tensors: Mapping[str, Tensor]

    @property
    def state(self) -> dict[str, Tensor]:
        """A state dict of the dense model, with zeros (of one element in memory) for the stored layers."""
        blank = {
            weight_of(name): torch.zeros((), dtype=layer.dtype).expand(layer.shape)
            for name, layer in self.layers.items()
            if not layer.tied
        }
        return {**self.tensors, **blank}

    def fill(self, module: nn.Module) -> nn.Module:
        """Fill a module of the same architecture: replace its layers, and load the other tensors.

        Raises:
            ModelError: names or shapes differ.
        """
        fill_packed(module, self.state)
        self.place(module)
        return module

    def place(self, module: nn.Module) -> None:
        """Replace the layers of a module; where it is Llama-like, new tokens take one compiled call as in `accelerate`.

        Raises:
            ModelError: a layer is missing, or has another shape.
        """
        replace_layers(module, {name: layer.matrix for name, layer in self.layers.items()})
        if can_fuse(module):
            fuse(module)


def fill_packed(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Fill a module of the same architecture with the tensors of packed files, in the floating dtypes of the files.

    Raises:
        ModelError: names or shapes differ, or the module is on the meta device.
    """
    plain, state = plain_names(module), module.state_dict()
    state = {plain.get(name, name): value for name, value in state.items()}
    if meta := [name for name, value in state.items() if isinstance(value, Tensor) and value.is_meta]:
        raise ModelError(f"{meta[0]} of the module is on the meta device; build the module with values to fill it.")
    missing = [names[0] for names in same_tensors(state) if tensors.keys().isdisjoint(names)]
    if missing:
        raise ModelError(f"The packed files lack {len(missing)} weights of the module, {min(missing)} the first.")
    try:
        fill_weights(module, tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())  # torch gives each tensor a line
        raise ModelError(f"The packed file does not fit the module: {reason}") from error


def write_ready(module: nn.Module, file: Path, precision: Precision) -> None:
    """Write a module; each linear layer, embedding and convolution of size 1 takes the format with the fewest bytes.

    Args:
        module: the model, dense.
        file: the file to write.
        precision: the fewest bits of a weight.

    Raises:
        ModelError: no layer becomes smaller, or the model is a single layer.
        NonFiniteError: a weight holds NaN or infinite entries; names the layer.
    """
    state = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    matrices = dict(stored_matrices(module, precision))
    if "" in matrices:
        raise ModelError("The model is a single layer, which nothing holds; give nn.Sequential(layer).")
    if not matrices:
        raise ModelError("The model has no layer that a stored format makes smaller; pack it without --precision.")
    tensors: dict[str, Tensor] = {}
    table: dict[str, dict[str, object]] = {}
    weights = {weight_of(name): name for name in matrices}
    for names in same_tensors(state):
        layers = [weights[name] for name in names if name in weights]
        dense = state[names[0]]
        for layer in layers:
            matrix = matrices[layer]
            if layer == layers[0]:
                tensors |= {f"{layer}:{part}": value for part, value in matrix.tensors.items()}
            table[layer] = {
                "format": matrix.format,
                "shape": list(dense.shape),
                "dtype": DTYPE_NAMES[dense.dtype],
                "tied": len(layers) < len(names),
                "tensors": layers[0],
            }
        if len(layers) < len(names):
            tensors[names[0]] = dense
    # Tensors of wide elements first: each then begins at a multiple of the size of its element.
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    entries = {name: Entry(tensors[name].dtype, tuple(tensors[name].shape)) for name in order}
    with ShardWriter(file, entries, {_TABLE: json.dumps(table)}) as writer:
        for name in order:
            writer.put(name, tensors[name])


def is_ready(file: Path) -> bool:
    """True if a packed file holds stored matrices.

    Raises:
        ModelError: the file is damaged.
    """
    return _TABLE in read_entries(file)[1]


def read_ready(file: Path) -> ReadyFile:
    """Read a packed file by memory map.

    Raises:
        ModelError: the file is damaged, or its parts do not agree.
    """
    metadata = read_entries(file)[1]
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
        table = json.loads(metadata[_TABLE])
        parts: dict[str, dict[str, Tensor]] = {str(name): {} for name in table}
        for name in [*tensors]:
            layer, mark, part = name.rpartition(":")
            if mark and layer in parts:
                parts[layer][part] = tensors.pop(name)
        layers = {name: _read_layer(table[name], parts[table[name].get("tensors", name)]) for name in parts}
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} is damaged ({error}); copy or pack it again.") from error
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from error
    return ReadyFile(layers, tensors)


def _read_layer(row: Mapping[str, object], parts: dict[str, Tensor]) -> ReadyLayer:
    """A layer from its row in the table and its tensors.

    Raises:
        ValueError: an entry has another type or value.
        ModelError: the tensors do not agree.
    """
    form = next((name for name in FORMATS if name == row["format"]), None)
    shape, dtype = row["shape"], DTYPES[str(row["dtype"])]
    if form is None or not isinstance(shape, list) or len(shape) < 2 or not dtype.is_floating_point:
        raise ValueError("a layer has an unknown format, shape or dtype")
    if not all(type(extent) is int and 0 < extent < 1 << 32 for extent in shape):
        raise ValueError("a layer has a shape that is no shape")
    matrix = StoredMatrix(form, shape[0], math.prod(shape[1:]), parts)
    require_valid(matrix)
    return ReadyLayer(matrix, tuple(shape), dtype, row["tied"] is True)


def weight_of(layer: str) -> str:
    """Name of the weight of a layer in the state dict."""
    return f"{layer}.{_WEIGHT}" if layer else _WEIGHT
