"""Damage of narrower networks, by softened outputs."""

import math

import pytest
import torch
from torch import nn

from iobs.pruning.calibration.losses import answered
from iobs.pruning.samples.batches import Samples
from iobs.pruning.widths.readers import damage, softened, temperature_of


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_networks_without_finite_outputs_are_the_last_choice(value):
    model = nn.Linear(3, 2)
    samples = answered(model, Samples.of([torch.randn(5, 3)]))
    loss = softened(temperature_of(samples))
    assert damage(model, samples, loss) == pytest.approx(0, abs=1e-6)
    model.weight.data.fill_(value)
    worst = damage(model, samples, loss)
    assert worst == 100
