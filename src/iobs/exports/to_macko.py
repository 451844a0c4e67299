"""MACKO: five tensors a matrix, which its kernels for NVIDIA GPUs multiply with one token at a time.

A row is a sequence of float16 values and of 4-bit counts of zeros before them. After 15 zeros one more entry is stored
even if it is zero, so that every distance fits. Zeros at the end of a row are not stored.

Format and kernels: https://github.com/vlejd/macko_spmv.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from iobs.errors import ModelError
from iobs.exports.source import ExportSource, Written, is_pretrained

FILE = "macko_model.pt"
_PLACES = (".self_attn.", ".mlp.")  # modules whose matrices the reader of MACKO expects in its form
_STEP = 16  # entries between two stored ones, at most
_PADDING = 8  # stored values come in multiples of this


def write_macko(source: ExportSource, directory: Path) -> list[Written]:
    """Write macko_model.pt: the state dict in float16, and `c_0` to `c_4` in place of each matrix.

    Raises:
        ModelError: the model has no such matrices, or a weight is too large for float16.
    """
    module = source.module
    inside = [matrix for matrix in source.matrices() if any(place in matrix.name for place in _PLACES)]
    linear = {
        matrix.name: matrix
        for matrix in inside
        if isinstance(module.get_submodule(matrix.name.rpartition(".")[0]), nn.Linear)
    }
    if not is_pretrained(module) or not linear:
        raise ModelError("An export to macko needs a language model with layers in self_attn and mlp; try onnx.")
    state: dict[str, Tensor] = {}
    written = []
    for name, tensor in module.state_dict().items():
        half = _half(name, tensor.detach().cpu())
        if name not in linear:
            state[name] = half
            continue
        for number, part in enumerate(packed(half)):
            state[f"{name.removesuffix('weight')}c_{number}"] = part
        written.append(linear[name].written("float16", half))
    torch.save(state, directory / FILE)
    source.copy_files(directory)
    return written


def packed(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The five tensors of a matrix.

    Args:
        weight: (rows, columns), float16.

    Returns:
        Values, float16, padded by zeros to a multiple of 8. Counts of zeros before each value, uint8, two in a byte,
        the first one in its lower half. For each row the place of its first value, and at the end the number of values,
        int32, (rows + 1,). The numbers of rows and of columns, int32, each of shape (1,).
    """
    rows, columns = weight.shape
    dense = weight.numpy()
    row, column = np.nonzero(dense)
    before = np.where(np.diff(row, prepend=-1) != 0, -1, np.roll(column, 1))
    zeros = column - before - 1
    stored = zeros // _STEP + 1  # this value, and zeros that bridge a long distance
    ends = np.cumsum(stored)
    total = int(ends[-1]) if len(ends) else 0
    size = -(-total // _PADDING) * _PADDING
    values, counts = np.zeros(size, np.float16), np.zeros(size, np.uint8)
    counts[:total] = _STEP - 1
    values[ends - 1] = dense[row, column]
    counts[ends - 1] = zeros % _STEP
    starts = np.zeros(rows + 1, np.int64)
    starts[1:] = np.cumsum(np.bincount(row, weights=stored, minlength=rows))
    if total > np.iinfo(np.int32).max:
        raise ModelError("A matrix has too many values for macko, which counts them in 32 bits.")
    return (
        torch.from_numpy(values),
        torch.from_numpy(counts[::2] | (counts[1::2] << 4)),
        torch.from_numpy(starts.astype(np.int32)),
        torch.tensor([rows], dtype=torch.int32),
        torch.tensor([columns], dtype=torch.int32),
    )


def _half(name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    half = tensor.to(torch.float16)
    if not bool(torch.isfinite(half).all()):
        raise ModelError(f"The weight {name!r} is too large for float16, the only type of macko.")
    return half
