"""The check of a removal: a narrower network gives what the wide one gives whose columns of removed units are zero.

Before a run `verify` removes units of single sites from copies of the modules around them. `require_narrower` removes
units of all sites, if batches differ in the layers that they call. After a run `Expected` checks the network itself.
"""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import combinations, islice
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import iobs
from iobs.errors import AuditError, ModelError, first_line, unless_out_of_memory
from iobs.pruning.network.calls import Args, Function, Kwargs, Observer, before_calls
from iobs.pruning.network.copies import copied
from iobs.pruning.network.layers import joined
from iobs.pruning.network.modes import evaluating, keeping_buffers, seeded
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.samples.outputs import logits, tensors_of
from iobs.pruning.structure.config_widths import counts_heads, is_configured
from iobs.pruning.structure.units import CONFIG, Attribute, Site, remove, zero_columns

_SIZED = {
    *(Tensor.view, Tensor.reshape, torch.reshape, Tensor.unflatten, torch.unflatten, Tensor.expand),
    *(Tensor.split, torch.split, Tensor.narrow, torch.narrow),
}
_LIBRARIES = tuple(Path(each.__path__[0]) for each in (torch, iobs))  # whose lines no user changes
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]  # of a call, by place and by name

_COPY_LIMIT = 2**30  # bytes of a model that is copied, to compare or time it beside another
_PIECE = 2**22  # outputs that are compared at once, in float64
_LARGEST_GAP = 0.05  # difference of outputs, relative to the largest output, that rounding may explain
_TOLERANCE = 1e-4  # difference of outputs of a site in float32, relative to the largest output
_MOST_TRIES = 64  # combinations of attributes of one site


def can_copy(model: nn.Module) -> bool:
    """True if a model is small enough for a second copy in memory."""
    return sum(value.nbytes for value in model.parameters()) <= _COPY_LIMIT


def relative_gap(expected: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
    """Largest difference, relative to the largest expected value, NaN included; infinite for other shapes.

    Outputs after the first with another size along one dimension, such as the attention maps of all heads, show the
    units themselves and are not compared. Equal infinities, such as the logits of tokens that are not allowed, are no
    difference.
    """
    if len(expected) != len(outputs) or any(
        a.ndim != b.ndim or sum(i != j for i, j in zip(a.shape, b.shape, strict=True)) > (index > 0)
        for index, (a, b) in enumerate(zip(expected, outputs, strict=True))
    ):
        return float("inf")
    gaps, sizes = [], []
    for a, b in ((a, b) for a, b in zip(expected, outputs, strict=True) if a.shape == b.shape):
        for old, new in zip(*(torch.split(values.flatten(), _PIECE) for values in (a, b)), strict=True):
            before, after = old.double(), new.double()
            gaps.append((before - after).abs().masked_fill(before == after, 0))
            sizes.append(before.abs().masked_fill(before.isinf(), 0))
    return _largest(gaps) / max(_largest(sizes), 1e-30)


def _largest(tensors: Iterable[Tensor]) -> float:
    """The largest entry; NaN if one is."""
    values = [float(values.max()) for values in tensors if values.numel()]
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)


def _rounding(model: nn.Module) -> float:
    """The difference of outputs, relative to the largest, that the shortest floats of a model explain."""
    return min(_LARGEST_GAP, 50 * float(_precision(model) ** 0.75))


def _precision(model: nn.Module) -> float:
    """The machine epsilon of the shortest floats of a model."""
    kinds = {value.dtype for value in model.parameters() if value.is_floating_point()}
    return max((torch.finfo(kind).eps for kind in kinds), default=0.0)


@torch.no_grad()
def outputs_of(model: nn.Module, batch: Batch, dtype: torch.dtype | None = None) -> Tensor:
    """The outputs of a model on a batch, in eval mode; computed in `dtype` by a copy if the model's own is shorter."""
    batch = batches.to_device(batch, next(model.parameters()).device)
    if dtype is not None and _precision(model) > torch.finfo(dtype).eps:
        model = copied(model).to(dtype)
        batch = _in_dtype(batch, dtype)
    with evaluating(model), keeping_buffers(model), seeded(model, 0):  # models that draw numbers draw the same ones
        return logits(batches.forward(model, batch))


