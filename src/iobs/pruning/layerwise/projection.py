"""Projection of the model: a mask and new weights for every layer, one group of layers at a time.

The way of one layer:

    pattern              how many entries stay: `plan.allocate` and `decisions.scheduled`
    Gram matrices        `calibration.sweep`
    Projection.project   builds the `Task` of the layer, writes the solution into the model, measures it
    problem.solve_layer  builds the quadratic and calls `iobs.solve`
    solver               decides the mask, in `iobs.solvers`
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor, nn

from iobs.core.formats import plural
from iobs.core.patterns import Pattern
from iobs.core.quadratic import Solution
from iobs.errors import NonFiniteError
from iobs.pruning.calibration.gram import SEARCH_COLUMNS, Energies, Statistics, relative_output_error, target_energy
from iobs.pruning.calibration.sweep import Group, batched
from iobs.pruning.callbacks import Callback
from iobs.pruning.descent.scoring import Scoring
from iobs.pruning.layerwise.patterns import share_of, sparsity_of, stored_weight
from iobs.pruning.layerwise.problem import (
    Task,
    can_divide,
    can_share,
    refitted_bias,
    solve_layer,
    solve_together,
)
from iobs.pruning.network.layers import Layer
from iobs.pruning.recipe import LayerSettings
from iobs.pruning.report import LayerRecord, RoundRecord, layer_record
from iobs.pruning.runtime.checkpoint import Checkpoint
from iobs.pruning.runtime.memory import MemoryWatch
from iobs.pruning.runtime.ranks import ALONE, Ranks
from iobs.pruning.store import Store
from iobs.solvers.row_metric import RowMetric


@dataclass(kw_only=True)
class Projection:
    """Prune the groups of one sweep, or read their weights from the checkpoint, and record the result.

    Args:
        store: holds the model and its dense weights.
        patterns: of every layer.
        settings: solver, refinement and damping of every layer.
        target: the output that every layer should match.
        index: number of the round, from 0.
        checkpoint: solved layers of a killed run.
        ranks: processes that share the layers of a group.
        masters: float32 weights after gradient steps, by parameter name. Layers without masters are pruned from the
            weights in the model.
        memory: watch of the peak memory, which every group may raise.
        callback: called after every layer.
        biases: names of the biases that are refitted, by layer.
        metrics: of the rows' errors, by layer; layers without one count all rows equally.
        level: number of this projection, if further ones of the same layers follow in the round; otherwise None.

    Attributes:
        record: the round, layer by layer.
    """

    store: Store
    patterns: dict[Layer, Pattern]
    settings: Mapping[Layer, LayerSettings]
    target: Target
    index: int
    checkpoint: Checkpoint
    ranks: Ranks
    masters: dict[str, Tensor]
    memory: MemoryWatch
    callback: Callback
    biases: Mapping[Layer, str] = field(default_factory=dict)
    metrics: Mapping[Layer, RowMetric] = field(default_factory=dict)
    level: int | None = None
    record: RoundRecord = field(init=False)

    def __post_init__(self) -> None:
        self.record = RoundRecord(self.index, sparsity_of(self.patterns))

    def at_level(self, patterns: Mapping[Layer, Pattern], level: int, levels: int) -> Projection:
        """One of several projections of the same layers at growing sparsity.

        The last one has the record, the callback and the keys of this projection. Those before it are not recorded.
        Projections after the first match the outputs of the current weights.

        Args:
            patterns: of the layers at this level.
            level: number of the projection, from 0.
            levels: number of projections.
        """
        target = TARGETS["layer"] if level else self.target
        patterns = {**self.patterns, **patterns}
        if level < levels - 1:
            return replace(self, patterns=patterns, target=target, callback=Callback(), level=level)
        last = replace(self, patterns=patterns, target=target)
        last.record = self.record
        return last

    def project_all(self, groups: Iterable[Group]) -> None:
        """Prune groups in order; each is pruned before the next one is computed."""
        for group in groups:
            self.project(group)
            self.memory.look()

    @torch.no_grad()
    def project(self, group: Group) -> None:
        """Prune the layers of a group; layers in the checkpoint are read from there.

        With several ranks every rank solves some rows of each layer. But each rank solves one layer at a time if no
        rank is then left without a layer. Layers whose rows cannot be divided are always solved so.
        """
        unsolved = [layer for layer in group.layers if key_of(self.index, layer, self.level) not in self.checkpoint]
        # Before any layer of the group changes: inputs of the gates of a recurrent matrix depend on all of its gates.
        statistics = group.statistics() if unsolved else None
        for layer in group.layers:
            if layer not in unsolved:
                self.read(layer)
        if statistics is None:
            return
        statistics.energies = {layer.name: self._energies_of(layer, statistics) for layer in unsolved}
        statistics.forget_energy()  # a third of the memory of Grams, which the solves need
        together = unsolved
        if self.ranks.size > 1:
            divides = len(unsolved) % self.ranks.size
            together = [layer for layer in unsolved if self._can_divide(layer)] if divides else []
        for solved in self._solve_group(together, statistics):
            self._add(self._measure(solved, statistics, 0))
        for layers in batched([layer for layer in unsolved if layer not in together], self.ranks.size):
            of_owners = [self._solve_if_owner(layer, statistics, owner) for owner, layer in enumerate(layers)]
            for owner, solved in enumerate(of_owners):
                self._add(self._measure(solved, statistics, owner))

    def _sharing(self, layer: Layer) -> Ranks:
        """The ranks that share the errors of a layer; small layers take no time."""
        return self.ranks if layer.shape[1] >= SEARCH_COLUMNS else ALONE

    def _energies_of(self, layer: Layer, statistics: Statistics) -> Energies:
        """The energies of the layer's target and of its dense weights."""
        task, ranks, dense = self._task(layer), self._sharing(layer), self.store.dense(layer)
        target, used = task.current if task.target is None else task.target, task.statistics(statistics)
        energy = target_energy(used.calibration, target, ranks)
        # A target other than the current weights is the dense layer.
        same = dense is None or task.target is not None
        return Energies(
            energy,
            0.0 if used.heldout is None else target_energy(used.heldout, target, ranks),
            energy if same or dense is None else target_energy(used.calibration, dense, ranks),
        )

    def _can_divide(self, layer: Layer) -> bool:
        """True if the ranks can solve a layer together."""
        return can_divide(layer, self.settings[layer], self.patterns[layer], self.ranks)

    def _solve_group(self, layers: Sequence[Layer], statistics: Statistics) -> Iterator[_Solved]:
        """Solve the layers on all ranks, together if they can share factorisations, otherwise one by one."""
        if not can_share(layers, [self.settings[layer] for layer in layers]):
            yield from (self._solve(self._task(layer), statistics, self.ranks) for layer in layers)
            return
        began = time.perf_counter()
        tasks = [self._task(layer) for layer in layers]
        solutions = solve_together(tasks, statistics, self.ranks)
        seconds = (time.perf_counter() - began) / len(tasks)
        pairs = zip(tasks, solutions, strict=True)
        yield from (self._write(task, [solution], statistics, seconds, self.ranks) for task, solution in pairs)

    def _solve(self, task: Task, statistics: Statistics, ranks: Ranks = ALONE) -> _Solved:
        """Solve one layer; with several ranks each solves some rows."""
        began = time.perf_counter()
        solutions = solve_layer(task, statistics, ranks)
        return self._write(task, solutions, statistics, time.perf_counter() - began, ranks)

    def _task(self, layer: Layer) -> Task:
        """The task of a layer: its pattern, its settings, its weights, and those that it should match."""
        key, model = layer.key, self.store.model
        current = layer.matrix(self.masters[key]) if key in self.masters else layer.read(model)
        dense = self.store.dense(layer)
        return Task(
            layer=layer,
            pattern=self.patterns[layer],
            current=current,
            target=self.target.weights(self.store, layer),
            settings=self.settings[layer],
            # The weights that the user gave have the zeros that `keep_zeros` keeps.
            zeros=None if not self.settings[layer].keep_zeros else current if dense is None else dense,
            bias=self._bias(layer),
            metric=self.metrics.get(layer),
            stored=self.store.stored_dtype(layer),
        )

    def _bias(self, layer: Layer) -> Tensor | None:
        """The bias that belongs to the layer's target weights, if it is refitted."""
        name = self.biases.get(layer)
        if name is None:
            return None
        target = self.target.biases(self.store, name)
        return self.store.model.get_parameter(name).detach().clone() if target is None else target

    def _solve_if_owner(self, layer: Layer, statistics: Statistics, owner: int) -> _Solved:
        """Solve a layer if this rank owns it; otherwise the weights arrive later, in `_measure`."""
        task = self._task(layer)
        return self._solve(task, statistics) if owner == self.ranks.rank else _Solved.empty(task)

    def _write(
        self,
        task: Task,
        solutions: Sequence[Solution],
        statistics: Statistics,
        seconds: float,
        ranks: Ranks = ALONE,
    ) -> _Solved:
        """Write the solutions of a layer and its refitted bias into the model.

        Args:
            task: the layer.
            solutions: one per group of its rows, or one of the rows of this rank.
            statistics: Grams of its inputs.
            seconds: of the solve.
            ranks: processes that have the other rows.
        """
        dtype = self.store.stored_dtype(task.layer)
        weight = torch.cat([stored_weight(solution, task.pattern, dtype) for solution in solutions])
        self.store.write(task.layer, weight if ranks.size == 1 else ranks.gather(weight, task.layer.shape[0]))
        bias = refitted_bias(task, task.layer.read(self.store.model), statistics.calibration)
        if bias is not None:
            self.store.write_tensor(self.biases[task.layer], bias)
        return _Solved.of(task, solutions, seconds)

    def _measure(self, solved: _Solved, statistics: Statistics, owner: int) -> LayerRecord:
        """Send the owner's weights to every rank, measure the layer, and store it in the checkpoint.

        Raises:
            NonFiniteError: the weights hold NaN or infinity.
        """
        layer, task = solved.task.layer, solved.task
        tensor = layer.tensor(self.store.model)
        if self.ranks.size > 1:
            weight = tensor.contiguous()
            self.ranks.broadcast(weight, owner)
            self.store.put(layer, weight)
            if layer in self.biases:
                bias = self.store.model.get_parameter(self.biases[layer]).detach()
                self.ranks.broadcast(bias, owner)
                self.store.write_tensor(self.biases[layer], bias)
            self.ranks.broadcast(solved.numbers, owner)
        energies = statistics.energies[layer.name]
        began, statistics = time.perf_counter(), task.statistics(statistics)
        damping, dead_columns, drift_damping, seconds = solved.numbers.tolist()
        written, gram, heldout = layer.read(self.store.model), statistics.calibration, statistics.heldout
        if not bool(torch.isfinite(written).all()):
            raise NonFiniteError(
                f"The pruned weight of layer {layer.name!r} holds NaN or infinity in {tensor.dtype}; load the model in "
                "a wider dtype, or raise the damping."
            )
        target = task.current if task.target is None else task.target
        dense = self.store.dense(layer)
        ranks = self._sharing(layer)
        error = relative_output_error(gram, written, target, ranks, energies.calibration)
        of_dense = error
        if dense is not None and task.target is None:
            of_dense = relative_output_error(gram, written, dense, ranks, energies.dense)
        held = None if heldout is None else relative_output_error(heldout, written, target, ranks, energies.heldout)
        entry = LayerRecord(
            name=layer.name,
            shape=layer.shape,
            asked=share_of(self.patterns[layer], layer),
            zeros=int((written == 0).sum()),
            error_calibration=error,
            error_heldout=held,
            error_dense=of_dense,
            damping=damping,
            dead_columns=int(dead_columns),
            inputs=gram.count if statistics.tokens is None else statistics.tokens,
            seconds=seconds + time.perf_counter() - began,
            stats={
                **({"rule": statistics.rule} if statistics.rule else {}),
                **({"drift_damping": drift_damping} if drift_damping else {}),
            },
        )
        self.checkpoint.put(key_of(self.index, layer, self.level), self._tensors(layer), {"entry": asdict(entry)})
        return entry

    def _tensors(self, layer: Layer) -> dict[str, Tensor]:
        """The tensors of a layer that a projection changes, for the checkpoint."""
        tensors = {"weight": layer.tensor(self.store.model)}
        if layer in self.biases:
            tensors["bias"] = self.store.model.get_parameter(self.biases[layer]).detach()
        return tensors

    @torch.no_grad()
    def read(self, layer: Layer) -> None:
        """Take a layer's weights and its record from the checkpoint."""
        tensors, values = self.checkpoint.get(key_of(self.index, layer, self.level))
        self.store.put(layer, tensors["weight"])
        if layer in self.biases:
            self.store.write_tensor(self.biases[layer], tensors["bias"])
        self._add(layer_record(values["entry"]))

    def _add(self, entry: LayerRecord) -> None:
        """Add the record of a layer to the record of the round, and tell the callback."""
        self.record.layers.append(entry)
        self.callback.on_layer(entry, self.index)


