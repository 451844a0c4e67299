"""Whole blocks of a network: modules of one list that return a hidden state of their input's shape.

During a run a removed block returns its input, so that all other modules keep their names. At the end it is deleted
from its list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import nn

from iobs.errors import LayerSelectionError, ModelError, first_line, is_out_of_memory
from iobs.pruning.calibration.blocks import hidden_of
from iobs.pruning.network.calls import after_calls
from iobs.pruning.network.layers import joined
from iobs.pruning.network.modes import keeping_buffers, replaced_forwards
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.structure import widths
from iobs.pruning.structure.shapes import is_configured, shapes_of
from iobs.pruning.whole.part import Effect, PartName, Stack, configured, hidden_argument, shapes_with

_PLACES = ("layer_idx", "layer_id", "layer_index", "layer_number")  # attributes that hold the place of a block


@dataclass
class Blocks:
    """The blocks of the list that holds most of a model's parameters.

    Attributes:
        model: its blocks are skipped within `without`, and deleted by `finish`.
        stacks: the list.
        rests: for every block the number of entries that it returns after the hidden state; None: no tuple.
    """

    model: nn.Module
    stacks: tuple[Stack, ...]
    rests: list[int | None]
    name: PartName = field(default="blocks", init=False)
    least: int = field(default=1, init=False)
    errors: dict[str, float] = field(default_factory=dict, init=False)

    @classmethod
    def found(cls, model: nn.Module, batch: Batch) -> Blocks:
        """Find the blocks of a model.

        Raises:
            LayerSelectionError: it has none.
        """
        lists = {
            path: module
            for path, module in model.named_modules()
            if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1 and _is_numbered(module)
        }
        calls = _calls(model, batch, {joined(path, str(at)) for path, one in lists.items() for at in range(len(one))})
        fitting = {
            path: sum(value.numel() for value in one.parameters())
            for path, one in lists.items()
            if all(_is_block(calls.get(joined(path, str(at)), [])) for at in range(len(one)))
        }
        if not fitting:
            raise LayerSelectionError(
                "No blocks were found that can be removed: no list of modules whose members are called once each and "
                "return a hidden state of the shape of their input."
            )
        path = max(fitting, key=lambda path: fitting[path])
        count = len(lists[path])
        return cls(model, (Stack(path, count),), [calls[joined(path, str(at))][0].rest for at in range(count)])

    @property
    def stack(self) -> Stack:
        """The list."""
        return self.stacks[0]

    def chosen(self, keep: int, damage: Effect) -> dict[str, list[int]]:
        """Remove the block whose absence damages the model least, and repeat; the other blocks stay as they are.

        A block without which the class cannot be built stays, such as the dense first block of some mixtures. So does
        one without which the model fails, since it computes with more of the block's result than the hidden state.

        Raises:
            ModelError: the class cannot be built without the chosen blocks, or the model fails without any block.
        """
        gone: list[int] = []
        while len(gone) < self.stack.count - keep:
            trials: dict[int, float] = {}
            reason = ""
            for block in (one for one in range(self.stack.count) if one not in gone):
                try:
                    with self.without({self.stack.path: [*gone, block]}):
                        trials[block] = damage()
                except batches.REFUSALS as error:
                    if is_out_of_memory(error):
                        raise
                    reason = reason or first_line(error)
            if not trials:
                raise ModelError(
                    f"{type(self.model).__name__} fails if a block of {self.stack.path or 'the model'} only passes on "
                    f"its hidden state ({reason}): it computes with other results of the blocks. Remove units inside "
                    'of them instead: leave out units="blocks".'
                )
            order = sorted(trials, key=lambda block: trials[block])
            gone.append(next((block for block in order if self._can_lose([*gone, block])), order[0]))
        if is_configured(self.model):
            self._narrower(sorted(gone))
        return {self.stack.path: sorted(gone)}

    def least_removed(self, keep: int) -> int:
        """The parameters of the smallest blocks; those that several blocks share stay."""
        blocks = [
            {id(one): one.numel() for one in self.model.get_submodule(path).parameters()}
            for path in self.unused({self.stack.path: range(self.stack.count)})
        ]
        uses = Counter(one for block in blocks for one in block)
        sizes = sorted(sum(size for one, size in block.items() if uses[one] == 1) for block in blocks)
        return sum(sizes[: self.stack.count - keep])

    def without(self, removed: Mapping[str, Sequence[int]]) -> AbstractContextManager[None]:
        """Context in which removed blocks return their input."""
        places = zip(removed[self.stack.path], self.unused(removed), strict=True)
        return replaced_forwards([(self.model.get_submodule(path), _Skip(self.rests[at])) for at, path in places])

    def first(self, removed: Mapping[str, Sequence[int]]) -> str:
        """Path of the first removed block."""
        return self.unused(removed)[0]

    def unused(self, removed: Mapping[str, Sequence[int]]) -> list[str]:
        """Paths of the removed blocks."""
        return [joined(self.stack.path, str(at)) for at in removed[self.stack.path]]

    def finish(self, removed: Mapping[str, Sequence[int]]) -> None:
        """Delete the blocks from their list.

        Raises:
            ModelError: the configuration cannot express the number of blocks.
        """
        gone = removed[self.stack.path]
        config = self._narrower(gone) if is_configured(self.model) else None
        members = self.model.get_submodule(self.stack.path)
        assert isinstance(members, (nn.ModuleList, nn.Sequential))
        for at in sorted(gone, reverse=True):
            del members[at]
        left = [at for at in range(self.stack.count) if at not in gone]
        for new, old in enumerate(left):
            for module in members[new].modules():
                for name in _PLACES:
                    if vars(module).get(name) == old:
                        setattr(module, name, new)
        if config is not None:
            widths.set_configuration(self.model, config)

    def require_possible(self, keep: int) -> None:
        """Check that the class of the model can have fewer blocks, before any work.

        Raises:
            ModelError: it cannot.
        """
        if is_configured(self.model):
            self._narrower(range(keep, self.stack.count))

    def _can_lose(self, gone: Sequence[int]) -> bool:
        """Check that the class of the model can be built without some blocks."""
        try:
            return not is_configured(self.model) or self._narrower(sorted(gone)) is not None
        except ModelError:
            return False

    def _narrower(self, gone: Sequence[int]) -> object:
        """The configuration of the model without some blocks."""
        keep = self.stack.count - len(gone)
        wanted = _renumbered(shapes_of(self.model), self.stack.path, gone)
        fields = configured(self.model, self.stack.count, lambda name: True)
        reason = "no field of the configuration has their number"
        for some in [*([one] for one in fields), fields]:
            found = shapes_with(self.model, some, keep, gone) if some else "no field has their number"
            if not isinstance(found, str):
                config, shapes = found
                if shapes == wanted:
                    return config
                found = f"{some[0][1]} changes other shapes"
            reason = found
        raise ModelError(
            f"{type(self.model).__name__} cannot be built with {keep} blocks of {self.stack.path}: {reason}."
        )


def _is_numbered(module: nn.Module) -> bool:
    """Check that the members of a list are named by their places: other names are parts of different kinds."""
    return [name for name, _ in module.named_children()] == [str(at) for at in range(len(module._modules))]


class _Skip:
    """The forward of a removed block: a copy of its hidden state."""

    def __init__(self, rest: int | None) -> None:
        self.rest = rest

    def __call__(self, *args: object, **kwargs: object) -> object:
        hidden = hidden_argument(args, kwargs)
        assert hidden is not None
        return hidden.clone() if self.rest is None else (hidden.clone(), *[None] * self.rest)


@dataclass(frozen=True)
class _Returned:
    """The result of one call of a module.

    Attributes:
        alike: True if it holds a hidden state of the shape of the input.
        rest: number of entries after the hidden state; None: no tuple.
    """

    alike: bool
    rest: int | None


def _is_block(calls: Sequence[_Returned]) -> bool:
    """Check that a module was called once and returned a hidden state of the shape of its input."""
    return len(calls) == 1 and calls[0].alike


@torch.no_grad()
def _calls(model: nn.Module, batch: Batch, paths: set[str]) -> dict[str, list[_Returned]]:
    """The results of every call of modules on the first sample of a batch, by path."""
    found: dict[str, list[_Returned]] = {}

    def note(path: str, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        given, hidden = hidden_argument(args, kwargs), hidden_of(output)
        alike = given is not None and hidden is not None and given.shape == hidden.shape and given.is_floating_point()
        rest = len(output) - 1 if isinstance(output, (tuple, list)) else None
        found.setdefault(path, []).append(_Returned(alike, rest))

    with keeping_buffers(model), after_calls(model, paths, note):
        batches.forward(model, batches.first_sample(batch))
    return found


def _renumbered(shapes: dict[str, tuple[int, ...]], path: str, gone: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Shapes by name after the blocks of a list were deleted."""
    found = {}
    for name, shape in shapes.items():
        if name.startswith(f"{path}."):
            place, _, rest = name[len(path) + 1 :].partition(".")
            if int(place) in gone:
                continue
            name = f"{path}.{int(place) - sum(one < int(place) for one in gone)}.{rest}"
        found[name] = shape
    return found
