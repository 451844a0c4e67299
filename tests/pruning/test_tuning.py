"""Search for the learning rate and for the number of steps."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from iobs.errors import NonFiniteError, ProblemError
from iobs.pruning import FineTune
from iobs.pruning.cost.inputs import affordable
from iobs.pruning.decisions.learning_rate import boldest, try_rates
from iobs.pruning.network.layers import find_layers
from iobs.pruning.samples.subsets import Samples

RATES = (5e-5, 1.5e-4, 5e-4, 1.5e-3, 4e-3)


def test_try_rates_goes_up_until_the_loss_rises():
    seen = []

    def trial(rate):
        seen.append(rate)
        return abs(rate - 4e-4) + 1e-4

    losses = try_rates(trial, RATES, before=1.0)
    assert min(losses, key=losses.get) == 5e-4
    assert list(losses) == sorted(seen)
    assert max(seen) < 4e-3


def test_try_rates_stops_at_divergence():
    def trial(rate):
        if rate > 1e-4:
            raise NonFiniteError("diverged")
        return 1.0

    assert try_rates(trial, RATES, before=1.0) == {5e-5: 1.0}


def test_try_rates_stops_if_the_first_rate_is_harmful():
    assert try_rates(lambda rate: 9.4, RATES, before=0.9) == {5e-5: 9.4}


def test_boldest_takes_the_largest_rate_near_the_best():
    tried = {("adam", 1e-3): 0.5, ("adam", 1e-2): 0.505, ("adam", 1e-1): 0.52, ("momentum", 1.0): 0.501}
    assert boldest(tried) == ("adam", 1e-2)
    assert boldest({("adam", 1e-4): -1.0, ("adam", 1e-3): -0.99, ("adam", 1e-2): -0.5}) == ("adam", 1e-3)
    assert boldest({}) is None


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
