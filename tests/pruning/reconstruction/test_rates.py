"""The rate of block reconstruction: the largest one with nearly the best gain of short trials."""

import math

from iobs.pruning.reconstruction.rates import useful_rate


def test_larger_rate_with_nearly_the_best_gain_is_taken():
    assert useful_rate({3e-4: 0.71, 1e-3: 0.58, 3e-3: 0.59, 1e-2: 2.7}, before=0.87) == 3e-3
    assert useful_rate({3e-4: 0.71, 1e-3: 0.58, 3e-3: 0.60}, before=0.87) == 1e-3
    assert useful_rate({3e-4: 0.71, 1e-3: 0.58, 3e-3: 0.60}, before=0.87, share=0.9) == 3e-3


def test_rate_without_gain_is_not_taken_where_all_losses_are_close():
    assert useful_rate({5e-5: 0.0399, 2e-4: 0.0406}, before=0.0408) == 5e-5


def test_least_loss_is_taken_where_no_trial_gains():
    assert useful_rate({1e-4: 1.1, 3e-4: 1.2, 1e-3: math.inf}, before=1.0) == 1e-4
    assert useful_rate({}, before=1.0) is None
