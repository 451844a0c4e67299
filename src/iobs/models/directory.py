"""Tensors of a model directory: read one at a time under the names of its module, written under those of its files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from iobs.errors import ModelError, first_line
from iobs.models.conversions import Conversion, find_conversions
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
            self.shards[file], self.metadata[file] = read_entries(file)
            self.entries |= self.shards[file]
        self._names = {name: name for name in self.entries}  # in the module, of every tensor that is not converted
        self._sources = self._names

    def use_names_of(self, module: nn.Module) -> None:
        """Name the tensors as a module of transformers does.

        Raises:
            ModelError: tensors of the files cannot be converted to those of the module and back.
        """
        self._names, conversions = find_conversions(module, self.entries)
        self._sources = {name: source for source, name in self._names.items()}
        self._conversions = {name: conversion for conversion in conversions for name in conversion.targets}
        self.entries = {self._names[name]: entry for name, entry in self.entries.items() if name in self._names}
        self.entries |= {name: entry for conversion in conversions for name, entry in conversion.targets.items()}

    def read(
        self,
        names: Sequence[str],
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        mapped: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Read tensors to a device, in the order of files; floating tensors are converted to `dtype` if given.

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
        for source, stored in self.stored({self._sources[name] for name in requested if name in self._sources}):
            copied = not (mapped and stored.ndim > 1)
            yield self._names[source], stored.to(device, _dtype(stored, dtype), copy=copied)
        for conversion in self._needed(requested):
            yield from self._converted(conversion, requested, device, dtype)

    def _converted(
        self, conversion: Conversion, requested: Collection[str], device: str | torch.device, dtype: torch.dtype | None
    ) -> Iterator[tuple[str, Tensor]]:
        """Wanted results of a conversion; none of its tensors is in memory when the next one begins."""
        for name, tensor in conversion.forward(dict(self.stored(conversion.sources))).items():
            if name in requested:
                yield name, tensor.to(device, _dtype(tensor, dtype)).contiguous()

    def reading_bytes(self, names: Collection[str], dtype: torch.dtype) -> int:
        """The bytes that reading tensors in a dtype takes at its peak, besides those of the tensors themselves.

        Tensors that are not converted are read before, from mapped files.
        """
        converted = {name for conversion in self._needed(names) for name in conversion.targets}
        present = sum(_bytes(self.entries[name], dtype) for name in names if name not in converted)
        peak = present
        for conversion in self._needed(names):
            copies = [_bytes(entry, dtype) for name, entry in conversion.targets.items() if name in names]
            copied = any(entry.dtype is not _dtype(entry, dtype) for entry in conversion.targets.values())
            peak = max(peak, present + conversion.reading, present + conversion.bytes + copied * sum(copies))
            present += sum(copies)
        return max(0, peak - present)

    def writing_bytes(self, names: Collection[str], dtype: torch.dtype) -> int:
        """The bytes that writing changed tensors takes at its peak, if they are in memory in a dtype."""
        most = 0
        for conversion in self._needed(names):
            changed = [entry for name, entry in conversion.targets.items() if name in names]
            others = sum(entry.bytes for name, entry in conversion.targets.items() if name not in names)
            rounded = sum(entry.bytes for entry in changed if entry.dtype is not _dtype(entry, dtype))
            most = max(most, rounded + others + conversion.writing)
        return most

    def unchanged(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Tensors as they are in the files, by their name in the files.

        Args:
            names: in the module. Of tensors that are converted together all are read.

        Raises:
            ModelError: as `read`.
        """
        sources = {self._sources[name] for name in names if name in self._sources}
        yield from self.stored(sources.union(*(conversion.sources for conversion in self._needed(names))))

    def changed(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the module as they are written into the files, by their name in the files.

        Args:
            tensors: by their name in the module. Tensors that are converted together with them are read.

        Raises:
            ModelError: as `read`.
        """
        for name, tensor in tensors.items():
            if name in self._sources:
                yield self._sources[name], tensor
        for conversion in self._needed(tensors):
            others = [name for name in conversion.targets if name not in tensors]
            changed = {name: tensors[name].detach().cpu() for name in conversion.targets if name in tensors}
            yield from conversion.backward({**dict(self.read(others)), **changed}).items()

    def name_of(self, source: str) -> str | None:
        """The module's name of a tensor of the files; None if it is converted."""
        return self._names.get(source)

    def together(self, names: Collection[str]) -> list[list[str]]:
        """The names in groups of tensors that are converted together."""
        single = [[name] for name in names if name not in self._conversions]
        return single + [[name for name in conversion.targets if name in names] for conversion in self._needed(names)]

    def with_others(self, names: Collection[str]) -> set[str]:
        """The names, and those of the other tensors of the module that are converted together with them."""
        return set(names).union(*(conversion.targets for conversion in self._needed(names)))

    def _needed(self, names: Collection[str]) -> list[Conversion]:
        """The conversions of tensors of the module."""
        conversions = {id(conversion): conversion for name, conversion in self._conversions.items() if name in names}
        return [*conversions.values()]

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
