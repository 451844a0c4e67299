"""Inputs of layers in one stage of a stream: which layers share an input, in which order, and their values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from iobs.errors import NonFiniteError
from iobs.pruning.calibration.additions import captured_additions
from iobs.pruning.calibration.blocks import Tracer, version_of
from iobs.pruning.calibration.hooks import captured_inputs
from iobs.pruning.calibration.replay import Shortcut, StopForward, Stream, exact_shortcuts
from iobs.pruning.network.layers import CONVOLUTIONS, Layer
from iobs.pruning.network.modes import replaced_forwards
from iobs.pruning.runtime.ranks import Ranks
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


def execution_order(
    stream: Stream, stage: int, layers: list[Layer], used: dict[Layer, bool], *, residuals: bool, most: int
) -> tuple[list[SharedInput], Sequence[Shortcut]]:
    """The layers that a stage calls, grouped by input, and the shortcuts of a block.

    The first run is on the batch of the largest samples, where a loop over positions is longest. Of several such
    batches, the batch with the fewest samples is first. Further batches follow while some layers have not been called,
    such as experts that receive few tokens.

    Args:
        stream: the model at the stage.
        stage: of the layers.
        layers: candidates.
        used: layers whose weight is the argument of any torch function are set to True.
        residuals: also count the tensors that the output of each layer is added to.
        most: numbers of an input wider than the hidden state, up to which shortcuts store it.
    """
    if not layers:
        return [], []
    order: dict[tuple[object, ...], SharedInput] = {}
    counts: dict[str, int] = {}
    alive: list[Tensor] = []  # keeps tensors that are compared by identity from being freed
    additions: Counter[str] = Counter()
    shortcuts: Sequence[Shortcut] | None = None  # of the first run
    tracer = Tracer()

    def note(layer: Layer, module: nn.Module, value: Tensor) -> None:
        if layer.expert is not None:  # all experts of a parameter form one group, including experts without a token
            experts = [other for other in layers if other.key == layer.key]
            order.setdefault((layer.key,), SharedInput(experts, 1))
            counts.update({expert.name: 1 for expert in experts})
            return
        counts[layer.name] = counts.get(layer.name, 0) + 1
        if counts[layer.name] == 1:
            alive.append(value)
            key = (id(value), version_of(value), *_geometry(module))
            order.setdefault(key, SharedInput([], 1)).layers.append(layer)

    for index in sorted(range(len(stream.data)), key=lambda index: _cost_of_a_run(stream.data[index])):
        uncalled = [layer for layer in layers if layer.name not in counts]
        if not uncalled:
            break
        with ExitStack() as stack:
            if residuals:
                stack.enter_context(
                    captured_additions(stream.model, uncalled, lambda layer, _: additions.update([layer.name]))
                )
            stack.enter_context(captured_inputs(stream.model, uncalled, note, used))
            if shortcuts is None and 0 <= stage < len(stream.chain):
                stack.enter_context(tracer.recording(stream.model, stream.chain[stage].path))
            output = stream.run(stage, index)
        if shortcuts is None:
            groups = [shared.layers for shared in order.values()]
            shortcuts = exact_shortcuts(stream, stage, index, tracer, groups, output, most)
    inputs = []
    for shared in order.values():
        once = [layer for layer in shared.layers if counts[layer.name] == 1]
        if once:
            inputs.append(SharedInput(once, 1, additions[once[0].name] if len(once) == 1 else 0))
        # A module that is called several times has several inputs, and so a Gram of its own.
        inputs.extend(SharedInput([layer], counts[layer.name]) for layer in shared.layers if counts[layer.name] > 1)
    return inputs, shortcuts or []


def agreed_order(
    order: list[SharedInput], layers: list[Layer], device: torch.device, ranks: Ranks
) -> list[SharedInput]:
    """The same order on all ranks: that of the first rank, then layers that only later ranks have called.

    Args:
        order: of this rank.
        layers: candidates, the same on all ranks.
        device: of the exchanged tensor.
        ranks: processes that share the batches.
    """
    # By rank and layer: number of the group from 1 on, number of calls, number of residuals.
    table = torch.zeros(ranks.size, len(layers), 3, device=device)
    for number, shared in enumerate(order, 1):
        for layer in shared.layers:
            facts = [number, shared.calls, shared.residuals]
            table[ranks.rank, layers.index(layer)] = torch.tensor(facts, device=device)
    ranks.sum(table)
    agreed: dict[tuple[int, int], SharedInput] = {}
    missing = set(layers)
    for rank, rows in enumerate(table.int().tolist()):
        called = [(*facts, layer) for facts, layer in zip(rows, layers, strict=True) if facts[0]]
        for number, calls, residuals, layer in sorted(called, key=lambda entry: entry[0]):
            if layer in missing:
                agreed.setdefault((rank, number), SharedInput([], calls, residuals)).layers.append(layer)
                missing.remove(layer)
    return list(agreed.values())


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
            stack.enter_context(_without_product(stream.model, layers[0]))
            stack.enter_context(captured_additions(stream.model, layers, add))
        stack.enter_context(suppress(StopForward))
        stack.enter_context(captured_inputs(stream.model, layers, keep))
        stream.run(stage, index)
    complete = residuals and len(residuals) == shared.residuals
    return Captured(values, sum(residuals[1:], residuals[0]) if complete else None)


@contextmanager
def _without_product(model: nn.Module, layer: Layer) -> Iterator[None]:
    """Context in which a linear layer returns zeros: its residual does not depend on its output."""
    module = model.get_submodule(layer.path)
    if type(module) is not nn.Linear:
        yield
        return

    def zeros(input: Tensor) -> Tensor:  # the name by which a caller may pass it
        return input.new_zeros(*input.shape[:-1], module.out_features)

    with replaced_forwards([(module, zeros)]):
        yield


def drift_of(residuals: list[Tensor | None]) -> Tensor | None:
    """The drift R - R' of the residual, from the pruned model's and the reference's; None if one of them has none."""
    pruned, dense = residuals
    return None if pruned is None or dense is None or pruned.shape != dense.shape else dense - pruned


def require_finite(values: Sequence[Tensor], layer: Layer, number: int) -> None:
    """Raise unless the inputs of a layer on the caller's batch with a number are finite.

    Raises:
        NonFiniteError: an input holds NaN or infinity.
    """
    # A sum is several times as fast as a test of each entry; it may overflow.
    if not all(bool(value.sum().isfinite()) or bool(value.isfinite().all()) for value in values):
        raise NonFiniteError(
            f"The input of layer {layer.name!r} holds NaN or infinity in calibration batch {number}; "
            "look at that batch, or run the model in a wider dtype."
        )