def key_of(index: int, layer: Layer, level: int | None) -> str:
    """Key of a layer's projection in the checkpoint; see `Projection`."""
    return f"round {index} {'' if level is None else f'level {level} '}layer {layer.name}"


@dataclass(frozen=True)
class _Solved:
    """A solved layer, before its measurement.

    Args:
        task: the task of the layer.
        numbers: (4,) float64: damping, number of dead columns, damping of the drift, seconds. A tensor can be
            broadcast to other ranks.
    """

    task: Task
    numbers: Tensor

    @classmethod
    def empty(cls, task: Task) -> _Solved:
        """A layer that another rank solves; the numbers are zero until they are received."""
        return cls(task, torch.zeros(4, dtype=torch.float64, device=task.current.device))

    @classmethod
    def of(cls, task: Task, solutions: Sequence[Solution], seconds: float) -> _Solved:
        """A layer with its solutions, one per group of its rows, and the seconds of the solve."""
        solved = cls.empty(task)
        solved.numbers[0] = max(solution.stats["damping"] for solution in solutions)
        solved.numbers[1] = sum(solution.stats["dead_columns"] for solution in solutions)
        solved.numbers[2] = max(solution.stats["drift_damping"] for solution in solutions)
        solved.numbers[3] = seconds
        return solved


