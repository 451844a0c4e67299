"""Inputs of layers in one stage of a stream: which layers share an input, and their values on a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from iobs.errors import NonFiniteError, is_out_of_memory
from iobs.pruning.calibration.additions import captured_additions
from iobs.pruning.calibration.blocks import Tracer
from iobs.pruning.calibration.hooks import captured_inputs, version_of
from iobs.pruning.calibration.replay import StopForward, Stream
from iobs.pruning.calibration.shortcuts import Shortcut, Shortcuts, find_shortcuts, same_output
from iobs.pruning.network.layers import CONVOLUTIONS, Layer
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch


@dataclass(frozen=True)
class SharedInput:
    """Layers whose input is the same tensor, so that they have the same Gram.

    Args:
        layers: in the order of their calls.
        calls: number of calls of the first layer in a forward pass; if it is more than 1, other batches may differ.
        residuals: number of tensors that the output of the only layer is added to.
    """

    layers: list[Layer]
    calls: int
    residuals: int = 0


@dataclass(frozen=True)
class Order:
    """Order of the layers of one stage.

    Args:
        groups: layers in execution order, grouped by input.
        shortcuts: modules that need not run again once the input of one layer is known.
    """

    groups: list[SharedInput]
    shortcuts: Sequence[Shortcut]


def execution_order(stream: Stream, stage: int, layers: list[Layer], used: dict[Layer, bool], residuals: bool) -> Order:
    """The layers that a stage calls, and the shortcuts of a block; with `residuals` also who adds to one.

    The first run is on the batch of the largest samples, where a loop over positions is longest. Of several such
    batches, the batch with the fewest samples is first. Further batches follow while some layers have not been called,
    such as experts that receive few tokens. Layers whose weight is the argument of any torch function are marked in
    `used`.
    """
    if not layers:
        return Order([], [])
    order: dict[tuple[object, ...], SharedInput] = {}
    counts: dict[str, int] = {}
    alive: list[Tensor] = []  # keeps tensors that are compared by identity from being freed
    adding: Counter[str] = Counter()
    shortcuts: Sequence[Shortcut] | None = None  # found in the first run
    tracer = Tracer()

    def note(layer: Layer, module: nn.Module, value: Tensor) -> None:
        if layer.expert is not None:  # all experts of a parameter form one group, including experts without a token
            every = [other for other in layers if other.key == layer.key]
            order.setdefault((layer.key,), SharedInput(every, 1))
            counts.update({other.name: 1 for other in every})
            return
        counts[layer.name] = counts.get(layer.name, 0) + 1
        if counts[layer.name] == 1:
            alive.append(value)
            key = (id(value), version_of(value), *_geometry(module))
            order.setdefault(key, SharedInput([], 1)).layers.append(layer)

    for index in sorted(range(len(stream.data)), key=lambda index: _cost_of_a_run(stream.data[index])):
        uncounted = [layer for layer in layers if layer.name not in counts]
        if not uncounted:
            break
        with ExitStack() as stack:
            if residuals:
                stack.enter_context(
                    captured_additions(stream.model, uncounted, lambda layer, _: adding.update([layer.name]))
                )
            stack.enter_context(captured_inputs(stream.model, uncounted, note, used))
            if shortcuts is None and 0 <= stage < len(stream.chain):
                stack.enter_context(tracer.recording(stream.model, stream.chain[stage].path))
            output = stream.run(stage, index)
        if shortcuts is None:
            alike = [shared.layers for shared in order.values()]
            shortcuts = _exact_shortcuts(stream, stage, index, tracer, alike, output)
    groups = []
    for shared in order.values():
        once = [layer for layer in shared.layers if counts[layer.name] == 1]
        if once:
            groups.append(SharedInput(once, 1, adding[once[0].name] if len(once) == 1 else 0))
        # A module that is called several times has several inputs, and so a Gram of its own.
        groups.extend(SharedInput([layer], counts[layer.name]) for layer in shared.layers if counts[layer.name] > 1)
    return Order(groups, shortcuts or [])


def _exact_shortcuts(
    stream: Stream, stage: int, index: int, tracer: Tracer, groups: list[list[Layer]], output: object
) -> Sequence[Shortcut]:
    """The shortcuts of a traced block that give the same output on the batch at `index`; none outside the blocks.

    Args:
        stream: the model at the block.
        stage: of the block.
        index: of the batch.
        tracer: calls of the block on the batch.
        groups: layers with the same input, in execution order.
        output: of the block on the batch.
    """
    if not tracer.calls:
        return []
    place = {layer: number for number, group in enumerate(groups) for layer in group}
    candidates = find_shortcuts(stream.model, tracer.calls, stream.chain[stage].path, [*place])
    inputs = _known_inputs(stream, stage, index, candidates)
    exact: list[Shortcut] = []
    for candidate in sorted(candidates, key=lambda shortcut: place[shortcut.layer]):
        # It is in force before the inputs of later shortcuts are known: the block must be exact without these.
        before = [shortcut for shortcut in exact if place[shortcut.layer] < place[candidate.layer]]
        if candidate.layer in inputs and _is_exact(stream, stage, index, [*before, candidate], inputs, output):
            exact.append(candidate)
    return exact


def _known_inputs(stream: Stream, stage: int, index: int, found: Sequence[Shortcut]) -> dict[Layer, Tensor]:
    """The inputs of the layers of shortcuts on a batch, as far as a sweep stores them."""
    if not found:
        return {}
    shortcuts = Shortcuts(found, lambda place, index, value: value.clone())
    with captured_inputs(
        stream.model,
        [one.layer for one in found],
        lambda layer, module, value: shortcuts.note([layer], index, value, stream.hidden[index]),
    ):
        stream.run(stage, index)
    return {layer: value for (layer, _), value in shortcuts.known.items()}


def _is_exact(
    stream: Stream,
    stage: int,
    index: int,
    found: Sequence[Shortcut],
    known: dict[Layer, Tensor],
    output: object,
) -> bool:
    """Check that a block with shortcuts gives the same hidden state on a batch, bit for bit."""
    shortcuts = Shortcuts(found, lambda place, index, value: value)
    shortcuts.known = {(one.layer, index): known[one.layer] for one in found}
    try:
        with shortcuts.taken(stream.model, index):
            given = stream.run(stage, index)
    except batches.REFUSALS as error:  # the block reads an output that only the whole module gives
        if is_out_of_memory(error):
            raise
        return False
    return same_output(given, output)


def _geometry(module: nn.Module) -> tuple[object, ...]:
    """The settings of a convolution that determine the windows of its input; empty for other modules."""
    if isinstance(module, CONVOLUTIONS):
        return module.kernel_size, module.stride, module.padding, module.dilation, module.groups, module.padding_mode
    return ()


def _cost_of_a_run(batch: Batch) -> tuple[int, int]:
    """Sorts batches with the largest samples first, and then those with the fewest samples."""
    numbers = sum(tensor[:1].numel() for tensor in batches.tensors(batches.inputs(batch)) if tensor.ndim)
    return -numbers, batches.size(batch)


@dataclass(frozen=True)
class Captured:
    """Inputs of a layer in a stage on one batch, and its residual.

    Args:
        calls: the module and its input, one per call.
        residual: the sum of the tensors that the layer's output is added to, or None.
    """

    calls: list[tuple[nn.Module, Tensor]]
    residual: Tensor | None = None


def captured(stream: Stream, stage: int, index: int, shared: SharedInput) -> Captured:
    """The inputs of a layer in a stage on one batch, and its residual if it has one.

    The pass ends after the call of a layer that is called once, or at its last residual addition. Otherwise the whole
    stage runs, since the number of calls may depend on the batch.
    """
    values: list[tuple[nn.Module, Tensor]] = []
    residuals: list[Tensor] = []

    def keep(layer: Layer, module: nn.Module, value: Tensor) -> None:
        # Later operations may overwrite the tensor: x += f(x).
        values.append((module, value.detach().clone() if shared.calls > 1 or shared.residuals else value.detach()))
        if stream.shortcuts is not None and shared.calls == 1:
            stream.shortcuts.note(shared.layers, index, values[-1][1], stream.hidden[index])
        if shared.calls == 1 and not shared.residuals:
            raise StopForward

    def add(layer: Layer, term: Tensor) -> None:
        residuals.append(term)
        if len(residuals) == shared.residuals:
            raise StopForward

    layers = shared.layers[:1]
    with ExitStack() as stack:
        if shared.residuals:
            stack.enter_context(captured_additions(stream.model, layers, add))
        stack.enter_context(suppress(StopForward))
        stack.enter_context(captured_inputs(stream.model, layers, keep))
        stream.run(stage, index)
    complete = residuals and len(residuals) == shared.residuals
    return Captured(values, sum(residuals[1:], residuals[0]) if complete else None)


def drift_of(residuals: list[Tensor | None]) -> Tensor | None:
    """The drift R - R' of the residual, from the pruned model's and the reference's; None if one of them has none."""
    pruned, dense = residuals
    return None if pruned is None or dense is None or pruned.shape != dense.shape else dense - pruned


def require_finite(values: Sequence[Tensor], layer: Layer, number: int) -> None:
    """Check the inputs of a layer on the caller's batch with a number.

    Raises:
        NonFiniteError: an input holds NaN or infinity.
    """
    if not all(bool(torch.isfinite(value).all()) for value in values):
        raise NonFiniteError(
            f"The input of layer {layer.name!r} holds NaN or infinity in calibration batch {number}; "
            "look at that batch, or run the model in a wider dtype."
        )
