"""Sparsity and bits of every layer under a budget of bits, from damage curves.

A layer is solved alone at every bit width and several sparsities, and `widths/knapsack.py` divides the budget. The
division is then tried as a whole, beside uniform plans, with the targets of the run: damages on grids of few bits do
not quite add up. The plan of least divergence wins, on samples that no layer was solved for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from iobs.core.grids import BITS, MOST, Budget
from iobs.core.patterns import Pattern
from iobs.errors import PatternError, ProblemError
from iobs.pruning.calibration.losses import answered, kl_to_answers, mean_loss
from iobs.pruning.calibration.sweep import Moments, Sweep
from iobs.pruning.layerwise.problem import Task, solve_layer
from iobs.pruning.layerwise.targets import TARGETS
from iobs.pruning.network.layers import Layer
from iobs.pruning.plan.counts import Curve
from iobs.pruning.plan.curves import (
    CURVE_TOKENS,
    POSITIONS,
    Choice,
    CurveSweep,
    allocation_record_of,
    fit_and_evaluation,
    judges_of,
    recipe_of_curves,
)
from iobs.pruning.recipe import LayerSettings
from iobs.pruning.report import AllocationRecord
from iobs.pruning.samples.subsets import Samples
from iobs.pruning.widths.knapsack import best_choices
from iobs.pruning.workspace import Workspace

# Measured sparsities by bits. Low sparsities cost more than they save: the mask has one bit for each entry.
LEVELS = {2: (0.0, 0.5, 0.8), 3: (0.0, 0.5, 0.9), 4: (0.0, 0.3, 0.6, 0.9), 8: (0.0, 0.5, 0.7, 0.9)}
_STEP = 0.05  # between the sparsities that are compared; damages between measured sparsities are interpolated
_PROBE, _PROBE_TOKENS = 100, 8192  # most samples and positions of text for divergences

_MEASURED = "by damages"  # name of the plan that the curves give


@torch.no_grad()
def divide_bits(
    workspace: Workspace, budget: Budget, layers: tuple[Layer, ...]
) -> tuple[dict[Layer, Choice], list[AllocationRecord], dict[str, float]]:
    """Bits and kept entries of every layer that receives input, and the measurements behind them.

    Returns:
        The plan, the curves of every layer, and the divergences of the plans that were tried, by name. The divergences
        are empty if no samples are left to judge the plans.

    Raises:
        PatternError: the budget is not enough for the layers that receive input.
    """
    quick = recipe_of_curves(workspace.recipe, budget).for_layers(layers)
    fit, evaluation = fit_and_evaluation(workspace.fit, workspace.heldout, workspace.request.seed)
    probe = answered(workspace.store.model, judges_of(workspace).first(_PROBE, _PROBE_TOKENS))
    densities = {bits: [1 - level for level in levels] for bits, levels in LEVELS.items()}

    def pattern(bits: int, keep: int, layer: Layer) -> Pattern:
        return budget.choice(bits, keep, layer.shape)

    measured = CurveSweep(workspace, layers, quick, densities, pattern).curves()
    shapes = {layer: layer.shape for layer in measured}
    if measured:  # layers without input share no bits, and the others may need more without them
        require_budget(budget, [*shapes.values()])
    curves = {layer: entry.curves for layer, entry in measured.items()}
    plans = {_MEASURED: divided(budget, shapes, curves), **_uniform(budget, shapes, curves)}
    # Samples that layers were solved for would judge in favour of plans that fit them.
    tried = {
        name: workspace.checkpoint.number(
            f"divergence of bits {name}",
            partial(_divergence, workspace, quick, plan, budget, fit.first(fit.samples, CURVE_TOKENS), probe),
        )
        for name, plan in plans.items()
        if evaluation.batches
    }
    chosen = plans[min(tried, key=tried.__getitem__)] if tried else plans[_MEASURED]
    records = [allocation_record_of(layer, curves[layer][bits], keep) for layer, (bits, keep) in chosen.items()]
    return chosen, records, tried


def _divergence(
    workspace: Workspace,
    settings: Mapping[Layer, LayerSettings],
    plan: dict[Layer, Choice],
    budget: Budget,
    fitted: Samples,
    probe: Samples,
) -> float:
    """KL divergence from the dense model to the model under a plan, its layers solved as the run solves them."""
    model, target = workspace.store.model, TARGETS[workspace.recipe.target]
    reference = None if workspace.scoring is None else target.teacher(workspace.scoring, True)
    dense = {layer: layer.tensor(model).to("cpu", copy=True) for layer in plan}  # a GPU has no room for them
    moments = Moments(workspace.request.seed, POSITIONS, drift=target.drift)
    sweep = Sweep(model, fitted, Samples(), tuple(plan), workspace.chain, reference, moments=moments)
    try:
        for group in sweep.groups():
            statistics = group.statistics()
            for layer in group.layers:
                current = layer.read(model)
                task = Task(
                    layer,
                    budget.choice(*plan[layer], layer.shape),
                    current,
                    None if reference is None else current,
                    settings[layer],
                )
                layer.write(model, torch.cat([solution.weight for solution in solve_layer(task, statistics)]))
        return mean_loss(model, probe, kl_to_answers)
    finally:
        for layer, tensor in dense.items():
            layer.tensor(model).copy_(tensor)


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
    """Bits and kept entries of every layer with the least sum of damages, within the budget.

    Bits that the compared sparsities leave over keep further entries of layers with zeros. So fewer bits are left than
    one value has, unless every such layer is full.

    Args:
        budget: the bits.
        shapes: of the layers.
        effects: effect on the model by layer and bits.
    """
    total = math.floor(budget.bits_per_weight * sum(rows * columns for rows, columns in shapes.values()) + 1e-6)
    choices = {layer: _choices(shape) for layer, shape in shapes.items()}
    costs = [[budget.cost(bits, keep, shapes[layer]) for bits, keep in options] for layer, options in choices.items()]
    worth = [[effects[layer][bits].at(keep) for bits, keep in options] for layer, options in choices.items()]
    numbers = best_choices(costs, worth, total)
    plan = {layer: options[number] for (layer, options), number in zip(choices.items(), numbers, strict=True)}
    left = total - sum(options[number] for options, number in zip(costs, numbers, strict=True))
    return _filled(plan, shapes, effects, left)


def _filled(
    plan: dict[Layer, Choice],
    shapes: dict[Layer, tuple[int, int]],
    effects: dict[Layer, dict[int, Curve]],
    left: int,
) -> dict[Layer, Choice]:
    """The choices with `left` more bits in kept entries, in the order of the effect that a bit removes."""

    def gain(layer: Layer) -> float:
        bits, keep = plan[layer]
        more = min(keep + max(1, left // bits), math.prod(shapes[layer]) - 1)
        curve = effects[layer][bits]
        return (curve.at(keep) - curve.at(more)) / max(1, (more - keep) * bits)

    for layer in sorted(plan, key=gain, reverse=True):
        bits, keep = plan[layer]
        most = math.prod(shapes[layer])
        if keep < most:
            more = max(0, min(left // bits, most - 1 - keep))
            plan[layer] = bits, keep + more
            left -= more * bits
    return plan


def _choices(shape: tuple[int, int]) -> list[Choice]:
    """All bits, with all entries or a compared sparsity."""
    weights = math.prod(shape)
    sparsities = [number * _STEP for number in range(1, round(MOST / _STEP) + 1)]
    keeps = [weights, *(max(1, round((1 - sparsity) * weights)) for sparsity in sparsities)]
    fewest = {bits: (1 - levels[-1]) * weights - 1 for bits, levels in LEVELS.items()}
    return [(bits, keep) for bits in BITS for keep in dict.fromkeys(keeps) if keep >= fewest[bits]]


def require_whole(pattern: object, whole: bool) -> None:
    """Raise if a budget of bits is asked of a model that is not in memory as a whole.

    Raises:
        ProblemError: it is not.
    """
    if isinstance(pattern, Budget) and not whole:
        raise ProblemError(
            "A budget of bits is divided by measurements of the whole model, which is not in memory here: give the "
            "bits of all layers, such as iobs.Grid(3) (--bits 3), or prune in memory."
        )


def require_budget(budget: Budget, shapes: Sequence[tuple[int, int]]) -> None:
    """Raise unless a budget is enough for the cheapest choices of all layers.

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


