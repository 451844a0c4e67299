"""Inputs of the layers in a forward pass, and the gradient steps that their multiply-adds afford."""

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
from iobs.pruning.cost.work import STEP_PASSES
from iobs.pruning.descent.batches import samples_of_step
from iobs.pruning.network.calls import Args, Kwargs, after_calls
from iobs.pruning.network.layers import CONVOLUTIONS, Layer
from iobs.pruning.recipe import FineTune
from iobs.pruning.samples import batches
from iobs.pruning.samples.subsets import Samples
from iobs.pruning.workspace import Decisions

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
    decided: Decisions, model: nn.Module, layers: Sequence[Layer], fit: Samples, sampled: bool = False
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
