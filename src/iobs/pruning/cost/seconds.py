"""Estimates of the time of a run and of affordable gradient steps, from one forward pass and one matrix product."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from iobs.pruning.allocation.sensitivity import (
    CURVE_TOKENS,
    ENOUGH_OUTPUTS,
    PROBE,
    PROBE_TOKENS,
    can_keep_grams,
    damage_passes,
    evaluation_share,
)
from iobs.pruning.calibration.blocks import Block, hidden_of
from iobs.pruning.calibration.gram import POSITIONS
from iobs.pruning.cost.memory_plan import speed
from iobs.pruning.decisions.learning_rate import trial_steps
from iobs.pruning.finetune.trainer import samples_a_step
from iobs.pruning.network.layers import CONVOLUTIONS, Layer
from iobs.pruning.recipe import FineTune, Recipe, as_allocation
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.samples.subsets import Samples
from iobs.pruning.workspace import Decisions

_STEP_PASSES = 4  # cost of a gradient step in forward passes: one of the dense model, three for forward and backward
_STEP_BUDGET = 1.25e13  # multiply-adds of all gradient steps: about five minutes on one core
_SOLVE_CUBES = 60  # cost of a solve in products of (columns, columns) matrices, and in products with the weight matrix


@torch.no_grad()
def estimate_seconds(
    model: nn.Module,
    layers: tuple[Layer, ...],
    chain: list[Block],
    fit: Samples,
    recipe: Recipe,
    decided: Decisions,
    holdout: float,
) -> float:
    """Estimate the seconds of a whole run, within a factor of about two on an idle machine.

    Args:
        model: the dense model, in eval mode.
        layers: the layers to prune.
        chain: blocks along which the model can be run.
        fit: calibration samples.
        recipe: how to prune.
        decided: rounds and fine-tuning.
        holdout: share of the samples that is held out.
    """
    batch = batches.take(fit.batches[0], torch.arange(min(16, batches.size(fit.batches[0]))))
    forward = min(_timed(model, batch) for _ in range(2)) / batches.size(batch)  # seconds per sample
    streams = 2 if recipe.target != "layer" or recipe.inputs == "dense" else 1
    # A group of layers costs a pass of its own block along a chain, and otherwise a pass of the whole model.
    passes = streams * (2 + len(layers) / (2 * max(1, len(chain))))
    rows = _rows_per_sample(model, layers, batch, POSITIONS)
    products = sum(
        _multiply_adds(layer, fit.samples * rows.get(layer.path, 0.0) * (2 * streams - 1)) for layer in layers
    )
    sweep = passes * forward * fit.samples + 2 * products / speed(next(model.parameters()).device)
    rounds = 1 if decided.rounds.schedule == "auto" else decided.rounds.count  # "auto" seldom adds rounds
    curves, extra = _allocation_cost(recipe, holdout, layers, fit, batches.positions(batch))
    stepped = _step_samples(decided.rounds.finetune, rounds - 1, fit) + _step_samples(decided.finetune, 1, fit)
    return (rounds + curves) * sweep + (extra + _STEP_PASSES * stepped) * forward


def _multiply_adds(layer: Layer, rows: float) -> float:
    """Multiply-adds of a layer: its Grams over a number of input rows, and its solve."""
    return (rows + _SOLVE_CUBES * sum(layer.shape)) * layer.shape[1] ** 2


def _step_samples(step: FineTune | None, times: int, fit: Samples) -> int:
    """Number of samples in gradient steps that are repeated `times` times, with the trials of their learning rate."""
    if step is None or times < 1:
        return 0
    return (times * step.steps + trial_steps(step)) * samples_a_step(step, fit)


def _allocation_cost(
    recipe: Recipe, holdout: float, layers: tuple[Layer, ...], fit: Samples, positions: int
) -> tuple[float, float]:
    """Cost of an allocation: a share of a sweep, and a number of forward passes of one sample."""
    allocation = as_allocation(recipe.allocation)
    if allocation.criterion == "uniform":
        return 0.0, 0.0
    evaluated = int(evaluation_share(holdout) * fit.samples)
    probe = max(1, min(PROBE, PROBE_TOKENS // positions, evaluated))
    searched = allocation.criterion == "evolve" or (
        allocation.criterion == "auto" and can_keep_grams(layers) and evaluated * positions >= ENOUGH_OUTPUTS
    )
    by_damage = allocation.by_damage or allocation.criterion == "auto"
    passes = damage_passes(len(layers), probe) if by_damage else PROBE
    passes += allocation.generations * probe if searched else 0
    return min(1.0, CURVE_TOKENS / (positions * fit.samples)), passes


def _timed(model: nn.Module, batch: Batch) -> float:
    """Seconds of a forward pass."""
    device = next(model.parameters()).device
    began = time.perf_counter()
    batches.forward(model, batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


@torch.no_grad()
def affordable(step: FineTune, model: nn.Module, layers: tuple[Layer, ...], fit: Samples) -> FineTune:
    """Raise `steps` towards `most_steps` as far as the budget of multiply-adds allows.

    The budget counts multiply-adds of the layers to prune, not seconds, so that the number of steps is the same on
    every machine. Text keeps `steps`: attention and vocabulary cost more than these layers, and samples of text cannot
    be mixed.
    """
    if step.most_steps is None:
        return step
    batch = batches.take(fit.batches[0], torch.arange(1))
    if batches.positions(batch) > 1:
        return replace(step, most_steps=None)
    rows = _rows_per_sample(model, layers, batch)
    sample = sum(rows.get(layer.path, 0.0) * layer.weights for layer in layers)
    count = int(_STEP_BUDGET / max(1.0, _STEP_PASSES * sample * samples_a_step(step, fit)))
    return replace(step, steps=max(step.steps, min(step.most_steps, count)), most_steps=None)


def _rows_per_sample(
    model: nn.Module, layers: tuple[Layer, ...], batch: Batch, most: float = math.inf
) -> dict[str, float]:
    """Input rows of each layer per sample, by module path; at most `most` positions of a convolution count."""
    found: dict[str, float] = {}

    def note(path: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, args: object, output: object) -> None:
            if isinstance(output := hidden_of(output), Tensor):
                convolution = isinstance(module, CONVOLUTIONS)
                positions = output.flatten(2).shape[2] if convolution and output.ndim > 2 else 0
                rows = min(positions, most) if convolution else output[..., 0].numel() / batches.size(batch)
                found[path] = found.get(path, 0.0) + rows

        return hook

    handles = [model.get_submodule(path).register_forward_hook(note(path)) for path in {layer.path for layer in layers}]
    try:
        batches.forward(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found
