"""One projection of a network: what a sweep does to each layer that it comes by."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn

from iobs.core.patterns import Pattern
from iobs.errors import NonFiniteError
from iobs.prune.checkpoint import Journal
from iobs.prune.distributed import ALONE, Ranks
from iobs.prune.gram import Statistics, relative_output_error
from iobs.prune.layers import Layer
from iobs.prune.memory import MemoryWatch
from iobs.prune.progress import Progress
from iobs.prune.record import LayerRecord, RoundRecord, layer_record
from iobs.prune.settings import Settings
from iobs.prune.solving import solve_layer
from iobs.prune.spread import asked, share_of
from iobs.prune.walk import batched

Weights = Callable[[Layer], Tensor]


@dataclass(frozen=True)
class _Work:
    """A layer between its solve and its measurement: what it imitates, its dense weights, and dampings, dead columns
    and seconds as numbers that ranks can send to one another."""

    imitated: Tensor
    dense: Tensor
    numbers: Tensor


@dataclass
class Projection:
    """Solves the layers that a walk comes by, or takes them from the journal, and writes down what came of it.

    Args:
        model: the network.
        patterns: of every layer.
        settings: solver, damping and the like.
        progress: is told of every layer.
        index: of the round.
        journal: keeps solved layers, or None.
        ranks: share the layers of a group among them.
        current: the weights that a layer is pruned from, (rows, columns); by default those that it has.
        dense: its weights in the dense network; by default the current ones.
        rounded: a layer's weights as the output's files can hold them.
        memory: looks at the peak after every layer.

    Attributes:
        record: the round, layer by layer.
    """

    model: nn.Module
    patterns: dict[Layer, Pattern]
    settings: Settings
    progress: Progress
    index: int = 0
    journal: Journal | None = None
    ranks: Ranks = ALONE
    current: Weights | None = None
    dense: Weights | None = None
    rounded: Callable[[Layer, Tensor], Tensor] = lambda layer, weight: weight
    memory: MemoryWatch = field(default_factory=lambda: MemoryWatch(torch.device("cpu")))

    def __post_init__(self) -> None:
        self.record = RoundRecord(self.index, asked(self.patterns), None, None, [])

    def visit(self, group: list[Layer], statistics: Statistics) -> None:
        """Prune every layer of a group that shares its input: as many at once as there are ranks."""
        for layer in group:
            if self._journalled(layer):
                self._replay_layer(layer)
        for layers in batched([layer for layer in group if not self._journalled(layer)], self.ranks.size):
            started = [self._solve(layer, statistics, owner) for owner, layer in enumerate(layers)]
            for owner, (layer, work) in enumerate(zip(layers, started, strict=True)):
                self._done(self._finished(layer, statistics, work, owner))

    def replay(self, group: list[Layer]) -> bool:
        """Take a whole group from the journal if all of it is there."""
        if not all(self._journalled(layer) for layer in group):
            return False
        for layer in group:
            self._replay_layer(layer)
        return True

    def _solve(self, layer: Layer, statistics: Statistics, owner: int) -> _Work:
        """Write a layer's pruned weights, if it is this rank's; what the solver needed is free again at the end."""
        began = time.perf_counter()
        current = layer.read(self.model) if self.current is None else self.current(layer)
        dense = current if self.dense is None else self.dense(layer)
        imitated = dense if self.settings.target == "dense" else current
        numbers = torch.zeros(4, dtype=torch.float64, device=current.device)
        if owner == self.ranks.rank:
            old = dense if self.settings.keep_zeros else None
            pattern = self.patterns[layer]
            solutions = solve_layer(layer, statistics, imitated, current, pattern, self.settings, old)
            layer.write(self.model, self.rounded(layer, torch.cat([solution.weight for solution in solutions])))
            numbers[0] = max(solution.stats["damping"] for solution in solutions)
            numbers[1] = sum(solution.stats["dead_columns"] for solution in solutions)
            numbers[2] = max(solution.stats["drift_damping"] for solution in solutions)
            numbers[3] = time.perf_counter() - began
        return _Work(imitated, dense, numbers)

    def _finished(self, layer: Layer, statistics: Statistics, work: _Work, owner: int) -> LayerRecord:
        """Give every rank the layer as its owner solved it; measure it and keep it in the journal."""
        tensor = layer.tensor(self.model)
        if self.ranks.size > 1:
            weight = tensor.contiguous()
            self.ranks.broadcast(weight, owner)
            tensor.copy_(weight)
            self.ranks.broadcast(work.numbers, owner)
        began = time.perf_counter()
        damping, dead_columns, drift_damping, seconds = work.numbers.tolist()
        written, gram, heldout = layer.read(self.model), statistics.calibration, statistics.heldout
        if not bool(torch.isfinite(written).all()):
            raise NonFiniteError(
                f"The pruned weight of layer {layer.name!r} holds NaN or infinity in {tensor.dtype}; load the model in "
                "a wider dtype, or raise the damping."
            )
        error = relative_output_error(gram, written, work.imitated)
        entry = LayerRecord(
            name=layer.name,
            shape=layer.shape,
            asked=share_of(self.patterns[layer], layer),
            zeros=int((written == 0).sum()),
            error_calibration=error,
            error_heldout=None if heldout is None else relative_output_error(heldout, written, work.imitated),
            error_dense=error if work.dense is work.imitated else relative_output_error(gram, written, work.dense),
            damping=damping,
            dead_columns=int(dead_columns),
            inputs=gram.count if statistics.tokens is None else statistics.tokens,
            seconds=seconds + time.perf_counter() - began,
            stats={
                **({"rule": statistics.rule} if statistics.rule else {}),
                **({"drift_damping": drift_damping} if drift_damping else {}),
            },
        )
        if self.journal is not None and self.ranks.first:
            self.journal.put(self._key(layer), {"weight": tensor}, {"entry": asdict(entry)})
        return entry

    def _key(self, layer: Layer) -> str:
        return f"round {self.index} layer {layer.name}"

    def _journalled(self, layer: Layer) -> bool:
        return self.journal is not None and self._key(layer) in self.journal

    def _replay_layer(self, layer: Layer) -> None:
        assert self.journal is not None
        tensors, values = self.journal.get(self._key(layer))
        layer.tensor(self.model).copy_(tensors["weight"])
        self._done(layer_record(values["entry"]))

    def _done(self, entry: LayerRecord) -> None:
        self.record.layers.append(entry)
        self.memory.look()
        self.progress.layer(self.index, entry)
