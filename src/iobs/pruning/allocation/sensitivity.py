"""Layer sensitivity: error curves per layer, and their effects on the model's loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial

import torch
from torch import Tensor, nn

from iobs.core.patterns import Pattern, Unstructured
from iobs.core.quadratic import Solution
from iobs.pruning.allocation.counts import (
    Curve,
    global_sparsity,
    keep_ranges,
    optimal_counts,
    total_kept,
    within_support,
)
from iobs.pruning.allocation.kin import Kin
from iobs.pruning.allocation.measurements import EVALUATION_SHARE, Measured, fit_and_evaluation, row_step
from iobs.pruning.allocation.output_fisher import output_fisher
from iobs.pruning.allocation.response import Trial, common_response, complete
from iobs.pruning.allocation.trials import Trials
from iobs.pruning.calibration.blocks import Block
from iobs.pruning.calibration.gram import Statistics, relative_output_error
from iobs.pruning.calibration.losses import answered, kl_to_answers, mean_loss
from iobs.pruning.calibration.replay import Stream
from iobs.pruning.calibration.residency import Residency
from iobs.pruning.calibration.sweep import Moments, Sweep
from iobs.pruning.network.layers import Layer
from iobs.pruning.recipe import Allocation
from iobs.pruning.report import AllocationRecord, JsonObject
from iobs.pruning.runtime.checkpoint import Checkpoint
from iobs.pruning.runtime.ranks import current
from iobs.pruning.samples import batches
from iobs.pruning.samples.subsets import Samples

_LEVELS = (1 / 6, 1 / 3, 2 / 3, 1.0, 1.5, 2.5)  # measured densities of a layer, relative to that of the whole model
CURVE_LEVELS = len(_LEVELS)
_TRIAL_LEVELS = (1 / 6, 1.0, 2.5)  # the levels at which the damage is measured too
_DENSEST = 0.9  # upper limit of the measured densities; at density 1 the error is zero
_NO_ERROR = 1e-9  # relative error up to which a trial counts as unchanged, such as for layers of mostly zeros
_POSITIONS = 16  # positions per sample of a convolution; curves need fewer than weights do
PROBE = 300  # most samples for gradients and divergences
PROBE_TOKENS = 16384  # most positions of text for gradients and divergences; each position has its own distribution
_PASSES = 4.0  # passes of the calibration samples for the trials of all layers together, through half of the model each
_LEAST_PASSES = 600  # the same in samples: for few calibration samples
_MOST_PASSES = 6000  # the same in samples: more do not help
_PROBE_PLACE = 1  # of the hidden states of the trials, among the streams of a sweep with one model
_FEWEST = 16  # least number of samples of one trial, also if that takes more passes
_BLOCK_SAMPLES = 32  # samples of a trial through one block
CURVE_TOKENS = 65536  # most positions of text for curves
_SEARCH_ENTRIES = 2**24  # most entries of all stored Grams; a search solves layers from stored Grams
ENOUGH_OUTPUTS = 150  # least number of outputs that can judge a search; with fewer, the best of 100 trials is noise

SolveLayer = Callable[[Layer, Statistics, Tensor, Pattern], list[Solution]]


@dataclass
class Planner:
    """Measure a dense model and allocate its sparsity.

    Args:
        model: the dense model; restored after every trial.
        layers: the layers to prune.
        chain: blocks along which the model can be run.
        calibration: calibration samples. Most of them give the Grams that layers are solved with. Errors and
            divergences are measured on the rest and on the held-out samples, because errors on few fitted samples are
            too small.
        heldout: held-out samples of the run.
        solve: (layer, statistics, dense weight, pattern) -> solutions, one per group of the layer.
        seed: seed of every random choice.
        on_progress: called with (task, done, total).
        on_note: called with a sentence on a decision.
        residency: of the blocks.
        checkpoint: keeps the measurements of every layer.

    Attributes:
        measured: results by layer.
    """

    model: nn.Module
    layers: tuple[Layer, ...]
    chain: list[Block]
    calibration: Samples
    heldout: Samples
    solve: SolveLayer
    seed: int
    on_progress: Callable[[str, int, int], None] = lambda task, done, total: None
    on_note: Callable[[str], None] = lambda text: None
    residency: Residency = field(default_factory=Residency)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    measured: dict[Layer, Measured] = field(default_factory=dict)

    @cached_property
    def parts(self) -> tuple[Samples, Samples]:
        """Samples that layers are solved for, and samples that errors and divergences are measured on."""
        return fit_and_evaluation(self.calibration, self.heldout, self.seed)

    @property
    def output_count(self) -> int:
        """Number of outputs of the model (samples times positions) that a search is judged by."""
        return sum(batches.size(batch) * batches.positions(batch) for batch in self._answered.batches)

    def allocate(self, pattern: Pattern, allocation: Allocation) -> tuple[dict[Layer, int], list[AllocationRecord]]:
        """The number of entries that every layer keeps, and the measurements behind it.

        Layers that receive no input are left out.

        Raises:
            PatternError: the bounds of the layers that receive input do not allow the sparsity.
        """
        sparsity = global_sparsity(pattern)
        assert sparsity is not None, "under_pattern accepts no other pattern"
        ranges = keep_ranges(allocation, self.layers, sparsity)
        without_input = self._measure(1 - sparsity, allocation)
        self.layers = tuple(layer for layer in self.layers if layer not in without_input)
        curves = {layer: self.measured[layer].curve for layer in self.layers}
        total = total_kept(self.layers, sparsity)
        ranges = within_support(curves, {layer: ranges[layer] for layer in self.layers}, total)
        found = self._effects(allocation, curves)
        if not found:
            self.on_note(f'No layer has an effect that "{allocation.criterion}" measures: sparsities are by "error".')
        effects = complete(found, curves)
        counts = optimal_counts(effects, total, ranges)
        if allocation.criterion == "evolve":
            counts = self._evolve(counts, {layer: ranges[layer] for layer in found}, allocation.generations)
        records = [_record(layer, curves[layer], effects[layer], counts[layer]) for layer in self.layers]
        return counts, records

    # ---- curves
    def _measure(self, density: float, allocation: Allocation) -> list[Layer]:
        """Measure the curves of all layers; returns the layers that receive no input."""
        levels = sorted({min(level * density, _DENSEST) for level in _LEVELS})
        by_block = allocation.criterion == "block"
        tries = allocation.by_damage or by_block
        tried = {min(level * density, _DENSEST) for level in _TRIAL_LEVELS} if tries else set()
        calibration, heldout = (part.first(part.samples, CURVE_TOKENS) for part in self.parts)
        sweep = Sweep(
            self.model,
            calibration,
            heldout,
            self.layers,
            self.chain,
            moments=Moments(self.seed, _POSITIONS),
            ranks=current(),
            residency=self.residency,
            followers=(),
        )
        trials = self._trials(sweep, by_block) if tries and self.chain else None
        kin = Kin(self.layers if by_block else (), self.chain)
        likened: dict[Layer, int] = {}
        for group in sweep.groups():
            if group.stack is not None:
                kin.meet(group.stack, self.checkpoint)
            statistics = cache(group.statistics)  # not called if the checkpoint holds the curves
            for layer in group.layers:
                if kin.covers(layer, self.measured):
                    likened[layer] = int(torch.count_nonzero(layer.read(self.model))) or layer.weights
                    continue
                measure = partial(self._measure_layer, layer, statistics, levels, tried, trials)
                found = self.checkpoint.remembered(f"curve of {layer.name}", measure)
                self.measured[layer] = Measured.of(found, statistics() if allocation.criterion == "evolve" else None)
                self.on_progress("error curves of layers", len(self.measured) + len(likened), len(self.layers))
        self.measured |= {layer: kin.likened(layer, count, self.measured) for layer, count in likened.items()}
        return [*sweep.without_input]

    def _trials(self, sweep: Sweep, by_block: bool) -> Trials:
        """The trials of layers along the blocks, on samples that follow the sweep through the dense model."""
        if by_block:
            part, answers = self._judges.first(_BLOCK_SAMPLES), None
        else:
            part = self._probe
            # A batch is (inputs, outputs of the dense model, labels if any).
            answers = [batch[1] for batch in part.batches]  # type: ignore[index]
            part = Samples([(batch[0], *batch[2:]) for batch in part.batches], part.numbers)  # type: ignore[index]
        place, ranks = sweep.place(_PROBE_PLACE), sweep.ranks
        stream = Stream(self.model, ranks.share(part).batches, self.chain, keep=place)
        sweep.followers = [stream]
        return Trials(stream, answers and answers[ranks.rank :: ranks.size])

    @torch.no_grad()
    def _measure_layer(
        self,
        layer: Layer,
        inputs: Callable[[], Statistics],
        levels: list[float],
        tried: set[float],
        along: Trials | None,
    ) -> JsonObject:
        """The values of the error of one layer at each density of `levels`, and of the damage at those of `tried`.

        Args:
            layer: the layer.
            inputs: computes the Grams of its input.
            levels: densities.
            tried: those of them with a trial.
            along: trials along the blocks; None: trials run the whole model.
        """
        statistics = inputs()
        stage = None if along is None else along.stream.block_of(layer)
        if along is not None and stage is not None and tried:
            along.prepare(stage)
        dense = layer.read(self.model)
        judged = statistics.heldout or statistics.calibration
        energy = judged.energy(dense)
        full = int(torch.count_nonzero(dense)) or layer.weights
        counts = {max(1, round(level * layer.weights)): level for level in reversed(levels)}
        wanted = sorted((level, keep) for keep, level in counts.items() if keep < full)
        sampled = row_step(layer.shape[0], layer.groups) if full == layer.weights else 1
        steps = [1 if level in tried else sampled for level, _ in wanted]
        keeps: list[int] = []
        errors: list[float] = []
        trials: list[Trial] = []
        weights = current().each(
            lambda place: self._solved(layer, statistics, dense, wanted[place][1], steps[place]), len(wanted), dense
        )
        for (level, keep), step, weight in zip(wanted, steps, weights, strict=True):
            part = energy if step == 1 else judged.energy(dense[::step])
            error = energy * relative_output_error(judged, weight[::step], dense[::step], energy=part)
            keeps.append(keep)
            errors.append(min([error, *errors]))  # an error that grows with more entries is noise of the solver
            if level in tried and error > _NO_ERROR * energy:
                damage = self._damage_along(along, stage, layer, weight)
                if damage is not None:
                    trials.append(Trial(error, damage))
        return Measured(Curve([*keeps, full], [*errors, 0.0], energy), trials).values()

    def _solved(self, layer: Layer, statistics: Statistics, dense: Tensor, keep: int, step: int = 1) -> Tensor:
        """The layer's weight (rows, columns), pruned to `keep` entries; every step-th row alone to the same density."""
        if step > 1:
            found, rows = dense.clone(), dense[::step]
            part = replace(layer, shape=(len(rows), layer.shape[1]))
            share = rows.numel() / layer.weights
            found[::step] = self._solved(part, statistics, rows, max(1, round(share * keep)))
            return found
        solutions = self.solve(layer, statistics, dense, Unstructured(keep=keep))
        return torch.cat([solution.weight for solution in solutions])

    # ---- effects
    def _effects(self, allocation: Allocation, curves: dict[Layer, Curve]) -> dict[Layer, Curve]:
        """The effects of output errors on the model, for the layers that have a measurable effect.

        Layers that do not affect the logits have no measurable effect; `complete` gives them a typical effect.
        """
        if allocation.criterion == "error":
            return {layer: curve.times(1 / max(curve.energy, 1e-30)) for layer, curve in curves.items()}
        if allocation.criterion == "fisher":
            weights = output_fisher(self.model, self.layers, self.calibration.first(PROBE, PROBE_TOKENS), self.seed)
            return {layer: curves[layer].times(weight) for layer, weight in weights.items()}
        untouched = 0.0 if allocation.criterion == "block" else self._damage({})
        # The comparison is exact, since a tiny effect is a measurement: the layer is cheap to prune.
        trials = {
            layer: self.measured[layer].trials
            for layer in self.layers
            if any(trial.damage != untouched for trial in self.measured[layer].trials)
        }
        response = common_response([*trials.values()])
        return {layer: response.effects(curves[layer], own) for layer, own in trials.items()}

    def _damage_along(self, along: Trials | None, stage: int | None, layer: Layer, weight: Tensor) -> float | None:
        """The damage of one changed layer; None if a trial through one block cannot measure it."""
        if along is None:
            return self._damage({layer: weight})
        if stage is None:
            return None if along.answers is None else self._damage({layer: weight})
        with self._written({layer: weight}):
            return along.damage(stage)

    def _damage(self, weights: dict[Layer, Tensor]) -> float:
        """KL divergence from the dense model to the model with the given weights in some layers."""
        probe = self._probe
        with self._written(weights):
            return mean_loss(self.model, probe, kl_to_answers)

    @cached_property
    def _answered(self) -> Samples:
        """Samples with the outputs of the dense model. The first use must come while the model is dense."""
        return answered(self.model, self._judges)

    @property
    def _judges(self) -> Samples:
        """Samples that no layer is solved for, if there are any."""
        _, evaluation = self.parts
        part = evaluation if evaluation.batches else self.calibration
        return part.first(PROBE, PROBE_TOKENS)

    @cached_property
    def _probe(self) -> Samples:
        """The samples on which the damage of each layer is measured."""
        return self._answered.first(samples_per_trial(len(self.layers), self.calibration.samples))

    # ---- search
    def _evolve(
        self, counts: dict[Layer, int], ranges: dict[Layer, tuple[int, int]], generations: int
    ) -> dict[Layer, int]:
        """Move weights between two random layers, and keep moves that lower the divergence of the model (EvoPress).

        Args:
            counts: entries that each layer keeps, for all layers.
            ranges: least and greatest count of each layer that takes part in the search.
            generations: number of trials.
        """
        layers = tuple(ranges)
        if len(layers) < 2:
            return counts
        generator = torch.Generator().manual_seed(self.seed)
        answered_samples = self._answered
        weights = {layer: self._weight_at(layer, counts[layer]) for layer in self.layers}
        with self._written(weights):
            best = mean_loss(self.model, answered_samples, kl_to_answers)
        for generation in range(1, generations + 1):
            self.on_progress("moves of weights between layers", generation, generations)
            giver, taker = (layers[i] for i in torch.randperm(len(layers), generator=generator)[:2].tolist())
            share = 0.02 + 0.18 * float(torch.rand((), generator=generator))
            moved = round(share * min(counts[giver], counts[taker]))
            moved = min(moved, counts[giver] - ranges[giver][0], ranges[taker][1] - counts[taker])
            if moved <= 0:
                continue
            trial = {giver: counts[giver] - moved, taker: counts[taker] + moved}
            changed = {layer: self._weight_at(layer, keep) for layer, keep in trial.items()}
            with self._written({**weights, **changed}):
                found = mean_loss(self.model, answered_samples, kl_to_answers)
            if found < best:
                best, counts, weights = found, {**counts, **trial}, {**weights, **changed}
        return counts

    def _weight_at(self, layer: Layer, keep: int) -> Tensor:
        """The layer's weight with `keep` entries, from its stored Grams."""
        statistics = self.measured[layer].statistics
        assert statistics is not None
        return self._solved(layer, statistics, layer.read(self.model), keep)

    @contextmanager
    def _written(self, weights: dict[Layer, Tensor]) -> Iterator[None]:
        """Write other weights into some layers; the weights of the model are restored on exit."""
        kept = {layer: layer.read(self.model) for layer in weights}
        with torch.no_grad():
            try:
                for layer, weight in weights.items():
                    layer.write(self.model, weight)
                yield
            finally:
                for layer, weight in kept.items():
                    layer.write(self.model, weight)


