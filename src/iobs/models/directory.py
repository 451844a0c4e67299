"""Tensors of a model directory: read one at a time under the names of its module, written under those of its files.

Hub files of mixtures hold one tensor per expert, of which the module makes one; others have older names. They are
converted to those of the module and back by the rules of transformers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from iobs.core.files import require_dense
from iobs.errors import ModelError, first_line
from iobs.models.huggingface import check_directory
from iobs.models.weights import Entry, read_entries

_CUT = 64  # entries along the last axis of the tensors that a conversion is tried on


# Rules of transformers, which it gives no types: `rename_source_key` gives the other name of a tensor and the pattern
# that matched; a `Converter` also takes tensors (`add_tensor`), converts them, and has a `reverse_transform`.
Renaming: TypeAlias = Any  # a `WeightRenaming`
Converter: TypeAlias = Any  # a `WeightConverter`


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


# ---- conversion of the tensors in the files to those of the module and back
@dataclass(frozen=True)
class ConversionRule:
    """One conversion of transformers for given tensors.

    Args:
        converter: a `WeightConverter`.
        renamed: the name of its first result, before `names`.
        patterns: of every given tensor, by name, in order.
        module: the module, whose configuration has numbers of heads and experts.
        names: names of results that are called otherwise.
    """

    converter: Converter
    renamed: str
    patterns: Mapping[str, str]
    module: nn.Module
    names: Mapping[str, str]

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert the tensors."""
        converter = deepcopy(self.converter)
        for name, pattern in self.patterns.items():
            converter.add_tensor(self.renamed, name, pattern, tensors[name])
        result = converter.convert(self.renamed, model=self.module, config=self.module.config)
        result = result[0] if isinstance(result, tuple) else result  # transformers 5.0 gives errors beside it
        single = {name: value[0] if isinstance(value, list) else value for name, value in result.items()}
        return {self.names.get(name, name): value for name, value in single.items()}


_Convert = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class Conversion:
    """Tensors of the files that become tensors of the module together.

    Args:
        sources: tensors in the files.
        targets: tensors in the module.
        forward: from the files to the module.
        backward: from the module to the files.
        operations: number of operations on numbers, each of which makes a copy; 0: a tensor has another name.
    """

    sources: Mapping[str, Entry]
    targets: Mapping[str, Entry]
    forward: _Convert
    backward: _Convert
    operations: int = 0

    @property
    def bytes(self) -> int:
        """Size of the tensors in the module."""
        return sum(entry.bytes for entry in self.targets.values())

    @property
    def reading(self) -> int:
        """Most bytes of new tensors during the conversion forward, with its results."""
        return self.operations * self.bytes

    @property
    def writing(self) -> int:
        """Most bytes of new tensors during the conversion backward; the last operation divides a stack into views."""
        return max(0, self.operations - 1) * self.bytes

    def require_exact(self) -> None:
        """Convert random bytes to the module and back: of narrow tensors, of whole ones if these do not come back.

        Raises:
            ModelError: other bytes come back.
        """
        if not self._exact(_CUT) and not self._exact(None):
            raise _no_way_back(next(iter(self.sources)))

    def _exact(self, most: int | None) -> bool:
        """Check that random bytes come back; the last axis has at most `most` entries."""
        draws = torch.Generator().manual_seed(0)
        tensors = {}
        for name, entry in self.sources.items():
            shape = (*entry.shape[:-1], min(most or entry.shape[-1], entry.shape[-1])) if entry.shape else ()
            tensors[name] = torch.randint(256, shape, dtype=torch.uint8, generator=draws)
        try:
            again = self.backward(self.forward(tensors))
        except Exception:  # rules of transformers raise exceptions of every kind
            return False
        return all(torch.equal(again[name], value) for name, value in tensors.items())


def renaming(source: str, target: str, entry: Entry) -> Conversion:
    """The conversion of a tensor that only gets another name, or keeps its own."""
    return Conversion(
        {source: entry}, {target: entry}, lambda read: {target: read[source]}, lambda made: {source: made[target]}
    )


