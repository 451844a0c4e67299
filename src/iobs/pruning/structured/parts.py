"""Whole parts of a network, blocks and experts: their choice, the refit of what follows, and their removal.

Blocks are modules of one list that return a hidden state of their input's shape. During a run a removed block returns
its input, so that all other modules keep their names. At the end it is deleted from its list. Experts are slices of the
stacked weights of a mixture, and their rows of the router.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from iobs.core.column_groups import Groups
from iobs.core.patterns import keep_count
from iobs.core.structured import Units
from iobs.errors import LayerSelectionError, ModelError, PatternError, ProblemError, first_line, unless_out_of_memory
from iobs.pruning.algorithm import run
from iobs.pruning.calibration.additions import captured_additions
from iobs.pruning.calibration.blocks import Block, hidden_of, rest_of, with_hidden
from iobs.pruning.calibration.losses import answered
from iobs.pruning.calibration.observe import multiplied_as_they_are
from iobs.pruning.calibration.row_fisher import PROBE, PROBE_TOKENS
from iobs.pruning.callbacks import Callbacks
from iobs.pruning.cost.foresight import Foresight
from iobs.pruning.coverage import Reason
from iobs.pruning.descent.scoring import frozen_copy
from iobs.pruning.network.calls import after_calls, before_calls
from iobs.pruning.network.layers import Layer, find_layers, joined
from iobs.pruning.network.modes import keeping_attributes, keeping_buffers, replaced_forwards
from iobs.pruning.network.selection import Selection
from iobs.pruning.report import Report
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch, Samples
from iobs.pruning.samples.outputs import attended, unpadded
from iobs.pruning.store import Store
from iobs.pruning.structure.config_widths import (
    Configuration,
    ConfigWidths,
    Shapes,
    WidthGroup,
    built_shapes,
    counting_fields,
    inner_configs,
    is_configured,
    set_configuration,
    set_fields,
    shapes_of,
    shapes_with,
    without_entries,
)
from iobs.pruning.structure.expected import Expected, can_copy, require_rebuilt
from iobs.pruning.structure.units import Attribute, Site, Slices, remove
from iobs.pruning.structured_report import (
    CostRecord,
    PlannedCost,
    PlannedUnits,
    StructuredRequest,
    UnitsPlan,
    WidthRecord,
)
from iobs.pruning.widths.costs import Products
from iobs.pruning.widths.readers import damage, softened, temperature_of
from iobs.pruning.workspace import Request, Workspace

_INDICES = ("layer_idx", "layer_id", "layer_index", "layer_number")  # attributes that hold the place of a block
_TOKENS = 2048  # tokens on which the output of a mixture is compared
_TRIAL_SECONDS = 2.0  # most time in which a dry run tries which blocks harm least
_ROUTED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")  # experts of a token


class Parts:
    """The parts of one kind that a model has: its blocks, or its experts.

    A removal is a mapping from the path of every list to the indices of the parts that go. A kind has the methods
    `choose`, `foretold_choice`, `likely`, `least_removed`, `require_possible`, `without` and `finish`, too.

    Args:
        model: with all parts.
        counts: number of parts in every list of blocks, or mixture of experts, by its path, in the order of the forward
            pass; each loses the same number.
        least: parts that must be left in each list.

    Attributes:
        errors: relative squared change of the output of every list, by its path, as far as `choose` measures it.
    """

    kind: ClassVar[str]

    def __init__(self, model: nn.Module, counts: Mapping[str, int], least: int) -> None:
        self.model, self.counts, self.least = model, counts, least
        self.errors: dict[str, float] = {}

    def first_changed(self, removed: Mapping[str, Sequence[int]]) -> str:
        """Path of the first module that a removal changes."""
        return next(iter(self.counts))

    def unused(self, removed: Mapping[str, Sequence[int]]) -> list[str]:
        """Paths of modules that stay in the model until `finish`, and compute nothing."""
        return []


# ---- blocks
class Blocks(Parts):
    """The blocks of the list that holds most of a model's parameters.

    Args:
        model: its blocks are skipped within `without`, and deleted by `finish`.
        path: of the list.
        rests: for every block what it returns after the hidden state, as `rest_of`.
    """

    kind = "blocks"

    def __init__(self, model: nn.Module, path: str, rests: Sequence[tuple[object, ...] | None]) -> None:
        super().__init__(model, {path: len(rests)}, least=1)
        self.path, self.count, self.rests = path, len(rests), rests

    @classmethod
    def find(cls, model: nn.Module, data: Sequence[Batch]) -> Blocks:
        """Find the blocks of a model.

        Raises:
            LayerSelectionError: it has none.
        """
        lists = {
            path: module
            for path, module in model.named_modules()
            if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1 and _is_numbered(module)
        }
        members = {joined(path, name) for path, module in lists.items() for name in module._modules}
        rests = _rests_of_blocks(model, data[0], members)
        fitting = {
            path: sum(value.numel() for value in module.parameters())
            for path, module in lists.items()
            if all(joined(path, name) in rests for name in module._modules)
        }
        if not fitting:
            raise LayerSelectionError(
                "No blocks were found that can be removed: no list of modules whose members are called once each and "
                "return a hidden state of the shape of their input."
            )
        path = max(fitting, key=lambda path: fitting[path])
        return cls(model, path, [rests[joined(path, name)] for name in lists[path]._modules])

    def choose(self, keep: int, damage: Callable[[], float]) -> dict[str, list[int]]:
        """Remove the block whose absence damages the model least, and repeat; the other blocks stay as they are.

        A block without which the class cannot be built stays, such as the dense first block of some mixtures. So does
        one without which the model fails, since it computes with more of the block's result than the hidden state.

        Raises:
            ModelError: the class cannot be built without the chosen blocks, or the model fails without any block.
        """
        gone: list[int] = []
        while len(gone) < self.count - keep:
            damages, reason = self._damages(gone, damage)
            if not damages:
                raise ModelError(
                    f"{type(self.model).__name__} fails if a block of {self.path or 'the model'} only passes on "
                    f"its hidden state ({reason}): it computes with other results of the blocks. Remove units inside "
                    'of them instead: leave out units="blocks".'
                )
            order = sorted(damages, key=lambda block: damages[block])
            gone.append(next((block for block in order if self._can_lose([*gone, block])), order[0]))
        if is_configured(self.model):
            self._shorter_config(sorted(gone))
        return {self.path: sorted(gone)}

    def _damages(
        self, gone: Sequence[int], damage: Callable[[], float], most: float = math.inf
    ) -> tuple[dict[int, float], str]:
        """The damage without each further block, by its place; and why the model failed without one.

        Args:
            gone: blocks that are removed already.
            damage: measures the damage to the model.
            most: seconds after which the others are left out.
        """
        damages: dict[int, float] = {}
        reason, began = "", time.perf_counter()
        for block in (index for index in range(self.count) if index not in gone):
            try:
                with self.without({self.path: [*gone, block]}):
                    damages[block] = damage()
            except unless_out_of_memory(*batches.REFUSALS) as error:
                reason = reason or first_line(error)
            if time.perf_counter() - began > most:
                break
        return damages, reason

    def foretold_choice(self, keep: int, damage: Callable[[], float]) -> tuple[float, dict[str, list[int]]]:
        """Seconds that `choose` takes, and blocks that it may choose."""
        began = time.perf_counter()
        damages, _ = self._damages([], damage, _TRIAL_SECONDS)
        each = (time.perf_counter() - began) / max(1, len(damages))
        order, removed = sorted(damages, key=lambda block: damages[block]), self.count - keep
        if len(damages) < self.count:  # those in the middle harm least
            order = sorted(range(self.count), key=lambda block: abs(block - self.count / 2))
        return each * _trials(self.count, removed), {self.path: sorted(order[:removed])}

    def likely(self, removed: Mapping[str, Sequence[int]]) -> AbstractContextManager[None]:
        """Context of a trial of the run after a removal."""
        return self.without(removed)

    def least_removed(self, keep: int) -> int:
        """The parameters of the smallest blocks; those that several blocks share stay."""
        blocks = [
            {id(value): value.numel() for value in self.model.get_submodule(path).parameters()}
            for path in self.unused({self.path: range(self.count)})
        ]
        uses = Counter(identity for block in blocks for identity in block)
        sizes = sorted(sum(size for identity, size in block.items() if uses[identity] == 1) for block in blocks)
        return sum(sizes[: self.count - keep])

    def require_possible(self, keep: int) -> None:
        """Raise unless the class of the model can have fewer blocks, before any work.

        Raises:
            ModelError: it cannot.
        """
        if is_configured(self.model):
            self._shorter_config(range(keep, self.count))

    def without(self, removed: Mapping[str, Sequence[int]]) -> AbstractContextManager[None]:
        """Context in which removed blocks return their input."""
        rests = [self.rests[index] for index in removed[self.path]]
        paths = zip(self.unused(removed), rests, strict=True)
        return replaced_forwards([(self.model.get_submodule(path), _passing_on(rest)) for path, rest in paths])

    def first_changed(self, removed: Mapping[str, Sequence[int]]) -> str:
        """Path of the first removed block."""
        return self.unused(removed)[0]

    def unused(self, removed: Mapping[str, Sequence[int]]) -> list[str]:
        """Paths of the removed blocks."""
        return [joined(self.path, str(index)) for index in removed[self.path]]

    def finish(self, removed: Mapping[str, Sequence[int]]) -> None:
        """Delete the blocks from their list.

        Raises:
            ModelError: the configuration cannot express the number of blocks.
        """
        gone = removed[self.path]
        config = self._shorter_config(gone) if is_configured(self.model) else None
        members = self.model.get_submodule(self.path)
        assert isinstance(members, (nn.ModuleList, nn.Sequential))
        for index in sorted(gone, reverse=True):
            del members[index]
        kept = [index for index in range(self.count) if index not in gone]
        for new, old in enumerate(kept):
            for module in members[new].modules():
                for name in _INDICES:
                    if vars(module).get(name) == old:
                        setattr(module, name, new)
        if config is not None:
            set_configuration(self.model, config)

    def _can_lose(self, gone: Sequence[int]) -> bool:
        """True if the class of the model can be built without some blocks."""
        try:
            return not is_configured(self.model) or self._shorter_config(sorted(gone)) is not None
        except ModelError:
            return False

    def _shorter_config(self, gone: Sequence[int]) -> Configuration:
        """The configuration of the model without some blocks.

        Raises:
            ModelError: there is none.
        """
        keep = self.count - len(gone)
        expected = _renumbered(shapes_of(self.model), self.path, gone)
        counting = counting_fields(self.model.config, self.count)
        reason = "no field of the configuration has their number"
        for fields in [*([field] for field in counting), counting] if counting else []:
            config = without_entries(self.model.config, fields, gone)
            try:
                set_fields(config, fields, keep)
                if built_shapes(self.model, config) == expected:
                    return config
                reason = f"{fields[0].name} changes other shapes"
            except Exception as error:  # configurations check their values
                reason = first_line(error)
        raise ModelError(f"{type(self.model).__name__} cannot be built with {keep} blocks of {self.path}: {reason}.")


def _trials(count: int, removed: int) -> int:
    """The number of removals that are tried until `removed` of `count` parts are gone, one after another."""
    return sum(count - gone for gone in range(removed))


def _is_numbered(module: nn.Module) -> bool:
    """True if the members of a list are named by their places: other names are parts of different kinds."""
    return [name for name, _ in module.named_children()] == [str(index) for index in range(len(module._modules))]


def _passing_on(rest: tuple[object, ...] | None) -> Callable[..., object]:
    """The forward of a removed block: a copy of its hidden state, in the format of the block."""

    def forward(*args: object, **kwargs: object) -> object:
        hidden = hidden_argument(args, kwargs)
        assert hidden is not None
        return with_hidden(hidden.clone(), rest)

    return forward


@torch.no_grad()
def _rests_of_blocks(model: nn.Module, batch: Batch, paths: set[str]) -> dict[str, tuple[object, ...] | None]:
    """The outputs of modules after their hidden state on the first sample of a batch, by path.

    Modules that are not called once, or return no hidden state of the shape of their input, are left out.
    """
    calls: Counter[str] = Counter()
    rests: dict[str, tuple[object, ...] | None] = {}

    def note(path: str, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        calls[path] += 1
        before, after = hidden_argument(args, kwargs), hidden_of(output)
        if before is not None and after is not None and before.shape == after.shape and before.is_floating_point():
            rests[path] = rest_of(output)

    with keeping_buffers(model), after_calls(model, paths, note):
        batches.forward(model, batches.first_sample(batch))
    return {path: rest for path, rest in rests.items() if calls[path] == 1}


def _renumbered(shapes: Shapes, path: str, gone: Sequence[int]) -> Shapes:
    """Shapes by name after the blocks of a list were deleted."""
    renumbered = {}
    for name, shape in shapes.items():
        if name.startswith(f"{path}."):
            index, _, rest = name[len(path) + 1 :].partition(".")
            if int(index) in gone:
                continue
            name = f"{path}.{int(index) - sum(block < int(index) for block in gone)}.{rest}"
        renumbered[name] = shape
    return renumbered


def hidden_argument(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Tensor | None:
    """The hidden state among a module's arguments: the first, or the one of that name."""
    value = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))
    return value if isinstance(value, Tensor) else None


