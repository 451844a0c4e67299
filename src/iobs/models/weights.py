"""Write and read all weights of a module as one safetensors file; tensors may share memory."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


def write_weights(module: nn.Module, file: Path) -> None:
    """Write every tensor of a module, tied tensors once.

    safetensors' `save_model` rejects tensors that overlap in memory, such as queries, keys and values that are chunks
    of one matrix. Here each tensor is written separately.
    """
    state = module.state_dict()
    used: set[int] = set()
    tensors = {names[0]: _alone(state[names[0]], used) for names in same_tensors(state)}
    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if others:
        warnings.warn(
            f"{', '.join(others)}: not a tensor, so not written; a module that reads the file keeps its own value.",
            stacklevel=2,
        )
    save_file(tensors, file, metadata={"format": "pt"})


def read_weights(module: nn.Module, file: Path) -> None:
    """Load weights that `write_weights` wrote into a module of the same architecture, in the stored floating dtypes.

    Raises:
        RuntimeError: names or shapes differ.
        safetensors.SafetensorError: the file is damaged.
    """
    fill_weights(module, load_file(file))


def fill_weights(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy a state dict into a module of the same architecture, in the floating dtypes of the state dict.

    Args:
        module: the module.
        tensors: tensors by name; of tied tensors one is enough.

    Raises:
        RuntimeError: names or shapes differ.
    """
    stored = dict(tensors)
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


def same_tensors(state: Mapping[str, object]) -> list[list[str]]:
    """Group the names of a state dict by tensor: tied tensors (same memory, shape, strides, dtype) share a group."""
    groups: dict[object, list[str]] = defaultdict(list)
    for name, value in state.items():
        if isinstance(value, Tensor):
            # Empty tensors all have the same address, so they are never tied.
            place: object = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else name
            groups[place].append(name)
    return [*groups.values()]


def _alone(tensor: Tensor, used: set[int]) -> Tensor:
    """A contiguous tensor that is alone in its storage; a copy only if needed.

    Args:
        tensor: the tensor.
        used: addresses of the storages of earlier tensors, such as a convolution with the weight of a linear layer;
            that of this tensor is added.
    """
    storage = tensor.untyped_storage()
    whole = storage.nbytes() == tensor.numel() * tensor.element_size() and storage.data_ptr() not in used
    used.add(storage.data_ptr())
    return tensor.contiguous() if whole else tensor.clone(memory_format=torch.contiguous_format)