@dataclass(frozen=True)
class Expected:
    """Outputs of a model with zeros, which the narrower model has to give.

    Attributes:
        batch: samples that the model was called on.
        outputs: of the model.
        dtype: float32 if they were computed in it. None: in the model's own, as those of models that are too large
            for a copy.
    """

    batch: Batch
    outputs: Tensor
    dtype: torch.dtype | None

    @classmethod
    def of(cls, model: nn.Module, batch: Batch) -> Expected:
        """The outputs of a model with zeros on the first samples of a batch: `batches.pieces` says how many."""
        batch = next(batches.pieces(batch))
        if not can_copy(model):
            return cls(batch, outputs_of(model, batch), None)
        try:
            return cls(batch, outputs_of(model, batch, torch.float32), torch.float32)
        except unless_out_of_memory(*batches.REFUSALS):  # its code has the dtype of its weights
            return cls(batch, outputs_of(model, batch), None)

    def require(self, model: nn.Module, wide: nn.Module | None = None) -> None:
        """Raise unless a narrower model gives these outputs.

        Args:
            model: the narrower model.
            wide: the model with zeros. With it, a small difference is measured again in float64, since deep networks
                may amplify the rounding of float32.

        Raises:
            AuditError: it does not.
        """
        gap = relative_gap([self.outputs], [outputs_of(model, self.batch, self.dtype)])
        # Only added biases are rounded to the model's own precision, or all products are.
        rounded = _rounding(model) if self.dtype is None else _precision(model)
        limit = max(50 * torch.finfo(torch.float32).eps ** 0.75, min(_LARGEST_GAP, rounded))
        if wide is not None and limit < gap < _LARGEST_GAP:
            try:
                gap = relative_gap(*([outputs_of(each, self.batch, torch.float64)] for each in (wide, model)))
            except unless_out_of_memory(*batches.REFUSALS):
                pass  # the code or the device does not take float64
        if not gap <= limit:
            raise AuditError(
                f"The narrower model gives other outputs than the model with zeros (difference {gap:.1e})."
            )


def require_narrower(model: nn.Module, sites: Sequence[Site], data: Sequence[Batch]) -> None:
    """Raise unless a model without every second unit takes several batches, and gives what zeros give.

    Nothing is checked of a model that is too large for a copy.

    Raises:
        ModelError: it does not.
    """
    if not can_copy(model):
        return
    wide, narrow = copied(model), copied(model)
    kept = {site.name: [*range(0, site.count, 2)] for site in sites}
    for site in sites:
        zero_columns(wide, site, kept[site.name])
    try:
        remove(narrow, sites, kept)
        for batch in data:
            Expected.of(wide, batch).require(narrow, wide)
    except unless_out_of_memory(AuditError, *batches.REFUSALS) as error:
        raise ModelError(
            f"Units cannot be removed: {type(model).__name__} calls other layers for other batches, and the narrower "
            f"network fails there ({first_line(error)}). Name the layers that may lose units in include=, or prune "
            "entries instead: Unstructured or NM."
        ) from error


def require_rebuilt(model: nn.Module, batch: Batch, note: Callable[[str], None]) -> None:
    """Raise unless the model's class, built from its configuration, gives the same outputs with the model's weights.

    Args:
        model: as it is after the removal of blocks or experts.
        batch: samples.
        note: called with a note where a large model cannot be checked.

    Raises:
        ModelError: it does not.
    """
    if not is_configured(model):
        return
    kind, large, loads = type(model).__name__, not can_copy(model), False
    buffers = dict(model.named_buffers())
    try:
        with torch.device("meta") if large else nullcontext():
            again = type(model)(copy.deepcopy(model.config)).eval()
        loads = True
        again.load_state_dict(model.state_dict(), assign=True)  # it borrows the tensors
        loads = False
        # Tensors that are no part of the state are computed anew; a large model lends them too, in its own dtype.
        for path, module in again.named_modules():
            for name in module._non_persistent_buffers_set:
                lent, built = buffers.get(joined(path, name)), module._buffers.get(name)
                if lent is not None and built is not None:
                    module._buffers[name] = lent if large else built.to(lent)
        outputs = outputs_of(again, batch)
    except unless_out_of_memory(Exception) as error:  # every class has its own
        if large and not loads:  # its code needs values of other tensors
            note(f"Not checked that {kind} can be built from its new configuration: {first_line(error)}")
            return
        raise ModelError(f"{kind} cannot be built from its new configuration: {first_line(error)}.") from None
    if not torch.allclose(outputs, outputs_of(model, batch), atol=1e-3, rtol=1e-2):
        raise ModelError(
            f"{kind} gives other outputs when it is built from its new configuration: its layers "
            "depend on their place in a way that the configuration does not say."
        )