# ---- experts
class Experts(Parts):
    """The experts of all mixtures of a model.

    Args:
        model: without the removed experts within `without`, and after `finish`.
        sites: the mixtures.
        widths: of the configuration.
        inputs: of every mixture, (tokens, 1, width), by its path.
    """

    kind = "experts"

    def __init__(
        self, model: nn.Module, sites: Sequence[Site], widths: ConfigWidths, inputs: dict[str, Tensor]
    ) -> None:
        routed = (vars(config).get(name) for _, config in inner_configs(model.config) for name in _ROUTED)
        least = max((value for value in routed if type(value) is int), default=1)
        super().__init__(model, {site.name: site.count for site in sites}, least)
        self.sites, self.widths, self.inputs = {site.name: site for site in sites}, widths, inputs

    @classmethod
    def find(cls, model: nn.Module, data: Sequence[Batch]) -> Experts:
        """Find the experts of a model.

        Raises:
            ModelError: the model is not built from a configuration.
            LayerSelectionError: it has no experts that its configuration counts.
        """
        if not is_configured(model):
            raise ModelError(
                "Experts are removed from models of transformers, whose configuration says their number; "
                f"{type(model).__name__} has none."
            )
        before = shapes_of(model)
        counts = [
            value
            for _, config in inner_configs(model.config)
            for name, value in vars(config).items()
            if type(value) is int and value > 1 and _counts_experts(name)
        ]
        for count in dict.fromkeys(counts):
            fields = counting_fields(model.config, count, _counts_experts)
            try:
                slices = _slices(before, shapes_with(model, fields, count - 1), count)
            except ModelError:
                continue
            if slices:
                mixtures = _mixtures(slices)
                inputs = _inputs(model, data, list(mixtures))
                if unfed := [path for path in mixtures if path not in inputs or not inputs[path].numel()]:
                    raise LayerSelectionError(
                        f"No calibration sample calls the mixture {unfed[0]}, so its experts cannot be judged, and "
                        "the configuration has one number for all mixtures. Give data that reach it; if the model "
                        "uses parts of this module without a call of its own, its experts stay."
                    )
                sites = [_site(model, path, mixtures[path], count) for path in inputs]
                group = WidthGroup(tuple(inputs), tuple(fields))
                return cls(model, sites, ConfigWidths((group,), shapes=before), inputs)
        raise LayerSelectionError("No experts were found whose number the configuration of this model says.")

    @torch.no_grad()
    def choose(self, keep: int, damage: Callable[[], float]) -> dict[str, list[int]]:
        """For every mixture: remove the expert without which its output changes least, and repeat.

        Raises:
            ModelError: a mixture does not compute with one expert less.
        """
        removed = {}
        for path, site in self.sites.items():
            dense = _output(self.model.get_submodule(path), self.inputs[path])
            gone: list[int] = []
            error = 0.0
            while len(gone) < site.count - keep:
                others = (expert for expert in range(site.count) if expert not in gone)
                errors = {expert: self._error_without(site, [*gone, expert], dense) for expert in others}
                gone.append(min(errors, key=lambda expert: errors[expert]))
                error = errors[gone[-1]]
            removed[path] = sorted(gone)
            self.errors[path] = error / max(float(dense.double().square().sum()), 1e-30)
        return removed

    @torch.no_grad()
    def foretold_choice(self, keep: int, damage: Callable[[], float]) -> tuple[float, dict[str, list[int]]]:
        """Seconds that `choose` takes, from one expert of the first mixture, and experts that it may choose."""
        path, site = next(iter(self.sites.items()))
        dense = _output(self.model.get_submodule(path), self.inputs[path])
        began = time.perf_counter()
        self._error_without(site, [0], dense)
        each = time.perf_counter() - began
        removed = {path: [*range(site.count - keep)] for path, site in self.sites.items()}
        return each * sum(_trials(site.count, site.count - keep) for site in self.sites.values()), removed

    def likely(self, removed: Mapping[str, Sequence[int]]) -> AbstractContextManager[None]:
        """Context of a trial of the run: all experts stay, since tokens go to as many of them after a removal."""
        return nullcontext()

    def _error_without(self, site: Site, gone: Sequence[int], dense: Tensor) -> float:
        """Squared change of the output of a mixture without some experts, from its dense output.

        Raises:
            ModelError: the mixture does not compute without them.
        """
        module, inputs = self.model.get_submodule(site.name), self.inputs[site.name]
        with keeping_attributes(module):
            self._remove([site], {site.name: gone})
            try:
                _output(module, inputs[:1])  # fails if groups do not divide the experts; those of many tokens may mix
                return float((_output(module, inputs) - dense).double().square().sum())
            except unless_out_of_memory(*batches.REFUSALS) as error:
                raise ModelError(
                    f"{site.name} does not compute with {site.count - len(gone)} experts ({first_line(error)}). They "
                    "are removed one by one, so a router that divides them into groups is not supported. Prune entries "
                    "instead."
                ) from error

    def _remove(self, sites: Sequence[Site], removed: Mapping[str, Sequence[int]]) -> None:
        kept = {site.name: [unit for unit in range(site.count) if unit not in removed[site.name]] for site in sites}
        remove(self.model, sites, kept)

    def least_removed(self, keep: int) -> int:
        """The parameters of the removed experts and their rows of the routers."""
        values = [(site.count, part.stored(self.model)) for site in self.sites.values() for part in site.writers]
        return sum(
            value.numel() // count * (count - keep) for count, value in values if isinstance(value, nn.Parameter)
        )

    def require_possible(self, keep: int) -> None:
        """Raise unless the class of the model can be built with this number of experts, before any work.

        Raises:
            ModelError: it cannot.
        """
        self.widths.require_counts(self.model, [*self.sites.values()], False, dict.fromkeys(self.sites, keep))

    @contextmanager
    def without(self, removed: Mapping[str, Sequence[int]]) -> Iterator[None]:
        """Context in which the experts are removed; they do not come back on exit."""
        self._remove([*self.sites.values()], removed)
        yield

    def finish(self, removed: Mapping[str, Sequence[int]]) -> None:
        """Let the configuration follow.

        Raises:
            ModelError: the class of the model cannot have this number of experts.
        """
        self.widths.configure(self.model, {path: self.sites[path].count - len(gone) for path, gone in removed.items()})


