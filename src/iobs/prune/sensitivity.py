"""What pruning each layer costs the network: error curves, and the effects that make them comparable."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean

import torch
from torch import Tensor, nn

from iobs.core.patterns import Pattern, Unstructured
from iobs.core.quadratic import Solution
from iobs.prune import batches
from iobs.prune.allocation import Allocation, Curve, global_sparsity, optimal_counts, total_kept
from iobs.prune.gram import Statistics, relative_output_error
from iobs.prune.layers import Layer
from iobs.prune.losses import answered, kl_to_answers, mean_loss
from iobs.prune.output_fisher import output_fisher
from iobs.prune.parts import Part, split
from iobs.prune.record import AllocationRecord
from iobs.prune.response import Trial, common_response
from iobs.prune.trace import Block
from iobs.prune.walk import Walk

# What a curve is measured at: multiples of the density that the whole network is to have.
_LEVELS = (1 / 6, 1 / 3, 2 / 3, 1.0, 1.5, 2.5)
_DENSEST = 0.9  # measured levels end here; at density 1 the error is zero
_TRIED = (1 / 6, 1.0, 2.5)  # those at which the damage is measured, too
_NO_ERROR = 1e-9  # of a layer's energy: a trial with less changed nothing, as where most entries were zero before
_POSITIONS = 16  # of a convolution, for each sample; curves need less than the weights themselves
_JUDGES = 0.2  # of the calibration samples: damage is measured on them and on the held-out ones
PROBE = 300  # samples that gradients and divergences are measured on
_PASSES = 6000  # samples that the divergences of all layers together may take,
_FEWEST = 16  # as long as each has so many
PROBE_TOKENS = 16384  # and positions of text, every one of which is a distribution of its own
_ANSWERS = 2**26  # numbers that the dense network's answers to the probe may take
CURVE_TOKENS = 65536  # positions of text that curves are measured on
_SEARCHED = 2**24  # entries of all layers' Grams up to which they can be kept for a search, whose solves are then cheap
ENOUGH = 150  # answers of the network that can judge a search: the least of a hundred noisier figures is mostly noise

SolveLayer = Callable[[Layer, Statistics, Tensor, Pattern], list[Solution]]


@dataclass
class Measured:
    """One layer's curve, the trials in which it alone was pruned, and its Gram if it is needed later."""

    curve: Curve
    trials: list[Trial]
    statistics: Statistics | None = None


