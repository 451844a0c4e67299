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
Mark = tuple[torch.Size, int]  # of a tensor: its shape and a weighted sum of its bits
_PIECE = 2**20  # numbers whose bits are summed at a time


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
    keep: Callable[[int, Tensor], Tensor] = lambda index, hidden: hidden  # where a batch's hidden state lies meanwhile
    arguments: list[list[Arguments]] = field(default_factory=list)  # by batch and block; hidden states left out
    hidden: list[Tensor] = field(default_factory=list)  # by batch: what the current block is fed
    _blocks: dict[str, int | None] = field(default_factory=dict)  # by layer name: the number of its block

    @property
    def stages(self) -> range:
        """Every stage, in order."""
        return range(BEFORE, len(self.chain) + 1) if self.chain else range(BEFORE, 0)

    def layers_of(self, stage: int, left: Sequence[Layer]) -> list[Layer]:
        """Those of the layers not yet visited that are to be seen in a stage, if it calls them."""
        own = stage if 0 <= stage < len(self.chain) else None
        return [layer for layer in left if self._block_of(layer) == own]

    def _block_of(self, layer: Layer) -> int | None:
        """The number of the block that a layer lies in; None where it is none."""
        if layer.name not in self._blocks:
            number = next((number for number, block in enumerate(self.chain) if inside(layer, block.path)), None)
            self._blocks[layer.name] = number
        return self._blocks[layer.name]

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
                self.hidden[index] = self.keep(index, hidden)

    def cast_arguments(self, dtype: torch.dtype) -> None:
        """Go on in another dtype: that of the blocks' floating arguments besides their hidden states."""
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
                self.hidden.append(self.keep(index, hidden))
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
    branches off in the middle; the output stands for what is not pruned. The first batch shows it, and those of the
    smallest and the largest samples; the others, that they take the same way.
    """
    sizes = [sum(tensor[:1].numel() for tensor in batches.tensors(batch) if tensor.ndim) for batch in data]
    shown = {0, sizes.index(min(sizes)), sizes.index(max(sizes))} if len(set(sizes)) > 1 else {0}
    try:
        for index, batch in enumerate(data):
            stream = Stream(model, [batch], chain, strict=True)
            if index not in shown:
                stream.advance(BEFORE)
            elif _fed(stream, layers) != _fed(Stream(model, [batch], []), layers):
                return False
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
    total = 0
    for part in torch.split(value.contiguous().view(integers).flatten(), _PIECE):
        places = torch.arange(1, 2 * len(part), 2, device=part.device)
        total = (31 * total + int((part.long() * places).sum())) % 2**64  # whole numbers: exact in every order
    return value.shape, total


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