def _site(model: nn.Module, path: str, slices: Sequence[Slices], count: int) -> Site:
    """The experts of a mixture as units; numbers of its modules that count experts follow."""
    attributes = [
        Attribute(joined(path, inner) if inner else path, name, 1)
        for inner, module in model.get_submodule(path).named_modules()
        for name, value in vars(module).items()
        if type(value) is int and value == count and _counts_experts(name)
    ]
    return Site(path, "experts", (), tuple(slices), path, attributes=tuple(attributes))


def _slices(before: Shapes, after: Shapes, count: int) -> list[Slices]:
    """The parameters whose shape has one entry less along one axis; empty if another shape changes otherwise."""
    slices = []
    if before.keys() != after.keys():
        return []
    for name, shape in before.items():
        if after[name] == shape:
            continue
        axes = [axis for axis, sizes in enumerate(zip(shape, after[name], strict=True)) if sizes[0] != sizes[1]]
        if len(axes) != 1 or shape[axes[0]] != count or after[name][axes[0]] != count - 1:
            return []
        path, _, parameter = name.rpartition(".")
        slices.append(Slices(path, parameter, axes[0], tuple((expert,) for expert in range(count))))
    return slices


def _counts_experts(name: str) -> bool:
    return "experts" in name and "per_tok" not in name and "shared" not in name


