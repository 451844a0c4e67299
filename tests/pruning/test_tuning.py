"""The number of gradient steps that a network can afford."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from iobs.errors import ProblemError
from iobs.pruning import FineTune
from iobs.pruning.cost.affordable import affordable
from iobs.pruning.network.layers import find_layers
from iobs.pruning.samples.batches import Samples


def test_affordable_gives_cheap_networks_more_steps():
    step = FineTune(steps=10, most_steps=100, batch_size=4)
    small, large = nn.Sequential(nn.Linear(8, 4)), nn.Sequential(nn.Linear(30000, 30000, device="meta"))
    part = Samples([torch.randn(20, 8)], [0])
    assert affordable(step, small, tuple(find_layers(small)), part) == replace(step, steps=100, most_steps=None)
    assert affordable(replace(step, most_steps=None), small, tuple(find_layers(small)), part).steps == 10
    with pytest.raises(ProblemError, match="most_steps"):
        FineTune(steps=10, most_steps=5)
    part = Samples([torch.randn(20, 30000, device="meta")], [0])
    # 30,000 x 30,000 weights, 4 samples, 4 passes: 14.4 G a step, 12,500 G in all
    assert affordable(replace(step, most_steps=1000), large, tuple(find_layers(large)), part).steps == 868