# ---- the check of single sites
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
def verify(model: nn.Module, short_batches: Sequence[Batch], sites: Sequence[Site]) -> Verified:
    """Remove units from a copy of each site's modules, and compare with the modules whose columns are zero.

    Numbers of the modules that count units, such as `num_heads`, are found here: those whose change makes the check
    pass. Sites with the same classes and widths share one check.

    Args:
        model: unchanged.
        short_batches: batches that the model accepts.
        sites: from a trace.
    """
    calls = _calls(model, short_batches, {path for site in sites for path in _around(site.owner)})
    called = [replace(site, owner=next(path for path in _around(site.owner) if path in calls)) for site in sites]
    alike: dict[object, list[Site]] = {}
    for site in called:
        alike.setdefault(_signature(model, site), []).append(site)
    verified: dict[str, Site] = {}
    refused = {}
    for group in alike.values():
        attributes = _counting_attributes(model, group[0], calls[group[0].owner])
        for site in group:
            if isinstance(attributes, str):
                refused[site.name] = attributes
            else:
                start = len(group[0].owner)
                moved = tuple(replace(each, path=site.owner + each.path[start:]) for each in attributes)
                verified[site.name] = replace(site, attributes=moved)
    return Verified([verified[site.name] for site in sites if site.name in verified], refused)


def _signature(model: nn.Module, site: Site) -> object:
    """Equal for sites whose modules differ in nothing but values of parameters, such as those of equal blocks."""
    start = len(site.owner) + 1 if site.owner else 0
    parts = [(part.path[start:], part.parameter, part.axis, part.index) for part in site.slices]
    numbers = [(type(module).__name__, tuple(sorted(_numbers(module)))) for module in _modules(model, site).values()]
    classes = [type(module).__name__ for module in model.get_submodule(site.owner).modules()]
    return site.owner and tuple(classes), tuple(parts), tuple(numbers)


