"""KL divergence of softened outputs: the damage of a width, also for networks that are sure of their training data.

A network that is certain of its calibration samples shows damage only on the few samples near a border, which makes its
KL divergence noisy. Outputs divided by a temperature let every sample count.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from iobs.pruning.calibration.losses import divergence, mean_loss
from iobs.pruning.recipe import LossFunction
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.samples.outputs import class_axis, logits
from iobs.pruning.samples.subsets import Samples

DAMAGE_LIMIT = 100.0  # nats; a divergence above it, or NaN, says no more than that the network is destroyed
_ENTROPY = 1.0  # nats that softened outputs have on average, or half of the most if there are few classes
_TEMPERATURES = (1.0, 2.0, 4.0, 8.0)


def damage(model: nn.Module, answered: Samples, loss: LossFunction) -> float:
    """The mean of a softened divergence from the dense outputs, or the upper limit if it is NaN or larger."""
    value = mean_loss(model, answered, loss)
    return DAMAGE_LIMIT if math.isnan(value) else min(value, DAMAGE_LIMIT)


def softened(temperature: float) -> LossFunction:
    """The divergence for batches of `losses.answered`, from outputs that are divided by a temperature."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(batch, (tuple, list))
        inputs, answers, *labels = batch
        outputs = logits(batches.forward(model, batch))
        return divergence(model, (inputs, *labels), answers / temperature, outputs / temperature)

    return loss


def temperature_of(answered: Samples) -> float:
    """The least temperature at which the dense outputs have enough entropy; 1 for outputs that are no classes."""
    batch = answered.batches[0]
    assert isinstance(batch, (tuple, list))
    inputs, answers, *labels = batch
    axis = class_axis(answers, (inputs, *labels))
    if axis is None:
        return _TEMPERATURES[0]
    scores = answers.movedim(axis, -1).float()
    enough = min(_ENTROPY, 0.5 * float(torch.tensor(scores.shape[-1]).log()))
    for temperature in _TEMPERATURES:
        shares = (scores / temperature).softmax(-1)
        if float(torch.special.entr(shares).sum(-1).mean()) >= enough:
            return temperature
    return _TEMPERATURES[-1]
