"""Replay of a model on fixed batches in stages, each of which can be repeated on the same inputs.

Stages 0 to n - 1 are the n blocks of the chain. Stage `BEFORE` holds the modules before the first block, and stage n
the modules after the last block. A block runs alone on its stored hidden state. In the first and the last stage the
whole model runs, with blocks that pass their input on. Without a chain the whole model is one stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from iobs.errors import CalibrationError, IOBSError, ModelError, first_line, is_out_of_memory, unless_out_of_memory
from iobs.pruning.calibration.blocks import Block, Call, Tracer, hidden_of, inside, number_of_block, with_hidden
from iobs.pruning.calibration.hooks import captured_inputs
from iobs.pruning.network.calls import Args, Kwargs
from iobs.pruning.network.layers import Layer
from iobs.pruning.network.modes import replaced_forwards
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch

BEFORE = -1

Arguments = tuple[Args, Kwargs]


class StopForward(Exception):
    """Raised inside a forward pass to end it early."""


class ChainError(CalibrationError):
    """A batch does not run from block to block along the chain."""

    def __init__(self) -> None:
        super().__init__("A batch passes through the model's blocks in another order than the first batch.")


@dataclass
class Stream:
    """A model, its batches, and the hidden state of each batch at the current block of the chain.

    Args:
        model: the model.
        data: its batches.
        chain: blocks of the model; empty to run the model whole.
        strict: raise ChainError for batches that do not run from block to block along the chain.
        keep: (index of a batch, hidden state) -> the tensor to store.
        fetch: stored tensor -> a copy of it on the device of the model.

    Attributes:
        arguments: of every block, by batch and block, without the hidden state.
        hidden: input of the current block, by batch.
        shortcuts: of the current block while its layers are pruned, otherwise None.
    """

    model: nn.Module
    data: list[Batch]
    chain: list[Block]
    strict: bool = False
    keep: Callable[[int, Tensor], Tensor] = lambda index, hidden: hidden
    fetch: Callable[[Tensor], Tensor] = Tensor.clone
    arguments: list[list[Arguments]] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    shortcuts: Shortcuts | None = None
    _blocks: dict[str, int | None] = field(default_factory=dict)  # number of the block, by layer name

    @property
    def stages(self) -> range:
        """All stages, in order."""
        return range(BEFORE, len(self.chain) + 1) if self.chain else range(BEFORE, 0)

    def layers_of(self, stage: int, layers: Sequence[Layer]) -> list[Layer]:
        """The layers that belong to a stage; the stage may not call all of them."""
        number = stage if 0 <= stage < len(self.chain) else None
        return [layer for layer in layers if self.block_of(layer) == number]

    def block_of(self, layer: Layer) -> int | None:
        """The number of the block that holds a layer; None for layers outside the blocks."""
        if layer.name not in self._blocks:
            self._blocks[layer.name] = number_of_block(self.chain, layer.path)
        return self._blocks[layer.name]

    def state(self, index: int) -> Tensor:
        """A copy of the hidden state of the batch at `index`, on the device of the model."""
        return self.fetch(self.hidden[index])

    def run(self, stage: int, index: int) -> object:
        """Run one stage on the batch at `index`, so that hooks see the calls of its modules."""
        if 0 <= stage < len(self.chain):
            with nullcontext() if self.shortcuts is None else self.shortcuts.taken(self.model, index):
                return self._block(stage, index, self.state(index))
        with suppress(StopForward):
            if not self.chain:
                return batches.forward(self.model, self.data[index])
            if stage == len(self.chain):
                return self.output(index, self.state(index))
            with replaced_blocks(self.model, self.chain[:1], _stop):
                return batches.forward(self.model, self.data[index])
        return None

    def _block(self, stage: int, index: int, hidden: Tensor) -> object:
        block = self.chain[stage]
        args, kwargs = inserted(self.arguments[index][stage], block.hidden, hidden)
        return self.model.get_submodule(block.path)(*args, **kwargs)

    def through(self, stages: Iterable[int], index: int, hidden: Tensor) -> Tensor:
        """A hidden state of the batch at `index` after some blocks; the stored hidden states are not used."""
        for stage in stages:
            output = hidden_of(self._block(stage, index, hidden))
            assert output is not None
            hidden = output
        return hidden

    def output(self, index: int, hidden: Tensor) -> object:
        """The model's output on the batch at `index` with this hidden state after the last block."""
        last = len(self.chain) - 1

        def pass_on(position: int, args: Args, kwargs: Kwargs) -> object:
            before = hidden_argument(self.chain[position], args, kwargs)
            # What lies outside the blocks may compute in another dtype than the blocks.
            return with_hidden(hidden.to(before.dtype) if position == last else before, self.chain[position].rest)

        with replaced_blocks(self.model, self.chain, pass_on):
            return batches.forward(self.model, self.data[index])

    def entry(self, index: int) -> Tensor:
        """The input of the first block on the batch at `index`, from the modules before it."""
        inputs: list[Tensor] = []

        def stop(position: int, args: Args, kwargs: Kwargs) -> object:
            inputs.append(hidden_argument(self.chain[position], args, kwargs))
            raise StopForward

        with suppress(StopForward), replaced_blocks(self.model, self.chain[:1], stop):
            batches.forward(self.model, self.data[index])
        return inputs[0]

    def advance(self, stage: int) -> None:
        """Compute the inputs of the next stage with the current weights of this stage."""
        if not self.chain or stage == len(self.chain):
            return
        if stage == BEFORE:
            self.arguments, self.hidden = [], []
            for index in range(len(self.data)):
                self._record(index)
        else:
            for index in range(len(self.data)):
                self.pass_on(index, self.run(stage, index))

    def pass_on(self, index: int, output: object) -> None:
        """Store the hidden state in the output of a block on the batch at `index`: the input of the next block."""
        hidden = hidden_of(output)
        assert hidden is not None
        self.hidden[index] = self.keep(index, hidden)

    def cast_arguments(self, dtype: torch.dtype) -> None:
        """Convert the floating arguments of the blocks, except the hidden states, to another dtype."""
        for index, blocks in enumerate(self.arguments):
            seen: dict[int, Tensor] = {}  # blocks share masks and positions, which are converted once
            self.arguments[index] = [cast_floats(arguments, dtype, seen) for arguments in blocks]

    def _record(self, index: int) -> None:
        """Record all blocks' arguments on one batch, and the input of the first; the blocks pass their input on."""
        recorded: list[Arguments] = []
        passed_on: Tensor | None = None  # output of the block before, which is its input

        def record(position: int, args: Args, kwargs: Kwargs) -> object:
            nonlocal passed_on
            block, hidden = self.chain[position], hidden_argument(self.chain[position], args, kwargs)
            if self.strict and (position != len(recorded) or (position and hidden is not passed_on)):
                raise ChainError
            if position == 0:
                self.hidden.append(self.keep(index, hidden))
            passed_on = hidden
            recorded.append(inserted((args, kwargs), block.hidden, None))
            if position == len(self.chain) - 1:
                raise StopForward
            return with_hidden(hidden, block.rest)

        try:
            with replaced_blocks(self.model, self.chain, record), suppress(StopForward):
                batches.forward(self.model, self.data[index])
        except batches.REFUSALS as error:
            if isinstance(error, IOBSError) or is_out_of_memory(error):
                raise
            raise ModelError(
                f"{type(self.model).__name__} cannot be run block by block on these data ({type(error).__name__}: "
                f"{first_line(error)}); prune it in memory instead."
            ) from error
        if self.strict and len(recorded) < len(self.chain):
            raise ChainError
        self.arguments.append(recorded)


