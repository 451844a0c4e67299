"""Sweep through a model in execution order; the inputs of every layer come through the layers already pruned."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor, nn

from iobs.errors import NonFiniteError
from iobs.pruning.calibration import gram
from iobs.pruning.calibration.blocks import Block
from iobs.pruning.calibration.gram import Gram, Statistics
from iobs.pruning.calibration.hooks import captured_inputs, version_of
from iobs.pruning.calibration.replay import BEFORE, StopForward, Stream
from iobs.pruning.network.layers import CONVOLUTIONS, Layer
from iobs.pruning.runtime.ranks import ALONE, Ranks
from iobs.pruning.samples import batches, outputs
from iobs.pruning.samples.batches import Batch
from iobs.pruning.samples.subsets import Samples

EXPERT_MEMORY = 2**30  # bytes of the Grams of experts that are computed in one pass over the data


class Residency(Protocol):
    """The place of the blocks' weights, and of the activations between them, during a sweep.

    Attributes:
        arithmetic: dtype of the computations in blocks; None: the dtype of the model.
    """

    arithmetic: torch.dtype | None

    def enter(self, stage: int) -> None:
        """Bring the weights of a stage into memory."""
        ...

    def leave(self, stage: int) -> None:
        """Release the weights of a stage, after the inputs of the next stage have been computed."""
        ...

    def keep(self, index: int, hidden: Tensor) -> Tensor:
        """Store the hidden state of the batch at `index` until the next block needs it."""
        ...


class InMemory:
    """Residency of a model whose weights and activations stay in memory."""

    arithmetic: torch.dtype | None = None

    def enter(self, stage: int) -> None:
        """Do nothing."""

    def leave(self, stage: int) -> None:
        """Do nothing."""

    def keep(self, index: int, hidden: Tensor) -> Tensor:
        """Return the hidden state itself."""
        return hidden


@dataclass(frozen=True)
class Group:
    """Layers with the same input, such as q, k and v.

    Attributes:
        layers: in the order in which the model calls them.
        statistics: computes the Gram matrices of their input. Not called if a checkpoint holds the layers' weights.
    """

    layers: list[Layer]
    statistics: Callable[[], Statistics]


@dataclass(frozen=True)
class SharedInput:
    """Layers whose input is the same tensor, so that they have the same Gram.

    Args:
        layers: in the order of their calls.
        calls: number of calls of the first layer in a forward pass; if it is more than 1, other batches may differ.
    """

    layers: list[Layer]
    calls: int


@dataclass
class Sweep:
    """Passes of the calibration data through a model, in execution order, for the Gram matrices of all layers.

    Args:
        model: the model that is being pruned, in eval mode.
        calibration: samples that layers are solved for.
        heldout: samples that errors are reported on, and that damp the correction of drift.
        layers: the layers to prune.
        chain: blocks along which the model can be run, from `exact_chain`; empty: the model is run whole.
        reference: the model whose outputs are the targets, or whose inputs are used; None: the layers match their own
            outputs.
        dense_inputs: take the layers' inputs from the reference.
        seed: of the positions of convolutions that enter the Grams.
        positions: number of positions per sample.
        ranks: processes that share the batches; Grams are summed over them.
        residency: holds weights and activations.

    Attributes:
        without_input: layers that have received no input so far; True if the model uses their weight in some other way.
    """

    model: nn.Module
    calibration: Samples
    heldout: Samples
    layers: tuple[Layer, ...]
    chain: list[Block]
    reference: nn.Module | None = None
    dense_inputs: bool = False
    seed: int = 0
    positions: int = gram.POSITIONS
    ranks: Ranks = ALONE
    residency: Residency = field(default_factory=InMemory)
    without_input: dict[Layer, bool] = field(default_factory=dict, init=False)

    @property
    def _own(self) -> tuple[Samples, Samples]:
        """The batches of this rank."""
        return self.ranks.share(self.calibration), self.ranks.share(self.heldout)

    def _numbered(self) -> list[tuple[int, bool, int]]:
        """The batches of a stream: (position, held out or not, number of the caller's batch)."""
        fit, heldout = self._own
        flags = [False] * len(fit.batches) + [True] * len(heldout.batches)
        return [*zip(itertools.count(), flags, fit.numbers + heldout.numbers, strict=False)]

    def groups(self) -> Iterator[Group]:
        """Groups of layers in execution order. Weights written to one group affect the inputs of all later groups.

        Afterwards `without_input` holds the layers that received no input on this data.

        Raises:
            NonFiniteError: the input of a layer holds NaN or infinity; names the layer and the batch.
        """
        data = self._own[0].batches + self._own[1].batches
        models = [self.model] if self.reference is None else [self.model, self.reference]
        streams = [Stream(one, data, self.chain, keep=self._kept) for one in models]
        self.without_input = dict.fromkeys(self.layers, False)
        for stage in streams[0].stages:
            self.residency.enter(stage)
            yield from self._groups_of(streams, stage)
            if self.without_input or stage < len(self.chain) - 1:
                with torch.no_grad():
                    for stream in streams:
                        stream.advance(stage)
                        if stage == BEFORE and self.residency.arithmetic is not None:
                            stream.cast_arguments(self.residency.arithmetic)
            self.residency.leave(stage)

    def _kept(self, index: int, hidden: Tensor) -> Tensor:
        dtype = self.residency.arithmetic
        return self.residency.keep(index, hidden if dtype is None else hidden.to(dtype))

    def _groups_of(self, streams: list[Stream], stage: int) -> Iterator[Group]:
        """The groups of one stage."""
        wanted = streams[0].layers_of(stage, [*self.without_input])
        with torch.no_grad():
            order = self._agreed(_execution_order(streams[0], stage, wanted, self.without_input), wanted)
        for shared in order:
            found = set(shared.layers)
            self.without_input = {layer: used for layer, used in self.without_input.items() if layer not in found}
            if shared.layers[0].expert is None:
                yield Group(shared.layers, partial(self._statistics, streams, stage, shared))
            else:
                yield from self._of_experts(streams, stage, shared.layers)

    def _agreed(self, order: list[SharedInput], layers: list[Layer]) -> list[SharedInput]:
        """The same order on all ranks: that of the first rank, then layers that only later ranks have called."""
        if self.ranks.size == 1 or not layers:
            return order
        device = layers[0].tensor(self.model).device
        seen = torch.zeros(self.ranks.size, len(layers), 2, device=device)  # (number of the group from 1 on, calls)
        for number, shared in enumerate(order, 1):
            for layer in shared.layers:
                seen[self.ranks.rank, layers.index(layer)] = torch.tensor([number, shared.calls], device=device)
        self.ranks.sum(seen)
        agreed: dict[tuple[int, int], SharedInput] = {}
        left = set(layers)
        for rank, table in enumerate(seen.int().tolist()):
            found = [(number, calls, layer) for (number, calls), layer in zip(table, layers, strict=True) if number]
            for number, calls, layer in sorted(found, key=lambda entry: entry[0]):
                if layer in left:
                    agreed.setdefault((rank, number), SharedInput([], calls)).layers.append(layer)
                    left.remove(layer)
        return list(agreed.values())

    @torch.no_grad()
    def _statistics(self, streams: list[Stream], stage: int, shared: SharedInput) -> Statistics:
        """The Grams of an input on the calibration and held-out batches of all ranks."""
        layer = shared.layers[0]
        device = layer.tensor(streams[0].model).device
        used = streams[-1:] if self.dense_inputs else streams
        grams = [Gram.empty(layer, device, len(used) > 1) for _ in range(2 if self.heldout.batches else 1)]
        generator = torch.Generator().manual_seed(self.seed)
        rerouted = torch.zeros(1, device=device)
        for index, held_out, number in self._numbered():
            attended = outputs.attended(streams[0].model, streams[0].data[index])
            captured = [_captured(stream, stage, index, shared) for stream in used]
            if len({tuple(value.shape for _, value in calls) for calls in captured}) > 1:
                rerouted += 1
                captured = captured[:1]
            for call in zip(*captured, strict=True):
                module, values = call[0][0], [value for _, value in call]
                positions = gram.draw_positions(module, values[0], generator, self.positions)
                if positions is None:  # not a convolution
                    values = [outputs.unpadded(value, attended) for value in values]
                _require_finite(values, layer, number)
                rows = [gram.input_rows(layer, module, value, positions) for value in values]
                grams[held_out].add(*rows)
        self.ranks.sum(rerouted)
        if rerouted.item():
            # The reference routes other tokens to this expert, which then matches its own weights on its own inputs.
            for one in grams:
                one.unpair()
        self._complete(grams)
        return gram.of_called(grams[0], grams[1] if self.heldout.batches else None)

    def _complete(self, grams: Sequence[Gram]) -> None:
        """Sum Grams over the ranks and turn the sums into means."""
        for one in grams:
            one.sum_over(self.ranks)
            one.finish()

    def _of_experts(self, streams: list[Stream], stage: int, experts: list[Layer]) -> Iterator[Group]:
        """One group per expert, with the statistics of the tokens that were routed to it.

        One pass computes the Grams of as many experts as fit into `EXPERT_MEMORY`, when the first Gram is needed.
        Experts match their own outputs even with a reference, since the dense model may route other tokens to them.
        """
        stream = streams[-1] if self.dense_inputs else streams[0]
        size = 2 * 8 * experts[0].shape[1] ** 2
        for some in batched(experts, max(1, EXPERT_MEMORY // size)):
            routed = cache(partial(self._routed, stream, stage, tuple(some)))
            for number, expert in enumerate(some):
                yield Group([expert], partial(_entry, routed, number))

    @torch.no_grad()
    def _routed(self, stream: Stream, stage: int, experts: Sequence[Layer]) -> list[Statistics]:
        """The statistics of some experts, from one pass over the data."""
        device = experts[0].tensor(stream.model).device
        grams = {layer: [Gram.empty(layer, device, False) for _ in range(2)] for layer in experts}
        for index, held_out, number in self._numbered():

            def note(
                layer: Layer, module: nn.Module, value: Tensor, held_out: bool = held_out, number: int = number
            ) -> None:
                _require_finite([value], layer, number)
                grams[layer][held_out].add(value.reshape(1, -1, layer.shape[1]))

            with captured_inputs(stream.model, experts, note):
                stream.run(stage, index)
        for pair in grams.values():
            self._complete(pair)
        return [gram.of_routed(*grams[layer]) for layer in experts]


def _entry(found: Callable[[], list[Statistics]], number: int) -> Statistics:
    return found()[number]


def _execution_order(stream: Stream, stage: int, layers: list[Layer], used: dict[Layer, bool]) -> list[SharedInput]:
    """The layers that a stage calls, in execution order, grouped by input.

    The first run is on the batch of the largest samples, where a loop over positions is longest. Further batches
    follow while some layers have not been called, such as experts that receive few tokens. Layers whose weight is the
    argument of any torch function are marked in `used`.
    """
    if not layers:
        return []
    order: dict[tuple[object, ...], SharedInput] = {}
    counts: dict[str, int] = {}
    alive: list[Tensor] = []  # keeps tensors that are compared by identity from being freed

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
        with captured_inputs(stream.model, uncounted, note, used):
            stream.run(stage, index)
    groups = []
    for shared in order.values():
        once = [layer for layer in shared.layers if counts[layer.name] == 1]
        if once:
            groups.append(SharedInput(once, 1))
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


def _captured(stream: Stream, stage: int, index: int, shared: SharedInput) -> list[tuple[nn.Module, Tensor]]:
    """The inputs of a layer in a stage on one batch, one per call, each with the module that is called.

    The pass ends after the call of a layer that is called once. Otherwise the whole stage runs, since the number of
    calls may depend on the batch.
    """
    values: list[tuple[nn.Module, Tensor]] = []

    def keep(layer: Layer, module: nn.Module, value: Tensor) -> None:
        # Later operations may overwrite the tensor: x += f(x).
        values.append((module, value.detach().clone() if shared.calls > 1 else value.detach()))
        if shared.calls == 1:
            raise StopForward

    with captured_inputs(stream.model, shared.layers[:1], keep), suppress(StopForward):
        stream.run(stage, index)
    return values


def batched(values: Sequence[Layer], size: int) -> Iterator[Sequence[Layer]]:
    """Consecutive slices of at most `size` values."""
    for start in range(0, len(values), size):
        yield values[start : start + size]


def _require_finite(values: list[Tensor], layer: Layer, number: int) -> None:
    if not all(bool(torch.isfinite(value).all()) for value in values):
        raise NonFiniteError(
            f"The input of layer {layer.name!r} holds NaN or infinity in calibration batch {number}; "
            "look at that batch, or run the model in a wider dtype."
        )
