"""Sparsity and bits of every layer under a budget of bits, from measured error curves.

A layer is solved alone at every bit width and several sparsities. Its errors become effects on the model by the
response that the allocation of sparsity uses (`response.py`), and `knapsack.py` divides the budget. The division is
then tried as a whole, beside uniform plans, with the targets of the run. The plan of least divergence wins, on samples
that no layer was solved for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor, nn

from iobs.core.grids import BITS, MOST, Budget
from iobs.core.patterns import Pattern
from iobs.core.quadratic import Solution
from iobs.errors import PatternError, ProblemError
from iobs.pruning.allocation.counts import Curve
from iobs.pruning.allocation.knapsack import best_choices
from iobs.pruning.allocation.measurements import LayerCurves, fit_and_evaluation
from iobs.pruning.allocation.response import Trial, common_response
from iobs.pruning.allocation.uniform import Choice, uniform_plans
from iobs.pruning.calibration.blocks import Block
from iobs.pruning.calibration.gram import Statistics, relative_output_error
from iobs.pruning.calibration.losses import answered, kl_to_answers, mean_loss
from iobs.pruning.calibration.sweep import Moments, Sweep
from iobs.pruning.network.layers import Layer
from iobs.pruning.report import AllocationRecord, JsonObject
from iobs.pruning.runtime.checkpoint import Checkpoint
from iobs.pruning.samples.subsets import Samples

SolveLayer = Callable[[Layer, Statistics, Tensor, Pattern], list[Solution]]

# Measured sparsities by bits. Low sparsities cost more than they save: the mask has one bit for each entry.
LEVELS = {2: (0.0, 0.5, 0.8), 3: (0.0, 0.5, 0.9), 4: (0.0, 0.3, 0.6, 0.9), 8: (0.0, 0.5, 0.7, 0.9)}
_STEP = 0.05  # between the sparsities that are compared; errors between measured sparsities are interpolated
_TRIALS = (0.6, 1.0, 1.5)  # shares of the budget; the damage of the best choice within each is measured
_POSITIONS = 16  # positions per sample of a convolution
_TOKENS = 65536  # most positions of text for curves
_PROBE, _PROBE_TOKENS = 100, 8192  # most samples and positions of text for divergences

_MEASURED = "by measured damages"  # name of the plan that the curves give


@dataclass
class BitPlanner:
    """Measure a dense model, and divide a budget of bits among its layers.

    Args:
        model: the dense model; restored after every trial.
        layers: the layers to prune.
        chain: blocks along which the model can be run.
        calibration: calibration samples; most give the Grams, the rest and the held-out samples measure.
        heldout: held-out samples of the run.
        solve: (layer, statistics, dense weight, pattern) -> solutions, one per group of the layer.
        seed: of every random choice.
        reference: a dense copy of the model whose outputs the layers of a tried plan match; None: their own outputs.
        drift: whether layers that write into a residual match the dense sum.
        on_progress: called with (task, done, total).
        checkpoint: keeps the measurements of every layer, and of every plan that was tried.
    """

    model: nn.Module
    layers: tuple[Layer, ...]
    chain: list[Block]
    calibration: Samples
    heldout: Samples
    solve: SolveLayer
    seed: int
    reference: nn.Module | None = None
    drift: bool = False
    on_progress: Callable[[str, int, int], None] = lambda task, done, total: None
    checkpoint: Checkpoint = field(default_factory=Checkpoint)

    @torch.no_grad()
    def allocate(self, budget: Budget) -> tuple[dict[Layer, Choice], list[AllocationRecord], dict[str, float]]:
        """Bits and kept entries of every layer that receives input, and the measurements behind them.

        Returns:
            The plan, the curves of every layer, and the divergences of the plans that were tried, by name. The
            divergences are empty if no samples are left to judge the plans.

        Raises:
            PatternError: the budget is not enough for the layers that receive input.
        """
        fit, evaluation = fit_and_evaluation(self.calibration, self.heldout, self.seed)
        probed = evaluation if evaluation.batches else self.calibration
        probe = answered(self.model, probed.first(_PROBE, _PROBE_TOKENS))
        fitted, judging = (part.first(part.samples, _TOKENS) for part in (fit, evaluation))
        moments = Moments(self.seed, _POSITIONS)
        sweep = Sweep(self.model, fitted, judging, self.layers, self.chain, moments=moments)
        measured: dict[Layer, LayerCurves] = {}
        for group in sweep.groups():
            statistics = cache(group.statistics)  # not called if the checkpoint holds the curves
            for layer in group.layers:
                measure = partial(self._measure, layer, statistics, budget, probe)
                measured[layer] = LayerCurves.of(self.checkpoint.remembered(f"curves of {layer.name}", measure))
                self.on_progress("error curves of layers on grids", len(measured), len(self.layers))
        shapes = {layer: layer.shape for layer in measured}
        if measured:  # layers without input share no bits, and the others may need more without them
            require_budget(budget, [*shapes.values()])
        response = common_response([own.trials for own in measured.values() if own.trials])
        effects = {
            layer: {bits: response.effects(curve, own.trials) for bits, curve in own.curves.items()}
            for layer, own in measured.items()
        }
        plans = {_MEASURED: divided(budget, shapes, effects), **_uniform(budget, shapes, effects)}
        # Samples that layers were solved for would judge in favour of plans that fit them.
        tried = {
            name: self.checkpoint.number(
                f"divergence of bits {name}", partial(self._divergence, plan, budget, fitted, probe)
            )
            for name, plan in plans.items()
            if judging.batches
        }
        chosen = plans[min(tried, key=tried.__getitem__)] if tried else plans[_MEASURED]
        records = [_record(layer, measured[layer], effects[layer], *chosen[layer]) for layer in measured]
        return chosen, records, tried

    def _divergence(self, plan: dict[Layer, Choice], budget: Budget, fitted: Samples, probe: Samples) -> float:
        """KL divergence from the dense model to the model under a plan, its layers solved as the run solves them."""
        dense = {layer: layer.tensor(self.model).to("cpu", copy=True) for layer in plan}  # a GPU has no room for them
        moments = Moments(self.seed, _POSITIONS, drift=self.drift)
        sweep = Sweep(self.model, fitted, Samples(), tuple(plan), self.chain, self.reference, moments=moments)
        try:
            for group in sweep.groups():
                statistics = group.statistics()
                for layer in group.layers:
                    pattern = budget.choice(*plan[layer], layer.shape)
                    found = self.solve(layer, statistics, layer.read(self.model), pattern)
                    layer.write(self.model, torch.cat([one.weight for one in found]))
            return mean_loss(self.model, probe, kl_to_answers)
        finally:
            for layer, tensor in dense.items():
                layer.tensor(self.model).copy_(tensor)

    def _measure(self, layer: Layer, inputs: Callable[[], Statistics], budget: Budget, probe: Samples) -> JsonObject:
        """The values of the error of one layer at every level, and of the damage of three of them."""
        statistics = inputs()
        dense = layer.read(self.model)
        judged = statistics.heldout or statistics.calibration
        energy = judged.energy(dense)
        tried = [
            (bits, max(1, round((1 - level) * layer.weights))) for bits, levels in LEVELS.items() for level in levels
        ]
        # Scales of few columns can take more than the budget: without a trial the layer would count as of no effect.
        least = min(budget.cost(*choice, layer.shape) for choice in tried)
        limit = {share: max(budget.bits_per_weight * share * layer.weights, least) for share in _TRIALS}
        points: dict[Choice, float] = {}
        best: dict[float, tuple[float, Tensor]] = {}
        for bits, keep in tried:
            pattern = budget.choice(bits, keep, layer.shape)
            weight = torch.cat([one.weight for one in self.solve(layer, statistics, dense, pattern)])
            error = points[bits, keep] = energy * relative_output_error(judged, weight, dense)
            for share, most in limit.items():
                fits = budget.cost(bits, keep, layer.shape) <= most
                if fits and (share not in best or error < best[share][0]):
                    best[share] = error, weight
        trials = {error: weight for error, weight in best.values() if error > 0}
        damages = [Trial(error, self._damage(layer, weight, probe)) for error, weight in trials.items()]
        curves = {}
        for bits in LEVELS:
            keeps = sorted(keep for own, keep in points if own == bits)
            errors = [points[bits, keep] for keep in keeps]
            falling = [min(errors[: place + 1]) for place in range(len(errors))]
            curves[bits] = Curve(keeps, falling, energy)
        return LayerCurves(curves, damages).values()

    def _damage(self, layer: Layer, weight: Tensor, probe: Samples) -> float:
        """KL divergence from the dense model to the model with other weights in one layer."""
        kept = layer.read(self.model)
        try:
            layer.write(self.model, weight)
            return mean_loss(self.model, probe, kl_to_answers)
        finally:
            layer.write(self.model, kept)


def _uniform(
    budget: Budget, shapes: dict[Layer, tuple[int, int]], effects: dict[Layer, dict[int, Curve]]
) -> dict[str, dict[Layer, Choice]]:
    """The uniform plans to try: without zeros, and the two with zeros of the least sums of effects."""
    plans = uniform_plans(budget, shapes, {bits: levels[-1] for bits, levels in LEVELS.items()})

    def effect(name: str) -> float:
        return sum(effects[layer][bits].at(keep) for layer, (bits, keep) in plans[name].items())

    dense = [name for name in plans if "zeros" not in name]
    sparse = sorted((name for name in plans if "zeros" in name), key=effect)[:2]
    return {name: plans[name] for name in [*dense, *sparse]}


def divided(
    budget: Budget, shapes: dict[Layer, tuple[int, int]], effects: dict[Layer, dict[int, Curve]]
) -> dict[Layer, Choice]:
    """Bits and kept entries of every layer with the least sum of effects, within the budget.

    Bits that the compared sparsities leave over keep further entries of layers with zeros. So fewer bits are left than
    one value has, unless every such layer is full.

    Args:
        budget: the bits.
        shapes: of the layers.
        effects: effect on the model by layer and bits.
    """
    total = math.floor(budget.bits_per_weight * sum(rows * columns for rows, columns in shapes.values()) + 1e-6)
    choices = {layer: _choices(shape) for layer, shape in shapes.items()}
    costs = [[budget.cost(bits, keep, shapes[layer]) for bits, keep in own] for layer, own in choices.items()]
    worth = [[effects[layer][bits].at(keep) for bits, keep in own] for layer, own in choices.items()]
    numbers = best_choices(costs, worth, total)
    found = {layer: own[number] for (layer, own), number in zip(choices.items(), numbers, strict=True)}
    left = total - sum(own[number] for own, number in zip(costs, numbers, strict=True))
    return _filled(found, shapes, effects, left)


def _filled(
    found: dict[Layer, Choice],
    shapes: dict[Layer, tuple[int, int]],
    effects: dict[Layer, dict[int, Curve]],
    left: int,
) -> dict[Layer, Choice]:
    """The choices with `left` more bits in kept entries, in the order of the effect that a bit removes."""

    def gain(layer: Layer) -> float:
        bits, keep = found[layer]
        more = min(keep + max(1, left // bits), math.prod(shapes[layer]) - 1)
        curve = effects[layer][bits]
        return (curve.at(keep) - curve.at(more)) / max(1, (more - keep) * bits)

    for layer in sorted(found, key=gain, reverse=True):
        bits, keep = found[layer]
        most = math.prod(shapes[layer])
        if keep < most:
            more = max(0, min(left // bits, most - 1 - keep))
            found[layer] = bits, keep + more
            left -= more * bits
    return found


def _choices(shape: tuple[int, int]) -> list[Choice]:
    """All bits, with all entries or a compared sparsity."""
    weights = math.prod(shape)
    sparsities = [number * _STEP for number in range(1, round(MOST / _STEP) + 1)]
    keeps = [weights, *(max(1, round((1 - sparsity) * weights)) for sparsity in sparsities)]
    fewest = {bits: (1 - levels[-1]) * weights - 1 for bits, levels in LEVELS.items()}
    return [(bits, keep) for bits in BITS for keep in dict.fromkeys(keeps) if keep >= fewest[bits]]


def require_whole(pattern: object, whole: bool) -> None:
    """Check that a budget of bits is asked of a model that is in memory as a whole.

    Raises:
        ProblemError: it is not.
    """
    if isinstance(pattern, Budget) and not whole:
        raise ProblemError(
            "A budget of bits is divided by measurements of the whole model, which is not in memory here: give the "
            "bits of all layers, such as iobs.Grid(3) (--bits 3), or prune in memory."
        )


def require_budget(budget: Budget, shapes: Sequence[tuple[int, int]]) -> None:
    """Check that a budget is enough for the cheapest choices of all layers.

    Raises:
        PatternError: it is not, and the message names the least budget; or there are no layers to divide it among.
    """
    if not shapes:
        raise PatternError(f"The rules give every layer a pattern of its own: no layer is left for {budget}.")
    weights = sum(math.prod(shape) for shape in shapes)
    least = sum(min(budget.cost(bits, keep, shape) for bits, keep in _choices(shape)) for shape in shapes)
    if least > budget.bits_per_weight * weights:
        raise PatternError(
            f"These layers need at least {least / weights:.3f} bits a weight with their masks and scales, the budget "
            f"is {budget.bits_per_weight:g}; raise it, or give a larger group."
        )


def _record(layer: Layer, own: LayerCurves, effects: dict[int, Curve], bits: int, keep: int) -> AllocationRecord:
    curve = own.curves[bits]
    return AllocationRecord(
        name=layer.name,
        shape=layer.shape,
        sparsities=[1 - count / layer.weights for count in curve.keeps],
        errors=[error / max(curve.energy, 1e-30) for error in curve.errors],
        effects=effects[bits].errors,
        chosen=1 - keep / layer.weights,
    )
