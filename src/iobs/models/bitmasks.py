"""Exact packed files, written and read one tensor at a time.

A tensor is stored in the shortest of three forms: the entropy code of its integers, where it has them (`Rate`); a mask
bit per entry and the nonzero values; or as it is.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from iobs.core.files import expanded, weight_index
from iobs.core.integers import Integers, looks_coded, matrices_of
from iobs.errors import ModelError
from iobs.models.entropy_code import decode, encode
from iobs.models.output import copy_companions
from iobs.models.ready import is_ready, read_ready, weight_of
from iobs.models.weights import DTYPES, Entry, ShardWriter, read_entries
from iobs.pruning.runtime.scratch import scratch_folder

SUFFIX = ".packed"
_MASK, _VALUES, _SHAPES = ":mask", ":values", "iobs_shapes"
_CODE, _CODED = ":code", "iobs_coded"  # bytes of `entropy_code`; its version, and dtype and shape by name
_VERSION = 1
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    """Flat integer view of the bits of a tensor. Only +0.0 maps to 0, so -0.0 and NaN count as values."""
    return tensor.contiguous().flatten().view(_BITS[tensor.element_size()])


def pack(shard: Path, target: Path) -> None:
    """Write a file of weights as a packed file, one tensor at a time.

    Raises:
        ModelError: the file is damaged.
    """
    entries, metadata = read_entries(shard)
    try:
        _pack_entries(shard, target, entries, metadata)
    except SafetensorError as error:
        raise ModelError(f"{shard} is damaged ({error}); copy it again.") from error


def _pack_entries(shard: Path, target: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> None:
    packed: dict[str, Entry] = {}
    shapes: dict[str, list[int]] = {}
    codes: dict[str, bytes] = {}
    with safe_open(shard, framework="pt") as opened:
        for name, entry in entries.items():
            size = entry.bytes // entry.dtype.itemsize
            tensor = opened.get_tensor(name)
            kept = int((_bits(tensor) != 0).sum()) if entry.dtype.is_floating_point and size else size
            code = _code_of(tensor) if kept else None
            if code is not None and len(code) < min(entry.bytes, (size + 7) // 8 + kept * entry.dtype.itemsize):
                packed[name + _CODE] = Entry(torch.uint8, (len(code),))
                codes[name] = code
            elif (size + 7) // 8 + kept * entry.dtype.itemsize < entry.bytes:
                packed[name + _MASK] = Entry(torch.uint8, ((size + 7) // 8,))
                packed[name + _VALUES] = Entry(entry.dtype, (kept,))
                shapes[name] = list(entry.shape)
            else:
                packed[name] = entry
        coded = {name: [str(entries[name].dtype).removeprefix("torch."), *entries[name].shape] for name in codes}
        own = {_SHAPES: json.dumps(shapes)} | (
            {_CODED: json.dumps({"version": _VERSION, "tensors": coded})} if coded else {}
        )
        with ShardWriter(target, packed, {**metadata, **own}) as writer:
            for name in entries:
                if name in codes:
                    writer.put(name + _CODE, torch.frombuffer(bytearray(codes.pop(name)), dtype=torch.uint8))
                    continue
                tensor = opened.get_tensor(name)
                if name not in shapes:
                    writer.put(name, tensor)
                    continue
                mask = _bits(tensor) != 0
                writer.put(name + _MASK, torch.from_numpy(np.packbits(mask.numpy(), bitorder="little")))
                writer.put(name + _VALUES, tensor.flatten()[mask])


def _code_of(tensor: Tensor) -> bytes | None:
    """The entropy code of the integers of a tensor; None if it has none."""
    if not looks_coded(tensor) or bool((tensor == 0).logical_and(tensor.signbit()).any()):
        return None
    found = ([Integers.of(matrix) for matrix in matrices] for matrices in matrices_of(tensor))
    ways = [[matrix for matrix in way if matrix is not None] for way in found if all(way)]
    shortest = min(ways, key=lambda way: sum(matrix.bits() for matrix in way), default=None)
    return None if shortest is None else b"".join(map(encode, shortest))


def unpack(path: str | Path, directory: Path) -> None:
    """Write the dense files of a packed directory into an existing directory.

    Raises:
        ModelError: the packed directory holds no packed file, or one is damaged or missing.
    """
    source = expanded(path)
    files = sorted(source.glob(f"*{SUFFIX}")) if source.is_dir() else []
    if not files:
        raise ModelError(f"{source} holds no {SUFFIX} file; give a directory that iobs pack wrote.")
    missing = sorted(_indexed(source) - {file.name for file in files})
    if missing:
        raise ModelError(f"{source} lacks {len(missing)} packed files, {missing[0]} the first; copy them again.")
    copy_companions(source, directory, keep_index=True)
    for file in files:
        if is_ready(file):
            _unround(file, directory / f"{file.stem}.safetensors")
            continue
        _unpack(file, directory / f"{file.stem}.safetensors")


@contextmanager
def unpacked(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder beside a packed directory with its dense files; it is removed at the end.

    Raises:
        ModelError: as `unpack`.
        OutputError: the disk has too little room for the dense files.
    """
    with scratch_beside(path, unpacked_bytes(path)) as folder:
        unpack(path, folder)
        yield folder


def unpacked_bytes(path: str | Path) -> int:
    """Bytes of the dense tensors of a packed directory.

    Raises:
        ModelError: a packed file is damaged.
    """
    total = 0
    for file in sorted(expanded(path).glob(f"*{SUFFIX}")):
        if is_ready(file):
            total += sum(tensor.nbytes for tensor in read_ready(file).state.values())
        else:
            total += sum(entry.bytes for entry in _contents(file)[0].values())
    return total


