"""Sweep: the one walk along the chain of blocks; every layer gets its inputs through the layers already pruned.

A sweep goes stage by stage (`replay.py`), and yields the layers of each stage in groups with the same input. Who
receives a group solves its layers before the next group is computed, or only measures them:

    Sweep.groups       all stages: rounds (`algorithm.project_layers`), curves (`plan/curves.py`, `plan/widths.py`)
    Sweep.through      one stage: `Reconstruction` goes along with one stream more, and leaves blocks later
    Sweep.groups_of    the groups of one stage once more: the projections of a block at growing sparsity
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from iobs.errors import NonFiniteError
from iobs.pruning.calibration.additions import captured_additions
from iobs.pruning.calibration.blocks import Block, Tracer, version_of
from iobs.pruning.calibration.gram import (
    POSITIONS,
    Gram,
    Statistics,
    draw_positions,
    input_rows,
    layer_outputs,
    output_rows,
    statistics_of,
)
from iobs.pruning.calibration.hooks import captured_inputs
from iobs.pruning.calibration.replay import BEFORE, Residency, Shortcut, Shortcuts, StopForward, Stream, exact_shortcuts
from iobs.pruning.network.layers import CONVOLUTIONS, Layer
from iobs.pruning.network.modes import replaced_forwards
from iobs.pruning.runtime.ranks import ALONE, Ranks
from iobs.pruning.samples import batches, outputs
from iobs.pruning.samples.batches import Batch, Samples

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
        drift: a layer that writes into a residual stream has target outputs: its dense ones, and the residual's drift.
    """

    seed: int = 0
    positions: int = POSITIONS
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
        changes: the weights of layers change; otherwise they are only measured, and nothing of a stage is kept.
        tables: the metrics of layers that embeddings look up; these layers come first, since all inputs depend on them.

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
    residency: Residency = field(default_factory=Residency)
    changes: bool = True
    tables: Mapping[Layer, Gram] = field(default_factory=dict)
    without_input: dict[Layer, bool] = field(default_factory=dict, init=False)

    @property
    def _shares(self) -> tuple[Samples, Samples]:
        """The calibration and held-out batches of this rank."""
        return self.ranks.share(self.calibration), self.ranks.share(self.heldout)

    def _numbered(self) -> list[tuple[int, bool, int]]:
        """The batches of a stream: (position, held out or not, number of the caller's batch)."""
        calibration, heldout = self._shares
        flags = [False] * len(calibration.batches) + [True] * len(heldout.batches)
        return [*zip(itertools.count(), flags, calibration.numbers + heldout.numbers, strict=False)]

    def groups(self) -> Iterator[Group]:
        """Groups of layers in execution order. Weights written to one group affect the inputs of all later groups.

        Afterwards `without_input` holds the layers that received no input on this data.

        Raises:
            NonFiniteError: the input of a layer holds NaN or infinity; names the layer and the batch.
        """
        streams = self.streams()
        for stage in streams[0].stages:
            self.residency.enter(stage)
            yield from self.through(streams, stage)
            (self.residency.leave if self.changes else self.residency.release)(stage)

    def through(self, streams: list[Stream], stage: int) -> Iterator[Group]:
        """The groups of one stage; afterwards the streams are at the next stage, if a layer there needs them."""
        with self.taking_shortcuts(streams):
            yield from self.groups_of(streams, stage)
            if self.without_input or stage < len(self.chain) - 1:
                self.advance(streams, stage)

    def streams(self) -> list[Stream]:
        """Streams of the model and of the reference, if there is one, at their start."""
        calibration, heldout = self._shares
        models = [self.model] if self.reference is None else [self.model, self.reference]
        self.without_input = dict.fromkeys([layer for layer in self.layers if layer not in self.tables], False)
        data, fetch = calibration.batches + heldout.batches, self.residency.fetch
        return [
            Stream(model, data, self.chain, keep=self.place(number), fetch=fetch) for number, model in enumerate(models)
        ]

    def place(self, number: int) -> Callable[[int, Tensor], Tensor]:
        """The function that stores the hidden states of the stream with this number."""
        calibration, heldout = self._shares
        return partial(self._keep, number * (len(calibration.batches) + len(heldout.batches)))

    def _keep(self, first: int, index: int, hidden: Tensor) -> Tensor:
        dtype = self.residency.arithmetic
        return self.residency.keep(first + index, hidden if dtype is None else hidden.to(dtype))

    def _keep_input(self, number: int, shortcut: int, index: int, value: Tensor) -> Tensor:
        """Store the input of a shortcut of the stream with this number."""
        return self.place(_SHORTCUTS + 2 * shortcut + number)(index, value)

    @torch.no_grad()
    def advance(self, streams: Sequence[Stream], stage: int) -> None:
        """Compute the inputs of the next stage."""
        for stream in streams:
            stream.advance(stage)
            if stage == BEFORE and self.residency.arithmetic is not None:
                stream.cast_arguments(self.residency.arithmetic)

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
        if stage == BEFORE:
            for layer, gram in self.tables.items():
                yield Group([layer], partial(Statistics, gram))
        for shared in self._order(streams, stage):
            for layer in shared.layers:
                self.without_input.pop(layer, None)
            if shared.layers[0].expert is None:
                yield Group(shared.layers, partial(self._statistics, streams, stage, shared))
            else:
                # Experts match their own outputs even with a reference, which may route other tokens to them.
                stream = streams[-1] if self.dense_inputs else streams[0]
                stack = Stack(stream, stage, tuple(shared.layers), self._numbered(), self.ranks)
                for expert in stack.layers:
                    yield Group([expert], partial(stack.statistics, expert), stack)

    @torch.no_grad()
    def _order(self, streams: list[Stream], stage: int) -> list[SharedInput]:
        """The inputs of a stage in execution order, the same on all ranks; gives the streams their shortcuts."""
        # A copy, since the sweeps of a reconstruction share it.
        self.without_input = dict(self.without_input)
        layers = streams[0].layers_of(stage, [*self.without_input])
        order, shortcuts = execution_order(
            streams[0], stage, layers, self.without_input, residuals=self._compares_residuals, most=self._most_kept
        )
        if shortcuts:
            for number, stream in enumerate(streams):
                keep = partial(self._keep_input, number)
                stream.shortcuts = Shortcuts(shortcuts, keep, self.residency.fetch, self._most_kept)
        if self.ranks.size == 1 or not layers:
            return order
        return agreed_order(order, layers, layers[0].tensor(self.model).device, self.ranks)

    @cached_property
    def _most_kept(self) -> int:
        """Numbers of an input of a batch that shortcuts keep though it is wider than the hidden state.

        In main memory, those of all batches of both streams take at most as much as the model; elsewhere none are kept.
        """
        if not self.residency.keeps_wide_inputs or next(self.model.parameters()).device.type != "cpu":
            return 0
        count = sum(len(part.batches) for part in self._shares) * (1 if self.reference is None else 2)
        return sum(parameter.numel() for parameter in self.model.parameters()) // max(1, count)

    @property
    def _compares_residuals(self) -> bool:
        """True if residuals of both models are compared."""
        return self.moments.drift and self.reference is not None and not self.dense_inputs

    @torch.no_grad()
    def _statistics(self, streams: list[Stream], stage: int, shared: SharedInput) -> Statistics:
        """The Grams of an input on the calibration and held-out batches of all ranks."""
        layer = shared.layers[0]
        device = layer.tensor(streams[0].model).device
        used = streams[-1:] if self.dense_inputs else streams
        generator = torch.Generator().manual_seed(self.moments.seed)
        unpaired = torch.zeros(1, device=device)  # batches whose inputs have no partner
        dense = layer.read(streams[-1].model) if shared.residuals and self._compares_residuals else None
        grams = []
        # One after the other: finished Grams of wide layers take half of the memory of their sums.
        for heldout in (False, True) if self.heldout.batches else (False,):
            gram = Gram.empty(layer, device, len(used) > 1, means=self.moments.means, outputs=dense is not None)
            for index, held_out, number in self._numbered():
                if held_out is heldout:
                    inputs = [captured(stream, stage, index, shared) for stream in used]
                    attended = outputs.attended(streams[0].model, streams[0].data[index])
                    targets = None
                    if dense is not None:
                        drift = drift_of([capture.residual for capture in inputs])
                        targets = TargetOutputs(dense, _float32_outputs(streams[-1], layer, index), drift)
                    unpaired += not self._add(gram, inputs, layer, number, attended, generator, targets)
            gram.sum_over(self.ranks)
            gram.finish()
            gram.park("heldout" if heldout else "calibration", self.residency.park)
            grams.append(gram)
        self.ranks.sum(unpaired)
        if unpaired:
            # The reference routes other tokens to this expert: it then matches its own weights on its own inputs.
            for gram in grams:
                gram.unpair()
        return statistics_of(grams[0], grams[1] if self.heldout.batches else None)

    def _add(
        self,
        gram: Gram,
        inputs: list[Captured],
        layer: Layer,
        number: int,
        attended: Tensor | None,
        generator: torch.Generator,
        targets: TargetOutputs | None,
    ) -> bool:
        """Add the inputs on one batch, by stream, to a Gram.

        Args:
            gram: of the layer.
            inputs: of the layer.
            layer: the layer.
            number: of the caller's batch.
            attended: positions that are not padding, or None.
            generator: draws the positions of convolutions.
            targets: of a layer that has them, or None.

        Returns:
            False if the inputs have no partner.
        """
        calls = [capture.calls for capture in inputs]
        paired = len({tuple(value.shape for _, value in calls_of_stream) for calls_of_stream in calls}) == 1
        calls = calls if paired else calls[:1]
        for call in zip(*calls, strict=True):
            module, values = call[0][0], [value for _, value in call]
            positions = draw_positions(module, values[0], generator, self.moments.positions)
            if positions is None:  # not a convolution
                values = [outputs.unpadded(value, attended) for value in values]
                targets = None if targets is None else targets.unpadded(attended)
            rows = [input_rows(layer, module, value, positions) for value in values]
            dense = rows[1] if len(rows) > 1 else None
            if dense is not None and targets is not None:
                dense = targets.rows(layer, dense, positions)
            gram.add(rows[0], dense)
            # The sums lack most positions of a convolution. Those of other layers show NaN and infinity sooner; they
            # may also come from products alone.
            if positions is not None or not gram.is_finite:
                require_finite(values, layer, number)
        return paired