@dataclass
class Planner:
    """Measures a dense network and allocates its sparsity.

    Args:
        model: the dense network; put back after every trial.
        layers: what will be pruned.
        chain: blocks along which the network can be run.
        calibration: samples to measure on. Most are what layers are solved for; the rest, with those held out, are what
            errors and divergences are read off on, since a layer that is solved for few samples does little harm on
            the very same ones.
        heldout: samples that the run holds out.
        solve: solves one layer for (layer, statistics, dense weight, pattern).
        seed: of everything drawn.
        told: hears what is measured, how much of it is done, and of how much.
    """

    model: nn.Module
    layers: tuple[Layer, ...]
    chain: list[Block]
    calibration: Part
    heldout: Part
    solve: SolveLayer
    seed: int
    told: Callable[[str, int, int], None] = lambda what, done, total: None
    measured: dict[Layer, Measured] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fit, rest = split(self.calibration, _JUDGES, self.seed)
        self.unseen = Part(rest.batches + self.heldout.batches, rest.numbers + self.heldout.numbers)

    @property
    def answers(self) -> int:
        """How many answers of the network a search is judged by."""
        return sum(batches.size(batch) * batches.positions(batch) for batch in self._judges.batches)

    def allocate(self, pattern: Pattern, allocation: Allocation) -> tuple[dict[Layer, int], list[AllocationRecord]]:
        """How many entries every layer keeps, and why; layers that the network feeds nothing are left out.

        Raises:
            PatternError: the bounds of the layers that are fed do not allow the sparsity.
        """
        sparsity = global_sparsity(pattern)
        assert sparsity is not None, "Allocation.under lets no other pattern through"
        ranges = allocation.ranges(self.layers, sparsity)
        unseen = self._measure(1 - sparsity, allocation)
        self.layers = tuple(layer for layer in self.layers if layer not in unseen)
        curves = {layer: self.measured[layer].curve for layer in self.layers}
        total = total_kept(self.layers, sparsity)
        ranges = within_support(curves, {layer: ranges[layer] for layer in self.layers}, total)
        felt = self._effects(allocation, curves)
        effects = complete(felt, curves)
        counts = optimal_counts(effects, total, ranges)
        if allocation.criterion == "evolve":
            counts = self._evolve(counts, {layer: ranges[layer] for layer in felt}, allocation.generations)
        records = [_record(layer, curves[layer], effects[layer], counts[layer]) for layer in self.layers]
        return counts, records

    # ---- curves
    def _measure(self, density: float, allocation: Allocation) -> list[Layer]:
        """Measure every layer's curve; returns the layers that the network feeds nothing."""
        levels = sorted({min(level * density, _DENSEST) for level in _LEVELS})
        tried = {min(level * density, _DENSEST) for level in _TRIED} if allocation.by_damage else set()

        def visit(group: list[Layer], statistics: Statistics) -> None:
            for layer in group:
                self.measured[layer] = self._measure_layer(layer, statistics, levels, tried)
                self.told("error curves of layers", len(self.measured), len(self.layers))
                if allocation.criterion == "evolve":
                    self.measured[layer].statistics = statistics

        calibration, heldout = (part.first(part.samples, CURVE_TOKENS) for part in (self.fit, self.unseen))
        walk = Walk(self.model, calibration, heldout, self.layers, self.chain, seed=self.seed, positions=_POSITIONS)
        return walk.sweep(visit)

    def _measure_layer(self, layer: Layer, statistics: Statistics, levels: list[float], tried: set[float]) -> Measured:
        dense = layer.read(self.model)
        judged = statistics.heldout or statistics.calibration
        energy = judged.energy(dense)
        full = int(torch.count_nonzero(dense)) or layer.weights
        keeps: list[int] = []
        errors: list[float] = []
        trials: list[Trial] = []
        for level in levels:
            keep = max(1, round(level * layer.weights))
            if keep >= full or (keeps and keep <= keeps[-1]):
                continue
            weight = self._solved(layer, statistics, dense, keep)
            error = energy * relative_output_error(judged, weight, dense)
            keeps.append(keep)
            errors.append(min([error, *errors]))  # more entries never cost more; noise of the solver aside
            if level in tried and error > _NO_ERROR * energy:
                trials.append(Trial(error, self._damage({layer: weight})))
        return Measured(Curve([*keeps, full], [*errors, 0.0], energy), trials)

    def _solved(self, layer: Layer, statistics: Statistics, dense: Tensor, keep: int) -> Tensor:
        solutions = self.solve(layer, statistics, dense, Unstructured(keep=keep))
        return torch.cat([solution.weight for solution in solutions])

    # ---- effects
    def _effects(self, allocation: Allocation, curves: dict[Layer, Curve]) -> dict[Layer, Curve]:
        """What output errors cost the network, for layers that the judged output shows it of.

        It does not of heads behind the network's other outputs, which are not free to prune for that.
        """
        if allocation.criterion == "error":
            return {layer: curve.times(1 / max(curve.energy, 1e-30)) for layer, curve in curves.items()}
        if allocation.criterion == "fisher":
            weights = output_fisher(self.model, self.layers, self.calibration.first(PROBE, PROBE_TOKENS), self.seed)
            return {layer: curves[layer].times(weight) for layer, weight in weights.items()}
        untouched = self._damage({})
        # To the last bit: a layer of little effect has some, and is cheap to prune.
        felt = {
            layer: self.measured[layer].trials
            for layer in self.layers
            if any(trial.damage != untouched for trial in self.measured[layer].trials)
        }
        response = common_response([*felt.values()])
        return {layer: response.effects(curves[layer], trials) for layer, trials in felt.items()}

    def _damage(self, weights: dict[Layer, Tensor]) -> float:
        """Divergence of the network with other weights in some layers from the dense one."""
        probe = self._probe
        with self._written(weights):
            return mean_loss(self.model, probe, kl_to_answers)

    @cached_property
    def _judges(self) -> Part:
        """Samples with the dense network's answers beside them; first asked for while the model is dense."""
        part = self.unseen if self.unseen.batches else self.calibration
        return answered(self.model, part.first(PROBE, PROBE_TOKENS), _ANSWERS)

    @cached_property
    def _probe(self) -> Part:
        """What every layer's own damage is measured on."""
        return self._judges.first(probed(len(self.layers)))

    # ---- search
    def _evolve(
        self, counts: dict[Layer, int], ranges: dict[Layer, tuple[int, int]], generations: int
    ) -> dict[Layer, int]:
        """Move weights between two layers at a time, as long as the divergence of the network falls (EvoPress).

        Only layers with a range take part.
        """
        layers = tuple(ranges)
        if len(layers) < 2:
            return counts
        generator = torch.Generator().manual_seed(self.seed)
        judges = self._judges
        weights = {layer: self._at(layer, counts[layer]) for layer in self.layers}
        with self._written(weights):
            best = mean_loss(self.model, judges, kl_to_answers)
        for generation in range(1, generations + 1):
            self.told("moves of weights between layers", generation, generations)
            giver, taker = (layers[i] for i in torch.randperm(len(layers), generator=generator)[:2].tolist())
            share = 0.02 + 0.18 * float(torch.rand((), generator=generator))
            moved = round(share * min(counts[giver], counts[taker]))
            moved = min(moved, counts[giver] - ranges[giver][0], ranges[taker][1] - counts[taker])
            if moved <= 0:
                continue
            trial = {giver: counts[giver] - moved, taker: counts[taker] + moved}
            changed = {layer: self._at(layer, keep) for layer, keep in trial.items()}
            with self._written({**weights, **changed}):
                found = mean_loss(self.model, judges, kl_to_answers)
            if found < best:
                best, counts, weights = found, {**counts, **trial}, {**weights, **changed}
        return counts

    def _at(self, layer: Layer, keep: int) -> Tensor:
        statistics = self.measured[layer].statistics
        assert statistics is not None
        return self._solved(layer, statistics, layer.read(self.model), keep)

    @contextmanager
    def _written(self, weights: dict[Layer, Tensor]) -> Iterator[None]:
        """The network with other weights in some layers."""
        kept = {layer: layer.read(self.model) for layer in weights}
        with torch.no_grad():
            try:
                for layer, weight in weights.items():
                    layer.write(self.model, weight)
                yield
            finally:
                for layer, weight in kept.items():
                    layer.write(self.model, weight)