# ---- the check that calibration data are enough for the layers that are fitted to them
_LEAST = 2  # inputs for each column of a layer, below which its fit is mostly to the noise of the data
_ENOUGH = 8  # inputs for each column with which it generalises


def too_few(layers: Sequence[LayerRecord], samples: int) -> str:
    """A sentence if layers saw too few inputs for their columns, with the number of samples that would do.

    Args:
        layers: records of a projection.
        samples: number of the samples that the layers were fitted to.

    Returns:
        The sentence; "" if the data are enough.
    """
    fitted = [layer for layer in layers if layer.inputs and "rule" not in layer.stats and "tokens" not in layer.stats]
    short = [layer for layer in fitted if layer.inputs < _LEAST * layer.shape[1]]
    if not short:
        return ""
    worst = max(short, key=lambda layer: layer.shape[1] / layer.inputs)
    factor = _ENOUGH * worst.shape[1] / worst.inputs
    others = f" (and {len(short) - 1} more)" if len(short) > 1 else ""
    seen, columns = plural(worst.inputs, "input"), plural(worst.shape[1], "column")
    return (
        f"Few calibration data: layer {worst.name}{others} saw {seen} for {columns}, and may fail on unseen data. "
        f"{plural(math.ceil(factor * samples), 'sample')} in place of {samples:,} would give {_ENOUGH} inputs for each "
        "column."
    )


