"""Packed files back to dense ones: one tensor at a time, into a directory or a temporary folder beside them."""

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
from iobs.errors import ModelError
from iobs.models.companions import copy_companions
from iobs.models.ready import is_ready, read_ready, weight_of
from iobs.models.shards import Entry, ShardWriter, read_entries
from iobs.pruning.runtime.scratch import scratch_folder

SUFFIX = ".packed"
MASK, VALUES, SHAPES = ":mask", ":values", "iobs_shapes"


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
    found = 0
    for file in sorted(expanded(path).glob(f"*{SUFFIX}")):
        if is_ready(file):
            found += sum(one.nbytes for one in read_ready(file).state.values())
        else:
            found += sum(entry.bytes for entry in _contents(file)[0].values())
    return found


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
        shapes = json.loads(metadata.pop(SHAPES))
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise ModelError(f"{file} is no packed file of iobs; give a directory that iobs pack wrote.") from error
    _require_parts(file, shapes, entries)
    dense: dict[str, Entry] = {}
    for name, entry in entries.items():
        if name.removesuffix(MASK) in shapes:
            whole = name.removesuffix(MASK)
            dense[whole] = Entry(entries[whole + VALUES].dtype, tuple(shapes[whole]))
        elif name.removesuffix(VALUES) not in shapes:
            dense[name] = entry
    return dense, shapes, metadata


def _unpack(file: Path, target: Path) -> None:
    dense, shapes, metadata = _contents(file)
    try:
        with safe_open(file, framework="pt") as opened, ShardWriter(target, dense, metadata) as writer:
            for name, entry in dense.items():
                stored = [name + MASK, name + VALUES] if name in shapes else [name]
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
        mask, values = entries.get(name + MASK, nothing), entries.get(name + VALUES, nothing)
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
    entries = {name: Entry(one.dtype, tuple(one.shape)) for name, one in contents.state.items()}
    layers = {weight_of(layer): layer for layer in contents.matrices}
    with ShardWriter(target, entries, {"format": "pt"}) as writer:
        for name in entries:
            writer.put(name, contents.tensors[name] if name in contents.tensors else contents.dense(layers[name]))


def _expanded(tensors: dict[str, Tensor], name: str, entry: Entry) -> Tensor:
    result = torch.zeros(entry.shape, dtype=entry.dtype)
    packed, values = tensors[name + MASK], tensors[name + VALUES]
    bits = np.unpackbits(packed.numpy(), axis=0, count=result.numel(), bitorder="little")
    chosen = torch.from_numpy(bits).bool()
    if int(chosen.sum()) != len(values):
        raise ModelError(f"The mask and the values of {name!r} do not agree; the packed file is damaged.")
    result.view(-1)[chosen] = values
    return result
