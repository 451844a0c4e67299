"""Conversion of the tensors in the files of a model to those of its module and back, by the rules of transformers.

Hub files of mixtures hold one tensor per expert, of which the module makes one; others have older names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from iobs.errors import ModelError
from iobs.models.weights import Entry

_CUT = 64  # entries along the last axis of the tensors that a conversion is tried on


# Rules of transformers, which it gives no types: `rename_source_key` gives the other name of a tensor and the pattern
# that matched; a `Converter` also takes tensors (`add_tensor`), converts them, and has a `reverse_transform`.
Renaming: TypeAlias = Any  # a `WeightRenaming`
Converter: TypeAlias = Any  # a `WeightConverter`


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
    forward = _NewNames({source: target})
    return Conversion({source: entry}, {target: entry}, forward, _NewNames({target: source}))


@dataclass(frozen=True)
class _NewNames:
    """Give tensors other names."""

    names: Mapping[str, str]

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensors[old] for old, name in self.names.items()}


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
