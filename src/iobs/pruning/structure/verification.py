"""Check of sites: after a removal, the narrower modules give what the wider ones gave without the removed units."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

from iobs.errors import first_line, is_out_of_memory
from iobs.pruning.network.calls import before_calls
from iobs.pruning.network.modes import evaluating, keeping_buffers, seeded
from iobs.pruning.samples import batches
from iobs.pruning.samples.outputs import tensors_of
from iobs.pruning.structure.equality import LARGEST_GAP, relative_gap, rounding
from iobs.pruning.structure.removal import CONFIG, remove, zero_columns
from iobs.pruning.structure.units import Attribute, Site

Arguments: TypeAlias = tuple[tuple[object, ...], dict[str, object]]  # of a call, by place and by name

_TOLERANCE = 1e-4  # difference of outputs in float32, relative to the largest output
_MOST_TRIES = 64  # combinations of attributes of one site


@dataclass(frozen=True)
class Verified:
    """Sites that passed the check, and the reasons why others did not.

    Args:
        sites: with the attributes that follow the number of units.
        refused: reason by name of the site.
    """

    sites: list[Site]
    refused: dict[str, str]


@torch.no_grad()
def verify(model: nn.Module, given: Sequence[batches.Batch], sites: Sequence[Site]) -> Verified:
    """Remove units from a copy of each site's modules, and compare with the modules whose columns are zero.

    Numbers of the modules that count units, such as `num_heads`, are found here: those whose change makes the check
    pass. Sites with the same classes and widths share one check.

    Args:
        model: unchanged.
        given: short batches that the model accepts.
        sites: from a trace.
    """
    calls = _calls(model, given, {place for site in sites for place in _around(site.owner)})
    called = [replace(site, owner=next(place for place in _around(site.owner) if place in calls)) for site in sites]
    alike: dict[object, list[Site]] = {}
    for site in called:
        alike.setdefault(_signature(model, site), []).append(site)
    found: dict[str, Site] = {}
    refused = {}
    for group in alike.values():
        attributes = _counting_attributes(model, group[0], calls[group[0].owner])
        for site in group:
            if isinstance(attributes, str):
                refused[site.name] = attributes
            else:
                moved = tuple(replace(one, path=_moved(one.path, group[0].owner, site.owner)) for one in attributes)
                found[site.name] = replace(site, attributes=moved)
    return Verified([found[site.name] for site in sites if site.name in found], refused)


def _signature(model: nn.Module, site: Site) -> object:
    """Equal for sites whose modules differ in nothing but values of parameters, such as those of equal blocks."""
    start = len(site.owner) + 1 if site.owner else 0
    parts = [(one.path[start:], one.parameter, one.axis, one.index) for one in site.slices]
    numbers = [(type(module).__name__, tuple(sorted(_numbers(module)))) for module in _modules(model, site).values()]
    classes = [type(module).__name__ for module in model.get_submodule(site.owner).modules()]
    return site.owner if site.owner == "" else tuple(classes), tuple(parts), tuple(numbers)


def _moved(path: str, owner: str, other: str) -> str:
    return other + path[len(owner) :] if owner else path


def _calls(model: nn.Module, given: Sequence[batches.Batch], owners: set[str]) -> dict[str, Arguments]:
    """Arguments of the first call of each module in forward passes."""
    found: dict[str, Arguments] = {}

    def note(path: str, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        found.setdefault(path, copy.deepcopy((args, kwargs)))

    with evaluating(model), keeping_buffers(model), before_calls(model, owners, note), torch.no_grad():
        for batch in given:
            batches.forward(model, batch)
    return found


def _around(path: str) -> list[str]:
    """A module's path and the paths of the modules around it, from the inside out."""
    names = path.split(".") if path else []
    return [".".join(names[:length]) for length in range(len(names), -1, -1)]


class _Trial:
    """A copy of a module, and what it gives without the odd units, and without the even units.

    Every unit is absent once. A part that needs a unit, such as the largest value of all units, shows itself.

    Args:
        owner: the module; its copy is in the dtype asked for unless its code needs its own.
        site: with paths inside the module.
        arguments: of a call.
        dtype: float32 or float64.
    """

    def __init__(self, owner: nn.Module, site: Site, arguments: Arguments, dtype: torch.dtype) -> None:
        try:
            self._call_wide(copy.deepcopy(owner).to(dtype), site, cast(Arguments, _in_dtype(arguments, dtype)))
            self.tolerance = _TOLERANCE
        except batches.REFUSALS as error:
            if is_out_of_memory(error):
                raise
            self._call_wide(copy.deepcopy(owner), site, arguments)
            self.tolerance = max(_TOLERANCE, rounding(owner))

    def _call_wide(self, dense: nn.Module, site: Site, arguments: Arguments) -> None:
        """Keep the copy, the units to keep and the outputs with zero columns for the others."""
        self.dense, self.arguments = _visible(dense), arguments
        self.cases: list[tuple[list[int], list[Tensor]]] = []
        for start in (0, 1):
            keep = [*range(start, site.count, 2)]
            zeroed = copy.deepcopy(dense)
            zero_columns(zeroed, site, keep)
            self.cases.append((keep, _outputs(zeroed, arguments)))

    def gap(self, site: Site) -> float:
        """The first relative gap of outputs above the tolerance, otherwise the last; of the narrower module."""
        gap = 0.0
        for keep, expected in self.cases:
            narrow = copy.deepcopy(self.dense)
            remove(narrow, [site], {site.name: keep})
            gap = relative_gap(expected, _outputs(narrow, self.arguments))
            if not gap <= self.tolerance:
                break
        return gap