def judged_share(holdout: float) -> float:
    """Judging samples for each one calibrated on, where so large a share of all is held out."""
    return _JUDGES + holdout / (1 - holdout)


def probed(layers: int) -> int:
    """Samples that every trial of so many layers is run on."""
    return max(_FEWEST, _PASSES // (len(_TRIED) * layers))


def damage_passes(layers: int, judges: int) -> int:
    """Samples that the trials of so many layers are run on altogether, of so many that judge."""
    return len(_TRIED) * layers * min(judges, probed(layers))


def can_keep_grams(layers: tuple[Layer, ...]) -> bool:
    """Whether the Grams of all layers can be kept for a search."""
    return sum(layer.groups * layer.shape[1] ** 2 for layer in layers) <= _SEARCHED


def within_support(
    curves: dict[Layer, Curve], ranges: dict[Layer, tuple[int, int]], total: int
) -> dict[Layer, tuple[int, int]]:
    """The ranges without counts beyond the entries that are not zero, as long as these are enough in all."""
    narrowed = {
        layer: (fewest, max(fewest, min(most, curves[layer].keeps[-1]))) for layer, (fewest, most) in ranges.items()
    }
    return narrowed if sum(most for _, most in narrowed.values()) >= total else ranges


def complete(found: dict[Layer, Curve], curves: dict[Layer, Curve]) -> dict[Layer, Curve]:
    """Effects of all layers, from their errors: to lose the whole output of one that none is known of is typical."""
    known = [curve.energy for curve in found.values() if curve.energy > 0]
    typical = math.exp(fmean(map(math.log, known))) if known else 1.0
    return {
        layer: found[layer] if layer in found else curve.times(typical / max(curve.energy, 1e-30))
        for layer, curve in curves.items()
    }


def _record(layer: Layer, curve: Curve, effect: Curve, keep: int) -> AllocationRecord:
    return AllocationRecord(
        name=layer.name,
        shape=layer.shape,
        sparsities=[1 - count / layer.weights for count in curve.keeps],
        errors=[error / max(curve.energy, 1e-30) for error in curve.errors],
        effects=effect.errors,
        chosen=1 - keep / layer.weights,
    )
