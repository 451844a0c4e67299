"""Walk through a network in execution order, every layer seeing its inputs through the layers already pruned."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from iobs.errors import NonFiniteError
from iobs.prune import batches, gram
from iobs.prune.batches import Batch
from iobs.prune.capture import captured_inputs
from iobs.prune.distributed import ALONE, Ranks
from iobs.prune.gram import Gram, Statistics
from iobs.prune.layers import CONVOLUTIONS, Layer
from iobs.prune.parts import Part
from iobs.prune.stream import StopForward, Stream
from iobs.prune.trace import Block

EXPERT_MEMORY = 2**30  # bytes of Grams of experts that are gathered in one pass over the data

Visit = Callable[[list[Layer], Statistics], None]
Replay = Callable[[list[Layer]], bool]


@dataclass(frozen=True)
class SharedInput:
    """Layers that are fed the same tensor in the same way, so that one Gram serves them all."""

    layers: list[Layer]
    calls: int  # how often a forward pass calls the first of them; more than once may be more on other batches


@dataclass
class Walk:
    """A network over calibration batches, laid out in stages.

    Args:
        model: the network that is being pruned, in eval mode.
        calibration: batches that layers are solved for.
        heldout: batches that errors are reported on besides, and that damp the correction of drift.
        layers: what will be pruned.
        chain: blocks along which the network can be run, from `exact_chain`; without any it is run whole.
        reference: the dense network, if targets or inputs are to come from it.
        dense_inputs: take the layers' inputs from the reference.
        seed: draws the positions of convolutions that enter the Grams.
        positions: how many of them for each sample.
        ranks: processes that share the batches; Grams are summed over them.
    """

    model: nn.Module
    calibration: Part
    heldout: Part
    layers: tuple[Layer, ...]
    chain: list[Block]
    reference: nn.Module | None = None
    dense_inputs: bool = False
    seed: int = 0
    positions: int = gram.POSITIONS
    ranks: Ranks = ALONE

    @property
    def _own(self) -> tuple[Part, Part]:
        """The batches of this rank."""
        return self.ranks.share(self.calibration), self.ranks.share(self.heldout)

    def _numbered(self) -> list[tuple[int, bool, int]]:
        """Of every batch of a stream: its place, whether it is held out, and the number of the caller's batch."""
        fit, heldout = self._own
        flags = [False] * len(fit.batches) + [True] * len(heldout.batches)
        return [*zip(itertools.count(), flags, fit.numbers + heldout.numbers, strict=False)]

    @torch.no_grad()
    def sweep(self, visit: Visit, replay: Replay | None = None) -> list[Layer]:
        """Call `visit` with every group of layers that share their input, in execution order, and its statistics.

        What `visit` writes into the model is seen by all that follows. Where `replay` knows a group's weights already
        it writes them and returns True, and no statistics are computed.

        Returns:
            Layers that the network never fed anything on this data; they were not visited.

        Raises:
            NonFiniteError: a layer's input holds NaN or infinity; names the layer and the batch.
        """
        data = self._own[0].batches + self._own[1].batches
        networks = [self.model] if self.reference is None else [self.model, self.reference]
        streams = [Stream(network, data, self.chain) for network in networks]
        left = list(self.layers)
        for stage in streams[0].stages:
            left = self.visit_stage(streams, stage, left, visit, replay)
            for stream in streams:
                stream.advance(stage)
        return left

    def visit_stage(
        self, streams: list[Stream], stage: int, left: list[Layer], visit: Visit, replay: Replay | None
    ) -> list[Layer]:
        """Visit the layers of one stage; returns those that are left."""
        wanted = streams[0].layers_of(stage, left)
        for shared in self._agreed(_execution_order(streams[0], stage, wanted), wanted):
            visited = set(shared.layers)
            left = [layer for layer in left if layer not in visited]
            if replay is not None and replay(shared.layers):
                continue
            if shared.layers[0].expert is not None:
                for expert, statistics in self._of_experts(streams, stage, shared.layers):
                    visit([expert], statistics)
            else:
                visit(shared.layers, self._statistics(streams, stage, shared))
        return left

    def _agreed(self, order: list[SharedInput], layers: list[Layer]) -> list[SharedInput]:
        """The same order on all ranks: the first rank's, then what others alone have seen on their own batches."""
        if self.ranks.size == 1 or not layers:
            return order
        device = layers[0].tensor(self.model).device
        seen = torch.zeros(self.ranks.size, len(layers), 2, device=device)  # group from 1 on, calls
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

    def _statistics(self, streams: list[Stream], stage: int, shared: SharedInput) -> Statistics:
        layer = shared.layers[0]
        device = layer.tensor(streams[0].model).device
        used = streams[-1:] if self.dense_inputs else streams
        grams = [Gram.empty(layer, device, len(used) > 1) for _ in range(2 if self.heldout.batches else 1)]
        generator = torch.Generator().manual_seed(self.seed)
        rerouted = torch.zeros(1, device=device)
        for index, held_out, number in self._numbered():
            attended = batches.attended(streams[0].model, streams[0].data[index])
            captured = [_captured(stream, stage, index, shared) for stream in used]
            if len({tuple(value.shape for _, value in calls) for calls in captured}) > 1:
                rerouted += 1
                captured = captured[:1]
            for call in zip(*captured, strict=True):
                module, values = call[0][0], [value for _, value in call]
                positions = gram.draw_positions(module, values[0], generator, self.positions)
                if positions is None:  # no convolution
                    values = [batches.unpadded(value, attended) for value in values]
                _require_finite(values, layer, number)
                rows = [gram.input_rows(layer, module, value, positions) for value in values]
                grams[held_out].add(*rows)
        self.ranks.sum(rerouted)
        if rerouted.item():
            # An expert to which the dense network sends other tokens: it imitates its weights on its own inputs.
            for one in grams:
                one.unpair()
        self._complete(grams)
        return gram.of_called(grams[0], grams[1] if self.heldout.batches else None)

    def _complete(self, grams: Sequence[Gram]) -> None:
        """Make Grams ready for use, over all ranks' samples."""
        for one in grams:
            self.ranks.sum_gram(one)
            one.finish()

    def _of_experts(
        self, streams: list[Stream], stage: int, experts: list[Layer]
    ) -> Iterator[tuple[Layer, Statistics]]:
        """The statistics of one parameter's experts, each of the tokens that were really routed to it.

        Experts imitate their weights on their own inputs even where a reference is given: the dense network may have
        routed other tokens to them.
        """
        stream = streams[-1] if self.dense_inputs else streams[0]
        size = 2 * 8 * experts[0].shape[1] ** 2
        for some in batched(experts, max(1, EXPERT_MEMORY // size)):
            yield from zip(some, self._routed(stream, stage, some), strict=True)

    def _routed(self, stream: Stream, stage: int, experts: Sequence[Layer]) -> list[Statistics]:
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


def _execution_order(stream: Stream, stage: int, layers: list[Layer]) -> list[SharedInput]:
    """The layers that a stage really calls, in order, those with the same input together.

    The batch of the largest samples says, on which a loop over positions is longest, and others where some layers are
    left, as experts may be that few tokens are sent to.
    """
    if not layers:
        return []
    order: dict[tuple[Any, ...], SharedInput] = {}
    counts: dict[str, int] = {}
    alive: list[Tensor] = []  # tensors compared by identity must not be freed meanwhile

    def note(layer: Layer, module: nn.Module, value: Tensor) -> None:
        if layer.expert is not None:  # all experts of a parameter are visited together, those without a token too
            every = [other for other in layers if other.key == layer.key]
            order.setdefault((layer.key,), SharedInput(every, 1))
            counts.update({other.name: 1 for other in every})
            return
        counts[layer.name] = counts.get(layer.name, 0) + 1
        if counts[layer.name] == 1:
            alive.append(value)
            key = (id(value), value._version, *_geometry(module))
            order.setdefault(key, SharedInput([], 1)).layers.append(layer)

    for index in sorted(range(len(stream.data)), key=lambda index: -_numbers_a_sample(stream.data[index])):
        unseen = [layer for layer in layers if layer.name not in counts]
        if not unseen:
            break
        with captured_inputs(stream.model, unseen, note):
            stream.run(stage, index)
    groups = []
    for shared in order.values():
        once = [layer for layer in shared.layers if counts[layer.name] == 1]
        if once:
            groups.append(SharedInput(once, 1))
        # A module that is called several times sees several inputs: its Gram is its own.
        groups.extend(SharedInput([layer], counts[layer.name]) for layer in shared.layers if counts[layer.name] > 1)
    return groups


def _geometry(module: nn.Module) -> tuple[Any, ...]:
    if isinstance(module, CONVOLUTIONS):
        return module.kernel_size, module.stride, module.padding, module.dilation, module.groups, module.padding_mode
    return ()


def _numbers_a_sample(batch: Batch) -> int:
    return sum(tensor[:1].numel() for tensor in batches.tensors(batches.inputs(batch)) if tensor.ndim)


def _captured(stream: Stream, stage: int, index: int, shared: SharedInput) -> list[tuple[nn.Module, Tensor]]:
    """What a stage feeds to a layer on one batch, one tensor a call, and the module that takes it.

    The pass ends with the only call of a layer; of one that is called several times, the batch itself says how often.
    """
    values: list[tuple[nn.Module, Tensor]] = []

    def keep(layer: Layer, module: nn.Module, value: Tensor) -> None:
        # A later call may overwrite it: x += f(x).
        values.append((module, value.detach().clone() if shared.calls > 1 else value.detach()))
        if shared.calls == 1:
            raise StopForward

    with captured_inputs(stream.model, shared.layers[:1], keep), suppress(StopForward):
        stream.run(stage, index)
    return values


def batched(values: Sequence[Layer], size: int) -> Iterator[Sequence[Layer]]:
    """Consecutive runs of at most `size` values."""
    for start in range(0, len(values), size):
        yield values[start : start + size]


def _require_finite(values: list[Tensor], layer: Layer, number: int) -> None:
    if not all(bool(torch.isfinite(value).all()) for value in values):
        raise NonFiniteError(
            f"The input of layer {layer.name!r} holds NaN or infinity in calibration batch {number}; "
            "look at that batch, or run the model in a wider dtype."
        )
