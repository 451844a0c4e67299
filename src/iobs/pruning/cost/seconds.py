"""Forecast of the time of a run, and affordable gradient steps, from one forward pass and one matrix product."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from iobs.pruning.allocation.counts import under_pattern
from iobs.pruning.allocation.kin import measured_shares
from iobs.pruning.allocation.sensitivity import (
    CURVE_LEVELS,
    CURVE_TOKENS,
    ENOUGH_OUTPUTS,
    PROBE,
    PROBE_TOKENS,
    can_keep_grams,
    damage_passes,
    evaluation_share,
)
from iobs.pruning.calibration.blocks import hidden_of
from iobs.pruning.calibration.gram import POSITIONS
from iobs.pruning.cost.loads import is_admm
from iobs.pruning.cost.speeds import speed
from iobs.pruning.decisions.learning_rate import candidates
from iobs.pruning.descent.batches import samples_of_block_step, samples_of_step
from iobs.pruning.descent.rates import block_trials, most_trial_steps, network_trials
from iobs.pruning.forecast import Forecast, Part
from iobs.pruning.network.calls import Args, Kwargs, after_calls
from iobs.pruning.network.layers import CONVOLUTIONS, Layer
from iobs.pruning.recipe import BlockFit, FineTune, as_allocation
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.samples.subsets import Samples
from iobs.pruning.workspace import Decisions, Request

_STEP_PASSES = 4  # cost of a gradient step in forward passes: one of the dense model, three for forward and backward
_SAMPLE_PASSES = 3  # cost of a window that is sampled token by token, in forward passes of the window
_STEP_BUDGET = 1.25e13  # multiply-adds of all gradient steps: about five minutes on one core
_SOLVE_CUBES = 60  # cost of a solve in products of (columns, columns) matrices, and in products with the weight matrix
_OTHER_CUBES = 3  # the same for a solver without iterations
_FAST_CUBES = 10  # the same for a solve of an error curve
_OVERHEAD = 0.015  # seconds of a solve besides its products
_GROUP_SHARE, _GROUP_OVERHEAD = 0.25, 0.0013  # of a block's forward pass, and seconds, per group of layers and batch
_UNFOLDED = 250  # cost of an entry of a convolution's unfolded input, in multiply-adds
_TRIAL_SHARE = 0.6  # of the model that a trial of a layer runs: the blocks behind the layer
_TIMED_PASSES, _TIMED_SECONDS = 20, 0.5  # at most, of the passes whose fastest is the measured one
_STEP_FORWARDS = 4.0  # cost of a gradient step of a window in forward passes of its blocks


@dataclass(frozen=True)
class Costs:
    """Measured speeds of a model on this machine.

    Args:
        forward: seconds of a forward pass of one sample.
        multiply: seconds of a multiply-add in a product of matrices.
        inputs: number of different inputs of the layers; layers with the same input share their passes.
        rows: input rows of each layer per sample, by name.
        convolutions: names of the layers whose inputs are unfolded.
    """

    forward: float
    multiply: float
    inputs: int
    rows: Mapping[str, float]
    convolutions: frozenset[str] = frozenset()


@torch.no_grad()
def measured_costs(model: nn.Module, layers: tuple[Layer, ...], fit: Samples) -> Costs:
    """Measure the dense model, in eval mode, on the first calibration samples."""
    batch = batches.take(fit.batches[0], torch.arange(min(16, batches.size(fit.batches[0]))))
    count = samples_of_block_step(batches.positions(batch), BlockFit())
    usual = batches.take(batch, torch.arange(min(count, batches.size(batch))))
    forward = _least_seconds(model, usual) / batches.size(usual)
    rows, inputs = _rows_per_sample(model, layers, batch, POSITIONS)
    by_name = {layer.name: rows.get(layer.path, 0.0) for layer in layers}
    unfolded = {layer.name for layer in layers if isinstance(model.get_submodule(layer.path), CONVOLUTIONS)}
    return Costs(forward, 2 / speed(next(model.parameters()).device), inputs, by_name, frozenset(unfolded))


def forecast(
    costs: Costs,
    layers: tuple[Layer, ...],
    blocks: int,
    fit: Samples,
    request: Request,
    decided: Decisions,
    sampled: int = 0,
) -> Forecast:
    """Forecast the work of a whole run. LOG.md has the measurements behind its constants.

    Args:
        costs: measured speeds of the dense model.
        layers: the layers to prune.
        blocks: number of blocks along which the model can be run; 0 if it is run whole.
        fit: calibration samples.
        request: what was asked.
        decided: rounds and fine-tuning, as far as they are decided.
        sampled: number of windows of text that are sampled from the dense model.
    """
    recipe = request.recipe
    if recipe.network_solver is not None:
        return Forecast(())
    streams = 2 if recipe.target != "layer" or recipe.inputs == "dense" else 1
    one_pass = costs.forward * fit.samples / (1 - request.holdout)
    groups = _group_passes(costs, blocks, fit, one_pass)
    usual = _SOLVE_CUBES if is_admm(recipe) else _OTHER_CUBES
    solves = {layer.name: _solve_seconds(layer, costs, usual) for layer in layers}
    grams = {layer.name: _gram_seconds(layer, costs, fit.samples * (2 * streams - 1)) for layer in layers}
    reconstruction = decided.blocks if blocks else None
    projections, fits, step = 1, 0.0, 0.0
    if reconstruction is not None:
        steps_a_pass = _step_batches(reconstruction, fit)
        reconstruction = reconstruction.within(steps_a_pass)
        projections, fits = reconstruction.masks, _fit_passes(reconstruction) / len(layers)
        step = costs.forward * fit.samples / steps_a_pass
    moves = streams if reconstruction is None else reconstruction.window + 0.5  # with the outputs of the dense blocks
    shared = (projections * streams * groups + moves * one_pass) / len(layers) + fits * step
    seconds = {layer.name: shared + projections * (solves[layer.name] + grams[layer.name]) for layer in layers}
    mean = sum(seconds.values()) / len(layers)
    rounds = 1 if decided.rounds.schedule == "auto" else decided.rounds.count  # "auto" seldom adds rounds
    network_steps = _network_parts(reconstruction, step)
    parts = [
        *_allocation_parts(request, costs, layers, blocks, fit, groups + one_pass, bool(network_steps)),
        *_rate_parts(reconstruction, blocks, step),
        Part("layers", rounds * len(layers), mean),
        *network_steps,
        *_step_parts(decided, rounds, fit, _STEP_PASSES * costs.forward),
    ]
    if sampled and decided.finetune is not None:
        parts.append(Part("windows of sampled text", sampled, _SAMPLE_PASSES * costs.forward, once=True))
    return Forecast(tuple(parts), {name: value / mean for name, value in seconds.items()})


def _solve_seconds(layer: Layer, costs: Costs, cubes: float) -> float:
    """Seconds of a solve whose products cost as much as `cubes` products of (columns, columns) and of the weight."""
    overhead = _OVERHEAD * min(1.0, cubes / _FAST_CUBES)
    return overhead + costs.multiply * cubes * sum(layer.shape) * layer.shape[1] ** 2


def _gram_seconds(layer: Layer, costs: Costs, samples: int) -> float:
    unfolded = _UNFOLDED if layer.name in costs.convolutions else 0
    return costs.multiply * samples * costs.rows[layer.name] * layer.shape[1] * (layer.shape[1] + unfolded)


def _group_passes(costs: Costs, blocks: int, fit: Samples, one_pass: float) -> float:
    """Seconds of the passes that give all groups of layers with one input their Gram, of one stream.

    Along a chain a group runs the rest of its own block, from the layers that were pruned last. Otherwise it runs half
    of the whole model.
    """
    if not blocks:
        return (1 + costs.inputs / 2) * one_pass
    calls = _step_batches(BlockFit(), fit)
    return costs.inputs * (_GROUP_SHARE * one_pass / blocks + _GROUP_OVERHEAD * calls)


def _allocation_parts(
    request: Request,
    costs: Costs,
    layers: tuple[Layer, ...],
    blocks: int,
    fit: Samples,
    sweep: float,
    network_steps: bool,
) -> list[Part]:
    """The curves of all layers, and the search.

    Args:
        request: what was asked.
        costs: measured speeds.
        layers: the layers to prune.
        blocks: number of blocks along which the model can be run; 0 if it is run whole.
        fit: calibration samples.
        sweep: seconds of the passes of a sweep with one model.
        network_steps: steps of the whole network follow, before which "auto" does not search.
    """
    allocation = under_pattern(as_allocation(request.recipe.allocation), request.pattern)
    if allocation.criterion == "uniform":
        return []
    positions = batches.positions(fit.batches[0])
    evaluated = int(evaluation_share(request.holdout) * fit.samples)
    probe = max(1, min(PROBE, PROBE_TOKENS // positions, evaluated))
    searched = allocation.criterion == "evolve" or (
        allocation.criterion == "auto"
        and not network_steps
        and can_keep_grams(layers)
        and probe * positions >= ENOUGH_OUTPUTS
    )
    by_damage = allocation.by_damage or allocation.criterion == "auto"
    passes = _TRIAL_SHARE * damage_passes(len(layers), probe, fit.samples) if by_damage else PROBE
    cubes = _FAST_CUBES if is_admm(request.recipe) else _OTHER_CUBES
    shares = measured_shares(layers, blocks if allocation.criterion == "block" else 0)
    solves = sum(share * _solve_seconds(layer, costs, cubes) for layer, share in zip(layers, shares, strict=True))
    curves = min(1.0, CURVE_TOKENS / (positions * fit.samples)) * sweep + CURVE_LEVELS * solves + passes * costs.forward
    parts = [Part("error curves of layers", len(layers), curves / len(layers), once=True)]
    if searched and allocation.generations:
        move = 2 * solves / len(layers) + probe * costs.forward
        parts.append(Part("moves of weights between layers", allocation.generations, move, once=True))
    return parts


def _step_batches(blocks: BlockFit, fit: Samples) -> int:
    """Number of gradient steps of block reconstruction in one pass over the calibration samples."""
    counts = ((batches.size(batch), samples_of_block_step(batches.positions(batch), blocks)) for batch in fit.batches)
    return sum(math.ceil(samples / at_once) for samples, at_once in counts)


def _fit_passes(blocks: BlockFit) -> float:
    """Passes of the whole network on the samples of one step, in all fits."""
    return _STEP_FORWARDS * (blocks.window * blocks.steps + (blocks.masks - 1) * blocks.between)


def _rate_parts(blocks: BlockFit | None, count: int, step: float) -> list[Part]:
    """The trials of the rate of block reconstruction, on the first window; `step` are seconds of a forward pass."""
    if blocks is None or blocks.lr != "auto" or not blocks.steps:
        return []
    trials = block_trials(blocks)
    seconds = _STEP_FORWARDS * step * trials.steps * min(1.0, blocks.window / count)
    return [Part(trials.name, len(trials.rates), seconds, once=True)]


def _network_parts(blocks: BlockFit | None, step: float) -> list[Part]:
    """The steps of the whole network, each forward, recomputed and backward, and the trials of their rate."""
    if blocks is None or not blocks.network_steps:
        return []
    found = [Part("steps of the whole network", blocks.network_steps, 5.0 * step)]  # with the head of the dense model
    if blocks.network_lr == "auto":
        trials = network_trials(blocks)
        found.insert(0, Part(trials.name, len(trials.rates), 5.0 * step * trials.steps, once=True))
    return found


def _step_parts(decided: Decisions, rounds: int, fit: Samples, sample: float) -> list[Part]:
    """The trials of learning rates, the steps between rounds, and the fine-tuning after the last round.

    Args:
        decided: rounds and fine-tuning.
        rounds: number of rounds.
        fit: calibration samples.
        sample: seconds of a gradient step on one sample.
    """
    parts = []
    between, after = decided.rounds.finetune if rounds > 1 else None, decided.finetune
    tried = [step for step in (after, between) if step is not None and step.lr == "auto"]
    if tried:
        step = max(tried, key=most_trial_steps)
        parts.append(Part("trial", most_trial_steps(step), sample * samples_of_step(step, fit), once=True))
    if between is not None:
        parts.append(Part("steps", (rounds - 1) * between.steps, sample * samples_of_step(between, fit)))
    if after is not None:
        steps = sum(step.steps for step in candidates(decided))
        parts.append(Part("fine-tuning", steps, sample * samples_of_step(after, fit)))
    return parts


def _least_seconds(model: nn.Module, batch: Batch) -> float:
    """Seconds of the fastest of 3 to 20 forward passes: other programs make short passes look many times longer."""
    times = [_timed(model, batch) for _ in range(3)]
    while len(times) < _TIMED_PASSES and sum(times) < _TIMED_SECONDS:
        times.append(_timed(model, batch))
    return min(times)


def _timed(model: nn.Module, batch: Batch) -> float:
    """Seconds of a forward pass."""
    device = next(model.parameters()).device
    began = time.perf_counter()
    batches.forward(model, batch)
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - began


@torch.no_grad()
def affordable(
    step: FineTune, model: nn.Module, layers: tuple[Layer, ...], fit: Samples, sampled: bool = False
) -> FineTune:
    """Raise `steps` towards `most_steps` as far as the budget of multiply-adds allows.

    The budget counts multiply-adds, not seconds, so that the number of steps is the same on every machine. It counts
    the multiply-adds of the layers to prune. For text it counts those of the whole model, where attention and
    vocabulary cost more than these layers.

    Args:
        step: fine-tuning.
        model: the dense model.
        layers: the layers to prune.
        fit: calibration samples.
        sampled: text is sampled from the dense model. Other text keeps `steps`: more of them fit the few windows alone.
    """
    if step.most_steps is None:
        return step
    batch = batches.take(fit.batches[0], torch.arange(1))
    if batches.positions(batch) > 1:
        if not sampled:
            return replace(step, most_steps=None)
        with FlopCounterMode(display=False) as counter:
            batches.forward(model, batch)
        sample = counter.get_total_flops() / 2
    else:
        rows, _ = _rows_per_sample(model, layers, batch)
        sample = sum(rows.get(layer.path, 0.0) * layer.weights for layer in layers)
    count = int(_STEP_BUDGET / max(1.0, _STEP_PASSES * sample * samples_of_step(step, fit)))
    return replace(step, steps=max(step.steps, min(step.most_steps, count)), most_steps=None)


def _rows_per_sample(
    model: nn.Module, layers: tuple[Layer, ...], batch: Batch, most: float = math.inf
) -> tuple[dict[str, float], int]:
    """Input rows of each layer per sample, by module path, and the number of different inputs.

    At most `most` positions of a convolution count.
    """
    found: dict[str, float] = {}
    inputs: dict[int, object] = {}  # by identity; kept, so that no later input has the same

    def note(path: str, module: nn.Module, args: Args, kwargs: Kwargs, output: object) -> None:
        inputs.update({id(value): value for value in args[:1]})
        if isinstance(output := hidden_of(output), Tensor):
            convolution = isinstance(module, CONVOLUTIONS)
            positions = output.flatten(2).shape[2] if convolution and output.ndim > 2 else 0
            rows = min(positions, most) if convolution else output[..., 0].numel() / batches.size(batch)
            found[path] = found.get(path, 0.0) + rows

    with after_calls(model, {layer.path for layer in layers}, note):
        batches.forward(model, batch)
    return found, max(1, len(inputs))
