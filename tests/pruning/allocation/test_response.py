"""The response (damage as a function of effect) that all layers share, and the effects inferred from it."""

import math

import pytest

from iobs.pruning.allocation.counts import Curve
from iobs.pruning.allocation.response import Response, Trial, common_response

PRICES = (2.0, 0.1, 30.0)
ERRORS = (0.3, 0.1, 0.03, 0.01)  # effects of trials


def effect(response, trials, error):
    return response.effects(Curve([1, 8], [error, 0.0], 2 * error), trials).errors[0]


@pytest.mark.parametrize("power", [1.0, 1.7, 2.5])
def test_common_response_inverts_a_power_law(power):
    """If damage is a power of the cost of an error, effects are proportional to the costs."""
    trials = [[Trial(felt / price, felt**power) for felt in ERRORS] for price in PRICES]
    response = common_response(trials)
    assert (response.early, response.late) == pytest.approx((1 / power, 1 / power), rel=1e-4)
    found = [effect(response, own, 0.02) for own in trials]
    assert found == pytest.approx([found[0] * price / PRICES[0] for price in PRICES], rel=1e-4)
    if power == 1:
        assert found == pytest.approx([0.02 * price for price in PRICES], rel=1e-4)  # then effects are damages


def test_common_response_inverts_a_bent_curve():
    true = Response(1e-6, 1.0, 0.9, 0.4)

    def damage(felt):  # the inverse of log_effect, by bisection
        low, high = math.log(1e-6), 0.0
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if true.log_effect(math.exp(middle)) < math.log(felt) else (low, middle)
        return math.exp(low)

    most = math.exp(true.log_effect(1.0))
    trials = [[Trial(most * share / price, damage(most * share)) for share in (1, 0.1, 0.01)] for price in PRICES]
    response = common_response(trials)
    assert (response.early, response.late) == pytest.approx((0.9, 0.4), abs=1e-3)
    found = [effect(response, own, most / 20) for own in trials]
    assert found == pytest.approx([found[0] * price / PRICES[0] for price in PRICES], rel=1e-3)


def test_effects_follow_the_measured_damage_of_a_layer():
    """All trials of a brittle layer count, not an extrapolation of the densest one."""
    tame = [Trial(1.0, 1e-2), Trial(0.1, 1e-3), Trial(0.01, 1e-4)]
    brittle = [Trial(1.0, 1.0), Trial(0.1, 1e-3), Trial(0.01, 1e-4)]
    response = common_response([tame, tame, brittle])
    assert effect(response, brittle, 0.05) == pytest.approx(effect(response, tame, 0.05))
    assert effect(response, brittle, 1.0) > 2 * effect(response, tame, 1.0)
    assert effect(response, brittle, 2.0) > 2 * effect(response, brittle, 1.0)


def test_effects_grow_with_the_error_if_damage_is_saturated():
    lost = [Trial(2.0, 1.0), Trial(1.0, 1.0), Trial(0.5, 1.0)]
    response = common_response([lost, [Trial(1.0, 0.1), Trial(0.1, 0.01)]])
    assert effect(response, lost, 4.0) >= 2 * effect(response, lost, 2.0) > effect(response, lost, 1.0)


def test_effects_of_a_harmless_layer_use_its_sparsest_trial():
    """The larger the error without damage, the tighter the bound on the cost."""
    works = [Trial(1.0, 1.0), Trial(0.1, 0.1)]
    idle = [Trial(1.0, 1e-9), Trial(0.1, 0.0), Trial(0.01, -1e-12)]
    response = common_response([idle, works])
    assert response.monotone(idle) == [Trial(1.0, response.least)]
    assert response.monotone([Trial(1.0, 0.3), *idle[1:]]) == [Trial(1.0, 0.3)]
    assert effect(response, idle, 0.5) < 1e-4 * effect(response, works, 0.5)


@pytest.mark.parametrize("broken", [math.nan, math.inf, 1e30])
def test_common_response_ignores_unbounded_damages(broken):
    trials = [[Trial(felt / price, felt) for felt in ERRORS] for price in PRICES]
    calm = common_response(trials)
    for index in range(3):
        shaken = [list(own) for own in trials]
        shaken[index][0] = Trial(shaken[index][0].error, broken)
        response = common_response(shaken)
        assert response.greatest <= 100
        found = [effect(response, own, 1e-3) for own in shaken]
        expected = [effect(calm, own, 1e-3) for own in trials]
        ratios = [one / other for one, other in zip(found, expected, strict=True)]
        assert max(ratios) < 3 * min(ratios)
        assert effect(response, shaken[index], 10.0) > effect(calm, trials[index], 0.01)


def test_common_response_accepts_no_trials():
    nothing = common_response([])
    assert effect(nothing, [], 1.0) == 0.0
    harmless = [[Trial(1.0, 0.0)] * 3 for _ in range(2)]
    assert 0 < effect(common_response(harmless), harmless[0], 1.0) < 1e-30


def test_effects_stay_finite_if_two_trials_have_nearly_equal_errors():
    close = [Trial(0.01, 0.5), Trial(0.01 * (1 - 1e-5), 1e-5)]
    response = common_response([close, [Trial(1.0, 1.0), Trial(0.1, 0.1)]])
    found = response.effects(Curve([1, 2, 8], [0.5, 0.01, 0.0], 1.0), close)
    assert math.isfinite(found.energy)
    assert found.energy >= found.errors[0] > found.errors[1] > 0