# ---- targets: the output that every layer should match, by the value of the recipe's field `target`
@dataclass(frozen=True)
class Target:
    """The output T D that a layer V X should match: ||V X - T D||^2.

    With a drift E of the residual the layer should match T D + E.

    Attributes:
        teacher: (scoring, dense) -> the model whose layer inputs are D; None: D = X, the layer's own input. `dense`
            is True if the model still has its dense weights.
        dense: True if T and its bias are those of the dense model, otherwise the current ones of the layer.
        drift: True if E is the drift of the residual, otherwise E = 0.
    """

    teacher: Callable[[Scoring, bool], nn.Module | None]
    dense: bool = False
    drift: bool = False

    def weights(self, store: Store, layer: Layer) -> Tensor | None:
        """T, (rows, columns); None: the layer's current weights."""
        return store.dense(layer) if self.dense else None

    def biases(self, store: Store, name: str) -> Tensor | None:
        """The bias that belongs to T, by parameter name, (rows,); None: the current bias."""
        return store.dense_tensor(name) if self.dense else None


TARGETS: dict[str, Target] = {
    # The layer's current weights on its own input, as in the paper.
    "layer": Target(lambda scoring, dense: None),
    # The dense model's output on inputs that have not drifted.
    "dense": Target(lambda scoring, dense: scoring.reference, dense=True),
    # The same; a layer that adds to a residual matches the dense model's sum.
    "residual": Target(lambda scoring, dense: scoring.reference, dense=True, drift=True),
    # The output of the model at the start of the round: the dense one at first, the fine-tuned one later.
    "model": Target(lambda scoring, dense: scoring.reference if dense else scoring.current_copy()),
}
