"""Inputs of layers in one stage of a stream: which layers share an input, and their values on a batch."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from torch import Tensor, nn

from iobs.pruning.calibration.additions import captured_additions
from iobs.pruning.calibration.hooks import captured_inputs, version_of
from iobs.pruning.calibration.replay import StopForward, Stream
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


def execution_order(
    stream: Stream, stage: int, layers: list[Layer], used: dict[Layer, bool], residuals: bool
) -> list[SharedInput]:
    """The layers that a stage calls, in execution order, grouped by input; with `residuals` also who adds to one.

    The first run is on the batch of the largest samples, where a loop over positions is longest. Further batches
    follow while some layers have not been called, such as experts that receive few tokens. Layers whose weight is the
    argument of any torch function are marked in `used`.
    """
    if not layers:
        return []
    order: dict[tuple[object, ...], SharedInput] = {}
    counts: dict[str, int] = {}
    alive: list[Tensor] = []  # keeps tensors that are compared by identity from being freed
    adding: Counter[str] = Counter()

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

    for index in sorted(range(len(stream.data)), key=lambda index: -_numbers_a_sample(stream.data[index])):
        uncounted = [layer for layer in layers if layer.name not in counts]
        if not uncounted:
            break
        with ExitStack() as stack:
            if residuals:
                stack.enter_context(
                    captured_additions(stream.model, uncounted, lambda layer, _: adding.update([layer.name]))
                )
            stack.enter_context(captured_inputs(stream.model, uncounted, note, used))
            stream.run(stage, index)
    groups = []
    for shared in order.values():
        once = [layer for layer in shared.layers if counts[layer.name] == 1]
        if once:
            groups.append(SharedInput(once, 1, adding[once[0].name] if len(once) == 1 else 0))
        # A module that is called several times has several inputs, and so a Gram of its own.
        groups.extend(SharedInput([layer], counts[layer.name]) for layer in shared.layers if counts[layer.name] > 1)
    return groups


def _geometry(module: nn.Module) -> tuple[object, ...]:
    """The settings of a convolution that determine the windows of its input; empty for other modules."""
    if isinstance(module, CONVOLUTIONS):
        return module.kernel_size, module.stride, module.padding, module.dilation, module.groups, module.padding_mode
    return ()


def _numbers_a_sample(batch: Batch) -> int:
    return sum(tensor[:1].numel() for tensor in batches.tensors(batches.inputs(batch)) if tensor.ndim)


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
