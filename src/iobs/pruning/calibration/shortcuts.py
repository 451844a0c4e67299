"""Shortcuts through a block: modules that need not run again once the input of one layer is known.

After q, k and v are pruned, attention is computed once, up to the input of the output projection. The layers behind it
need only this input: the attention module is replaced by one that returns the output projection of the input, and
computes nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from iobs.errors import unless_out_of_memory
from iobs.pruning.calibration.blocks import Call, Tracer, hidden_of, inside, with_hidden
from iobs.pruning.calibration.hooks import captured_inputs
from iobs.pruning.network.layers import Layer
from iobs.pruning.network.modes import replaced_forwards
from iobs.pruning.samples import batches

if TYPE_CHECKING:
    from iobs.pruning.calibration.replay import Stream


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
        """The hidden state of the module of a shortcut on a batch; a copy, since the model may change it in place.

        Layers behind the shortcut's are reached once it has its new weights. So its output is computed once, and
        stored in place of an input of the same shape.
        """
        shortcut = self.shortcuts[place]
        key = shortcut.layer, index
        hidden = self.fetch(self.inputs[key])
        if not shortcut.applied or key in self.outputs:
            return hidden
        output: Tensor = model.get_submodule(shortcut.layer.path)(hidden)
        if (output.shape, output.dtype) == (hidden.shape, hidden.dtype):
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
