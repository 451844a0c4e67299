"""The weights of a module in one safetensors file, whatever its tensors share with each other."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


def write_weights(module: nn.Module, file: Path) -> None:
    """Write every tensor of a module, those of several names once.

    safetensors' own `save_model` refuses a tensor that is a part of another one's memory, as queries, keys and values
    that are chunks of one matrix; here each part is written by itself.
    """
    state = module.state_dict()
    tensors = {names[0]: _alone(state[names[0]]) for names in same_tensors(state)}
    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if others:
        warnings.warn(
            f"{', '.join(others)}: no tensor, so not written; whoever reads the weights keeps that of the module that "
            "they are read into.",
            stacklevel=2,
        )
    save_file(tensors, file, metadata={"format": "pt"})


def read_weights(module: nn.Module, file: Path) -> None:
    """Fill a module with what `write_weights` wrote of one like it, in the floating dtypes that were written.

    Raises:
        RuntimeError: names or shapes do not agree.
        safetensors.SafetensorError: the file is damaged.
    """
    stored = load_file(file)
    for name, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
        if name in stored and tensor.is_floating_point() and stored[name].is_floating_point():
            tensor.data = tensor.data.to(stored[name].dtype)
    state = module.state_dict()
    for names in same_tensors(state):
        written = next((stored[name] for name in names if name in stored), None)
        if written is not None:
            stored |= dict.fromkeys(names, written)
    kept = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    module.load_state_dict({**stored, **kept}, strict=True)


def same_tensors(state: Mapping[str, Any]) -> list[list[str]]:
    """The names of tensors, together where several stand for the very same entries."""
    groups: dict[Any, list[str]] = defaultdict(list)
    for name, value in state.items():
        if isinstance(value, Tensor):
            # Tensors without entries have no place in memory that could be the same.
            place: Any = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else name
            groups[place].append(name)
    return [*groups.values()]


def _alone(tensor: Tensor) -> Tensor:
    """A tensor in memory of its own."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor.contiguous() if whole else tensor.clone(memory_format=torch.contiguous_format)
