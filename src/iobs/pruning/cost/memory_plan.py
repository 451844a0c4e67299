"""Prediction of peak memory and time of block-by-block pruning, from the shapes of its tensors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from iobs.pruning.calibration.gram import WIDE
from iobs.pruning.network.layers import Layer
from iobs.pruning.recipe import Recipe
from iobs.pruning.runtime.memory import resident
from iobs.pruning.samples import batches as data_batches
from iobs.pruning.samples.batches import Batch
from iobs.solvers.admm import ADMM, SCHEDULES

_CODE = 100 * 2**20  # bytes that compiled kernels and the linear algebra library allocate at their first use
_STEP_TOKENS = 1024  # of one gradient step of a reconstruction
_ACTIVATIONS = 6  # tensors of (tokens, widest columns) in memory at once in the forward pass of a block


@dataclass(frozen=True)
class Plan:
    """The predicted cost of a run.

    Attributes:
        peak_bytes: peak anonymous resident memory; on a GPU peak allocated memory.
        seconds: time of Grams and solves, at the measured speed of this machine.
        model_bytes: size of the whole model.
        spilled_bytes: size of the activations that are kept in files.
        layers: number of matrices to prune.
    """

    peak_bytes: int
    seconds: float
    model_bytes: int
    spilled_bytes: int
    layers: int


@dataclass(frozen=True)
class Held:
    """Blocks and hidden states that are in memory or in files at once.

    Args:
        blocks: number of blocks with weights.
        fitted: number of blocks whose parameters are fitted, with masters, moments and gradients in float32.
        streams: number of hidden states per token.
        steps: gradient steps that each block takes part in.
    """

    blocks: int = 1
    fitted: int = 0
    streams: int = 1
    steps: int = 0

    def bytes(self, numbers: int, itemsize: int) -> int:
        """Bytes of the blocks, each of which holds a number of weights."""
        return numbers * (itemsize * self.blocks + 4 * 4 * self.fitted)


def held_blocks(recipe: Recipe) -> Held:
    """The blocks and hidden states of a recipe: a dense block beside the pruned one, and the blocks of a window."""
    fit = recipe.blocks
    if fit is None:
        return Held() if recipe.target == "layer" else Held(2, 0, 2)
    steps = fit.window * fit.steps + (fit.masks - 1) * fit.between
    return Held(fit.window + 1, fit.window, 4, steps)


def plan(
    layers: Sequence[Layer],
    block_bytes: int,
    outside_bytes: int,
    model_bytes: int,
    batches: Sequence[Batch],
    recipe: Recipe,
    holdout: float,
    itemsize: int,
    device: torch.device,
    held: Held | None = None,
) -> Plan:
    """Predict peak memory and time of block-by-block pruning.

    Call it after the modules outside the blocks (embeddings, head) have been loaded.

    Args:
        layers: the layers to prune.
        block_bytes: size of the weights of the largest block.
        outside_bytes: size of the weights that are dropped before the first block is loaded.
        model_bytes: size of the weights of the whole model.
        batches: calibration data.
        recipe: how to prune.
        holdout: share of the samples that is held out.
        itemsize: bytes per number in a forward pass.
        device: of the computations.
        held: blocks and hidden states at once; None for one of each.
    """
    held = held or Held()
    present = resident() + _CODE if device.type == "cpu" else torch.cuda.memory_allocated(device)
    sizes = [max(tensor.shape[:2].numel() for tensor in data_batches.tensors(batch)) for batch in batches]
    grams = 2 if holdout > 0 else 1
    solving = max(_solving_bytes(layer, recipe, grams) for layer in layers)
    gathering = max(_gathering_bytes(layer, grams, max(sizes), itemsize) for layer in layers)
    hidden = itemsize * sum(sizes) * min(layer.shape[1] for layer in layers)
    forward = itemsize * _ACTIVATIONS * max(sizes) * max(layer.shape[1] for layer in layers)
    return Plan(
        peak_bytes=max(present, present - outside_bytes + block_bytes + max(solving, gathering + forward)),
        seconds=(_products(layers, sum(sizes), recipe) + _steps(layers, held)) / speed(device),
        model_bytes=model_bytes,
        # A GPU keeps activations in its own memory.
        spilled_bytes=held.streams * hidden if device.type == "cpu" else 0,
        layers=len(layers),
    )


def _steps(layers: Sequence[Layer], held: Held) -> float:
    """Floating-point operations of the gradient steps of a reconstruction: six per weight and token."""
    return 6.0 * held.steps * _STEP_TOKENS * sum(layer.weights for layer in layers)


def _gathering_bytes(layer: Layer, grams: int, tokens: int, itemsize: int) -> int:
    """Bytes to compute Grams: float64 sums, the float32 product of a batch, and its inputs, stored and in float32."""
    square, columns = layer.shape[1] ** 2, layer.shape[1]
    return 8 * grams * layer.groups * square + 4 * layer.groups * square + (4 + itemsize) * tokens * columns


def _solving_bytes(layer: Layer, recipe: Recipe, grams: int) -> int:
    """Bytes of a solve: squares (columns, columns) and matrices (rows, columns) that are in memory at once.

    All solvers need the Gram means and a damped copy, in float64 or float32, and the weights in float32, as anchor
    and as linear term.

    ADMM's search adds squares in float32: the scaled Hessian, the last inverse, and the next inverse with three
    temporary squares. It adds matrices: the scaled linear term, three iterates and a mask, or seven in the refit.

    Exact elimination adds a factor of the Hessian and two temporary copies, its weights, their changes and a mask.
    """
    square, matrix = layer.shape[1] ** 2, layer.weights // layer.groups
    wide = layer.shape[1] >= WIDE
    number = 4 if wide else 8
    squares = number * square * (grams * layer.groups + 1)
    matrices = (4 + number + (0 if wide else number)) * matrix
    if is_admm(recipe):
        return squares + matrices + max((6 * 4) * square + 17 * matrix, 4 * square + 29 * matrix)
    return squares + matrices + 3 * number * square + (2 * number + 1) * matrix


def _products(layers: Sequence[Layer], tokens: int, recipe: Recipe) -> float:
    """Floating-point operations of the products in a run: multiplications and additions; float64 counts twice.

    A layer needs its Gram, about three passes of the data through its weights, and the inverses of the solver. It also
    needs products of its weights with a square: one per iteration, one for the linear term, two for the error.
    """
    schedule = SCHEDULES[recipe.solver.budget if isinstance(recipe.solver, ADMM) else "default"]
    iterations, stages = (schedule.iterations + schedule.refit + 1, schedule.stages + 1)
    if not is_admm(recipe):
        iterations, stages = 1, 2
    total = 0.0
    for layer in layers:
        square = layer.shape[1] ** 2
        other = 3 if layer.shape[1] >= WIDE else 6
        total += 2.0 * tokens * (square + 3 * layer.weights)
        total += 2.0 * layer.shape[0] * square * (iterations + other) + 2.0 * layer.shape[1] * square * stages
    return total


def is_admm(recipe: Recipe) -> bool:
    """Check that the solver is ADMM, whose memory and time differ from those of the others."""
    return recipe.solver == "admm" or isinstance(recipe.solver, ADMM)


def speed(device: torch.device) -> float:
    """Measured floating-point operations per second of a float32 product: multiplications and additions."""
    square = torch.ones(1024, 1024, device=device)
    float((square @ square)[0, 0])  # the first product initialises libraries; reading a value waits for the device
    began = time.perf_counter()
    for _ in range(4):
        float((square @ square)[0, 0])
    return 4 * 2 * 1024.0**3 / (time.perf_counter() - began)
