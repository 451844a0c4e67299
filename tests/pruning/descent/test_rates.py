"""Learning rates: the largest one with nearly the best gain of short trials, or nearly the least loss."""

import math

import pytest

from iobs.errors import NonFiniteError
from iobs.pruning.descent import OPTIMIZERS, Factored, OptimizerKind
from iobs.pruning.descent.rates import RateTrials, boldest, try_rates, useful_rate
from iobs.pruning.runtime.checkpoint import Checkpoint


def test_larger_rate_with_nearly_the_best_gain_is_taken():
    assert useful_rate({3e-4: 0.71, 1e-3: 0.58, 3e-3: 0.59, 1e-2: 2.7}, before=0.87) == 3e-3
    assert useful_rate({3e-4: 0.71, 1e-3: 0.58, 3e-3: 0.60}, before=0.87) == 1e-3
    assert useful_rate({3e-4: 0.71, 1e-3: 0.58, 3e-3: 0.60}, before=0.87, share=0.9) == 3e-3


def test_rate_without_gain_is_not_taken_where_all_losses_are_close():
    assert useful_rate({5e-5: 0.0399, 2e-4: 0.0406}, before=0.0408) == 5e-5


def test_least_loss_is_taken_where_no_trial_gains():
    assert useful_rate({1e-4: 1.1, 3e-4: 1.2, 1e-3: math.inf}, before=1.0) == 1e-4
    assert useful_rate({}, before=1.0) is None


class Quadratic:
    """Steps that move a number by their rate towards `wanted`; the loss is the squared distance."""

    def __init__(self, wanted, diverges=()):
        self.wanted, self.diverges = wanted, diverges
        self.undo()

    def undo(self):
        self.value = 0.0

    def run(self, steps, rate):
        if rate in self.diverges:
            raise NonFiniteError("infinite")
        self.value += steps * rate

    def loss(self):
        return (self.value - self.wanted) ** 2


@pytest.mark.parametrize(
    ("wanted", "diverges", "tried", "rate"),
    [
        (1.0, (), ["0.01", "0.1", "1"], 0.1),  # a usual rate gains: no lower rate is tried
        (0.01, (), ["0.01", "0.004", "0.001"], 0.001),  # the first lower rate that gains is the last one
        (0.01, (0.01, 0.004), ["0.001"], 0.001),
        (-1.0, (), ["0.01", "0.004", "0.001", "0.0004"], 0.0004),  # no rate gains
    ],
)
def test_lower_rates_are_tried_until_one_gains_where_no_usual_rate_does(monkeypatch, wanted, diverges, tried, rate):
    told = []
    kind = OptimizerKind(Factored, (0.01, 0.1, 1.0), (0.004, 0.001, 0.0004))
    monkeypatch.setitem(OPTIMIZERS, "factored", kind)
    trials = RateTrials("rate", "factored", 10)
    fit = Quadratic(wanted, diverges)
    found = trials.choose(fit, fit.loss(), Checkpoint(), "key", lambda *given: told.append(given[1:]))
    assert found["rate"] == rate
    assert [one.split(":")[0] for one in found["text"].split("trials ")[1].split(", ")] == tried
    assert fit.value == 0.0
    assert all(count == 6 for _, count in told)


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
