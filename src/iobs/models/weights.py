"""Weights in safetensors files: one tensor at a time, or all those of a module at once."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from iobs.core.files import read_header
from iobs.core.late import library_class
from iobs.errors import ModelError
from iobs.pruning.network.layers import same_tensors

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Entry:
    """Dtype and shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.dtype.itemsize * math.prod(self.shape)


def read_entries(file: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Read the header of a safetensors file: its tensors by name, and its metadata.

    Raises:
        ModelError: the file is damaged, cut short, or holds an unknown dtype.
    """
    try:
        header, length = read_header(file)
        metadata = dict(header.pop("__metadata__", {}))
        described = {name: (value["dtype"], tuple(value["shape"])) for name, value in header.items()}
        strange = {name: dtype for name, (dtype, _) in described.items() if dtype not in DTYPES}
        end = max((int(value["data_offsets"][1]) for value in header.values()), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} is damaged or no safetensors file ({error}); copy it again.") from error
    if strange:
        name = min(strange)
        raise ModelError(
            f"{name} in {file} holds {strange[name]} numbers, which iobs cannot handle; convert them first."
        )
    if file.stat().st_size < 8 + length + end:
        raise ModelError(f"{file} is cut short: {file.stat().st_size} of {8 + length + end} bytes; copy it again.")
    return {name: Entry(DTYPES[dtype], shape) for name, (dtype, shape) in described.items()}, metadata


class ShardWriter:
    """Writer of one safetensors file, which takes the tensors in any order. The header is written first.

    As a context manager it closes the file at the end, also after an error.

    Args:
        file: the file to write.
        entries: dtypes and shapes of all tensors, in the order of the file.
        metadata: metadata of the header.
    """

    def __init__(self, file: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> None:
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        self.entries, self.places, offset = dict(entries), {}, 0
        for name, entry in entries.items():
            header[name] = {
                "dtype": DTYPE_NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [offset, offset + entry.bytes],
            }
            self.places[name] = offset
            offset += entry.bytes
        text = json.dumps(header, separators=(",", ":")).encode("utf8")
        text += b" " * (-len(text) % 8)
        self.start, self.missing = 8 + len(text), set(entries)
        self.opened: BinaryIO = file.open("wb")
        self.opened.write(len(text).to_bytes(8, "little") + text)
        self.opened.truncate(self.start + offset)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.opened.close()

    def put(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, whose dtype and shape must be those of its entry."""
        entry = self.entries[name]
        assert (tensor.dtype, tuple(tensor.shape)) == (entry.dtype, entry.shape), name
        self.opened.seek(self.start + self.places[name])
        flat = tensor.detach().cpu().contiguous().flatten()
        self.opened.write(flat.view(torch.uint8).numpy().data)
        self.missing.discard(name)

    def append(self, body: Path, names: Iterable[str]) -> None:
        """Write the last tensors, whose bytes a file holds in their order."""
        with body.open("rb") as opened:
            self.opened.seek(self.start + min((self.places[name] for name in names), default=0))
            shutil.copyfileobj(opened, self.opened)
        self.missing.difference_update(names)

    def close(self) -> None:
        """Close the file; every tensor must have been written."""
        assert not self.missing, self.missing
        self.opened.close()


def write_weights(module: nn.Module, file: Path) -> None:
    """Write every tensor of a module, tied tensors once.

    safetensors' `save_model` rejects tensors that overlap in memory, such as queries, keys and values that are chunks
    of one matrix. Here each tensor is written separately.
    """
    plain, state = plain_names(module), module.state_dict()
    state = {plain.get(name, name): value for name, value in state.items()}
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
    stored_names = {plain: name for name, plain in plain_names(module).items()}
    stored = {stored_names.get(name, name): value for name, value in tensors.items()}
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


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside torch.compile, DataParallel and DistributedDataParallel."""
    while path := _inside(module):
        module = getattr(module, path)
    return module


def plain_names(module: nn.Module) -> dict[str, str]:
    """The names of tensors in a module with wrappers inside, with the names that they have without the wrappers."""
    wrappers = {path: inside for path, each in module.named_modules() if (inside := _inside(each))}
    if not wrappers:
        return {}

    def plain(name: str) -> str:
        parts = name.split(".")
        return ".".join(part for i, part in enumerate(parts) if wrappers.get(".".join(parts[:i])) != part)

    return {name: plain(name) for name in module.state_dict()}


def _inside(module: nn.Module) -> str | None:
    """The name of the module that a wrapper holds; None for other modules."""
    if isinstance(module, library_class("torch._dynamo.eval_frame", "OptimizedModule")):
        return "_orig_mod"
    return "module" if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)) else None


def _alone(tensor: Tensor, used: set[int]) -> Tensor:
    """A contiguous tensor that is alone in its storage; a copy only if needed.

    Args:
        tensor: the tensor.
        used: addresses of the storages of earlier tensors, such as a convolution with the weight of a linear layer;
            that of this tensor is added.
    """
    storage = tensor.untyped_storage()
    whole = storage.nbytes() == tensor.nbytes and storage.data_ptr() not in used
    used.add(storage.data_ptr())
    return tensor.contiguous() if whole else tensor.clone(memory_format=torch.contiguous_format)
