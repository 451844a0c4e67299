"""What a run will need, said before it starts: peak memory and time, from the shapes of its tensors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from iobs.prune import batches as data_batches
from iobs.prune.batches import Batch
from iobs.prune.gram import WIDE
from iobs.prune.layers import Layer
from iobs.prune.memory import resident
from iobs.prune.settings import Settings
from iobs.solvers.admm import SCHEDULES

_CODE = 100 * 2**20  # what compiled kernels and the linear algebra library take for themselves when first used
_ACTIVATIONS = 6  # tensors of (tokens, widest columns) that are alive at once in a block's forward pass


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
    block_bytes: int,
    outside_bytes: int,
    model_bytes: int,
    batches: Sequence[Batch],
    settings: Settings,
    itemsize: int,
    device: torch.device,
) -> Plan:
    """Predict a run that keeps one block in memory, from a moment when what lies outside the blocks has been loaded.

    Args:
        layers: what is pruned.
        block_bytes: weights of the largest block.
        outside_bytes: weights that are let go before the first block comes.
        model_bytes: weights of the whole model.
        batches: calibration data.
        settings: of the run.
        itemsize: bytes of a number in a forward pass.
        device: whose memory and speed are meant.
    """
    present = resident() + _CODE if device.type == "cpu" else torch.cuda.memory_allocated(device)
    sizes = [max(tensor.shape[:2].numel() for tensor in data_batches.tensors(batch)) for batch in batches]
    grams = 2 if settings.holdout > 0 else 1
    solving = max(_solving_bytes(layer, settings, grams) for layer in layers)
    gathering = max(_gathering_bytes(layer, grams, max(sizes), itemsize) for layer in layers)
    forward = itemsize * _ACTIVATIONS * max(sizes) * max(layer.shape[1] for layer in layers)
    return Plan(
        peak_bytes=max(present, present - outside_bytes + block_bytes + max(solving, gathering + forward)),
        seconds=_products(layers, sum(sizes), settings) / speed(device),
        model_bytes=model_bytes,
        # Another device keeps them in its own memory.
        spilled_bytes=itemsize * sum(sizes) * min(layer.shape[1] for layer in layers) if device.type == "cpu" else 0,
        layers=len(layers),
    )


def _gathering_bytes(layer: Layer, grams: int, tokens: int, itemsize: int) -> int:
    """Float64 sums, the float32 product of a batch, and its inputs as they are and in float32."""
    square, columns = layer.shape[1] ** 2, layer.shape[1]
    return 8 * grams * layer.groups * square + 4 * layer.groups * square + (4 + itemsize) * tokens * columns


def _solving_bytes(layer: Layer, settings: Settings, grams: int) -> int:
    """The squares (columns, columns) and the matrices (rows, columns) that are alive at once in a solve.

    Both have the Gram means and a damped copy, in float64 or float32, and the weights in the model's float32, as
    anchor and as linear term. ADMM's search adds in float32: the scaled Hessian, the last inverse, and the next one
    with three on the way to it; the scaled linear term, three iterates and a mask; or, in the polish, seven matrices.
    Exact elimination adds a factor of the Hessian and two copies on the way, its weights, their changes and a mask.
    """
    square, matrix = layer.shape[1] ** 2, layer.weights // layer.groups
    wide = layer.shape[1] >= WIDE
    number = 4 if wide else 8
    squares = number * square * (grams * layer.groups + 1)
    matrices = (4 + number + (0 if wide else number)) * matrix
    if settings.solver == "admm":
        return squares + matrices + max((6 * 4) * square + 17 * matrix, 4 * square + 29 * matrix)
    return squares + matrices + 3 * number * square + (2 * number + 1) * matrix


def _products(layers: Sequence[Layer], tokens: int, settings: Settings) -> float:
    """Multiplications and additions in float32 products, one of each counted as two, those in float64 twice over.

    Of a layer: its Gram; about three passes of the data through its weights; then as many products of its weights
    with a square as the solver has iterations, the linear term and the error's two; and the solver's inverses.
    """
    schedule = SCHEDULES[settings.budget]
    iterations, stages = (schedule.iterations + schedule.refit + 1, schedule.stages + 1)
    if settings.solver != "admm":
        iterations, stages = 1, 2
    total = 0.0
    for layer in layers:
        square = layer.shape[1] ** 2
        other = 3 if layer.shape[1] >= WIDE else 6
        total += 2.0 * tokens * (square + 3 * layer.weights)
        total += 2.0 * layer.shape[0] * square * (iterations + other) + 2.0 * layer.shape[1] * square * stages
    return total


def speed(device: torch.device) -> float:
    """Multiplications and additions a second of a float32 product here and now; one of each counts as two."""
    square = torch.ones(1024, 1024, device=device)
    float((square @ square)[0, 0])  # libraries wake up in the first, and reading a value waits for the device
    began = time.perf_counter()
    for _ in range(4):
        float((square @ square)[0, 0])
    return 4 * 2 * 1024.0**3 / (time.perf_counter() - began)