def _stop(position: int, args: Args, kwargs: Kwargs) -> object:
    raise StopForward


def cast_floats(value: object, dtype: torch.dtype, seen: dict[int, Tensor]) -> Any:
    """Convert the floating tensors in nested arguments; `seen` holds converted tensors by the id of the original."""
    if isinstance(value, Tensor):
        if id(value) not in seen:
            seen[id(value)] = value.to(dtype) if value.is_floating_point() else value
        return seen[id(value)]
    if isinstance(value, (tuple, list)):
        return type(value)([cast_floats(entry, dtype, seen) for entry in value])
    if isinstance(value, dict):
        return {key: cast_floats(entry, dtype, seen) for key, entry in value.items()}
    return value


def hidden_argument(block: Block, args: Args, kwargs: Kwargs) -> Tensor:
    """The hidden state among the arguments of a block."""
    hidden: Tensor = kwargs[block.hidden] if isinstance(block.hidden, str) else args[block.hidden]
    return hidden


def inserted(arguments: Arguments, where: int | str, hidden: Tensor | None) -> Arguments:
    """The arguments with a hidden state at a position or keyword."""
    args, kwargs = arguments
    if isinstance(where, str):
        return args, {**kwargs, where: hidden}
    return (*args[:where], hidden, *args[where + 1 :]), kwargs


