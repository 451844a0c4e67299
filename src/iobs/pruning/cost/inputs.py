"""Inputs of the layers in a forward pass, and the gradient steps and epochs that their multiply-adds afford."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from iobs.pruning.calibration.blocks import hidden_of
from iobs.pruning.cost.work import NETWORK_STEP, STEP_PASSES
from iobs.pruning.descent.batches import samples_of_step
from iobs.pruning.network.calls import Args, Kwargs, after_calls
from iobs.pruning.network.layers import CONVOLUTIONS, Layer
from iobs.pruning.recipe import FineTune, Recipe
from iobs.pruning.recipe.parts import MOST_EPOCHS
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.samples.subsets import Samples
from iobs.pruning.workspace import Decisions

_FIT_BUDGET = 1e14  # multiply-adds of block reconstruction and of steps of the whole network: about an hour on one core
SAMPLING_EPOCHS = 4.0  # fewer passes over the calibration windows do not overfit them, and need no sampled ones
_STEP_BUDGET = 1.25e13  # multiply-adds of all gradient steps: about five minutes on one core
_ALIVE = 8  # latest inputs that a new one is compared with: layers that share an input are called in a row


@dataclass
class ObservedInput:
    """Input of a module with layers.

    Attributes:
        group: key of its input; modules with the same input have the same key.
        rows: rows of all its inputs.
        unfolded: it is a convolution.
    """

    group: object
    rows: float
    unfolded: bool


@contextmanager
def observing_inputs(
    model: nn.Module, layers: Sequence[Layer], most: float = math.inf
) -> Iterator[dict[str, ObservedInput]]:
    """Observe the inputs of layers, by path of their module, in the forward passes inside the context.

    Args:
        model: the model.
        layers: the layers.
        most: most positions of a sample that count in a convolution.
    """
    observed: dict[str, ObservedInput] = {}
    latest: deque[tuple[object, int]] = deque(maxlen=_ALIVE)  # inputs and their numbers

    def note(path: str, module: nn.Module, args: Args, kwargs: Kwargs, output: object) -> None:
        output = hidden_of(output)
        if not isinstance(output, Tensor):
            return
        value = args[0] if args else output
        group = next((number for other, number in latest if other is value), len(observed))
        latest.append((value, group))
        convolution = isinstance(module, CONVOLUTIONS)
        if convolution:
            rows = len(output) * min(output.flatten(2).shape[2] if output.ndim > 2 else 0, most)
        else:
            rows = output[..., 0].numel()
        entry = observed.setdefault(path, ObservedInput(group, 0.0, convolution))
        entry.rows += rows

    with after_calls(model, {layer.path for layer in layers}, note):
        yield observed


@torch.no_grad()
def with_affordable_steps(
    decided: Decisions, model: nn.Module, layers: Sequence[Layer], fit: Samples, sampled: bool
) -> Decisions:
    """The decisions with the numbers of gradient steps that a run can afford, see `affordable`."""
    between, after = (
        None if step is None else affordable(step, model, layers, fit, sampled)
        for step in (decided.rounds.finetune, decided.finetune)
    )
    return replace(decided, rounds=replace(decided.rounds, finetune=between), finetune=after)


def affordable(
    step: FineTune, model: nn.Module, layers: Sequence[Layer], fit: Samples, sampled: bool = False
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
        with observing_inputs(model, layers) as observed:
            batches.forward(model, batch)
        sample = sum(observed[layer.path].rows * layer.weights for layer in layers if layer.path in observed)
    count = int(_STEP_BUDGET / max(1.0, STEP_PASSES * sample * samples_of_step(step, fit)))
    return replace(step, steps=max(step.steps, min(step.most_steps, count)), most_steps=None)


def with_affordable_epochs(
    recipe: Recipe, layers: Sequence[Layer], data: Sequence[Batch], device: torch.device
) -> Recipe:
    """The recipe with a number of epochs of block reconstruction in place of "auto", see `BlockFit`.

    Fewer epochs also mean fewer steps between projections, and no sampled windows where few epochs are left. Like all
    budgets here it counts multiply-adds, so that it is the same on every CPU.

    Args:
        recipe: how to prune.
        layers: the layers to prune.
        data: calibration samples.
        device: of the computations.
    """
    blocks = recipe.blocks
    if blocks is None or blocks.epochs != "auto":
        return recipe
    epochs = MOST_EPOCHS
    if device.type == "cpu" and data and batches.positions(data[0]) > 1:
        positions = sum(batches.size(batch) * batches.positions(batch) for batch in data)
        passes = STEP_PASSES * blocks.window + (NETWORK_STEP if blocks.network_steps else 0)
        epochs = _FIT_BUDGET / max(1.0, passes * positions * sum(layer.weights for layer in layers))
        epochs = round(min(MOST_EPOCHS, max(1.0, epochs)), 1)
    between = math.ceil(blocks.between * epochs / MOST_EPOCHS)
    sampled = 0 if blocks.sampled == "auto" and epochs < SAMPLING_EPOCHS else blocks.sampled
    return recipe.but(blocks=replace(blocks, epochs=epochs, between=between, sampled=sampled))
