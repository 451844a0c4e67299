"""What a run will need, said before it starts: peak memory and time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from iobs.prune import batches as data_batches
from iobs.prune.batches import Batch
from iobs.prune.layers import Layer
from iobs.prune.memory import MemoryWatch

# Working copies of a solve with the "fast" budget, by measured peak: of the (columns, columns) float64 Hessian
# (the mean, its damped factor, the scaled copy and the eigenvectors), and of the (rows, columns) float64 weights.
_SQUARES, _MATRICES = 2.5, 3.6


@dataclass(frozen=True)
class Plan:
    """A prediction.

    Attributes:
        peak_bytes: anonymous resident memory at its highest.
        seconds: time of the Grams and the solves at the speed that this machine shows now.
        model_bytes: what the whole model would take.
        spilled_bytes: activations kept in files.
        layers: matrices that will be pruned.
    """

    peak_bytes: int
    seconds: float
    model_bytes: int
    spilled_bytes: int
    layers: int


def plan(
    layers: Sequence[Layer],
    resident_bytes: int,
    block_bytes: int,
    model_bytes: int,
    batches: Sequence[Batch],
    holdout: bool,
) -> Plan:
    """Predict a run that keeps one block in memory.

    Args:
        layers: what is pruned.
        resident_bytes: weights that stay in memory throughout.
        block_bytes: weights of the largest block.
        model_bytes: weights of the whole model.
        batches: calibration data.
        holdout: a second Gram is kept for held-out samples.
    """
    baseline = MemoryWatch().peak
    grams = 2 + (1 if holdout else 0)
    solving = max(
        8 * layer.groups * layer.shape[1] ** 2 * (_SQUARES + grams - 2) + 8 * layer.weights * _MATRICES
        for layer in layers
    )
    tokens = sum(max(tensor.shape[:2].numel() for tensor in data_batches.tensors(batch)) for batch in batches)
    widest = max(layer.shape[1] for layer in layers)
    largest = max(max(tensor.shape[:2].numel() for tensor in data_batches.tensors(batch)) for batch in batches)
    activations = 4 * largest * widest * 6
    flops = sum(2.0 * tokens * layer.shape[1] ** 2 + 60.0 * layer.shape[1] ** 3 / 3 for layer in layers)
    flops += sum(40.0 * 2 * layer.shape[0] * layer.shape[1] ** 2 for layer in layers)
    return Plan(
        peak_bytes=int(baseline + resident_bytes + block_bytes + max(solving, activations)),
        seconds=flops / _speed(),
        model_bytes=model_bytes,
        spilled_bytes=2 * tokens * min(layer.shape[1] for layer in layers),
        layers=len(layers),
    )


def _speed() -> float:
    """Multiply-adds a second of a float32 product here and now."""
    square = torch.ones(768, 768)
    square @ square
    began = time.perf_counter()
    for _ in range(4):
        square @ square
    return 4 * 2 * 768.0**3 / (time.perf_counter() - began)