@contextmanager
def replaced_blocks(
    model: nn.Module, blocks: list[Block], behaviour: Callable[[int, Args, Kwargs], object]
) -> Iterator[None]:
    """Replace the forward of blocks by `behaviour(position, args, kwargs)`; restored on exit."""

    def forward_of(position: int) -> Callable[..., object]:
        return lambda *args, **kwargs: behaviour(position, args, kwargs)

    replacements = [(model.get_submodule(block.path), forward_of(position)) for position, block in enumerate(blocks)]
    with replaced_forwards(replacements):
        yield


# ---- places of weights and activations between the uses of their blocks
class Residency:
    """The place of the blocks' weights, and of the activations between them, during a sweep: all stay in memory.

    Stores of models that do not fit override the methods.

    Attributes:
        arithmetic: dtype of the computations in blocks; None: the dtype of the model.
        keeps_wide_inputs: True if there may be memory for inputs of layers that are wider than hidden states.
    """

    arithmetic: torch.dtype | None = None
    keeps_wide_inputs: bool = True

    def enter(self, stage: int) -> None:
        """Bring the weights of a stage into memory."""

    def leave(self, stage: int) -> None:
        """Release the weights of a stage, after the inputs of the next stage have been computed."""

    def release(self, stage: int) -> None:
        """Release the weights of a stage without keeping them; it will be entered again."""

    def release_dense(self, stage: int) -> None:
        """Release the dense weights of a stage: its dense outputs are known, and nothing else is needed of it."""

    def keep(self, index: int, hidden: Tensor) -> Tensor:
        """Store a hidden state until the next block needs it; it replaces the one at the same `index`."""
        return hidden

    def hold(self, tensor: Tensor) -> Tensor:
        """Store a tensor until the end of the run."""
        return tensor

    def fetch(self, stored: Tensor) -> Tensor:
        """A copy of a stored hidden state on the device of the computations."""
        return stored.clone()

    def park(self, name: str, moments: Tensor) -> Tensor:
        """Store a finished Gram, or moments of drift, of a wide layer; it replaces the one with the same name."""
        return moments


# ---- shortcuts through a block: modules that need not run again once the input of one layer is known
# After q, k and v are pruned, attention is computed once, up to the input of the output projection. The layers behind
# it need only this input: the attention module is replaced by one that returns the output projection of the input, and
# computes nothing else.
@dataclass(frozen=True)
class Shortcut:
    """A module whose output follows from the input of one layer.

    Args:
        path: of the module.
        layer: the layer.
        applied: True: the module's hidden state is the output of the layer; False: it is the layer's input.
        rest: entries that the module returns after the hidden state, as in `Block`.
    """

    path: str
    layer: Layer
    applied: bool
    rest: tuple[object, ...] | None

    @contextmanager
    def taken(self, model: nn.Module, hidden: Callable[[], Tensor]) -> Iterator[None]:
        """Replace the forward of the module by a function that returns its hidden state; restored on exit."""

        def forward(*_: object, **__: object) -> object:
            return with_hidden(hidden(), self.rest)

        with replaced_forwards([(model.get_submodule(self.path), forward)]):
            yield


