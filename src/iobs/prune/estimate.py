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
from iobs.prune.batches import Batch, Part
from iobs.prune.choices import trial_steps
from iobs.prune.gram import POSITIONS
from iobs.prune.layers import Layer
from iobs.prune.sensitivity import (
    CURVE_TOKENS,
    ENOUGH,
    PASSES,
    PROBE,
    PROBE_TOKENS,
    can_keep_grams,
    judged_share,
)
from iobs.prune.settings import Settings
from iobs.prune.steps import GradientStep, samples_a_step
from iobs.prune.trace import Block

_STEP_PASSES = 4  # forward passes that a gradient step costs: the teacher's, and three for forward and backward
_CHEAP = 1.25e13  # multiplications and additions: some five minutes of a core
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
    count = batches.size(batch)
    rows = _rows_per_sample(model, layers, batch, POSITIONS)
    forward = min(_timed(model, batch) for _ in range(2)) / count
    rate = _products_per_second(next(model.parameters()).device)
    # Along a chain of blocks a group of layers costs its own block's pass, elsewhere the whole network's.
    blocks = max(1, len(chain))
    streams = 2 if settings.target in ("dense", "network") or settings.inputs == "dense" else 1
    products = 0.0
    for layer in layers:
        columns = layer.shape[1]
        grams = fit.samples * rows.get(layer.path, 0.0) * columns**2 * (2 * streams - 1)
        products += grams + _SOLVE_CUBES * columns**2 * (columns + layer.shape[0])
    sweep = forward * fit.samples * streams * (2 + len(layers) / (2 * blocks)) + products / rate
    rounds = 1 if settings.schedule == "auto" else settings.rounds  # sparsity seldom has to grow
    stepped = 0.0  # samples that all gradient steps see
    for step, times in ((settings.step, rounds - 1), (settings.polish, 1)):
        if step is not None:
            stepped += (times * step.steps + (trial_steps(step) if times else 0)) * samples_a_step(step, fit)
    allocation = as_allocation(settings.allocation)
    uneven = allocation.criterion != "uniform"
    judges = int(judged_share(settings.holdout) * fit.samples)
    probe = max(1, min(PROBE, PROBE_TOKENS // batches.positions(batch), judges))
    searches = allocation.criterion == "evolve" or (
        allocation.criterion == "auto" and can_keep_grams(layers) and judges * batches.positions(batch) >= ENOUGH
    )
    searched = allocation.generations * probe if searches else 0
    looks = forward * (searched + uneven * min(PASSES, probe * len(layers)))
    curves = uneven * min(1.0, CURVE_TOKENS / (batches.positions(batch) * fit.samples))
    return (rounds + curves) * sweep + looks + stepped * _STEP_PASSES * forward


def _timed(model: nn.Module, batch: Batch) -> float:
    device = next(model.parameters()).device
    began = time.perf_counter()
    batches.forward(model, batches.to_device(batch, device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


@torch.no_grad()
def affordable(step: GradientStep, model: nn.Module, layers: tuple[Layer, ...], fit: Part) -> GradientStep:
    """The step with as many repetitions as are cheap: between its `steps` and its `most_steps`.

    Cheap is counted in multiplications and additions of the layers to be pruned, so that every machine takes as many.
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
            if isinstance(output, Tensor):
                convolution = isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
                places = output.flatten(2).shape[2] if convolution and output.ndim > 2 else 0
                rows = min(places, places_at_most) if convolution else output[..., 0].numel() / batches.size(batch)
                found[path] = found.get(path, 0.0) + rows

        return hook

    handles = [model.get_submodule(path).register_forward_hook(note(path)) for path in {layer.path for layer in layers}]
    try:
        _timed(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _products_per_second(device: torch.device) -> float:
    """Multiplications and additions of float32 matrix products in a second."""
    size = 512
    matrix = torch.ones(size, size, device=device)
    float((matrix @ matrix)[0, 0])  # libraries wake up in the first
    began = time.perf_counter()
    float((matrix @ matrix)[0, 0])  # reading a value waits for the device
    return float(size**3) / max(time.perf_counter() - began, 1e-6)