def uniform_plans(
    budget: Budget, shapes: Mapping[Layer, tuple[int, int]], most: Mapping[int, float]
) -> dict[str, dict[Layer, Choice]]:
    """Plans by their text form: the largest bits without zeros, and for all bits the fewest zeros, within the budget.

    Args:
        budget: the bits.
        shapes: of the layers.
        most: largest sparsity by bits.
    """
    sizes = {layer: math.prod(shape) for layer, shape in shapes.items()}
    total = budget.bits_per_weight * sum(sizes.values()) + 1e-6
    plans: dict[str, dict[Layer, Choice]] = {}
    for bits in sorted(BITS):
        dense = sum(budget.cost(bits, sizes[layer], shape) for layer, shape in shapes.items())
        if dense <= total:
            plans = {f"{bits} bits": {layer: (bits, size) for layer, size in sizes.items()}}
            continue
        empty = sum(budget.cost(bits, 0, shape) for shape in shapes.values())
        kept = (total - empty) / (bits * sum(sizes.values()))
        if 1 - most[bits] <= kept < 1:
            keeps = {layer: max(1, math.floor(kept * size)) for layer, size in sizes.items()}
            name = f"{1 - kept:.0%} zeros and {bits} bits"
            plans[name] = {layer: (bits, keep) for layer, keep in keeps.items()}
    return plans
