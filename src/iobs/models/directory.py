"""Tensors of a model directory: read one at a time under the names of its module, written under those of its files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from iobs.core.files import require_dense
from iobs.errors import ModelError, first_line
from iobs.models.conversions import Conversion, find_conversions, renaming
from iobs.models.huggingface import check_directory
from iobs.models.weights import Entry, read_entries


@dataclass
class Directory:
    """The tensors of a model directory, which are read one at a time.

    Args:
        path: of the directory.

    Attributes:
        shards: for every file its tensors by their name in the file.
        metadata: of every file.
        entries: all tensors by their name in the module; without a module, in the files.

    Raises:
        ModelError: the directory is damaged.
    """

    path: Path
    shards: dict[Path, dict[str, Entry]] = field(default_factory=dict, init=False)
    metadata: dict[Path, dict[str, str]] = field(default_factory=dict, init=False)
    entries: dict[str, Entry] = field(default_factory=dict, init=False)
    _conversions: dict[str, Conversion] = field(default_factory=dict, init=False)  # by tensor of the module

    def __post_init__(self) -> None:
        for file in check_directory(self.path, allow_pickle=False):
            require_dense(file)
            self.shards[file], self.metadata[file] = read_entries(file)
        self._convert_by([renaming(name, name, entry) for name, entry in self._stored_entries().items()])

    def use_names_of(self, module: nn.Module) -> None:
        """Name the tensors as a module of transformers does.

        Raises:
            ModelError: tensors of the files cannot be converted to those of the module and back.
        """
        self._convert_by(find_conversions(module, self._stored_entries()))

    def _stored_entries(self) -> dict[str, Entry]:
        """All tensors by their name in the files."""
        return {name: entry for entries in self.shards.values() for name, entry in entries.items()}

    def _convert_by(self, conversions: Sequence[Conversion]) -> None:
        self._conversions = {name: conversion for conversion in conversions for name in conversion.targets}
        self.entries = {name: entry for conversion in conversions for name, entry in conversion.targets.items()}

    def read(
        self,
        names: Collection[str],
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        mapped: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Read tensors to a device; floating tensors are converted to `dtype` if given.

        Args:
            names: of the tensors in the module.
            device: of the tensors.
            dtype: of floating tensors; None: as in the files.
            mapped: matrices that need no conversion stay mapped files, which take no anonymous memory; a change of
                them would not reach the file.

        Raises:
            ModelError: a file has vanished or changed since it was opened.
        """
        requested = set(names)
        for conversion in self._needed(requested):  # none of its tensors is in memory when the next one begins
            yield from self._read(conversion, requested, device, dtype, mapped)

    def _read(
        self,
        conversion: Conversion,
        names: Collection[str],
        device: str | torch.device,
        dtype: torch.dtype | None,
        mapped: bool,
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors of some names that a conversion makes."""
        for name, tensor in conversion.forward(dict(self.stored(conversion.sources))).items():
            if name in names:
                copied = not conversion.operations and not (mapped and tensor.ndim > 1)
                yield name, tensor.to(device, _dtype(tensor, dtype), copy=copied).contiguous()

    def write(
        self, names: Collection[str], changed: Mapping[str, Tensor], arithmetic: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor, str | None]]:
        """The tensors to write into the files: changed ones, and all others bit for bit as they are stored.

        Args:
            names: in the module. Of tensors that are converted together all are written.
            changed: tensors of the module by name, for some of the names.
            arithmetic: dtype that the changed tensors have been rounded to. Parts of a converted tensor that only this
                has changed, such as an expert that was left out, are written as they are stored.

        Yields:
            The name in the files, the tensor, and its name in the module; None for a tensor that is converted.

        Raises:
            ModelError: as `read`.
        """
        for conversion in self._needed(names):  # none of its tensors is in memory when the next one begins
            yield from self._write(conversion, changed, arithmetic)

    def _write(
        self, conversion: Conversion, changed: Mapping[str, Tensor], arithmetic: torch.dtype | None
    ) -> Iterator[tuple[str, Tensor, str | None]]:
        """The tensors of the files that belong to a conversion."""
        present = changed.keys() & conversion.targets.keys()
        if present:
            tensors = dict(self.read(conversion.targets.keys() - present))
            tensors |= {name: changed[name].detach().cpu().to(self.entries[name].dtype) for name in present}
            pairs: Iterable[tuple[str, Tensor]] = conversion.backward(tensors).items()
        else:
            pairs = self.stored(conversion.sources)
        (target, *_) = conversion.targets
        for name, tensor in pairs:
            if conversion.operations and present and arithmetic is not None:
                tensor = self._unrounded(name, tensor, arithmetic)
            yield name, tensor, None if conversion.operations else target

    def _unrounded(self, source: str, tensor: Tensor, arithmetic: torch.dtype) -> Tensor:
        """The stored tensor if this one differs from it by rounding to `arithmetic` alone; otherwise this one."""
        if torch.promote_types(arithmetic, tensor.dtype) is not arithmetic:
            for _, stored in self.stored([source]):
                if torch.equal(stored.to(arithmetic).to(stored.dtype), tensor.to(stored.dtype)):
                    return stored
        return tensor

    def reading_bytes(self, names: Collection[str], dtype: torch.dtype) -> int:
        """The bytes that reading tensors in a dtype takes at its peak, besides those of the tensors themselves.

        Tensors that are only renamed are read before, from mapped files.
        """
        peak = present = 0
        for conversion in self._needed(names):
            copies = sum(_bytes(entry, dtype) for name, entry in conversion.targets.items() if name in names)
            if conversion.operations:
                copied = any(entry.dtype is not _dtype(entry, dtype) for entry in conversion.targets.values())
                peak = max(peak, present + conversion.reading, present + conversion.bytes + copied * copies)
            present += copies
        return max(0, peak - present)

    def writing_bytes(self, names: Collection[str], dtype: torch.dtype) -> int:
        """The bytes that writing changed tensors takes at its peak, if they are in memory in a dtype."""
        most = 0
        for conversion in self._needed(names):
            if conversion.operations:
                changed = [entry for name, entry in conversion.targets.items() if name in names]
                others = sum(entry.bytes for name, entry in conversion.targets.items() if name not in names)
                rounded = sum(entry.bytes for entry in changed if entry.dtype is not _dtype(entry, dtype))
                most = max(most, rounded + others + conversion.writing)
        return most

    def _needed(self, names: Collection[str]) -> list[Conversion]:
        """The conversions of tensors of the module."""
        requested = set(names)
        needed = {id(conversion): conversion for name, conversion in self._conversions.items() if name in requested}
        return [*needed.values()]

    def stored(self, sources: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Tensors by their name in the files, as mapped files.

        Raises:
            ModelError: as `read`.
        """
        names = set(sources)
        for file, entries in self.shards.items():
            present = names & entries.keys()
            if present:
                with _reading(file), safe_open(file, framework="pt") as opened:
                    for name in sorted(present):
                        yield name, opened.get_tensor(name)


def _dtype(stored: Tensor | Entry, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that a tensor is read in: `dtype` for floating tensors, if given."""
    return dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype


def _bytes(entry: Entry, dtype: torch.dtype) -> int:
    """The bytes of a tensor that is read in a dtype."""
    return entry.bytes // entry.dtype.itemsize * _dtype(entry, dtype).itemsize


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Convert failures of reading a file of weights into one error."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{file} cannot be read any more ({first_line(error)}); put the file back and start again. With a "
            "checkpoint the run goes on from there."
        ) from error
