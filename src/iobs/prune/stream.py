"""One network over fixed batches, cut into stages that can be run again and again on the same inputs.

Stages are numbered: `BEFORE` is what runs before the first block of the chain, 0 to n - 1 are the blocks, n is what
runs after the last. A block is replayed alone on its hidden state; before and after, the whole network runs with its
blocks standing still. Without a chain there is one stage, the whole network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from iobs.errors import CalibrationError
from iobs.prune import batches
from iobs.prune.batches import Batch
from iobs.prune.capture import captured_inputs
from iobs.prune.layers import Layer
from iobs.prune.trace import Block, find_chains, hidden_of, inside, with_hidden

BEFORE = -1

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Mark = tuple[torch.Size, int]  # of a tensor: its shape and the sum of its bits


class StopForward(Exception):
    """Raised inside a forward pass to end it early."""


class WayError(CalibrationError):
    """A batch does not go from block to block along the chain."""

    def __init__(self) -> None:
        super().__init__("A batch takes another way through the network's blocks than the first one.")


@dataclass
class Stream:
    """A network, its batches, and how far the batches have come along its chain of blocks."""

    model: nn.Module
    data: list[Batch]
    chain: list[Block]
    strict: bool = False  # a batch that does not go from block to block along the chain raises WayError
    arguments: list[list[Arguments]] = field(default_factory=list)  # by batch and block; hidden states left out
    hidden: list[Tensor] = field(default_factory=list)  # by batch: what the current block is fed

    @property
    def stages(self) -> range:
        """Every stage, in order."""
        return range(BEFORE, len(self.chain) + 1) if self.chain else range(BEFORE, 0)

    def layers_of(self, stage: int, left: Sequence[Layer]) -> list[Layer]:
        """Those of the layers not yet visited that are to be seen in a stage, if it calls them."""
        if 0 <= stage < len(self.chain):
            return [layer for layer in left if inside(layer, self.chain[stage].path)]
        return [layer for layer in left if not any(inside(layer, block.path) for block in self.chain)]

    def run(self, stage: int, index: int) -> Any:
        """Run one stage on one batch; hooks see the modules in it being called."""
        if 0 <= stage < len(self.chain):
            block = self.chain[stage]
            args, kwargs = _insert(self.arguments[index][stage], block.hidden, self.hidden[index].clone())
            return self.model.get_submodule(block.path)(*args, **kwargs)
        with ExitStack() as stack:
            if self.chain and stage == BEFORE:
                stack.enter_context(_replaced(self.model, self.chain[:1], self._stop))
            elif self.chain:
                stack.enter_context(
                    _replaced(self.model, self.chain, lambda k, a, kw: self._stand_still(index, k, a, kw))
                )
            try:
                return batches.forward(self.model, self.data[index])
            except StopForward:
                return None

    def advance(self, stage: int) -> None:
        """Compute what the next stage is fed, through the stage as its weights now are."""
        if not self.chain or stage == len(self.chain):
            return
        if stage == BEFORE:
            self.arguments, self.hidden = [], []
            for index in range(len(self.data)):
                self._record(index)
        else:
            for index in range(len(self.data)):
                hidden = hidden_of(self.run(stage, index))
                assert hidden is not None
                self.hidden[index] = hidden

    def cast(self, dtype: torch.dtype) -> None:
        """Go on in another dtype: hidden states and the blocks' other floating arguments."""
        self.hidden = [hidden.to(dtype) for hidden in self.hidden]
        for index, blocks in enumerate(self.arguments):
            seen: dict[int, Tensor] = {}  # blocks share their masks and positions
            self.arguments[index] = [_cast(arguments, dtype, seen) for arguments in blocks]

    def _record(self, index: int) -> None:
        """Every block's arguments on one batch, and the first block's hidden state, from a run without blocks."""
        recorded: list[Arguments] = []
        handed_on: Tensor | None = None  # by the block before: what it was given, as long as the blocks stand still

        def record(position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal handed_on
            block = self.chain[position]
            hidden = kwargs[block.hidden] if isinstance(block.hidden, str) else args[block.hidden]
            if self.strict and (position != len(recorded) or (position and hidden is not handed_on)):
                raise WayError
            if position == 0:
                self.hidden.append(hidden)
            handed_on = hidden
            recorded.append(_insert((args, kwargs), block.hidden, None))
            if position == len(self.chain) - 1:
                raise StopForward
            return with_hidden(hidden, block.rest)

        with _replaced(self.model, self.chain, record), suppress(StopForward):
            batches.forward(self.model, self.data[index])
        if self.strict and len(recorded) < len(self.chain):
            raise WayError
        self.arguments.append(recorded)

    def _stop(self, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise StopForward

    def _stand_still(self, index: int, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        block = self.chain[position]
        hidden = kwargs[block.hidden] if isinstance(block.hidden, str) else args[block.hidden]
        last = position == len(self.chain) - 1
        return with_hidden(self.hidden[index].clone() if last else hidden, block.rest)


def exact_chain(model: nn.Module, data: Sequence[Batch], layers: tuple[Layer, ...]) -> list[Block]:
    """The longest chain of blocks along which a network can be run, or none."""
    for chain in find_chains(model, data[0], layers):
        if len(chain) > 1 and running_along_is_exact(model, chain, data, layers):
            return chain
    return []


@torch.no_grad()
def running_along_is_exact(
    model: nn.Module, chain: list[Block], data: Sequence[Batch], layers: Sequence[Layer]
) -> bool:
    """Whether every layer is fed along the chain, in its own stage, just what it is fed when the network runs whole.

    So nothing but the hidden state is handed on, no layer is called from two stages, and nothing that is pruned
    branches off in the middle; the output stands for what is not pruned. One batch of each shape shows it; the others,
    that they take the same way.
    """
    shapes: set[tuple[torch.Size, ...]] = set()
    try:
        for batch in data:
            shape = tuple(tensor.shape[1:] for tensor in batches.tensors(batch))
            stream = Stream(model, [batch], chain, strict=True)
            if shape in shapes:
                stream.advance(BEFORE)
            elif _fed(stream, layers) != _fed(Stream(model, [batch], []), layers):
                return False
            shapes.add(shape)
    except Exception:  # a network that cannot be run in parts is run whole: any failure here says just that
        return False
    return True


def _fed(stream: Stream, layers: Sequence[Layer]) -> tuple[dict[str, list[Mark]], Mark]:
    """What every layer is fed in the stage that it is visited in, by its name, and the output; on the first batch."""
    fed: dict[str, list[Mark]] = {}

    def note(layer: Layer, module: nn.Module, value: Tensor) -> None:
        fed.setdefault(layer.name, []).append(_mark(value))

    for stage in stream.stages:
        left = [layer for layer in layers if layer.name not in fed]
        with captured_inputs(stream.model, stream.layers_of(stage, left), note):
            output = stream.run(stage, 0)
        stream.advance(stage)
    return fed, _mark(batches.logits(output))


def _mark(value: Tensor) -> Mark:
    """Tells tensors apart, which are not kept: a network's activations together need not fit into memory."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    return value.shape, int(value.contiguous().view(integers).sum(dtype=torch.int64))  # exact in every order


def _cast(value: Any, dtype: torch.dtype, seen: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if id(value) not in seen:
            seen[id(value)] = value.to(dtype) if value.is_floating_point() else value
        return seen[id(value)]
    if isinstance(value, (tuple, list)):
        return type(value)([_cast(entry, dtype, seen) for entry in value])
    if isinstance(value, dict):
        return {key: _cast(entry, dtype, seen) for key, entry in value.items()}
    return value


def _insert(arguments: Arguments, where: int | str, hidden: Tensor | None) -> Arguments:
    args, kwargs = arguments
    if isinstance(where, str):
        return args, {**kwargs, where: hidden}
    return (*args[:where], hidden, *args[where + 1 :]), kwargs


@contextmanager
def _replaced(
    model: nn.Module, blocks: list[Block], behaviour: Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
) -> Iterator[None]:
    """Blocks of the model do something else instead of their forward; undone at the end."""
    modules = [model.get_submodule(block.path) for block in blocks]
    own = [vars(module).get("forward") for module in modules]  # set on the module itself, by an adapter or a user
    for position, module in enumerate(modules):
        module.forward = lambda *args, position=position, **kwargs: behaviour(position, args, kwargs)
    try:
        yield
    finally:
        for module, forward in zip(modules, own, strict=True):
            if forward is None:
                del module.forward
            else:
                module.forward = forward
