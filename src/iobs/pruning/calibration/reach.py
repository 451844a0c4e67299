"""Layers that calibration data reach."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from iobs.pruning.calibration.hooks import captured_inputs
from iobs.pruning.network.layers import Layer
from iobs.pruning.network.modes import keeping_buffers
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch


@torch.no_grad()
def reached(model: nn.Module, layers: Iterable[Layer], data: Sequence[Batch]) -> set[Layer]:
    """The layers that receive an input on some batch; an expert that is called without a token receives none.

    Args:
        model: in eval mode.
        layers: candidates.
        data: calibration data; batches are run until every layer has received an input.
    """
    left = set(layers)
    found: set[Layer] = set()

    def note(layer: Layer, module: nn.Module, value: Tensor) -> None:
        if value.numel():
            found.add(layer)

    with keeping_buffers(model):
        for part in (part for batch in data for part in batches.pieces(batch)):
            if not left:
                break
            with captured_inputs(model, sorted(left, key=lambda layer: layer.name), note):
                batches.forward(model, part)
            left -= found
    return found
