"""Sweep through a model in execution order; the inputs of every layer come through the layers already pruned."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from iobs.pruning.calibration import gram
from iobs.pruning.calibration.blocks import Block
from iobs.pruning.calibration.experts import Stack
from iobs.pruning.calibration.gram import Gram, Statistics
from iobs.pruning.calibration.inputs import Captured, SharedInput, captured, drift_of, execution_order, require_finite
from iobs.pruning.calibration.replay import BEFORE, Stream
from iobs.pruning.calibration.residency import InMemory, Residency, park_wide
from iobs.pruning.calibration.shortcuts import Shortcuts
from iobs.pruning.network.layers import Layer
from iobs.pruning.runtime.ranks import ALONE, Ranks
from iobs.pruning.samples import outputs
from iobs.pruning.samples.subsets import Samples

_SHORTCUTS = 5  # number of the first place for inputs of shortcuts; the places before it hold hidden states


@dataclass(frozen=True)
class Group:
    """Layers with the same input, such as q, k and v.

    Attributes:
        layers: in the order in which the model calls them.
        statistics: computes the Gram matrices of their input. Not called if a checkpoint holds the layers' weights.
        stack: the experts that an expert stands among; None for other layers.
    """

    layers: list[Layer]
    statistics: Callable[[], Statistics]
    stack: Stack | None = None


@dataclass(frozen=True)
class Moments:
    """Settings of the moments that a sweep computes.

    Args:
        seed: of the positions of convolutions that enter the Grams.
        positions: number of positions per sample.
        means: also compute the means of inputs, which the refit of a bias needs.
        drift: also compute the drift of the residual of every layer that writes into a residual stream.
    """

    seed: int = 0
    positions: int = gram.POSITIONS
    means: bool = False
    drift: bool = False


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
        moments: settings of the moments.
        ranks: processes that share the batches; Grams are summed over them.
        residency: holds weights and activations.
        followers: further streams of the model, if the weights are only measured: a stage is then released instead of
            left. None: the weights change.

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
    moments: Moments = field(default_factory=Moments)
    ranks: Ranks = ALONE
    residency: Residency = field(default_factory=InMemory)
    followers: Sequence[Stream] | None = None
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
        streams = self.streams()
        for stage in streams[0].stages:
            self.residency.enter(stage)
            with self.taking_shortcuts(streams):
                yield from self.groups_of(streams, stage)
                if self.without_input or stage < len(self.chain) - 1:
                    self.advance([*streams, *(self.followers or ())], stage)
            (self.residency.leave if self.followers is None else self.residency.release)(stage)

    def streams(self) -> list[Stream]:
        """Streams of the model and of the reference, if there is one, at their start."""
        data = self._own[0].batches + self._own[1].batches
        models = [self.model] if self.reference is None else [self.model, self.reference]
        self.without_input = dict.fromkeys(self.layers, False)
        fetch = self.residency.fetch
        return [Stream(one, data, self.chain, False, self.place(number), fetch) for number, one in enumerate(models)]

    def place(self, number: int) -> Callable[[int, Tensor], Tensor]:
        """The function that stores the hidden states of the stream with this number."""
        fit, heldout = self._own
        return partial(self._kept, number * (len(fit.batches) + len(heldout.batches)))

    @torch.no_grad()
    def advance(self, streams: Sequence[Stream], stage: int) -> None:
        """Compute the inputs of the next stage."""
        for stream in streams:
            stream.advance(stage)
            if stage == BEFORE and self.residency.arithmetic is not None:
                stream.cast_arguments(self.residency.arithmetic)

    def _known(self, number: int, place: int, index: int, value: Tensor) -> Tensor:
        """Store the input of a shortcut of the stream with this number."""
        return self.place(_SHORTCUTS + 2 * place + number)(index, value)

    def _kept(self, first: int, index: int, hidden: Tensor) -> Tensor:
        dtype = self.residency.arithmetic
        return self.residency.keep(first + index, hidden if dtype is None else hidden.to(dtype))

    @contextmanager
    def taking_shortcuts(self, streams: Sequence[Stream]) -> Iterator[None]:
        """Context of one stage, at whose end the streams forget its shortcuts."""
        try:
            yield
        finally:
            for stream in streams:
                stream.shortcuts = None

    def groups_of(self, streams: list[Stream], stage: int) -> Iterator[Group]:
        """The groups of one stage, with layers that have received no input so far; inside `taking_shortcuts`.

        Between two groups only the weights of the layers of this stage may change.
        """
        wanted = streams[0].layers_of(stage, [*self.without_input])
        with torch.no_grad():
            found = execution_order(streams[0], stage, wanted, self.without_input, self._pairs)
            order = self._agreed(found.groups, wanted)
        if found.shortcuts:
            for number, stream in enumerate(streams):
                stream.shortcuts = Shortcuts(found.shortcuts, partial(self._known, number), self.residency.fetch)
        for shared in order:
            fed = set(shared.layers)
            self.without_input = {layer: used for layer, used in self.without_input.items() if layer not in fed}
            if shared.layers[0].expert is None:
                yield Group(shared.layers, partial(self._statistics, streams, stage, shared))
            else:
                # Experts match their own outputs even with a reference, which may route other tokens to them.
                stream = streams[-1] if self.dense_inputs else streams[0]
                stack = Stack(stream, stage, tuple(shared.layers), self._numbered(), self.ranks)
                for expert in stack.layers:
                    yield Group([expert], partial(stack.statistics, expert), stack)

    def _agreed(self, order: list[SharedInput], layers: list[Layer]) -> list[SharedInput]:
        """The same order on all ranks: that of the first rank, then layers that only later ranks have called."""
        if self.ranks.size == 1 or not layers:
            return order
        device = layers[0].tensor(self.model).device
        # By rank and layer: number of the group from 1 on, number of calls, number of residuals.
        seen = torch.zeros(self.ranks.size, len(layers), 3, device=device)
        for number, shared in enumerate(order, 1):
            for layer in shared.layers:
                facts = [number, shared.calls, shared.residuals]
                seen[self.ranks.rank, layers.index(layer)] = torch.tensor(facts, device=device)
        self.ranks.sum(seen)
        agreed: dict[tuple[int, int], SharedInput] = {}
        left = set(layers)
        for rank, table in enumerate(seen.int().tolist()):
            found = [(*facts, layer) for facts, layer in zip(table, layers, strict=True) if facts[0]]
            for number, calls, residuals, layer in sorted(found, key=lambda entry: entry[0]):
                if layer in left:
                    agreed.setdefault((rank, number), SharedInput([], calls, residuals)).layers.append(layer)
                    left.remove(layer)
        return list(agreed.values())

    @property
    def _pairs(self) -> bool:
        """Check that residuals of both models are compared."""
        return self.moments.drift and self.reference is not None and not self.dense_inputs

    @torch.no_grad()
    def _statistics(self, streams: list[Stream], stage: int, shared: SharedInput) -> Statistics:
        """The Grams of an input on the calibration and held-out batches of all ranks."""
        layer = shared.layers[0]
        device = layer.tensor(streams[0].model).device
        used = streams[-1:] if self.dense_inputs else streams
        generator = torch.Generator().manual_seed(self.moments.seed)
        lost = torch.zeros(2, device=device)  # batches whose inputs, or whose residuals, have no partner
        grams = []
        # One after the other: finished Grams of wide layers take half of the memory of their sums.
        for part in (False, True) if self.heldout.batches else (False,):
            drifts = shared.residuals > 0 and self._pairs
            grams.append(Gram.empty(layer, device, len(used) > 1, self.moments.means, drifts))
            for index, held_out, number in self._numbered():
                if held_out is part:
                    found = [captured(stream, stage, index, shared) for stream in used]
                    attended = outputs.attended(streams[0].model, streams[0].data[index])
                    lost += self._add(grams[-1], found, layer, number, attended, generator).to(device)
            grams[-1].sum_over(self.ranks)
            grams[-1].finish()
            park_wide(grams[-1], "heldout" if part else "calibration", self.residency)
        self.ranks.sum(lost)
        for one in grams:
            if lost[0]:
                # The reference routes other tokens to this expert: it then matches its own weights on its own inputs.
                one.unpair()
            if lost[1]:
                one.drift = None
        return gram.of_called(grams[0], grams[1] if self.heldout.batches else None)

    def _add(
        self,
        total: Gram,
        found: list[Captured],
        layer: Layer,
        number: int,
        attended: Tensor | None,
        draws: torch.Generator,
    ) -> Tensor:
        """Add what was captured of one batch, by stream, to a Gram; `draws` chooses the positions of convolutions.

        Returns:
            (2,) 1 where the inputs, or the residuals, have no partner; otherwise 0.
        """
        lost = torch.zeros(2)
        drift = drift_of([one.residual for one in found]) if total.drift is not None else None
        lost[1] += total.drift is not None and drift is None
        calls = [one.calls for one in found]
        if len({tuple(value.shape for _, value in one) for one in calls}) > 1:
            lost[0] += 1
            calls = calls[:1]
        for call in zip(*calls, strict=True):
            module, values = call[0][0], [value for _, value in call]
            positions = gram.draw_positions(module, values[0], draws, self.moments.positions)
            if positions is None:  # not a convolution
                values = [outputs.unpadded(value, attended) for value in values]
                drift = None if drift is None else outputs.unpadded(drift, attended)
            require_finite(values, layer, number)
            rows = [gram.input_rows(layer, module, value, positions) for value in values]
            moved = None if drift is None else gram.output_rows(layer, drift, positions)
            total.add(rows[0], rows[1] if len(rows) > 1 else None, moved)
        return lost


def batched(values: Sequence[Layer], size: int) -> Iterator[Sequence[Layer]]:
    """Consecutive slices of at most `size` values."""
    for start in range(0, len(values), size):
        yield values[start : start + size]