def _counting_attributes(model: nn.Module, site: Site, arguments: Arguments) -> tuple[Attribute, ...] | str:
    """The attributes whose change makes the check pass, or the reason why no change does.

    Deep networks may amplify the rounding of float32. A small difference is therefore measured again in float64.
    """
    owner, reason = model.get_submodule(site.owner), ""
    kind = type(owner).__name__
    for dtype in (torch.float32, torch.float64):
        least, why = float("inf"), ""
        with evaluating(owner):
            try:
                trial = _Trial(owner, site.inside(), arguments, dtype)
            except batches.REFUSALS as error:
                if is_out_of_memory(error):
                    raise
                return reason or f"a copy of the {kind} fails: {first_line(error)}"
            for attributes in _combinations(_candidates(model, site)):
                try:
                    gap = trial.gap(replace(site, attributes=attributes).inside())
                except batches.REFUSALS as error:
                    if is_out_of_memory(error):
                        raise
                    why = why or (
                        f"the narrower {kind} fails ({first_line(error)}): "
                        "its code, or a tensor that is no parameter, keeps the full width"
                    )
                    continue
                if gap <= trial.tolerance:
                    return attributes
                least = min(least, gap)
                why = f"the narrower {kind} gives other outputs (relative difference {gap:.1e})"
        reason = reason or why
        if not least < LARGEST_GAP:
            break
    return reason


def _visible(module: nn.Module) -> nn.Module:
    """The module with ones in place of parameters that are all zero, as the scales of new residual branches are."""
    for value in module.parameters():
        if value.is_floating_point() and not bool(value.any()):
            value.fill_(1)
    return module


def _outputs(module: nn.Module, given: Arguments) -> list[Tensor]:
    args, kwargs = copy.deepcopy(given)
    with seeded(module, 0):  # both modules draw the same numbers
        found = module(*args, **kwargs)
    return [value for value in tensors_of(found) if value.is_floating_point()]


def _in_dtype(value: object, dtype: torch.dtype) -> object:
    """Tensors of floating-point numbers in another dtype, inside tuples, lists and mappings too."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: _in_dtype(one, dtype) for key, one in value.items()}
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_in_dtype(one, dtype) for one in value)
    return [_in_dtype(one, dtype) for one in value] if type(value) is list else value


def _modules(model: nn.Module, site: Site) -> dict[str, nn.Module]:
    """The owner, and modules inside it that hold a reader or writer."""
    found = {site.owner: model.get_submodule(site.owner)}
    for one in site.slices:
        names = one.path.split(".")
        for length in range(len(names) + 1):
            path = ".".join(names[:length])
            if len(path) > len(site.owner) and model.get_submodule(path)._modules:
                found[path] = model.get_submodule(path)
        found.setdefault(one.path, model.get_submodule(one.path))
    return found


def _numbers(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Whole numbers among a module's own attributes, and among the fields of its `config`."""
    config = vars(vars(module).get("config", nn.Identity()))
    fields = {f"{CONFIG}{name}": value for name, value in config.items()} if "config" in vars(module) else {}
    for name, value in {**vars(module), **fields}.items():
        if type(value) is int and not name.startswith("_"):
            yield name, value


def _candidates(model: nn.Module, site: Site) -> tuple[list[Attribute], list[Attribute]]:
    """Attributes that may follow the number of units: those named as counts, and those equal to a width or a number.

    Fields of a module's `config` are candidates too, since some modules read their widths there.
    """
    widths = {one.stored(model).shape[one.axis] for one in site.slices}
    counts: list[Attribute] = []
    others: list[Attribute] = []
    for path, module in _modules(model, site).items():
        if not module._modules:
            continue  # sizes of layers follow their parameters
        for name, value in _numbers(module):
            if value < site.count or value % site.count:
                continue
            counted = "head" in name and not name.endswith(("dim", "size"))
            counted = counted or (site.kind == "heads" and name.endswith("groups"))
            if counted or (site.kind == "neurons" and value == site.count and "." not in name):
                (others if "." in name else counts).append(Attribute(path, name, value // site.count))
            elif (value in widths or (site.kind == "heads" and value == site.count)) and "." not in name:
                others.append(Attribute(path, name, value // site.count))
    return counts, others


def _combinations(candidates: tuple[list[Attribute], list[Attribute]]) -> Iterator[tuple[Attribute, ...]]:
    """Subsets of the candidates, at most `_MOST_TRIES`: as many counts and as few widths as possible first."""
    counts, others = candidates
    some = (
        (*left, *right)
        for out in range(len(counts) + 1)
        for size in range(len(others) + 1)
        for left in combinations(counts, len(counts) - out)
        for right in combinations(others, size)
    )
    yield from islice(some, _MOST_TRIES)