@dataclass
class Shortcuts:
    """The shortcuts of one block, and the inputs of their layers as far as they are known.

    Args:
        shortcuts: of the block, by position.
        keep: (position of a shortcut, index of a batch, input) -> the tensor to store.
        fetch: a stored tensor -> a copy of it on the device of the model.
        most: numbers of the input of a batch up to which it is stored, if it is wider than the hidden state.

    Attributes:
        inputs: that are known, by layer and index of the batch.
        outputs: layers and batches whose output has taken the place of the input.
    """

    shortcuts: Sequence[Shortcut]
    keep: Callable[[int, int, Tensor], Tensor]
    fetch: Callable[[Tensor], Tensor] = Tensor.clone
    most: int = 0
    inputs: dict[tuple[Layer, int], Tensor] = field(default_factory=dict, init=False)
    outputs: set[tuple[Layer, int]] = field(default_factory=set, init=False)

    def note(self, layers: Sequence[Layer], index: int, value: Tensor, hidden: Tensor) -> None:
        """Store the common input of layers on a batch, if a shortcut needs it.

        An input is not stored if it takes more memory than the hidden state and than `most`, or has another dtype.
        """
        if value.numel() > max(hidden.numel(), self.most) or value.dtype != hidden.dtype:
            return
        for place, shortcut in enumerate(self.shortcuts):
            if shortcut.layer in layers:
                self.inputs[shortcut.layer, index] = self.keep(place, index, value)
                self.outputs.discard((shortcut.layer, index))

    @contextmanager
    def taken(self, model: nn.Module, index: int) -> Iterator[None]:
        """Take the shortcuts whose inputs are known on a batch; modules are restored on exit."""
        with ExitStack() as stack:
            for place, shortcut in enumerate(self.shortcuts):
                if (shortcut.layer, index) in self.inputs:
                    stack.enter_context(shortcut.taken(model, partial(self._hidden, model, place, index)))
            yield

    def _hidden(self, model: nn.Module, place: int, index: int) -> Tensor:
        """The hidden state of the module of a shortcut on a batch; a copy, since the model may change it in place."""
        shortcut = self.shortcuts[place]
        return self._output(model, place, index) if shortcut.applied else self.fetch(self.inputs[shortcut.layer, index])

    def output(self, model: nn.Module, layer: Layer, index: int) -> Tensor | None:
        """The output of a layer with final weights on a batch, if a shortcut will need it; None if none will."""
        for place, shortcut in enumerate(self.shortcuts):
            if shortcut.layer == layer and shortcut.applied and (layer, index) in self.inputs:
                return self._output(model, place, index)
        return None

    def _output(self, model: nn.Module, place: int, index: int) -> Tensor:
        """The output of the layer of a shortcut on a batch, a copy.

        Layers behind it are reached once it has its new weights. So its output is computed once, and stored in place of
        an input that is not smaller.
        """
        layer = self.shortcuts[place].layer
        key = layer, index
        hidden = self.fetch(self.inputs[key])
        if key in self.outputs:
            return hidden
        output: Tensor = model.get_submodule(layer.path)(hidden)
        if output.numel() <= hidden.numel() and output.dtype == hidden.dtype:
            self.inputs[key] = self.keep(place, index, output.clone())
            self.outputs.add(key)
        return output


