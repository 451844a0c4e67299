"""How long a run will take, and how long its steps may, from one forward pass and one matrix product."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from iobs.prune import batches
from iobs.prune.allocation import as_allocation
from iobs.prune.batches import Batch
from iobs.prune.choices import trial_steps
from iobs.prune.gram import POSITIONS
from iobs.prune.layers import CONVOLUTIONS, Layer
from iobs.prune.parts import Part
from iobs.prune.plan import speed
from iobs.prune.sensitivity import (
    CURVE_TOKENS,
    ENOUGH,
    PROBE,
    PROBE_TOKENS,
    can_keep_grams,
    damage_passes,
    judged_share,
)
from iobs.prune.settings import Settings
from iobs.prune.steps import GradientStep, samples_a_step
from iobs.prune.trace import Block, hidden_of

_STEP_PASSES = 4  # forward passes that a gradient step costs: the teacher's, and three for forward and backward
_CHEAP = 1.25e13  # multiplications with their additions: some five minutes of a core
_SOLVE_CUBES = 60  # products of (columns, columns) matrices that a layer's solve costs, and as many row by row


@torch.no_grad()
def estimate_seconds(
    model: nn.Module, layers: tuple[Layer, ...], chain: list[Block], fit: Part, settings: Settings
) -> float:
    """Seconds of a whole run, right to a factor of about two on a quiet machine.

    Args:
        model: the dense network, in eval mode.
        layers: what will be pruned.
        chain: blocks along which the network can be run.
        fit: calibration samples.
        settings: of the run.
    """
    batch = batches.take(fit.batches[0], torch.arange(min(16, batches.size(fit.batches[0]))))
    forward = min(_timed(model, batch) for _ in range(2)) / batches.size(batch)  # of one sample
    streams = 2 if settings.target in ("dense", "network") or settings.inputs == "dense" else 1
    # Along a chain of blocks a group of layers costs its own block's pass, elsewhere the whole network's.
    passes = streams * (2 + len(layers) / (2 * max(1, len(chain))))
    rows = _rows_per_sample(model, layers, batch, POSITIONS)
    pairs = sum(_pairs(layer, fit.samples * rows.get(layer.path, 0.0) * (2 * streams - 1)) for layer in layers)
    sweep = passes * forward * fit.samples + 2 * pairs / speed(next(model.parameters()).device)
    rounds = 1 if settings.schedule == "auto" else settings.rounds  # sparsity seldom has to grow
    curves, looked = _allocation_share(settings, layers, fit, batches.positions(batch))
    stepped = _stepped(settings.step, rounds - 1, fit) + _stepped(settings.polish, 1, fit)
    return (rounds + curves) * sweep + (looked + _STEP_PASSES * stepped) * forward


def _pairs(layer: Layer, rows: float) -> float:
    """A multiplication with its addition, so many times: a layer's Grams over rows of its inputs, and its solve."""
    return (rows + _SOLVE_CUBES * sum(layer.shape)) * layer.shape[1] ** 2


def _stepped(step: GradientStep | None, times: int, fit: Part) -> int:
    """Samples that gradient steps see, taken so many times, with the trials of their rate."""
    if step is None or times < 1:
        return 0
    return (times * step.steps + trial_steps(step)) * samples_a_step(step, fit)


def _allocation_share(settings: Settings, layers: tuple[Layer, ...], fit: Part, positions: int) -> tuple[float, float]:
    """What choosing the layers' sparsities costs: a share of a sweep, and samples that the network is run on."""
    allocation = as_allocation(settings.allocation)
    if allocation.criterion == "uniform":
        return 0.0, 0.0
    judges = int(judged_share(settings.holdout) * fit.samples)
    probe = max(1, min(PROBE, PROBE_TOKENS // positions, judges))
    searched = allocation.criterion == "evolve" or (
        allocation.criterion == "auto" and can_keep_grams(layers) and judges * positions >= ENOUGH
    )
    by_damage = allocation.by_damage or allocation.criterion == "auto"
    looked = damage_passes(len(layers), probe) if by_damage else PROBE
    looked += allocation.generations * probe if searched else 0
    return min(1.0, CURVE_TOKENS / (positions * fit.samples)), looked


def _timed(model: nn.Module, batch: Batch) -> float:
    device = next(model.parameters()).device
    began = time.perf_counter()
    batches.forward(model, batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


@torch.no_grad()
def affordable(step: GradientStep, model: nn.Module, layers: tuple[Layer, ...], fit: Part) -> GradientStep:
    """The step with as many repetitions as are cheap: between its `steps` and its `most_steps`.

    Cheap is counted in multiplications, each with its addition, of the layers to be pruned, so that every machine takes
    as many.
    Text keeps to `steps`: there its attention and vocabulary cost more than they, and samples cannot be mixed.
    """
    if step.most_steps is None:
        return step
    batch = batches.take(fit.batches[0], torch.arange(1))
    if batches.positions(batch) > 1:
        return replace(step, most_steps=None)
    rows = _rows_per_sample(model, layers, batch)
    sample = sum(rows.get(layer.path, 0.0) * layer.weights for layer in layers)
    count = int(_CHEAP / max(1.0, _STEP_PASSES * sample * samples_a_step(step, fit)))
    return replace(step, steps=max(step.steps, min(step.most_steps, count)), most_steps=None)


def _rows_per_sample(
    model: nn.Module, layers: tuple[Layer, ...], batch: Batch, places_at_most: float = math.inf
) -> dict[str, float]:
    """Rows that a sample sends through each layer, by module path, with so many places of a convolution at most."""
    found: dict[str, float] = {}

    def note(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output := hidden_of(output), Tensor):
                convolution = isinstance(module, CONVOLUTIONS)
                places = output.flatten(2).shape[2] if convolution and output.ndim > 2 else 0
                rows = min(places, places_at_most) if convolution else output[..., 0].numel() / batches.size(batch)
                found[path] = found.get(path, 0.0) + rows

        return hook

    handles = [model.get_submodule(path).register_forward_hook(note(path)) for path in {layer.path for layer in layers}]
    try:
        batches.forward(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found
