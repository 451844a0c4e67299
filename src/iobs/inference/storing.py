"""The layers of a model as stored matrices in the formats with the fewest bytes, without timing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn

from iobs.errors import ModelError
from iobs.inference.choices import FORMATS_OF, Precision, require_finite
from iobs.inference.formats import MOST_COLUMNS, FormatName, StoredMatrix, bytes_of, steps_of_grid, store
from iobs.inference.modules import (
    StoredEmbedding,
    StoredLayer,
    can_store,
    is_table,
    matrix_of,
    refuse_to_save,
    table_with_matrix,
    with_matrix,
)

# ---- Bytes of the tensors that a model holds in memory while it runs, dense or stored


def bytes_held(model: nn.Module) -> dict[str, int]:
    """Bytes in memory of all parameters and buffers, in their present form; a tensor with two names counts once.

    Returns:
        The bytes of embeddings (with an output head of the same weight), of other matrices, and of all other tensors:
        biases, norms and buffers.
    """
    totals = {"embeddings": 0, "matrices": 0, "others": 0}
    seen: set[tuple[int, int]] = set()
    for module in model.modules():
        table = isinstance(module, nn.Embedding | StoredEmbedding)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            place = tensor.data_ptr(), tensor.nbytes
            if place not in seen:
                seen.add(place)
                stored = isinstance(module, StoredLayer) and tensor is not module.bias
                weight = stored or (isinstance(tensor, nn.Parameter) and tensor.ndim > 1)
                totals["embeddings" if weight and table else "matrices" if weight else "others"] += tensor.nbytes
    return totals


_DENSE = 0.95  # share of entries that are not zero, above which no solver has made zeros


def smallest_format(weight: torch.Tensor, precision: Precision, ties: bool = True) -> FormatName | None:
    """The format with the fewest bytes for a matrix; None if the dense tensor has fewer.

    A matrix with few zeros that lies on no grid of four bits, such as an embedding, is never rounded to four bits.

    Args:
        weight: (rows, columns).
        precision: the fewest bits of a weight.
        ties: whether a format with as many bytes as the dense tensor wins, since kernels read it.
    """
    rows, columns = weight.shape
    nonzeros = int(weight.count_nonzero())
    sizes: dict[FormatName, int] = {}
    for name in FORMATS_OF[precision]:
        if name == "bitmask-int4" and nonzeros > _DENSE * weight.numel() and steps_of_grid(weight.float()) is None:
            continue
        if name != "index-bf16" or columns <= MOST_COLUMNS:
            sizes[name] = bytes_of(name, rows, columns, nonzeros)
    smallest = min(sizes, key=sizes.__getitem__)
    more = sizes[smallest] - weight.nbytes
    return smallest if more < 0 or (ties and more == 0) else None


def precision_of(model: nn.Module) -> Precision | None:
    """The fewest bits in which a layer of a model is stored; None if none is stored."""
    return fewest_bits({module.format for module in model.modules() if isinstance(module, StoredLayer)})


def fewest_bits(formats: Collection[FormatName]) -> Precision | None:
    """The precision with the fewest bits among formats; None if there is none."""
    fewest: tuple[Precision, ...] = ("int4", "int8", "bf16")
    return next((name for name in fewest if any(stored.endswith(name) for stored in formats)), None)


def stored_matrices(model: nn.Module, precision: Precision) -> Iterator[tuple[str, StoredMatrix]]:
    """Yield the name and the matrix of each layer that a format makes smaller, or that kernels read in as many bytes.

    Args:
        model: a module; linear layers, embeddings and convolutions of size 1 are looked at, see `can_store`.
        precision: the fewest bits of a weight.

    Raises:
        NonFiniteError: a weight holds NaN or infinite entries; names the layer.
    """
    multiplied = {id(layer.weight) for layer in model.modules() if can_store(layer)}
    for name, layer in model.named_modules():
        if (can_store(layer) or is_table(layer)) and matrix_of(layer).numel():  # else there is nothing to store
            require_finite({name: layer})
            form = smallest_format(matrix_of(layer), precision, ties=id(layer.weight) in multiplied)
            if form is not None:
                yield name, store(matrix_of(layer), form)


def replace_layers(model: nn.Module, matrices: Mapping[str, StoredMatrix]) -> None:
    """Replace layers of a model by stored ones, in place.

    Args:
        model: the module.
        matrices: matrices by the name of the layer. They must have passed `formats.require_valid`.

    Raises:
        ModelError: a layer is missing, has no stored form, or has another shape.
    """
    layers = {name: layer for name, layer in model.named_modules() if name}
    for name, matrix in matrices.items():
        layer = layers.get(name)
        fits = layer is not None and (can_store(layer) or is_table(layer))
        if layer is None or not fits or matrix_of(layer).shape != (matrix.rows, matrix.columns):
            raise ModelError(
                f"The stored matrix {name!r}, ({matrix.rows}, {matrix.columns}), fits no layer of the model."
            )
        form = table_with_matrix(layer, matrix) if is_table(layer) else with_matrix(layer, matrix)
        model.set_submodule(name, form.train(layer.training))
    if matrices:
        refuse_to_save(model)