def _mixtures(slices: Sequence[Slices]) -> dict[str, list[Slices]]:
    """The slices by the smallest module around a router and its experts; the matrix of a router may lie deeper."""
    around = {part.path.rpartition(".")[0] for part in slices}
    mixtures: dict[str, list[Slices]] = {}
    for part in slices:
        path = min((path for path in around if not path or part.path.startswith(f"{path}.")), key=len)
        mixtures.setdefault(path, []).append(part)
    return mixtures


@torch.no_grad()
def _inputs(model: nn.Module, data: Sequence[Batch], paths: Sequence[str]) -> dict[str, Tensor]:
    """Inputs of mixtures as samples of one token, (tokens, 1, width), in the order of their calls, without padding."""
    inputs: dict[str, list[Tensor]] = {}
    mask: Tensor | None = None

    def note(path: str, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        hidden = hidden_argument(args, kwargs)
        if hidden is not None:
            tokens = unpadded(hidden.detach(), mask)
            inputs.setdefault(path, []).append(tokens.reshape(-1, 1, tokens.shape[-1]).clone())

    with keeping_buffers(model), before_calls(model, paths, note):
        for batch in data:
            mask = attended(model, batch)
            batches.forward(model, batch)
            if all(sum(map(len, inputs.get(path, []))) >= _TOKENS for path in paths):
                break
    return {path: torch.cat(values)[:_TOKENS] for path, values in inputs.items()}


def _output(module: nn.Module, inputs: Tensor) -> Tensor:
    hidden = hidden_of(module(inputs.clone()))  # a module may change its input in place
    assert hidden is not None
    return hidden


# ---- a run
class StoreBesideDense(Store):
    """A store of a model that loses parts during the run, with the dense model beside it from then on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.beside: nn.Module | None = None
        self.untrained = [name for name, value in model.named_parameters() if not value.requires_grad]

    @property
    def dense_model(self) -> nn.Module | None:
        """The dense model."""
        return self.beside

    def as_dense(self) -> AbstractContextManager[object]:
        """Context in which the dense model answers calls of the model, whose parts are gone already."""
        return nullcontext() if self.beside is None else replaced_forwards([(self.model, self.beside.forward)])


PARTS: dict[Units, type[Blocks | Experts]] = {"blocks": Blocks, "experts": Experts}


class PartRemoval:
    """The removal of blocks or experts from a model.

    Args:
        store: of the model, to which `solve` gives the dense model.
        data: calibration batches that the model takes.
        request: its pattern asks for blocks or experts.
        callbacks: of the run.

    Raises:
        ProblemError: names of layers.
        LayerSelectionError: there are no such parts.
        PatternError: the share is none of them, or more than can be removed.
        ModelError: the model's class cannot have fewer of them, or experts of a model without a configuration.
    """

    stays: tuple[str, ...] = ()  # as in `SiteRemoval`: no block or expert has a reason to stay

    def __init__(
        self, store: StoreBesideDense, data: list[Batch], request: StructuredRequest, callbacks: Callbacks
    ) -> None:
        self.store, self.model, self.data, self.request, self.callbacks = store, store.model, data, request, callbacks
        units = request.pattern.units
        if request.include is not None or request.ignore is not None:
            raise ProblemError(f'units="{units}" chooses among all of them: leave out include= and ignore=.')
        self.parts = PARTS[units].find(self.model, data)
        self.keep = self._kept_count()
        self.parts.require_possible(self.keep)

    def _kept_count(self) -> int:
        """The number of parts that are left in each list.

        Raises:
            PatternError: it is all of them, or fewer than are needed.
        """
        parts, share = self.parts, self.request.pattern.sparsity
        count = next(iter(parts.counts.values()))
        keep = keep_count(count, share)
        if keep == count:
            raise PatternError(
                f"{share:.3g} of {count} {parts.kind} is less than a half of one; ask for at least {1 / count:.3g}."
            )
        if keep < parts.least:
            raise PatternError(
                f"{keep} of {count} {parts.kind} would be left, and {parts.least} are needed; ask for at most "
                f"{1 - parts.least / count:.3g}."
            )
        return keep

    def plan(self) -> UnitsPlan:
        """The removal of a run."""
        parts, keep = self.parts, self.keep
        units = tuple(PlannedUnits(path, parts.kind, (), count, keep, keep) for path, count in parts.counts.items())
        before = float(sum(value.numel() for value in self.model.parameters()))
        cost = PlannedCost("parameters", before, before - parts.least_removed(keep), "in all layers")
        return UnitsPlan(units, (cost,), tuple(self.callbacks.notes))

    def solve(self, frozen: frozenset[str]) -> Report:
        """Choose the parts, and refit what follows while they are absent.

        Raises:
            LayerSelectionError: no layer could repair their absence.
        """
        self.dense = self.store.beside = frozen_copy(self.model, Samples.of(self.data))
        self.removed = self.parts.choose(self.keep, _damage_of(self.model, self.dense, self.data))
        for path, gone in self.removed.items():
            self.callbacks.on_note(f"Removed {self.parts.kind} of {path or 'the model'}: {', '.join(map(str, gone))}.")
        with self.parts.without(self.removed):
            report = run(self._workspace(frozen), ends=False)
            self.expected = Expected.of(self.model, self.data[0])
        return report

    def foretell(self) -> float:
        """Seconds of a run after the search for parts, on this machine."""
        damage = _damage_of(self.model, self.model, self.data)
        seconds, removed = self.parts.foretold_choice(self.keep, damage)
        with self.parts.likely(removed):
            solving, _ = self._refit(removed)
            foresight = Foresight.of(self.store, solving, self.data)
            if self._runs_whole(foresight.chain, removed):
                foresight = replace(foresight, chain=[], workload=replace(foresight.workload, blocks=0))
            return seconds + foresight.forecast(self.request.recipe).seconds

    def _refit(self, removed: Mapping[str, Sequence[int]]) -> tuple[Request, Selection]:
        """The refit of the layers after the first removal; all their columns are kept."""
        model, request = self.model, self.request
        layers = _writers(model, self.data[0], self.parts.first_changed(removed))
        skipped = {
            layer.name: Reason("asked", "is not refitted") for layer in find_layers(model) if layer not in layers
        }
        with keeping_buffers(model):
            selection = multiplied_as_they_are(model, Selection(tuple(layers), skipped), self.data[0])
        patterns = {layer: Groups(layer.shape[1], keep=1) for layer in selection.layers}
        common = request.recipe, patterns, request.pattern, request.holdout, request.seed, request.checkpoint
        return Request(*common), selection

    def _runs_whole(self, chain: Sequence[Block], removed: Mapping[str, Sequence[int]]) -> bool:
        """True if the model runs whole, since a chain would skip the dense model's blocks too."""
        lists = {block.path.rpartition(".")[0] for block in chain}
        return bool(self.parts.unused(removed)) and not lists >= self.parts.counts.keys()

    def _workspace(self, frozen: frozenset[str]) -> Workspace:
        """The workspace of the refit."""
        solving, selection = self._refit(self.removed)
        unused = tuple(f"{path}." for path in self.parts.unused(self.removed))
        names = [name for name, _ in self.model.named_parameters() if unused and name.startswith(unused)]
        workspace = Workspace(self.store, solving, selection, self.data, self.callbacks, frozenset({*frozen, *names}))
        if self._runs_whole(workspace.chain, self.removed):
            workspace.run_whole()
        return workspace

    def remove(self) -> None:
        """Delete the parts from the model, and check what is left.

        Raises:
            AuditError: the smaller model gives other outputs.
            ModelError: its class does, or cannot have this number of parts.
        """
        self.parts.finish(self.removed)
        if self.parts.kind == "experts":  # new parameters are in the place of frozen ones
            for name in self.store.untrained:
                self.model.get_parameter(name).requires_grad_(False)
        self.expected.require(self.model)
        require_rebuilt(self.model, self.expected.batch, self.callbacks.on_note)

    def wide(self) -> nn.Module | None:
        """The dense model, to be timed; None if it is too large."""
        return self.dense if can_copy(self.model) else None

    def width_records(self, report: Report) -> list[WidthRecord]:
        """The parts of every list before and after."""
        kind, errors = self.parts.kind, self.parts.errors
        return [
            WidthRecord(path, kind, path, count, self.keep, errors.get(path, 0.0))
            for path, count in self.parts.counts.items()
        ]

    def costs(self) -> list[CostRecord]:
        """Multiplications by the weights of modules, and all parameters, before and after."""
        models = self.dense, self.model
        macs = [Products.count(model, self.data[0], ()).of({}) for model in models]
        numbers = [float(sum(value.numel() for value in model.parameters())) for model in models]
        return [
            CostRecord("parameters", numbers[0], numbers[1], "in all layers"),
            CostRecord("macs", macs[0], macs[1], "in linear layers and convolutions"),
        ]

    def refitted(self, report: Report) -> list[str]:
        """Names of the layers that lost no inputs: all that were solved for."""
        return [record.name for record in report.layers]


@torch.no_grad()
def _damage_of(model: nn.Module, dense: nn.Module, data: list[Batch]) -> Callable[[], float]:
    """The KL divergence of softened outputs of a model from those of the dense model, on calibration samples."""
    answers = answered(dense, Samples.of(data).first(PROBE, PROBE_TOKENS))
    return torch.no_grad()(partial(damage, model, answers, softened(temperature_of(answers))))


@torch.no_grad()
def _writers(model: nn.Module, batch: Batch, first: str) -> list[Layer]:
    """Layers that write into a residual stream after a module was called; all such layers if there are none after it.

    Raises:
        LayerSelectionError: no layer writes into a residual stream.
    """
    layers = [layer for layer in find_layers(model) if layer.is_called and layer.groups == 1]
    adding: set[str] = set()
    calls: list[str] = []
    paths = {first, *(layer.path for layer in layers)}
    with (
        keeping_buffers(model),
        after_calls(model, paths, lambda path, *_: calls.append(path)),
        captured_additions(model, layers, lambda layer, _: adding.add(layer.name)),
    ):
        batches.forward(model, batches.first_sample(batch))
    order = {path: index for index, path in reversed([*enumerate(calls)])}
    writers = sorted((layer for layer in layers if layer.name in adding), key=lambda layer: order[layer.path])
    if not writers:
        raise LayerSelectionError("No layer adds its output to a residual stream, so none could repair a removal.")
    after = [layer for layer in writers if order[layer.path] > order[first]]
    return after or writers