def find_shortcuts(model: nn.Module, calls: Sequence[Call], block: str, layers: Sequence[Layer]) -> list[Shortcut]:
    """The shortcuts of a block, from the module calls of one run: at most one per layer, the outermost module.

    A module qualifies under two conditions. It holds a matrix besides the matrix of the layer, and every layer inside
    it has been called once before the end of the shortcut. So all these layers are pruned when the input of the
    shortcut's layer is known.

    Args:
        model: the model.
        calls: module calls of one run of the block.
        block: path of the block.
        layers: layers that are pruned in this block.
    """
    counts = Counter(call.path for call in calls)
    once = {call.path: call for call in calls if counts[call.path] == 1}
    modules = [call for call in once.values() if call.path.startswith(f"{block}.") and call.output is not None]
    shortcuts: dict[str, Shortcut] = {}
    for layer in layers:
        if layer.path not in once or not layer.is_called or layer.expert is not None:
            continue
        call_of_layer = once[layer.path]
        outer: Call | None = None
        for call in modules:
            applied = inside(layer.path, call.path) and call.path != layer.path and call.output == call_of_layer.output
            first = call_of_layer.arguments[:1]
            passes_on = call.ended < call_of_layer.began and any(value == call.output for _, value in first)
            if not (applied or passes_on) or not _holds_more(model, call.path, layer):
                continue
            within = [other for other in layers if inside(other.path, call.path)]
            if any(other.path not in once or once[other.path].began > call_of_layer.began for other in within):
                continue
            if outer is None or call.began < outer.began:
                outer = call
        if outer is not None:
            applied = inside(layer.path, outer.path) and outer.path != layer.path
            shortcuts.setdefault(outer.path, Shortcut(outer.path, layer, applied, outer.rest))
    return [*shortcuts.values()]


def _holds_more(model: nn.Module, path: str, layer: Layer) -> bool:
    """True if a module holds a matrix besides that of a layer; without one a shortcut saves nothing."""
    matrix = model.get_parameter(layer.key)
    return any(value.ndim > 1 and value is not matrix for value in model.get_submodule(path).parameters())


def exact_shortcuts(
    stream: Stream, stage: int, index: int, tracer: Tracer, groups: list[list[Layer]], output: object, most: int
) -> Sequence[Shortcut]:
    """The shortcuts of a traced block that give the same output on the batch at `index`; none outside the blocks.

    Args:
        stream: the model at the block.
        stage: of the block.
        index: of the batch.
        tracer: calls of the block on the batch.
        groups: layers with the same input, in execution order.
        output: of the block on the batch.
        most: see `Shortcuts`.
    """
    if not tracer.calls:
        return []
    place = {layer: number for number, group in enumerate(groups) for layer in group}
    candidates = find_shortcuts(stream.model, tracer.calls, stream.chain[stage].path, [*place])
    inputs = _known_inputs(stream, stage, index, candidates, most)
    exact: list[Shortcut] = []
    for candidate in sorted(candidates, key=lambda shortcut: place[shortcut.layer]):
        # It is in force before the inputs of later shortcuts are known: the block must be exact without these.
        before = [shortcut for shortcut in exact if place[shortcut.layer] < place[candidate.layer]]
        if candidate.layer in inputs and _is_exact(stream, stage, index, [*before, candidate], inputs, output):
            exact.append(candidate)
    return exact


def _known_inputs(
    stream: Stream, stage: int, index: int, candidates: Sequence[Shortcut], most: int
) -> dict[Layer, Tensor]:
    """The inputs of the layers of shortcuts on a batch, as far as a sweep stores them."""
    if not candidates:
        return {}
    shortcuts = Shortcuts(candidates, lambda place, index, value: value.clone(), most=most)
    with captured_inputs(
        stream.model,
        [candidate.layer for candidate in candidates],
        lambda layer, module, value: shortcuts.note([layer], index, value, stream.hidden[index]),
    ):
        stream.run(stage, index)
    return {layer: value for (layer, _), value in shortcuts.inputs.items()}


def _is_exact(
    stream: Stream,
    stage: int,
    index: int,
    candidates: Sequence[Shortcut],
    inputs: dict[Layer, Tensor],
    expected: object,
) -> bool:
    """True if a block with shortcuts gives the same hidden state on a batch, bit for bit."""
    shortcuts = Shortcuts(candidates, lambda place, index, value: value)
    shortcuts.inputs = {(candidate.layer, index): inputs[candidate.layer] for candidate in candidates}
    try:
        with shortcuts.taken(stream.model, index):
            output = stream.run(stage, index)
    except unless_out_of_memory(*batches.REFUSALS):  # the block reads an output that only the whole module gives
        return False
    hidden, other = hidden_of(output), hidden_of(expected)
    return hidden is not None and other is not None and hidden.device == other.device and torch.equal(hidden, other)