def find_conversions(module: nn.Module, entries: Mapping[str, Entry]) -> list[Conversion]:
    """The conversions of tensors in files to those of a module, by the rules of transformers.

    Args:
        module: a model of transformers.
        entries: the tensors in the files.

    Raises:
        ModelError: tensors of the files cannot be converted, or not back.
    """
    state = module.state_dict()
    if all(name in state for name in entries):
        return [renaming(name, name, entry) for name, entry in entries.items()]
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    rules = get_model_conversion_mapping(module)  # type: ignore[arg-type]
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    prefix = getattr(module, "base_model_prefix", None)
    conversions: list[Conversion] = []
    groups: dict[str, dict[str, str]] = defaultdict(dict)  # by the first target: the pattern of every source
    for name in sorted(entries, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, state)
        if target not in state:
            target, pattern = loading.rename_source_key(name, [], [], prefix, state)
        if target not in state or (target != name and target in entries):
            conversions.append(renaming(name, name, entries[name]))  # without a place in the module, or beside another
        elif pattern is None:
            conversions.append(renaming(name, target, entries[name]))
        else:
            groups[target][name] = pattern
    exact = set[int]()
    for target, patterns in groups.items():
        converter = next(rule for rule in converters if next(iter(patterns.values())) in rule.source_patterns)
        forward = ConversionRule(converter, target, patterns, module, {})
        sources = {name: entries[name] for name in patterns}
        converted = _converted(forward, sources, state)
        conversions.append(_with_way_back(forward, sources, converted, renamings, prefix))
        if id(converter) not in exact:  # once, before any work; all blocks have the same rule
            conversions[-1].require_exact()
            exact.add(id(converter))
    _require_one_source(conversions)
    return conversions


def _converted(forward: ConversionRule, sources: Mapping[str, Entry], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the module that tensors of the files make up, without numbers.

    Raises:
        ModelError: some are missing, or the configuration has other sizes.
    """
    empty = {name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for name, entry in sources.items()}
    try:
        converted = forward(empty)
    except Exception:  # rules of transformers raise exceptions of every kind
        converted = {}
    wrong = [name for name, tensor in converted.items() if name not in state or tensor.shape != state[name].shape]
    if wrong or not converted:
        raise ModelError(
            f"{len(sources)} tensors of the files, {next(iter(sources))} the first, do not make up {forward.renamed}: "
            "some are missing, or the configuration has other sizes; complete the files."
        )
    return converted


def _with_way_back(
    forward: ConversionRule,
    sources: Mapping[str, Entry],
    converted: Mapping[str, Tensor],
    renamings: Iterable[Renaming],
    prefix: str | None,
) -> Conversion:
    """The conversion with its inverse, after that was tried on the converted tensors without numbers.

    Raises:
        ModelError: the inverse does not lead back to the same names and shapes.
    """
    from transformers import core_model_loading as loading

    try:
        reverse = forward.converter.reverse_transform()
        renamed = {name: reverse.rename_source_key(name) for name in sorted(converted, key=loading.dot_natural_key)}
        interim = {f"{prefix}.{_renamed(name, renamings)}": name for name in sources}
        interim |= {_renamed(name, renamings): name for name in sources}
        first = next(iter(renamed.values()))[0]
        patterns = {name: str(pattern) for name, (_, pattern) in renamed.items()}
        backward = ConversionRule(reverse, first, patterns, forward.module, interim)
        again = {name: tuple(tensor.shape) for name, tensor in backward(converted).items()}
    except Exception as error:  # rules of transformers raise exceptions of every kind
        raise _no_way_back(next(iter(sources)), error) from error
    if again != {name: entry.shape for name, entry in sources.items()}:
        raise _no_way_back(next(iter(sources)))
    targets = {name: Entry(tensor.dtype, tuple(tensor.shape)) for name, tensor in converted.items()}
    return Conversion(sources, targets, forward, backward, len(forward.converter.operations))


def _renamed(name: str, renamings: Iterable[Renaming]) -> str:
    """A name after all renamings, which a converter is applied to."""
    for renaming in renamings:
        name = renaming.rename_source_key(name)[0]
    return name


def _no_way_back(name: str, error: Exception | None = None) -> ModelError:
    reason = "" if error is None else f" ({type(error).__name__})"
    return ModelError(
        f"{name} is converted while the model is loaded, and cannot be converted back{reason}; prune the model in "
        "memory instead of block by block."
    )


def _require_one_source(conversions: Iterable[Conversion]) -> None:
    """Raise if a tensor of the module comes from two places.

    Raises:
        ModelError: names it.
    """
    seen: set[str] = set()
    for name in (name for conversion in conversions for name in conversion.targets):
        if name in seen:
            raise ModelError(f"Several tensors of the files become {name}; prune the model in memory instead.")
        seen.add(name)