@dataclass(frozen=True)
class TargetOutputs:
    """Target outputs of a layer that adds to a residual stream, on one batch: its dense outputs and the drift.

    Args:
        weight: (rows, columns) of the dense layer.
        known: the outputs of this weight, if they are computed; they need no second product.
        drift: of the residual; None without two residuals of one shape: the targets are the dense outputs.
    """

    weight: Tensor
    known: Tensor | None
    drift: Tensor | None

    def unpadded(self, attended: Tensor | None) -> TargetOutputs:
        """The targets without the positions that are padding."""
        known, drift = (
            None if value is None else outputs.unpadded(value, attended) for value in (self.known, self.drift)
        )
        return TargetOutputs(self.weight, known, drift)

    def rows(self, layer: Layer, dense: Tensor, positions: Tensor | None) -> Tensor:
        """The targets of dense inputs (groups, count, columns) at drawn positions, (groups, count, rows of a group)."""
        known = None if self.known is None else output_rows(layer, self.known, positions)
        targets = layer_outputs(self.weight, dense) if known is None else known
        return targets if self.drift is None else targets.add_(output_rows(layer, self.drift, positions))


def _float32_outputs(stream: Stream, layer: Layer, index: int) -> Tensor | None:
    """The outputs of a linear layer without its bias on a batch, (..., rows), that the stream needs anyway; or None.

    Only those in float32 or wider, which are as exact as `layer_outputs`, of modules whose output no function changes.
    """
    module = stream.model.get_submodule(layer.path)
    if stream.shortcuts is None or type(module) is not nn.Linear or module.weight.dtype.itemsize < 4:
        return None
    if module._forward_hooks or "forward" in vars(module):
        return None
    found = stream.shortcuts.output(stream.model, layer, index)
    return found if found is None or module.bias is None else found.sub_(module.bias)