def scratch_beside(path: str | Path, needed_bytes: int) -> AbstractContextManager[Path]:
    """A temporary folder on the disk of a packed directory."""
    place = Path(os.path.realpath(expanded(path)))
    return scratch_folder(place.parent, place.name, needed_bytes)


def _indexed(directory: Path) -> set[str]:
    """Names of the packed files of all shards in the index. Empty without an index."""
    index = weight_index(directory)
    if index is None:
        return set()
    try:
        shards = json.loads(index.read_text(encoding="utf8"))["weight_map"].values()
        return {f"{Path(shard).stem}{SUFFIX}" for shard in shards}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index} is damaged; copy it again.") from error


def _contents(file: Path) -> tuple[dict[str, Entry], dict[str, list[int]], dict[str, str]]:
    """The dense tensors of a packed file, the shapes of the packed tensors, and the other metadata.

    Raises:
        ModelError: it is no packed file, or damaged.
    """
    entries, metadata = read_entries(file)
    try:
        shapes = json.loads(metadata.pop(_SHAPES))
        known = json.loads(metadata.pop(_CODED, "null")) or {"version": _VERSION, "tensors": {}}
        version, stated = known["version"], known["tensors"]
        coded = {name: Entry(_DTYPES[value[0]], tuple(value[1:])) for name, value in stated.items()}
        if any(_entries_in(value[1:]) < 0 for value in stated.values()):
            raise ValueError("a shape that is none")
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} is no packed file of iobs; give a directory that iobs pack wrote.") from error
    _require_parts(file, shapes, entries)
    if version != _VERSION:
        raise ModelError(f"{file} has a code of version {version}; install the iobs that wrote it.")
    if lost := [name for name in coded if name + _CODE not in entries]:
        raise ModelError(f"{file} is damaged (the code of {lost[0]!r} is not there); copy or pack it again.")
    dense: dict[str, Entry] = {}
    for name, entry in entries.items():
        if name.removesuffix(_CODE) in coded:
            whole = name.removesuffix(_CODE)
            dense[whole] = coded[whole]
        elif name.removesuffix(_MASK) in shapes:
            whole = name.removesuffix(_MASK)
            dense[whole] = Entry(entries[whole + _VALUES].dtype, tuple(shapes[whole]))
        elif name.removesuffix(_VALUES) not in shapes:
            dense[name] = entry
    return dense, shapes, metadata


def _unpack(file: Path, target: Path) -> None:
    dense, shapes, metadata = _contents(file)
    try:
        with safe_open(file, framework="pt") as opened, ShardWriter(target, dense, metadata) as writer:
            names = set(opened.keys())
            for name, entry in dense.items():
                if name not in names and name not in shapes:
                    writer.put(name, _decoded(opened.get_tensor(name + _CODE), name, entry))
                    continue
                stored = [name + _MASK, name + _VALUES] if name in shapes else [name]
                tensors = {part: opened.get_tensor(part) for part in stored}
                writer.put(name, _expanded(tensors, name, entry) if name in shapes else tensors[name])
    except SafetensorError as error:
        raise ModelError(f"{file} is damaged ({error}); copy or pack it again.") from error


def _require_parts(file: Path, shapes: object, entries: Mapping[str, Entry]) -> None:
    """Check that each packed tensor has a mask of its size, and at most as many values; shapes alone promise nothing.

    Raises:
        ModelError: it has not.
    """
    nothing = Entry(torch.uint8, ())
    for name, shape in shapes.items() if isinstance(shapes, dict) else [("", None)]:
        mask, values = entries.get(name + _MASK, nothing), entries.get(name + _VALUES, nothing)
        size = _entries_in(shape)
        fits = mask.dtype is torch.uint8 and mask.shape == ((size + 7) // 8,)
        if not fits or len(values.shape) != 1 or not 0 <= values.shape[0] <= size:
            raise ModelError(f"{file} is damaged (shape, mask and values of {name!r}); copy or pack it again.")


def _entries_in(shape: object) -> int:
    """Number of entries of a shape; -1 if it is no list of whole numbers."""
    if not isinstance(shape, list) or not all(type(extent) is int and extent >= 0 for extent in shape):
        return -1
    return math.prod(shape)


def _unround(file: Path, target: Path) -> None:
    """Write the dense weights of a file that is ready to run."""
    contents = read_ready(file)
    entries = {name: Entry(tensor.dtype, tuple(tensor.shape)) for name, tensor in contents.state.items()}
    layers = {weight_of(name): layer for name, layer in contents.layers.items()}
    with ShardWriter(target, entries, {"format": "pt"}) as writer:
        for name in entries:
            writer.put(name, contents.tensors[name] if name in contents.tensors else layers[name].dense())


def _decoded(code: Tensor, name: str, entry: Entry) -> Tensor:
    """The tensor of an entropy code.

    Raises:
        ModelError: it is damaged, or has another shape.
    """
    matrices = [matrix.weight(entry.dtype).flatten() for matrix in decode(code.numpy().tobytes(), repr(name))]
    if sum(map(len, matrices)) != math.prod(entry.shape):
        raise ModelError(f"The code of {name!r} is that of another shape; the packed file is damaged.")
    return torch.cat(matrices).reshape(entry.shape)


def _expanded(tensors: dict[str, Tensor], name: str, entry: Entry) -> Tensor:
    result = torch.zeros(entry.shape, dtype=entry.dtype)
    packed, values = tensors[name + _MASK], tensors[name + _VALUES]
    bits = np.unpackbits(packed.numpy(), axis=0, count=result.numel(), bitorder="little")
    chosen = torch.from_numpy(bits).bool()
    if int(chosen.sum()) != len(values):
        raise ModelError(f"The mask and the values of {name!r} do not agree; the packed file is damaged.")
    result.view(-1)[chosen] = values
    return result