def _calls(model: nn.Module, short_batches: Sequence[Batch], paths: set[str]) -> dict[str, Arguments]:
    """Arguments of the first call of each module in forward passes."""
    calls: dict[str, Arguments] = {}

    def note(path: str, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        calls.setdefault(path, copy.deepcopy((args, kwargs)))

    with evaluating(model), keeping_buffers(model), before_calls(model, paths, note), torch.no_grad():
        for batch in short_batches:
            batches.forward(model, batch)
    return calls


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
            self._call_wide(copied(owner).to(dtype), site, _in_dtype(arguments, dtype))
            self.tolerance = _TOLERANCE
        except unless_out_of_memory(*batches.REFUSALS):
            self._call_wide(copied(owner), site, arguments)
            self.tolerance = max(_TOLERANCE, _rounding(owner))

    def _call_wide(self, dense: nn.Module, site: Site, arguments: Arguments) -> None:
        """Keep the copy, the units to keep and the outputs with zero columns for the others."""
        self.dense, self.arguments = _visible(dense), arguments
        self.cases: list[tuple[list[int], list[Tensor]]] = []
        for start in (0, 1):
            keep = [*range(start, site.count, 2)]
            zeroed = copied(dense)
            zero_columns(zeroed, site, keep)
            self.cases.append((keep, _outputs(zeroed, arguments)))

    def full_width(self, site: Site) -> str:
        """The reason why the narrower module fails: the line of code that holds the full width, if it is found."""
        narrow = copied(self.dense)
        remove(narrow, [site], {site.name: self.cases[0][0]})
        lines: list[str] = []

        def note(function: Function, args: Args, kwargs: Kwargs) -> None:
            if function in _SIZED:
                sizes = (size for size in tree_leaves((args[1:], kwargs)) if type(size) is int)
                if any(size >= site.count and size % site.count == 0 for size in sizes):
                    lines.append(_line_of_code())

        with suppress(*batches.REFUSALS), Observer(note):
            _outputs(narrow, self.arguments)
        if not any(lines):
            return "its code, or a tensor that is no parameter, keeps the full width"
        line = [*filter(None, lines)][-1]
        return f"its code holds the full width as a number ({line}); -1 or flatten(1) would follow the units"

    def gap(self, site: Site) -> float:
        """The first relative gap of outputs above the tolerance, otherwise the last; of the narrower module."""
        gap = 0.0
        for keep, expected in self.cases:
            narrow = copied(self.dense)
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
            except unless_out_of_memory(*batches.REFUSALS) as error:
                return reason or f"a copy of the {kind} fails: {first_line(error)}"
            for attributes in _combinations(_candidates(model, site)):
                try:
                    gap = trial.gap(replace(site, attributes=attributes).inside())
                except unless_out_of_memory(*batches.REFUSALS) as error:
                    why = why or f"the narrower {kind} fails ({first_line(error)}): {trial.full_width(site.inside())}"
                    continue
                if gap <= trial.tolerance:
                    return attributes
                least = min(least, gap)
                why = f"the narrower {kind} gives other outputs (relative difference {gap:.1e})"
        reason = reason or why
        if not least < _LARGEST_GAP:
            break
    return reason


def _visible(module: nn.Module) -> nn.Module:
    """The module with ones in place of parameters that are all zero, as the scales of new residual branches are."""
    for value in module.parameters():
        if value.is_floating_point() and not bool(value.any()):
            value.fill_(1)
    return module


def _outputs(module: nn.Module, arguments: Arguments) -> list[Tensor]:
    args, kwargs = copy.deepcopy(arguments)
    with seeded(module, 0):  # both modules draw the same numbers
        return [value for value in tensors_of(module(*args, **kwargs)) if value.is_floating_point()]


def _in_dtype(values: Any, dtype: torch.dtype) -> Any:
    """Values with tensors of floating-point numbers in another dtype, inside tuples, lists and mappings too."""
    return batches.mapped(values, lambda value: value.to(dtype) if value.is_floating_point() else value)


def _modules(model: nn.Module, site: Site) -> dict[str, nn.Module]:
    """The owner, and modules inside it that hold a reader or writer."""
    modules = {site.owner: model.get_submodule(site.owner)}
    for part in site.slices:
        for path in reversed(_around(part.path)[1:]):
            if len(path) > len(site.owner):
                modules[path] = model.get_submodule(path)
        modules.setdefault(part.path, model.get_submodule(part.path))
    return modules


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
    widths = {part.stored(model).shape[part.axis] for part in site.slices}
    counts: list[Attribute] = []
    others: list[Attribute] = []
    for path, module in _modules(model, site).items():
        if not module._modules:
            continue  # sizes of layers follow their parameters
        for name, value in _numbers(module):
            if value < site.count or value % site.count:
                continue
            counted = counts_heads(name) or (site.kind == "heads" and name.endswith("groups"))
            if counted or (site.kind == "neurons" and value == site.count and "." not in name):
                (others if "." in name else counts).append(Attribute(path, name, value // site.count))
            elif (value in widths or (site.kind == "heads" and value == site.count)) and "." not in name:
                others.append(Attribute(path, name, value // site.count))
    return counts, others


def _combinations(candidates: tuple[list[Attribute], list[Attribute]]) -> Iterator[tuple[Attribute, ...]]:
    """Subsets of the candidates, at most `_MOST_TRIES`: as many counts and as few widths as possible first."""
    counts, others = candidates
    subsets = (
        (*some_counts, *some_others)
        for out in range(len(counts) + 1)
        for size in range(len(others) + 1)
        for some_counts in combinations(counts, len(counts) - out)
        for some_others in combinations(others, size)
    )
    yield from islice(subsets, _MOST_TRIES)


# ---- the line of code that gives a tensor a size which removed units would change, such as `x.view(-1, 256)`
def _line_of_code() -> str:
    """Place and text of the innermost line that runs and is no line of torch or iobs; "" without one."""
    for frame in reversed(traceback.extract_stack()):
        file = Path(frame.filename)
        if not any(file.is_relative_to(folder) for folder in _LIBRARIES):
            text = f": {frame.line}" if frame.line else ""
            return f"{file.name}, line {frame.lineno}{text}"
    return ""
