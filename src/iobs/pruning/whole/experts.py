"""Whole experts of a mixture: slices of the stacked weights of experts, and their rows of the router.

The parameters with one slice for each expert are those whose shape follows the number of experts in the configuration.
An expert is judged by the squared change of its mixture's output on the inputs of the dense model. All tokens are
routed anew among the other experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from iobs.errors import LayerSelectionError, ModelError, first_line, is_out_of_memory
from iobs.pruning.calibration.blocks import hidden_of
from iobs.pruning.network.calls import before_calls
from iobs.pruning.network.modes import keeping_buffers
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.samples.outputs import attended, unpadded
from iobs.pruning.structure import config_fields, widths
from iobs.pruning.structure.shapes import shapes_of
from iobs.pruning.whole.part import (
    Effect,
    PartName,
    Stack,
    configured,
    hidden_argument,
    require_configured,
    shapes_with,
)

_TOKENS = 2048  # tokens on which the output of a mixture is compared


@dataclass(frozen=True)
class Slice:
    """A parameter or buffer with one slice for each expert.

    Attributes:
        path: of the module.
        name: in the module.
        axis: of the experts.
    """

    path: str
    name: str
    axis: int


@dataclass
class Experts:
    """The experts of all mixtures of a model.

    Attributes:
        model: without the removed experts within `without`, and after `finish`.
        stacks: the mixtures.
        slices: the parameters of every mixture, by its path.
        fields: of the configuration with the number of experts.
        inputs: of every mixture, (tokens, 1, width), by its path.
        errors: squared change of the output of every mixture, relative to its square, after `chosen`.
    """

    model: nn.Module
    stacks: tuple[Stack, ...]
    least: int
    slices: dict[str, list[Slice]]
    fields: list[tuple[str, str]]
    inputs: dict[str, Tensor]
    errors: dict[str, float] = field(default_factory=dict)
    name: PartName = field(default="experts", init=False)

    @classmethod
    def found(cls, model: nn.Module, data: Sequence[Batch]) -> Experts:
        """Find the experts of a model.

        Raises:
            ModelError: the model is not built from a configuration.
            LayerSelectionError: it has no experts that its configuration counts.
        """
        require_configured(model, "Experts")
        before = shapes_of(model)
        counts = [
            value
            for _, one in config_fields.configurations(model.config)
            for name, value in vars(one).items()
            if type(value) is int and value > 1 and _counts_experts(name)
        ]
        for count in dict.fromkeys(counts):
            fields = configured(model, count, _counts_experts)
            narrower = shapes_with(model, fields, count - 1)
            if isinstance(narrower, str) or narrower[1].keys() != before.keys():
                continue
            slices = _slices(before, narrower[1], count)
            if slices:
                mixtures = _mixtures(slices)
                inputs = _inputs(model, data, list(mixtures))
                if unfed := [path for path in mixtures if path not in inputs or not inputs[path].numel()]:
                    raise LayerSelectionError(
                        f"No calibration sample calls the mixture {unfed[0]}, so its experts cannot be judged, and "
                        "the configuration has one number for all mixtures. Give data that reach it; if the model "
                        "uses parts of this module without a call of its own, its experts stay."
                    )
                stacks = tuple(Stack(path, count) for path in inputs)
                return cls(model, stacks, _least(model), mixtures, fields, inputs)
        raise LayerSelectionError("No experts were found whose number the configuration of this model says.")

    @torch.no_grad()
    def chosen(self, keep: int, damage: Effect) -> dict[str, list[int]]:
        """For every mixture: remove the expert without which its output changes least, and repeat.

        Raises:
            ModelError: a mixture does not compute with one expert less.
        """
        found = {}
        for stack in self.stacks:
            dense = _output(self.model.get_submodule(stack.path), self.inputs[stack.path])
            gone: list[int] = []
            error = 0.0
            while len(gone) < stack.count - keep:
                left = (one for one in range(stack.count) if one not in gone)
                trials = {expert: self._error_without(stack, [*gone, expert], dense) for expert in left}
                gone.append(min(trials, key=lambda expert: trials[expert]))
                error = trials[gone[-1]]
            found[stack.path] = sorted(gone)
            self.errors[stack.path] = error / max(float(dense.double().square().sum()), 1e-30)
        return found

    def _error_without(self, stack: Stack, gone: Sequence[int], dense: Tensor) -> float:
        """Squared change of the output of a mixture without some experts, from its dense output.

        Raises:
            ModelError: the mixture does not compute without them.
        """
        module, given = self.model.get_submodule(stack.path), self.inputs[stack.path]
        undo = self._narrowed(stack, gone)
        try:
            _output(module, given[:1])  # fails if groups do not divide the experts; those of many tokens may be mixed
            return float((_output(module, given) - dense).double().square().sum())
        except batches.REFUSALS as error:
            if is_out_of_memory(error):
                raise
            raise ModelError(
                f"{stack.path} does not compute with {stack.count - len(gone)} experts ({first_line(error)}). They are "
                "removed one by one, so a router that divides them into groups is not supported. Prune entries instead."
            ) from error
        finally:
            undo()

    @contextmanager
    def without(self, removed: Mapping[str, Sequence[int]]) -> Iterator[None]:
        """Context in which the experts are removed; they do not come back on exit."""
        for stack in self.stacks:
            self._narrowed(stack, removed[stack.path])
        yield

    def first(self, removed: Mapping[str, Sequence[int]]) -> str:
        """Path of the first mixture."""
        return self.stacks[0].path

    def unused(self, removed: Mapping[str, Sequence[int]]) -> list[str]:
        """Nothing: removed experts are gone at once."""
        return []

    def finish(self, removed: Mapping[str, Sequence[int]]) -> None:
        """Let the configuration follow.

        Raises:
            ModelError: the class of the model cannot have this number of experts.
        """
        keep = self.stacks[0].count - len(removed[self.stacks[0].path])
        found = shapes_with(self.model, self.fields, keep)
        shapes = shapes_of(self.model)
        if isinstance(found, str) or found[1] != shapes:
            reason = found if isinstance(found, str) else "its shapes differ"
            raise ModelError(f"{type(self.model).__name__} cannot be built with {keep} experts: {reason}.")
        widths.set_configuration(self.model, found[0])

    def least_removed(self, keep: int) -> int:
        """The parameters of the removed experts and their rows of the routers."""
        values = [(stack, self._stored(one)) for stack in self.stacks for one in self.slices[stack.path]]
        return sum(
            value.numel() // stack.count * (stack.count - keep)
            for stack, value in values
            if isinstance(value, nn.Parameter)
        )

    def _stored(self, one: Slice) -> Tensor:
        value: Tensor = getattr(self.model.get_submodule(one.path), one.name)
        return value

    def require_possible(self, keep: int) -> None:
        """Check the class of the model before any work.

        Raises:
            ModelError: it cannot be built with this number of experts.
        """
        found = shapes_with(self.model, self.fields, keep)
        if isinstance(found, str):
            raise ModelError(f"{type(self.model).__name__} cannot be built with {keep} experts: {found}.")

    def _narrowed(self, stack: Stack, gone: Sequence[int]) -> Callable[[], None]:
        """Remove experts of one mixture; returns the function that brings them back."""
        keep = torch.tensor([expert for expert in range(stack.count) if expert not in gone])
        module = self.model.get_submodule(stack.path)
        numbers = [
            (one, name)
            for one in module.modules()
            for name, value in vars(one).items()
            if type(value) is int and value == stack.count and _counts_experts(name)
        ]
        before: list[tuple[nn.Module, str, Tensor]] = []

        def put(owner: nn.Module, name: str, value: Tensor) -> None:
            held = owner._parameters if name in owner._parameters else owner._buffers
            held[name] = value  # type: ignore[assignment]
            if isinstance(owner, nn.Linear):
                owner.out_features = len(owner.weight)

        def undo() -> None:
            for owner, name, value in before:
                put(owner, name, value)
            for one, name in numbers:
                setattr(one, name, stack.count)

        for one in self.slices[stack.path]:
            owner = self.model.get_submodule(one.path)
            value = self._stored(one)
            before.append((owner, one.name, value))
            narrower = value.detach().index_select(one.axis, keep.to(value.device))
            is_parameter = isinstance(value, nn.Parameter)
            put(owner, one.name, nn.Parameter(narrower, value.requires_grad) if is_parameter else narrower)
        for owner, name in numbers:
            setattr(owner, name, len(keep))
        return undo


def _slices(before: dict[str, tuple[int, ...]], after: dict[str, tuple[int, ...]], count: int) -> list[Slice]:
    """The parameters whose shape has one entry less along one axis; empty if another shape changes otherwise."""
    found = []
    for name, shape in before.items():
        other = after[name]
        if other == shape:
            continue
        axes = [axis for axis, (old, new) in enumerate(zip(shape, other, strict=True)) if old != new]
        if len(axes) != 1 or shape[axes[0]] != count or other[axes[0]] != count - 1:
            return []
        path, _, own = name.rpartition(".")
        found.append(Slice(path, own, axes[0]))
    return found


def _counts_experts(name: str) -> bool:
    return "experts" in name and "per_tok" not in name and "shared" not in name


def _mixtures(slices: Sequence[Slice]) -> dict[str, list[Slice]]:
    """The slices by the smallest module around a router and its experts; the matrix of a router may lie deeper."""
    around = {one.path.rpartition(".")[0] for one in slices}
    found: dict[str, list[Slice]] = {}
    for one in slices:
        path = min((path for path in around if not path or one.path.startswith(f"{path}.")), key=len)
        found.setdefault(path, []).append(one)
    return found


def _least(model: nn.Module) -> int:
    """The experts that every token is routed to, by the configuration."""
    named = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
    values = (vars(one).get(name) for _, one in config_fields.configurations(model.config) for name in named)
    return max((value for value in values if type(value) is int), default=1)


@torch.no_grad()
def _inputs(model: nn.Module, data: Sequence[Batch], paths: Sequence[str]) -> dict[str, Tensor]:
    """Inputs of mixtures as samples of one token, (tokens, 1, width), in the order of their calls, without padding."""
    found: dict[str, list[Tensor]] = {}
    mask: Tensor | None = None

    def note(path: str, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        given = hidden_argument(args, kwargs)
        if given is not None:
            tokens = unpadded(given.detach(), mask)
            found.setdefault(path, []).append(tokens.reshape(-1, 1, tokens.shape[-1]).clone())

    with keeping_buffers(model), before_calls(model, paths, note):
        for batch in data:
            mask = attended(model, batch)
            batches.forward(model, batch)
            if all(sum(map(len, found.get(path, []))) >= _TOKENS for path in paths):
                break
    return {path: torch.cat(values)[:_TOKENS] for path, values in found.items()}


def _output(module: nn.Module, given: Tensor) -> Tensor:
    hidden = hidden_of(module(given.clone()))  # a module may change its input in place
    assert hidden is not None
    return hidden
