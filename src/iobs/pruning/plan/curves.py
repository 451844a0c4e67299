"""Damage curves: nats that the model loses if one layer alone is pruned, by what the layer keeps.

A sweep through the dense model gives the Gram of every layer. The layer is solved on it at a few densities, and its
squared output errors are priced by the Fisher information of the rows. Errors on the samples that a layer was solved
for are too small, so a part of the calibration samples measures them.

Curves of the same layer in different blocks have different heights and nearly one shape. Of a deep model a few blocks
are measured at all densities, the others at one, and get the shape of those.

Where a model gives one output for a sample, errors at many positions come together in it, and prices that add up
squares can be wrong by a factor. There the damage of each layer is also measured once, at the density of the whole
model, and scales its curve. The trials of all layers share a fixed number of samples: their cost is linear in depth.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from statistics import fmean, median

import torch
from torch import Tensor, nn

from iobs.core.patterns import Unstructured
from iobs.pruning.calibration.gram import Gram, Statistics
from iobs.pruning.calibration.losses import answered, kl_to_answers, mean_loss
from iobs.pruning.calibration.row_fisher import PROBE, RowFisher
from iobs.pruning.calibration.sweep import Moments, Sweep
from iobs.pruning.layerwise.patterns import solver_without_grid
from iobs.pruning.layerwise.problem import Task, can_share, solve_layer, solve_together
from iobs.pruning.network.layers import Layer
from iobs.pruning.plan.counts import Curve
from iobs.pruning.recipe import LayerSettings, Recipe
from iobs.pruning.report import AllocationRecord, JsonObject
from iobs.pruning.runtime.ranks import current
from iobs.pruning.samples.batches import Samples, positions, split
from iobs.pruning.workspace import Workspace

CURVE_ROWS = 256  # least number of rows that stand for a layer; 1,024 move a hundredth of the weights (LOG.md)
CURVE_TOKENS = 4096  # most positions of text for curves; twice as many move a hundredth of the weights (LOG.md)
WHOLE_CURVES = 8  # of like layers in different blocks, about how many are measured at all densities
SINGLE = 1  # position of the density at which the others are measured
POSITIONS = 16  # positions per sample of a convolution; curves need fewer than weights do
EVALUATION_SHARE = 0.2  # share of the calibration samples that measure errors, besides the held-out ones

TRIAL_SAMPLES = 6000  # of the trials of all layers together; a pass of each through the whole model
TRIAL_TOKENS = 2048  # about as many positions has a trial of texts; five times as many divide no better (LOG.md)
_NEARLY_DENSE = 0.99  # share of nonzero weights from which some rows stand for a layer: others have uneven zeros
_LEAST_SHARE = 1e-12  # of the energy, below which a damage is rounding
LEAST_TRIAL = 16  # samples of one trial, below which it says nothing: no trials in models of more layers
_MOST_CORRECTION = 1e3


@dataclass(frozen=True)
class Damages:
    """Measured damages of one layer.

    Attributes:
        points: (kept entries, damage), ascending in the entries; some of those that the curve needs.
        full: number of nonzero entries of the dense layer.
        energy: damage with no entries.
        priced: True if the damages are in nats; otherwise they are relative errors, since no price is known.
        trial: (kept entries, KL divergence in nats) of the model with the layer pruned; None without a trial.
    """

    points: list[tuple[int, float]]
    full: int
    energy: float
    priced: bool
    trial: tuple[int, float] | None = None

    @classmethod
    def of(cls, values: JsonObject) -> Damages:
        """The damages with these JSON values."""
        points = [(int(keep), float(damage)) for keep, damage in values["points"]]
        trial = None if values["trial"] is None else (int(values["trial"][0]), float(values["trial"][1]))
        return cls(points, values["full"], values["energy"], values["priced"], trial)

    def shaped(self, like: Sequence[Damages]) -> Damages:
        """The damages with all points of layers of one kind, from a single point and the shape of their curves.

        The shape is the median: layers with redundant inputs have damages of nearly zero at some densities.
        """
        ((measured, damage),) = self.points
        curves = [{keep: max(value, _LEAST_SHARE * other.energy) for keep, value in other.points} for other in like]
        ratios: dict[int, list[float]] = {}
        for curve in curves:
            for keep, value in curve.items() if curve.get(measured) else ():
                ratios.setdefault(keep, []).append(value / curve[measured])
        points = [(keep, min(damage * median(values), self.energy)) for keep, values in sorted(ratios.items())]
        return replace(self, points=points or self.points)

    def curve(self) -> Curve:
        """The curve through all points."""
        curve = Curve.of([*self.points, (self.full, 0.0)], self.energy, self.priced)
        if self.trial is None or curve.at(self.trial[0]) <= 0:
            return curve
        factor = self.trial[1] / curve.at(self.trial[0])
        factor = factor if math.isfinite(factor) else _MOST_CORRECTION  # the network is destroyed
        return curve.times(min(max(factor, 1 / _MOST_CORRECTION), _MOST_CORRECTION))


def fit_and_evaluation(calibration: Samples, heldout: Samples, seed: int) -> tuple[Samples, Samples]:
    """Samples that layers are solved for, and samples that errors are measured on: the rest, and the held-out ones."""
    fit, rest = split(calibration, EVALUATION_SHARE, seed)
    return fit, Samples(rest.batches + heldout.batches, rest.numbers + heldout.numbers)


def judges_of(workspace: Workspace) -> Samples:
    """Samples that judge trials: those that no layer is solved for, if there are any."""
    _, evaluation = fit_and_evaluation(workspace.fit, workspace.heldout, workspace.request.seed)
    return evaluation if evaluation.batches else workspace.fit


def trial_answers(workspace: Workspace, samples: int) -> Samples:
    """At most `samples` samples that no layer is solved for, with the outputs of the dense model.

    None if they are too few to say anything, if the model is not in memory, or if it gives an output at every position,
    where prices of rows are enough. Without gradients there are no prices, and trials are the only common measure.
    """
    if samples < LEAST_TRIAL or not workspace.store.whole or workspace.fisher.by_position:
        return Samples()
    judges = judges_of(workspace)
    longest = max(map(positions, judges.batches))
    return answered(workspace.store.model, judges.first(min(samples, most_of_trial(longest))))


def most_of_trial(length: float) -> int:
    """Most samples that judge one trial; each has `length` positions."""
    return min(PROBE, max(LEAST_TRIAL, int(TRIAL_TOKENS / length)))


def dense_sweep(workspace: Workspace, layers: tuple[Layer, ...], fit: Samples, heldout: Samples) -> Sweep:
    """A sweep through the dense model that changes nothing, of at most `CURVE_TOKENS` positions of each samples."""
    return Sweep(
        workspace.store.model,
        fit.first(fit.samples, CURVE_TOKENS),
        heldout.first(heldout.samples, CURVE_TOKENS),
        layers,
        workspace.chain,
        moments=Moments(workspace.request.seed, POSITIONS),
        ranks=current(),
        residency=workspace.store,
        changes=False,
        tables={layer: metric for layer, metric in workspace.table_metrics.items() if layer in layers},
    )


def row_step(rows: int, groups: int) -> int:
    """Every how many-th row of a layer is solved for its curve; 1: all rows.

    Rows have the same Hessian, so a few hundred of them show the error of all.

    Args:
        rows: of the layer's matrix.
        groups: of a convolution, which have Hessians of their own.
    """
    return 1 if groups > 1 else max(1, rows // CURVE_ROWS)


def with_whole_curves(layers: Sequence[Layer]) -> list[Layer]:
    """The layers that are measured at all densities: all of a few like ones, evenly spread ones of many."""
    return [layer for like in _by_kind(layers).values() for layer in _evenly(like, WHOLE_CURVES)]


def _evenly(layers: Sequence[Layer], count: int) -> list[Layer]:
    """At most `count` layers, the first and the last among them; no step that parts of a block could share."""
    if len(layers) <= count:
        return [*layers]
    return [layers[round(place * (len(layers) - 1) / (count - 1))] for place in range(count)]


def recipe_of_curves(recipe: Recipe) -> Recipe:
    """The recipe of the solves that measure damages: quick, and on no grid."""
    fast = recipe.with_quick_solver()
    return fast.but(solver=solver_without_grid(fast.solver))


@dataclass
class CurveSweep:
    """Measurement of layers in one sweep through the dense model.

    Args:
        workspace: state of the run; the model is dense.
        layers: the layers to measure.
        settings: how each layer is solved.
        densities: measured shares of entries, ascending.
        trial_density: density at which the damage is measured too, or None.
        statistics: filled with the Grams of every layer, if they are kept; otherwise None.
    """

    workspace: Workspace
    layers: tuple[Layer, ...]
    settings: Mapping[Layer, LayerSettings]
    densities: Sequence[float]
    trial_density: float | None = None
    statistics: dict[Layer, Statistics] | None = None

    def curves(self) -> dict[Layer, Curve]:
        """The curves of all layers that receive input, in nats.

        Layers that no gradient reaches have a typical price: the geometric mean of the energies of the others.
        """
        damages = dict(self._measured())
        curves: dict[Layer, Curve] = {}
        whole = [layer for layer in self._whole if layer in damages and _is_dense(layer, damages[layer].full)]
        like = {kind: [damages[layer] for layer in layers] for kind, layers in _by_kind(whole).items()}
        for layer, entry in damages.items():
            if len(entry.points) == 1 and _is_dense(layer, entry.full) and layer not in self._whole:
                entry = entry.shaped(like.get(_kind(layer), []))
            curves[layer] = entry.curve()
        energies = [curve.energy for curve in curves.values() if curve.priced]
        typical = math.exp(fmean([math.log(energy) for energy in energies if energy > 0] or [0.0]))
        if not energies:
            self.workspace.note(
                "No gradient of the model's outputs reaches a layer: layers are compared by relative error."
            )
        return {layer: curve if curve.priced else curve.times(typical) for layer, curve in curves.items()}

    @cached_property
    def _whole(self) -> dict[Layer, None]:
        return dict.fromkeys(with_whole_curves(self.layers))

    def _measured(self) -> Iterator[tuple[Layer, Damages]]:
        workspace = self.workspace
        fisher = workspace.fisher  # before the sweep: its passes load and release blocks
        parts = fit_and_evaluation(workspace.fit, workspace.heldout, workspace.request.seed)
        sweep = dense_sweep(workspace, self.layers, *parts)
        done = 0
        for group in sweep.groups():
            statistics = cache(group.statistics)  # not called if the checkpoint holds the damages
            for layer in group.layers:
                values = workspace.checkpoint.remembered(
                    f"damages of {layer.name}", partial(self._damages, layer, statistics, fisher)
                )
                if self.statistics is not None:
                    self.statistics[layer] = statistics()
                done += 1
                workspace.callbacks.on_measure("error curves of layers", done, len(self.layers))
                yield layer, Damages.of(values)

    @torch.no_grad()
    def weight_at(self, layer: Layer, keep: int) -> Tensor:
        """The layer's weight (rows, columns) with `keep` entries, from its kept Grams."""
        assert self.statistics is not None
        task = self._task(layer, layer.read(self.workspace.store.model), keep)
        (weight,) = _solved([task], self.statistics[layer])
        return weight

    @torch.no_grad()
    def _damages(self, layer: Layer, inputs: Callable[[], Statistics], fisher: RowFisher) -> JsonObject:
        """The values of the damages of one layer, at all densities or at one."""
        statistics = inputs()
        dense = layer.read(self.workspace.store.model)
        gram = statistics.heldout or statistics.calibration
        prices = fisher.price(layer, gram)
        full = int(torch.count_nonzero(dense)) or layer.weights
        complete = _is_dense(layer, full)
        of_rows = _damages_of_rows(gram, dense, prices)
        step = row_step(layer.shape[0], layer.groups) if complete else 1
        sample = _spread(of_rows, step)
        rows, prices_of_rows = dense[sample], None if prices is None else prices[sample.cpu()]
        energy, sampled = float(of_rows.sum()), float(of_rows[sample].sum())
        scale = (energy if prices is not None else 1.0) / max(sampled, 1e-30)
        keeps = [max(1, round(density * layer.weights)) for density in self.densities]
        keeps = [keep for keep in dict.fromkeys(keeps) if keep < full]
        if complete and layer not in self._whole:
            keeps = keeps[SINGLE : SINGLE + 1] or keeps
        weights = _solved([self._task(layer, rows, keep, sample) for keep in keeps], statistics)
        points: list[tuple[int, float]] = []
        for keep, weight in zip(keeps, weights, strict=True):
            damage = scale * float(_damages_of_rows(gram, weight - rows, prices_of_rows).sum())
            # A damage that grows with more entries is noise of the solver.
            points.append((keep, min([damage, *(before for _, before in points)])))
        trial, keep = None, 0 if self.trial_density is None else max(1, round(self.trial_density * layer.weights))
        if self._answers.batches and prices is not None and 0 < keep < full:
            (weight,) = _solved([self._task(layer, dense, keep)], statistics)
            trial = keep, self._divergence(layer, weight)
        priced = prices is not None
        return asdict(Damages(points, full, energy if priced else 1.0, priced, trial))

    @cached_property
    def _answers(self) -> Samples:
        """Samples of the trials with the outputs of the dense model; none if the trials of all layers cost too much."""
        return trial_answers(self.workspace, TRIAL_SAMPLES // len(self.layers))

    def _divergence(self, layer: Layer, weight: Tensor) -> float:
        """KL divergence in nats from the dense model to the model with another weight of one layer."""
        model = self.workspace.store.model
        with weights_written(model, {layer: weight}):
            return mean_loss(model, self._answers, kl_to_answers)

    def _task(self, layer: Layer, rows: Tensor, keep: int, sample: Tensor | None = None) -> Task:
        """Rows of the layer's weight, all or a sample of them, to prune to the density of `keep` entries of it."""
        settings, metric = self.settings[layer], self.workspace.metric_of(layer)
        if len(rows) < layer.shape[0]:
            keep = max(1, round(keep * rows.numel() / layer.weights))
            layer = replace(layer, shape=(len(rows), layer.shape[1]))
        # Rows are solved one by one: a curve needs the shape of the damage alone.
        metric = None if metric is None else metric.uncoupled(sample)
        zeros = rows if settings.keep_zeros else None
        return Task(layer, Unstructured(keep=keep), rows, None, settings, zeros, metric=metric)


def _solved(tasks: Sequence[Task], statistics: Statistics) -> Iterator[Tensor]:
    """The weights (rows, columns) of one layer's tasks, which differ in their patterns.

    One process computes every factorisation once for all of them; several processes divide the tasks.
    """
    if not tasks:
        return iter(())
    ranks = current()
    if ranks.size == 1 and can_share([task.layer for task in tasks], [task.settings for task in tasks]):
        return (solution.weight for solution in solve_together(tasks, statistics))

    def weight(place: int) -> Tensor:
        return torch.cat([solution.weight for solution in solve_layer(tasks[place], statistics)])

    return ranks.each(weight, len(tasks), tasks[0].current)


def _kind(layer: Layer) -> tuple[str, tuple[int, int]]:
    """The name without the numbers of blocks, and the shape; layers that share them have curves of like shape."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", layer.name), layer.shape


def _by_kind(layers: Iterable[Layer]) -> dict[tuple[str, tuple[int, int]], list[Layer]]:
    """Layers by their kinds, in their order."""
    kinds: dict[tuple[str, tuple[int, int]], list[Layer]] = {}
    for layer in layers:
        kinds.setdefault(_kind(layer), []).append(layer)
    return kinds


def _is_dense(layer: Layer, full: int) -> bool:
    """True if a layer with `full` nonzero entries is nearly dense: some rows, and the shape of others, stand for it."""
    return full >= _NEARLY_DENSE * layer.weights


def _spread(of_rows: Tensor, step: int) -> Tensor:
    """Numbers of the rows that stand for a layer: every step-th in the order of their energies, int64.

    Few rows may have most of the energy. In this order, every part of it has its share.
    """
    return torch.arange(len(of_rows), device=of_rows.device) if step == 1 else of_rows.argsort()[step // 2 :: step]


def _damages_of_rows(gram: Gram, change: Tensor, prices: Tensor | None) -> Tensor:
    """The price of a change (rows, columns) of each row, (rows,) float64; without prices its squared output error."""
    errors = gram.energies(change)
    return errors if prices is None else errors * prices.to(errors.device, errors.dtype)


@contextmanager
def weights_written(
    model: nn.Module, weights: Mapping[Layer, Tensor], biases: Mapping[str, Tensor] | None = None
) -> Iterator[None]:
    """Context in which some layers have other weights; those of the model are restored on exit.

    Args:
        model: the model.
        weights: (rows, columns), by layer.
        biases: (rows,), by the name of the parameter.
    """
    kept = {layer: layer.read(model) for layer in weights}
    vectors = {model.get_parameter(name).detach(): value for name, value in (biases or {}).items()}
    kept_vectors = {vector: vector.clone() for vector in vectors}
    with torch.no_grad():
        try:
            for layer, weight in weights.items():
                layer.write(model, weight)
            for vector, value in vectors.items():
                vector.copy_(value)
            yield
        finally:
            for layer, weight in kept.items():
                layer.write(model, weight)
            for vector, value in kept_vectors.items():
                vector.copy_(value)


def allocation_record_of(layer: Layer, curve: Curve, keep: int) -> AllocationRecord:
    """The sparsity of a layer and its curve, for the report."""
    return AllocationRecord(
        name=layer.name,
        shape=layer.shape,
        sparsities=[1 - count / layer.weights for count in curve.keeps],
        errors=[damage / max(curve.energy, 1e-30) for damage in curve.damages],
        effects=curve.damages,
        chosen=1 - keep / layer.weights,
    )
