"""Walk through a network in execution order, every layer seeing its inputs through the layers already pruned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from iobs.errors import NonFiniteError
from iobs.prune import gram
from iobs.prune.batches import Part
from iobs.prune.gram import Gram, Statistics
from iobs.prune.layers import Layer
from iobs.prune.stream import StopForward, Stream, running_along_is_exact
from iobs.prune.trace import Block, find_chain, inside

Visit = Callable[[list[Layer], Statistics], None]


@dataclass(frozen=True)
class SharedInput:
    """Layers that are fed the same tensor in the same way, so that one Gram serves them all."""

    layers: list[Layer]
    calls: int  # how often a forward pass calls the first of them


@dataclass
class Walk:
    """A network over calibration batches, laid out in stages.

    Args:
        model: the network that is being pruned, in eval mode.
        calibration: batches that layers are solved for.
        heldout: batches that errors are reported on besides.
        layers: what will be pruned.
        reference: the dense network, if targets or inputs are to come from it.
        dense_inputs: take the layers' inputs from the reference.
        seed: draws the positions of convolutions that enter the Grams.
        positions: how many of them for each sample.
    """

    model: nn.Module
    calibration: Part
    heldout: Part
    layers: tuple[Layer, ...]
    reference: nn.Module | None = None
    dense_inputs: bool = False
    seed: int = 0
    positions: int = gram.POSITIONS
    chain: list[Block] = field(init=False)

    def __post_init__(self) -> None:
        chain = find_chain(self.model, self.calibration.batches[0], self.layers)
        exact = len(chain) > 1 and running_along_is_exact(self.model, chain, self.calibration.batches[0])
        self.chain = chain if exact else []

    @torch.no_grad()
    def sweep(self, visit: Visit) -> None:
        """Call `visit` with every group of layers that share their input, in execution order, and its statistics.

        What `visit` writes into the model is seen by all that follows.

        Raises:
            NonFiniteError: a layer's input holds NaN or infinity; names the layer and the batch.
        """
        data = self.calibration.batches + self.heldout.batches
        networks = [self.model] if self.reference is None else [self.model, self.reference]
        streams = [Stream(network, data, self.chain) for network in networks]
        left = list(self.layers)
        for stage in streams[0].stages:
            groups = _execution_order(streams[0], stage, self._layers_of(stage, left))
            for shared in groups:
                left = [layer for layer in left if layer not in shared.layers]
                visit(shared.layers, self._statistics(streams, stage, shared))
            for stream in streams:
                stream.advance(stage)

    def _layers_of(self, stage: int, left: list[Layer]) -> list[Layer]:
        if 0 <= stage < len(self.chain):
            return [layer for layer in left if inside(layer, self.chain[stage].path)]
        return [layer for layer in left if not any(inside(layer, block.path) for block in self.chain)]

    def _statistics(self, streams: list[Stream], stage: int, shared: SharedInput) -> Statistics:
        layer = shared.layers[0]
        module = streams[0].model.get_submodule(layer.path)
        device = layer.tensor(streams[0].model).device
        used = streams[-1:] if self.dense_inputs else streams
        grams = [Gram.empty(layer, device, len(used) > 1) for _ in range(2)]
        generator = torch.Generator().manual_seed(self.seed)
        for index in range(len(streams[0].data)):
            held_out = index >= len(self.calibration.batches)
            number = (self.calibration.numbers + self.heldout.numbers)[index]
            values = [_captured(stream, stage, index, shared) for stream in used]
            for call in zip(*values, strict=True):
                _require_finite(call, layer, number)
                positions = gram.draw_positions(module, call[0], generator, self.positions)
                grams[held_out].add(*[gram.input_rows(layer, module, value, positions) for value in call])
        return Statistics(grams[0], grams[1] if self.heldout.batches else None)


def _execution_order(stream: Stream, stage: int, layers: list[Layer]) -> list[SharedInput]:
    """The layers that a stage really calls, in order, those with the same input together."""
    if not layers:
        return []
    order: dict[tuple[Any, ...], SharedInput] = {}
    counts: dict[str, int] = {}
    alive: list[Tensor] = []  # tensors compared by identity must not be freed meanwhile

    def note(layer: Layer, module: nn.Module, value: Tensor) -> None:
        counts[layer.name] = counts.get(layer.name, 0) + 1
        if counts[layer.name] == 1:
            alive.append(value)
            key = (id(value), value._version, *_geometry(module))
            order.setdefault(key, SharedInput([], 1)).layers.append(layer)

    with _input_hooks(stream.model, layers, note):
        stream.run(stage, 0)
    groups = []
    for shared in order.values():
        once = [layer for layer in shared.layers if counts[layer.name] == 1]
        if once:
            groups.append(SharedInput(once, 1))
        # A module that is called several times sees several inputs: its Gram is its own.
        groups.extend(SharedInput([layer], counts[layer.name]) for layer in shared.layers if counts[layer.name] > 1)
    return groups


def _geometry(module: nn.Module) -> tuple[Any, ...]:
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return module.kernel_size, module.stride, module.padding, module.dilation, module.groups, module.padding_mode
    return ()


def _captured(stream: Stream, stage: int, index: int, shared: SharedInput) -> list[Tensor]:
    """What a stage feeds to a layer on one batch, one tensor a call; the forward pass ends at the last call."""
    values: list[Tensor] = []

    def keep(layer: Layer, module: nn.Module, value: Tensor) -> None:
        values.append(value.detach())
        if len(values) == shared.calls:
            raise StopForward

    with _input_hooks(stream.model, shared.layers[:1], keep), suppress(StopForward):
        stream.run(stage, index)
    return values


@contextmanager
def _input_hooks(
    model: nn.Module, layers: list[Layer], action: Callable[[Layer, nn.Module, Tensor], None]
) -> Iterator[None]:
    def hook(layer: Layer) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            value = args[0] if args else next(iter(kwargs.values()))
            action(layer, module, value)

        return before

    modules = [model.get_submodule(layer.path) for layer in layers]
    handles = [
        module.register_forward_pre_hook(hook(layer), with_kwargs=True)
        for layer, module in zip(layers, modules, strict=True)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _require_finite(values: tuple[Tensor, ...], layer: Layer, number: int) -> None:
    if not all(bool(torch.isfinite(value).all()) for value in values):
        raise NonFiniteError(
            f"The input of layer {layer.name!r} holds NaN or infinity in calibration batch {number}; "
            "look at that batch, or run the model in a wider dtype."
        )