def batched(values: Sequence[Layer], size: int) -> Iterator[Sequence[Layer]]:
    """Consecutive slices of at most `size` values."""
    for start in range(0, len(values), size):
        yield values[start : start + size]


# ---- experts in one parameter: their loads, and the Grams of the tokens that each of them receives
EXPERT_MEMORY = 2**30  # bytes of the Grams of experts that are computed in one pass over the data


@dataclass
class Stack:
    """The experts of one parameter in one stage of a sweep.

    Args:
        stream: the model, at the stage.
        stage: of the experts.
        layers: the experts.
        batches: (position in the stream, held out or not, number of the caller's batch) of the batches of this rank.
        ranks: processes that share the batches.

    Attributes:
        needed: experts whose Grams will be needed; all of them unless another sequence is set.
    """

    stream: Stream
    stage: int
    layers: tuple[Layer, ...]
    batches: Sequence[tuple[int, bool, int]]
    ranks: Ranks
    needed: Sequence[Layer] = ()
    _statistics: dict[Layer, Statistics] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.needed = self.layers

    @torch.no_grad()
    def loads(self) -> list[float]:
        """The number of tokens of every expert times the squared norm of its matrix, about the energy of its outputs.

        Tokens are those of all ranks.
        """
        counts = dict.fromkeys(self.layers, 0)

        def note(layer: Layer, value: Tensor, held_out: bool, number: int) -> None:
            counts[layer] += value.numel() // layer.shape[1]

        self._run(self.layers, note)
        tokens = torch.tensor([*counts.values()], device=self._device)
        self.ranks.sum(tokens)
        norms = [float(layer.tensor(self.stream.model).double().square().sum()) for layer in self.layers]
        return [count * norm for count, norm in zip(tokens.tolist(), norms, strict=True)]

    def statistics(self, layer: Layer) -> Statistics:
        """The Grams of the tokens of one of the needed experts.

        One pass computes the Grams of as many experts as fit into `EXPERT_MEMORY`, when the first of them is needed.
        """
        if layer not in self._statistics:
            size = max(1, EXPERT_MEMORY // (2 * 8 * layer.shape[1] ** 2))
            first = self.needed.index(layer) // size * size
            self._statistics = {}  # before others take its place
            self._statistics = self._measure(self.needed[first : first + size])
        return self._statistics[layer]

    @torch.no_grad()
    def _measure(self, experts: Sequence[Layer]) -> dict[Layer, Statistics]:
        """The statistics of some experts, from one pass over the data."""

        def empty(layer: Layer) -> Gram:
            return Gram.empty(layer, self._device, False)

        pairs = {layer: (empty(layer), empty(layer)) for layer in experts}

        def note(layer: Layer, value: Tensor, held_out: bool, number: int) -> None:
            gram = pairs[layer][held_out]
            gram.add(value.reshape(1, -1, layer.shape[1]))
            if not gram.is_finite:
                require_finite([value], layer, number)

        self._run(experts, note)
        for gram in (gram for pair in pairs.values() for gram in pair):
            gram.sum_over(self.ranks)
            gram.finish()
        return {layer: statistics_of(*pairs[layer], routed=True) for layer in experts}

    def _run(self, experts: Sequence[Layer], note: Callable[[Layer, Tensor, bool, int], None]) -> None:
        """Run the stage, and call `note(layer, input, held out, number)` for every input of some experts."""
        for index, held_out, number in self.batches:

            def note_input(
                layer: Layer, module: nn.Module, value: Tensor, held_out: bool = held_out, number: int = number
            ) -> None:
                note(layer, value, held_out, number)

            with captured_inputs(self.stream.model, experts, note_input):
                self.stream.run(self.stage, index)

    @property
    def _device(self) -> torch.device:
        return self.layers[0].tensor(self.stream.model).device


# ---- inputs of layers in one stage of a stream: which layers share an input, in which order, and their values
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