def evaluation_share(holdout: float) -> float:
    """Number of evaluation samples per calibration sample, if a share `holdout` of all samples is held out."""
    return EVALUATION_SHARE + holdout / (1 - holdout)


def samples_per_trial(layers: int, samples: int) -> int:
    """Number of samples in each trial, for a model of `layers` layers and a number of calibration samples."""
    passes = min(max(_PASSES * samples, _LEAST_PASSES), _MOST_PASSES)
    return max(_FEWEST, int(passes) // (len(_TRIAL_LEVELS) * layers))


def damage_passes(layers: int, available: int, samples: int) -> int:
    """Forward passes (in samples) for the trials of `layers` layers; `available` samples can judge them.

    Args:
        layers: number of layers.
        available: number of samples that can judge a trial.
        samples: number of calibration samples.
    """
    return len(_TRIAL_LEVELS) * layers * min(available, samples_per_trial(layers, samples))


def can_keep_grams(layers: tuple[Layer, ...]) -> bool:
    """Check that the Grams of all layers are small enough to be kept for a search."""
    return sum(layer.groups * layer.shape[1] ** 2 for layer in layers) <= _SEARCH_ENTRIES


def _record(layer: Layer, curve: Curve, effect: Curve, keep: int) -> AllocationRecord:
    return AllocationRecord(
        name=layer.name,
        shape=layer.shape,
        sparsities=[1 - count / layer.weights for count in curve.keeps],
        errors=[error / max(curve.energy, 1e-30) for error in curve.errors],
        effects=effect.errors,
        chosen=1 - keep / layer.weights,
    )
